"""Models of 4 to 8 billion parameters on this machine: ``python -m bench.large [SHAPE ...]``.

Every row is a job on a random model in bfloat16, with one thread: its processor time, its peak memory above the
weights, and the memory that gatelens estimates for it before it runs (the number that batches are cut by). A shape is
loaded once, and every row runs in a process of its own that is forked from there. Finished rows are kept in
results/bench/large.json and are not run again. The weights are files of 8 to 16 GB in the folder that the environment
variable ``GATELENS_BENCH`` names, ~/.cache/gatelens/bench by default; they are mapped into memory and stay on the disk
until you remove them.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import torch

import gatelens
from bench.large_models import SHAPES, model_folder
from bench.measurements import arguments, quick
from bench.memory_watch import Used, watched
from bench.sparsify_memory import step_gb
from bench.tables import markdown, processor, write_table
from gatelens.gates import EDGES, HEADS
from gatelens.gates.fitting import loss_and_gradient
from gatelens.gates.heads import HeadScores
from gatelens.gates.response_checks import check_responses
from gatelens.gates.runs import run_numbers
from gatelens.measures.top_k import Circuits, circuit_numbers
from gatelens.methods.attribution import attribute_edges
from gatelens.methods.head_gating import HeadGatingSettings, nll_objective
from gatelens.methods.patching import patch, patch_numbers
from gatelens.model import Model
from gatelens.runtime.context import Context
from gatelens.runtime.files import replace_file
from gatelens.sparse.mixture import TrainingText
from gatelens.sparse.sparsify import SparsifySettings
from gatelens.sparse.sparsify._sequences import TrainingSequences
from gatelens.sparse.sparsify._student import Student
from gatelens.sparse.sparsify._training import Training
from gatelens.tasks.base import CircuitTask, Example, ResponseTask
from gatelens.tasks.build import from_tokens
from gatelens.tasks.tokens import Pair, PairTokens

HOME = Path(os.environ.get("GATELENS_BENCH", Path.home() / ".cache" / "gatelens" / "bench"))
RESULTS = Path(__file__).parents[1] / "results" / "bench"
LENGTH, STEPS, POINTS, TRAINED = 40, 3, 4, 128  # tokens of a prompt, of EAP-IG, of the curve, tokens of a sequence


class Job(NamedTuple):
    """A row of the table.

    Arguments:
        run: the work.
        estimate: the memory in GB that gatelens expects it to take, besides the weights; None: it makes no estimate.
    """

    run: Callable[[Model], object]
    estimate: Callable[[Model], float] | None = None


def main() -> None:
    torch.set_num_threads(1)
    shapes = ["tiny"] if quick() else arguments() or [shape for shape in SHAPES if shape != "tiny"]
    if unknown := [shape for shape in shapes if shape not in SHAPES]:
        sys.exit(f"no shape '{unknown[0]}': there are {', '.join(SHAPES)}.")
    state = (HOME if quick() else RESULTS) / "large.json"
    state.parent.mkdir(parents=True, exist_ok=True)
    rows: list[dict[str, Any]] = json.loads(state.read_text()) if state.exists() else []
    for shape in shapes:
        missing = [name for name in JOBS if not any((row["shape"], row["job"]) == (shape, name) for row in rows)]
        for row in measured(shape, missing):
            rows.append(row)
            replace_file(state, json.dumps(rows, indent=1))
            print(markdown([record(row)]).splitlines()[-1], flush=True)
    if rows and not quick():
        write_table(RESULTS / "large.csv", [record(row) for row in rows], description(rows))


def measured(shape: str, names: Sequence[str]) -> Iterator[dict[str, Any]]:
    """The rows of one shape, each as soon as its process has ended. Rows whose process failed are left out."""
    if not names:
        return
    tiny = gatelens.load(model_folder("tiny", HOME), dtype=torch.bfloat16, check=False)
    model = gatelens.load(model_folder(shape, HOME), dtype=torch.bfloat16, check=False)
    forward = min(_forward_seconds(model) for _ in range(2))  # the first one reads the weights from the disk
    for name in names:
        used = in_a_process(lambda job=JOBS[name]: measure(job, model, tiny))
        if used is None:
            print(f"{shape}, {name}: failed", flush=True)
            continue
        estimate = None if JOBS[name].estimate is None else JOBS[name].estimate(model)
        sizes = {"forward": forward, "estimate_gb": estimate, "weights_gb": weights_gb(model)}
        yield {"shape": shape, "job": name, **asdict(used), **sizes, **machine()}


def measure(job: Job, model: Model, tiny: Model) -> Used:
    """Run a job, after the same job on a tiny model, which loads what is loaded once."""
    job.run(tiny)
    with watched() as used:
        job.run(model)
    return used


def in_a_process(work: Callable[[], Used]) -> Used | None:
    """Run work in a forked process; None if it failed, for example because the system had no memory left.

    Nothing has used autograd before the fork, so there are no threads that the new process would lack.
    """
    reads, writes = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.write(writes, json.dumps(asdict(work())).encode())
            os._exit(0)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
    os.close(writes)
    with os.fdopen(reads) as answer:
        text = answer.read()
    _, status = os.waitpid(child, 0)
    return Used(**json.loads(text)) if status == 0 else None


def machine() -> dict[str, str]:
    return {"processor": processor(), "torch": torch.__version__}


def weights_gb(model: Model) -> float:
    return sum(weight.numel() * weight.element_size() for weight in model.hf.parameters()) / 1e9


def _forward_seconds(model: Model) -> float:
    """The processor time of a plain forward of the prompt, with the logits of all positions."""
    with watched() as used, torch.no_grad():
        model.hf(input_ids=random_task(model).buckets[0].clean, use_cache=False)
    return used.seconds


def record(row: dict[str, Any]) -> dict[str, Any]:
    """A line of the table."""
    estimate = row["estimate_gb"]
    return {
        "shape": row["shape"],
        "job": row["job"],
        "weights GB": row["weights_gb"],
        "processor seconds": row["seconds"],
        "in forwards": row["seconds"] / row["forward"],
        "peak above weights GB": row["peak_gb"],
        "estimate GB": estimate,
        "peak / estimate": None if estimate is None else row["peak_gb"] / estimate,
    }


def description(rows: list[dict[str, Any]]) -> str:
    machines = sorted({f"{row['processor']}, torch {row['torch']}" for row in rows})
    return (
        "# Large models\n\n"
        f"`python -m bench.large` on: {'; '.join(machines)}. Random weights in bfloat16, one thread. One prompt of "
        f"{LENGTH} tokens; EAP-IG has {STEPS} steps, the curve {POINTS} points, the training step one sequence of "
        f"{TRAINED} tokens. Time is processor time of this process, and a forward is a plain forward of the same "
        "prompt with all logits. Peak memory is that of anonymous pages, above that before the job, so a "
        "job that fits into memory which an earlier forward has freed shows hardly any; weights are mapped from files. "
        "The estimate is the one that gatelens cuts batches by; that of the training step is made by this benchmark."
    )


def random_task(model: Model) -> CircuitTask:
    """One prompt of random tokens, and another one as its corrupt prompt."""
    generator = torch.Generator().manual_seed(0)
    clean, corrupt = torch.randint(3, int(model.hf.config.vocab_size), (2, LENGTH), generator=generator).tolist()
    tokens = [PairTokens(clean, corrupt, [5], [6])]
    return from_tokens("random", 0, [Pair("clean", "corrupt", ("right",), ("wrong",))], tokens)


def patch_layer(model: Model) -> object:
    """All heads of the middle layer, one at a time."""
    layer = model.n_layers // 2
    heads = torch.arange(layer * model.n_heads, (layer + 1) * model.n_heads)
    return patch(HEADS, model, random_task(model), gates=[heads])


def head_curve(model: Model) -> object:
    """Circuits of heads by a random ranking: none, all, and two between."""
    scores = HeadScores(torch.randn(model.n_layers, model.n_heads), "random")
    circuits = Circuits.of(model, random_task(model), scores)
    return circuits.metric(0, [round(i * circuits.total / (POINTS - 1)) for i in range(POINTS)])


def gate_update(model: Model) -> object:
    """The gradient of one update of one seed, for one example with a response of one token."""
    clean = random_task(model).buckets[0].clean[0].tolist()
    task = ResponseTask("random", 0, [Example("prompt", "response", tuple(clean), (5,))])
    check_responses(model, task, Context())
    logits = torch.zeros(1, model.n_layers, model.n_heads).requires_grad_()
    objective = nll_objective(model, task, HeadGatingSettings(batch=1), [0], torch.zeros(1), Context())
    return loss_and_gradient(logits, 0, objective)


TRAINING = SparsifySettings(batch=1, length=TRAINED, lengths=(), gradient_checkpointing=True, bf16=True)


def training_step(model: Model) -> object:
    """One step of sparse post-training with adapters on the attention, and with gradient checkpointing."""
    from accelerate import Accelerator

    vocabulary = int(model.hf.config.vocab_size)
    tokens = torch.randint(3, vocabulary, (8 * TRAINED,), generator=torch.Generator().manual_seed(0))
    sequences = TrainingSequences([TrainingText("random", tokens.int(), None, 1.0, 1.0)], 0)
    student = Student(model, TRAINING, share=True)
    return Training(student, model.hf, sequences, TRAINING, Accelerator(cpu=True)).step(0)


def estimated(numbers: Callable[[Model], int]) -> Callable[[Model], float]:
    """GB from a number of float32 numbers."""
    return lambda model: 4e-9 * numbers(model)


JOBS: dict[str, Job] = {
    "load and check": Job(lambda model: gatelens.load(model.source, dtype=torch.bfloat16)),
    "head curve": Job(head_curve, estimated(lambda model: circuit_numbers(HEADS, model, LENGTH, POINTS))),
    "EAP": Job(
        lambda model: attribute_edges(model, random_task(model)),
        estimated(lambda model: EDGES.attribute_numbers(model, LENGTH)),
    ),
    "EAP-IG": Job(
        lambda model: attribute_edges(model, random_task(model), STEPS),
        estimated(lambda model: EDGES.attribute_numbers(model, LENGTH)),
    ),
    "gate update": Job(gate_update, estimated(lambda model: run_numbers(model, 1, LENGTH + 1, 2, grad=True))),
    "training step": Job(training_step, lambda model: step_gb(model, TRAINING)),
    "heads of a layer by patching": Job(patch_layer, estimated(lambda model: patch_numbers(HEADS, model, LENGTH))),
}


if __name__ == "__main__":
    main()
