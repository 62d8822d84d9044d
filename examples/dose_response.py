"""Does sparser attention need smaller circuits? Dose and response on a small model.

    python examples/dose_response.py runs/small results/dose-response

The model of `small_model.py` is post-trained to several numbers of open keys per query (the dose), with three seeds
each. For every model and task, the circuit is found and counted: how many heads and how many edges explain 90 % of the
effect (the response)? All runs are folders, so that the same command resumes. The result is `dose-response.csv`, where
every count has its interval and its number of prompts, and `dose-response.png`.
"""

import csv
import sys
from dataclasses import dataclass
from io import StringIO
from pathlib import Path

import torch
from matplotlib.figure import Figure
from small_model import LENGTH, write_texts
from small_model import main as train_small_model

import gatelens
from gatelens import CircuitSettings, Model
from gatelens.measures.counts import Count, Multiplier
from gatelens.runtime.files import replace_file
from gatelens.sparse.in_model import is_sparse
from gatelens.sparse.recording import record_open
from gatelens.sparse.sparsify import SparsifySettings, sparsify
from gatelens.tasks.base import CircuitTask

DOSES = (4.0, 2.0, 1.0, 0.5, 0.25)  # open keys per query and head
SEEDS = (0, 1, 2)
STEPS, PROMPTS = 800, 64
LEVELS = ("heads", "edges")
TASKS = (
    "ioi",
    "greater-than",
    "ioi-long",
)  # the dense model does not have docstring


@dataclass(frozen=True)
class Point:
    """One task in one model.

    Arguments:
        dose: the keys per query that were asked for in training; infinite for the dense model.
        keys: open keys per query and head on the task's prompts.
        right: share of right answers.
        multipliers: dense count / count of this model, by level; none for the dense model.
    """

    dose: float
    seed: int
    task: str
    keys: float
    right: float
    counts: dict[str, Count]
    multipliers: dict[str, Multiplier]


def sparse_model(dense: Model, folder: Path, dose: float, seed: int) -> Model:
    """The small model with this many open keys, trained for the first time or loaded from its folder."""
    settings = SparsifySettings(
        steps=STEPS,
        batch=8,
        length=LENGTH,
        keys=dose,
        weights="full",
        learning_rate=5e-4,
        bf16=True,
        seed=seed,
        checkpoint_every=200,
    )
    out = folder / f"keys-{dose:g}-seed-{seed}"
    if not (out / "result.json").exists():
        sparsify(dense, write_texts(folder / "text"), settings, out=out, show=True)
    return gatelens.load(out)


@torch.no_grad()
def on_task(model: Model, task: CircuitTask) -> tuple[float, float]:
    """Open keys per query and head on the prompts, and the share of right answers."""
    keys = right = queries = 0.0
    for bucket in task.buckets:
        with record_open(model.hf) as record:
            logits = model.hf(input_ids=bucket.clean, use_cache=False).logits[:, -1]
        right += float(task.correct(logits, bucket).sum())
        per_query = record.open_keys if is_sparse(model.hf) else torch.arange(1.0, bucket.clean.shape[1] + 1)
        keys += float(per_query.float().mean()) * len(bucket)
        queries += len(bucket)
    return keys / queries, right / len(task)


def measure(model: Model, folder: Path, dose: float, seed: int, dense: dict[tuple[str, str], object]) -> list[Point]:
    """The circuits of all tasks and levels in one model. The dense model's curves are remembered in `dense`."""
    points = []
    for name in TASKS:
        counts, multipliers = {}, {}
        task = gatelens.task(name, model, n=PROMPTS, seed=0)
        assert isinstance(task, CircuitTask)
        for level in LEVELS:
            out = folder / "circuits" / f"{model.name}-{name}-{level}"
            settings = CircuitSettings(level=level, n=PROMPTS, sample=0, describe=0)
            result = gatelens.find_circuit(model, name, settings, out=out)
            counts[level] = result.count
            curve = dense.setdefault((name, level), result.curve)
            if curve is not result.curve:
                multipliers[level] = gatelens.multiplier(curve, result.curve, at=settings.threshold)  # type: ignore[arg-type]
        keys, right = on_task(model, task)
        points.append(Point(dose, seed, name, keys, right, counts, multipliers))
        print(
            f"{model.name} {name}: {keys:.2f} keys, {right:.0%} right, {counts['heads']}, {counts['edges']}", flush=True
        )
    return points


def write_table(points: list[Point], path: Path) -> None:
    text = StringIO(newline="")
    writer = csv.writer(text)
    measured = [name for level in LEVELS for name in (level, f"{level} low", f"{level} high", f"{level} multiplier")]
    writer.writerow(["task", "dose", "seed", "keys per query", "right", "prompts", *measured])
    for point in points:
        cells: list[object] = []
        for level in LEVELS:
            count = point.counts[level].columns()
            cells += [count.count, count.count_low, count.count_high, point.multipliers.get(level, "")]
        numbers = (f"{point.keys:.3f}", f"{point.right:.3f}", PROMPTS)
        writer.writerow([point.task, point.dose, point.seed, *numbers, *cells])
    replace_file(path, text.getvalue())


def draw(points: list[Point], path: Path) -> None:
    """Counts against keys per query, a panel for each level and task; bars are intervals."""
    figure = Figure(figsize=(2.4 * len(TASKS), 2.2 * len(LEVELS) + 0.6), layout="constrained")
    axes = figure.subplots(len(LEVELS), len(TASKS), squeeze=False)
    for row, level in zip(axes, LEVELS, strict=True):
        for axis, task in zip(row, TASKS, strict=True):
            for point in points:
                count = point.counts[level].columns()
                if point.task != task or count.count is None:
                    continue
                low, high = count.count_low or count.count, count.count_high or count.count
                bars = [[count.count - low], [high - count.count]]
                colour = "black" if point.dose == float("inf") else "#0072B2"
                axis.errorbar(point.keys, count.count, yerr=bars, fmt="o", markersize=3, color=colour, linewidth=0.8)
            axis.set(xscale="log", title=f"{task}: {level}", ylim=(0, None))
            if row is axes[-1]:
                axis.set_xlabel("open keys per query and head")
    axes[0, 0].set_ylabel("heads for 90 % of the effect")
    axes[1, 0].set_ylabel("edges for 90 % of the effect")
    figure.suptitle(f"Black: dense. Bars: 95 % intervals over {PROMPTS} prompts. {len(SEEDS)} seeds of training.")
    figure.savefig(path, dpi=130)


def main(folder: Path, out: Path) -> None:
    dense = gatelens.load(train_small_model(folder))
    curves: dict[tuple[str, str], object] = {}
    points = measure(dense, folder, float("inf"), 0, curves)
    out.mkdir(parents=True, exist_ok=True)
    for dose in DOSES:
        for seed in SEEDS:
            points += measure(sparse_model(dense, folder, dose, seed), folder, dose, seed, curves)
            write_table(points, out / "dose-response.csv")
            draw(points, out / "dose-response.png")


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(Path(sys.argv[1]), Path(sys.argv[2]))
