"""Pack the last run of sparse_smollm2.py as the built-in model `sparse-smollm2`, and evaluate it.

    python examples/pack_sparse_smollm2.py runs

The adapter goes to src/gatelens/loading/builtin/sparse_smollm2 in float16, beside a model card, and the logs of all
runs go to results/sparse-smollm2 with the frontier: loss against open keys per query in the course of training. The
numbers on the card are measured in float32 on the packed weights: on 64 sequences of each held-out text that were not
looked at during training, at 256 and at 64 tokens, and on 256 prompts of each task with a seed that was not looked at
either.
"""

import copy
import json
import shutil
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file
from sparse_smollm2 import RUNS, run_folder
from sparse_smollm2_text import HELD_OUT, MIXTURE

import gatelens
from gatelens.loading.builtin import ADAPTERS
from gatelens.model import Model
from gatelens.report.frontier import frontier
from gatelens.runtime.files import write_tensors
from gatelens.sparse.adapters import ABOUT, WEIGHTS, apply_adapter
from gatelens.sparse.in_model import is_sparse
from gatelens.sparse.recording import record_open
from gatelens.sparse.sparsify import evaluate
from gatelens.sparse.sparsify._result import write_card
from gatelens.sparse.sparsify.judge import IDLE
from gatelens.tasks import task
from gatelens.tasks.base import Bucket, CircuitTask

FOLDER = ADAPTERS["sparse-smollm2"]
LOGS = Path(__file__).parents[1] / "results" / "sparse-smollm2"
TASKS = ("greater-than", "ioi", "docstring", "ioi-long")
PROMPTS, SEED = 256, 2
SEQUENCES, SHORT = 64, 64


def pack(run: Path) -> None:
    """Write the adapter of a finished run in float16."""
    tensors = load_file(run / WEIGHTS)
    write_tensors(FOLDER / WEIGHTS, {name: tensor.half() for name, tensor in tensors.items()})
    description = json.loads((run / ABOUT).read_text())
    (FOLDER / ABOUT).write_text(json.dumps({**description, "base": "smollm2"}, indent=1) + "\n")


def copy_logs(run: Path, folder: Path) -> None:
    """Copy the logs of a run, if it has any: a run that another one starts from may be an adapter alone."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("log.csv", "judged.csv", "settings.json"):
        if (run / name).exists():
            shutil.copy(run / name, folder / name)


@torch.no_grad()
def on_task(model: Model, prompts: CircuitTask) -> tuple[float, float, float, float]:
    """The share of right answers, the mean metric, keys per query and head, and the share of idle heads."""
    right = metric = keys = idle = 0.0
    for bucket in prompts.buckets:
        for start in range(0, len(bucket), 16):
            part = Bucket(*(x[start : start + 16] for x in (bucket.clean, bucket.corrupt, bucket.which)))
            with record_open(model.hf) as record:
                logits = model.hf(input_ids=part.clean, use_cache=False).logits[:, -1]
            right += float(prompts.correct(logits, part).sum())
            metric += float(prompts.metric(logits, part).sum())
            if is_sparse(model.hf):
                per_query = record.open_keys.float().mean(-1)  # (layer, prompt, head)
                keys += float(per_query.mean((0, 2)).sum())
                idle += float((per_query < IDLE).float().mean((0, 2)).sum())
    return right / len(prompts), metric / len(prompts), keys / len(prompts), idle / len(prompts)


def task_table(dense: Model, sparse: Model) -> str:
    lines = [
        f"| task, {PROMPTS} prompts | right: dense | right: sparse | metric: dense | metric: sparse "
        "| keys per query and head | idle heads |",
        "|---|---|---|---|---|---|---|",
    ]
    for name in TASKS:
        prompts = task(name, dense, n=PROMPTS, seed=SEED)
        assert isinstance(prompts, CircuitTask)
        dense_right, dense_metric, _, _ = on_task(dense, prompts)
        right, metric, keys, idle = on_task(sparse, prompts)
        numbers = f"{dense_right:.1%} | {right:.1%} | {dense_metric:.2f} | {metric:.2f} | {keys:.2f} | {idle:.0%}"
        lines.append(f"| {name} | {numbers} |")
        print(lines[-1], flush=True)
    return "\n".join(lines)


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    for name in RUNS:
        copy_logs(run_folder(folder, name), LOGS / name)
    frontier([LOGS / name for name in RUNS], LOGS)
    *_, (last, settings) = RUNS.items()
    pack(run_folder(folder, last))
    dense = gatelens.load("smollm2")
    sparse = Model("sparse-smollm2", apply_adapter(copy.deepcopy(dense.hf), FOLDER), dense.tokenizer, dense.anatomy)
    judged = {}
    for length in (settings.length, SHORT):
        skip = settings.judge_sequences * settings.length // length  # evaluated during training
        texts = evaluate(sparse, list(HELD_OUT), dense, length=length, n_sequences=SEQUENCES, skip=skip)
        judged |= {f"{name}, {length} tokens": judgement for name, judgement in texts.items()}
    card = write_card(dense, list(MIXTURE), settings, settings.steps, judged)
    (FOLDER / "README.md").write_text(f"{card}\n{task_table(dense, sparse)}\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
