"""Pack the last checkpoint of sparse_smollm2.py as the built-in model `sparse-smollm2`, and evaluate it.

    python examples/pack_sparse_smollm2.py [SEQUENCES]

The adapter, with its biases, goes to src/gatelens/loading/builtin/sparse_smollm2 in float16, beside a model card. The
logs of all stages go to results/sparse-smollm2, beside `trade-off.csv`: the loss against open edges when all gate
biases are moved up or down together. The numbers on the card are measured on the packed float16 weights, on SEQUENCES
sequences of each held-out text. Training did not use any of these sequences.
"""

import copy
import csv
import json
import re
import shutil
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file
from sparse_smollm2 import HELD_OUT, OUT, STAGES, text_of

import gatelens
from gatelens.loading.builtin import ADAPTERS
from gatelens.model import Model
from gatelens.runtime.checkpoints import Checkpoints
from gatelens.sparse.adapters import apply_adapter, write_adapter
from gatelens.sparse.in_model import GateValues, gate_biases, make_sparse
from gatelens.sparse.sparsify import evaluate
from gatelens.sparse.sparsify._result import write_card
from gatelens.sparse.sparsify._student import SCALE
from gatelens.tasks import task

FOLDER = ADAPTERS["sparse-smollm2"]
LOGS = Path(__file__).parents[1] / "results" / "sparse-smollm2"
TASKS = ("ioi", "docstring", "greater-than")
PROMPTS = 256
LOOKED_AT = STAGES[0].judge_sequences  # sequences at the beginning of each text that were evaluated during training
SHIFTS = (-1.0, -0.5, 0.0, 0.5, 1.0, 2.0)


def pack() -> list[int]:
    """Write the adapter of the last stage that has a checkpoint; return the steps of each stage up to there."""
    runs = [Path(OUT) / str(number) for number in range(1, len(STAGES) + 1)]
    started = [(run, last) for run in runs if (last := Checkpoints(run / "checkpoints").last()) is not None]
    if not started:
        raise SystemExit(f"{OUT} has no checkpoint: run sparse_smollm2.py first")
    steps = [json.loads((last / "state.json").read_text())["steps"] for _, last in started]
    weights = load_file(started[-1][1] / "weights.safetensors")
    layers = {int(re.findall(r"\.(\d+)\.", name)[0]): w for name, w in weights.items() if name.endswith("gate_bias")}
    biases = torch.stack([layers[layer] for layer in sorted(layers)])
    settings = [stage.as_dict() for stage in STAGES[: len(started)]]
    description = {"base": "smollm2", "steps": steps, "stages": settings}
    write_adapter(FOLDER, weights, GateValues("score", biases), SCALE, description, torch.float16)
    LOGS.mkdir(parents=True, exist_ok=True)
    for number, (run, _) in enumerate(started, 1):
        for name in ("log.csv", "judged.csv"):
            if (run / name).exists():
                shutil.copy(run / name, LOGS / f"{Path(name).stem}-{number}.csv")
    return steps


@torch.no_grad()
def accuracy(model: Model, name: str, dense: Model) -> float:
    """The share of a task's prompts that are answered correctly; the prompts are those of the dense model."""
    prompts = task(name, dense, n=PROMPTS, seed=1)
    right = 0
    for bucket in prompts.buckets:
        logits = [model.hf(input_ids=tokens, use_cache=False).logits[:, -1] for tokens in bucket.clean.split(8)]
        right += int(prompts.correct(torch.cat(logits), bucket).sum())
    return right / len(prompts)


def trade_off(sparse: Model, dense: Model, sequences: int) -> None:
    """Write loss and open edges for biases that are all shifted: a smaller bias gives fewer edges and more loss."""
    trained = gate_biases(sparse.hf)
    with (LOGS / "trade-off.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["text", "bias shift", "open", "above dense", "kl"])
        for shift in SHIFTS:
            make_sparse(sparse.hf, trained + shift)
            judged = evaluate(sparse, list(HELD_OUT), dense, length=256, n_sequences=sequences, skip=LOOKED_AT)
            for text, judgement in judged.items():
                numbers = (judgement.open_share, judgement.above_dense, judgement.kl)
                writer.writerow([text, shift, *(f"{number:.5f}" for number in numbers)])
                print(text, f"{shift:+.1f}", *(f"{number:.4f}" for number in numbers), flush=True)
    make_sparse(sparse.hf, trained)


def main(sequences: int = 64) -> None:
    steps = pack()
    dense = gatelens.load("smollm2")
    sparse = Model("sparse-smollm2", apply_adapter(copy.deepcopy(dense.hf), FOLDER), dense.tokenizer, dense.anatomy)
    judged = evaluate(sparse, list(HELD_OUT), dense, length=256, n_sequences=sequences, skip=LOOKED_AT)
    texts = dict.fromkeys(Path(text).name for stage in range(len(steps)) for text in text_of(stage + 1))
    card = write_card(dense, list(texts), STAGES[len(steps) - 1], sum(steps), judged)
    card += f"\n| task, {PROMPTS} prompts | dense | sparse |\n|---|---|---|\n"
    for name in TASKS:
        card += f"| {name} | {accuracy(dense, name, dense):.1%} | {accuracy(sparse, name, dense):.1%} |\n"
    (FOLDER / "README.md").write_text(card)
    print(card, flush=True)
    trade_off(sparse, dense, min(6, sequences))


if __name__ == "__main__":
    main(*(int(argument) for argument in sys.argv[1:]))
