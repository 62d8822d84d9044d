"""nnsight: traces of the Hugging Face model."""

import torch
from nnsight import NNsight
from serve import clean, corrupt, heads, metric, random_gpt2, serve

hf = random_gpt2()
model = NNsight(hf)
DIM = 64


@torch.no_grad()
def patch() -> torch.Tensor:
    with model.trace(corrupt):
        other = [block.attn.c_proj.input.save() for block in model.transformer.h]
    with model.trace(clean):
        base = model.lm_head.output.save()
    scores = torch.zeros(len(heads))
    for number, (layer, head) in enumerate(heads):
        part = slice(head * DIM, (head + 1) * DIM)
        with model.trace(clean):
            model.transformer.h[layer].attn.c_proj.input[:, :, part] = other[layer][:, :, part]
            logits = model.lm_head.output.save()
        scores[number] = (metric(base) - metric(logits)).mean()
    return scores


serve({"patch heads": patch})
