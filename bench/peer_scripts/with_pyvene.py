"""pyvene: one interchange intervention for each head."""

import pyvene
import torch
from serve import clean, corrupt, heads, metric, random_gpt2, serve

hf = random_gpt2()


@torch.no_grad()
def patch() -> torch.Tensor:
    base = metric(hf(clean).logits)
    scores = torch.zeros(len(heads))
    length = list(range(clean.shape[1]))
    for number, (layer, head) in enumerate(heads):
        place = pyvene.RepresentationConfig(
            layer, "head_attention_value_output", "h.pos", 1, pyvene.VanillaIntervention
        )
        patched = pyvene.IntervenableModel(pyvene.IntervenableConfig([place]), hf)
        patched.disable_model_gradients()
        where = [[[[[head]] * len(clean), [length] * len(clean)]]]
        _, output = patched({"input_ids": clean}, [{"input_ids": corrupt}], {"sources->base": (where[0], where[0])})
        scores[number] = (base - metric(output.logits)).mean()
    return scores


serve({"patch heads": patch})
