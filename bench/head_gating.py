"""The cost of causal head gating in plain forwards (F) and forward-backwards (FB): ``python -m bench.head_gating``.

One update of the fits, and the ablation curves of a seed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

import gatelens
from bench.heads import gpt2_small
from bench.measurements import Measurement, quick, show
from bench.timing import ratios
from gatelens import GatelensError, HeadGatingSettings, Model
from gatelens.gates.fitting import loss_and_gradient
from gatelens.gates.roles import KINDS, HeadRoles
from gatelens.measures.ablation import ablation_curve
from gatelens.methods.head_gating import nll_objective
from gatelens.runtime.context import Context
from gatelens.tasks.base import Example, ResponseBatch, ResponseTask

EXAMPLES, PROMPT, RESPONSE = 8, 28, 4
AT_MOST = {1: 0.75, 8: 5.5}
# A user holds out 64 examples. Both sides of the ratio grow with their number, so one batch of usual length is enough.
# A few examples of all lengths would not do: their padding makes F dearer, but not the curves.
HELD_OUT, CURVES_ON, ABLATED, EVERY, CURVES_AT_MOST = 64, 8, 50, 5, 12.0
# SmolLM2 does not meet this limit. Its 60 rows are 52 forwards, because rows share only the layers below the first gate
# in which they differ, and 80 % of the time are products in float32, which already run by the faster library.


def main() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    try:
        model = gpt2_small() if quick() else gatelens.load("smollm2")
    except GatelensError as error:
        print(f"skipped smollm2: {error}")
        return
    batch = random_batch(model)
    print(
        f"{EXAMPLES} examples of {PROMPT} + {RESPONSE} tokens, one thread; FB is a plain Hugging Face forward-backward "
        "(gradients of activations, all logits)"
    )
    jobs = {str(seeds): update(model, batch, seeds) for seeds in ((1, 2) if quick() else AT_MOST)}
    for seeds, ratio in ratios(plain(model, batch), jobs, repeats=1 if quick() else 3).items():
        # The floor is one FB for each row. Computing only the logits of the responses can be cheaper than that.
        show(
            Measurement(f"{model.name}: update of {seeds} seed(s)", ratio, "FB", float(seeds), AT_MOST.get(int(seeds)))
        )
    if not quick():
        task = usual_examples(model)
        jobs = {"curves": curves(model, task)}
        cost = ratios(forwards(model, task), jobs, repeats=1, warm=False)["curves"]
        name = f"{model.name}: ablation curves of a seed, {ABLATED // EVERY + 1} points, {len(KINDS)} kinds"
        show(Measurement(name, cost, "F", most=CURVES_AT_MOST))


def random_batch(model: Model) -> ResponseBatch:
    """Random tokens, all examples of the same length."""
    ids = torch.randint(0, model.hf.config.vocab_size, (EXAMPLES, PROMPT + RESPONSE)).tolist()
    examples = [Example("", "", tuple(tokens[:PROMPT]), tuple(tokens[PROMPT:])) for tokens in ids]
    return next(iter(ResponseTask("any", 0, examples).batches(EXAMPLES)))


def plain(model: Model, batch: ResponseBatch) -> Callable[[], object]:
    """The unit FB: a forward-backward of the Hugging Face model, without gates."""

    def run() -> None:
        embedding = model.hf.get_input_embeddings()(batch.tokens).detach().requires_grad_()
        logits: Tensor = model.hf(inputs_embeds=embedding, use_cache=False).logits
        loss = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), batch.tokens[:, 1:].flatten())
        loss.backward()

    return run


def update(model: Model, batch: ResponseBatch, seeds: int) -> Callable[[], object]:
    """Forward, backward and optimizer step of all seeds, as rows of one batch."""
    logits = torch.zeros(seeds, model.n_layers, model.n_heads).requires_grad_()
    adam = torch.optim.Adam([logits], lr=0.1)
    tokens = batch.tokens.tolist()
    task = ResponseTask("any", 0, [Example("", "", tuple(ids[:PROMPT]), tuple(ids[PROMPT:])) for ids in tokens])
    settings = HeadGatingSettings(batch=EXAMPLES)
    objective = nll_objective(model, task, settings, [0] * seeds, torch.zeros(seeds), Context())

    def run() -> None:
        _, logits.grad = loss_and_gradient(logits, 0, objective)
        adam.step()

    return run


def usual_examples(model: Model) -> ResponseTask:
    """The held-out examples in the middle of the order by length."""
    task = gatelens.task("syntax", model, n=HELD_OUT, seed=1)
    assert isinstance(task, ResponseTask)
    first = (HELD_OUT - CURVES_ON) // 2
    return replace(task, examples=sorted(task.examples, key=len)[first : first + CURVES_ON])


def forwards(model: Model, task: ResponseTask) -> Callable[[], object]:
    """The unit F: the Hugging Face model on all examples, in batches of similar lengths, with all logits."""

    @torch.no_grad()
    def run() -> None:
        for batch in task.batches(EXAMPLES):
            model.hf(input_ids=batch.tokens, attention_mask=batch.mask, use_cache=False)

    return run


def curves(model: Model, task: ResponseTask) -> Callable[[], object]:
    """The ablation curves of all kinds, for one seed with random gates."""
    gates = torch.rand(3, 1, model.n_layers, model.n_heads)
    roles = HeadRoles(gates[0], gates[1], gates[2], torch.zeros(3, 1, 1))

    def run() -> None:
        for kind in KINDS:
            ablation_curve(model, task, roles, kind, ABLATED, every=EVERY, batch=EXAMPLES)

    return run


if __name__ == "__main__":
    main()
