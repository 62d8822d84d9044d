"""The cost of one update of causal head gating, in plain forward-backwards: ``python -m bench.head_gating``."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

import gatelens
from bench.heads import gpt2_small
from bench.measurements import Measurement, quick, show
from bench.timing import ratios
from gatelens import GatelensError, HeadGatingSettings, Model
from gatelens.gates.fitting import loss_and_gradient
from gatelens.methods.head_gating import nll_objective
from gatelens.runtime.context import Context
from gatelens.tasks.base import Example, ResponseBatch, ResponseTask

EXAMPLES, PROMPT, RESPONSE = 8, 28, 4
AT_MOST = {1: 0.75, 8: 5.5}


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


if __name__ == "__main__":
    main()
