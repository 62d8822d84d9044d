"""Does sparser attention need smaller circuits? Dose and response on a small model.

    python examples/dose_response.py runs/small results/dose-response

The model of `small_model.py` is post-trained to fewer and fewer open keys per query (the dose), with three seeds. The
doses of one seed are one chain: each begins with the weights and gates of the dose before it. The control is trained
for as many steps as the whole chain, with all gates open, so that it shows what training does without sparsity.

For every model and task, the circuit is found and counted: how many heads, edges and attention edges explain 90 % of
the effect (the response)? Heads and edges are ranked on as many other prompts. All runs are folders, so that the same
command resumes. The results are `dose-response.csv`, where every count has its interval and its number of prompts,
`dose-response.png`, the runs of heads, and a summary that is printed and written to `summary.md`.
"""

import csv
import math
import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from statistics import mean

import torch
from matplotlib.figure import Figure
from small_model import LENGTH, write_texts
from small_model import main as train_small_model

import gatelens
from gatelens import CircuitSettings, Model
from gatelens.errors import GatelensError
from gatelens.gates import LEVELS
from gatelens.measures.counts import Count, Multiplier
from gatelens.measures.curves import Curve
from gatelens.runtime.files import replace_file
from gatelens.sparse.in_model import is_sparse
from gatelens.sparse.recording import record_open
from gatelens.sparse.sparsify import SparsifySettings, sparsify
from gatelens.tasks.base import CircuitTask

DOSES = (4.0, 2.0, 1.0, 0.5, 0.25)  # open keys per query and head
SEEDS = (0, 1, 2)
STEPS, BATCH, RATE = 120, 16, 5e-4  # for each dose: updates, sequences of an update, learning rate
PROMPTS = {"heads": 64, "edges": 32, "attention": 32}
TASKS = ("ioi", "docstring", "ioi-long")  # the dense model hardly has greater-than
THRESHOLD = 0.9
DENSE, CONTROL = "dense", "control"


@dataclass(frozen=True)
class Point:
    """One task in one model.

    Arguments:
        model: dense, control, or the keys per query that were asked for in training.
        keys: open keys per query and head on the task's prompts.
        right: share of right answers.
        counts: by level; None if the model's effect is too small for a circuit.
        multipliers: dense count / count of this model, by level, if both reach the threshold.
    """

    model: str
    seed: int
    task: str
    keys: float
    right: float
    counts: dict[str, Count | None]
    multipliers: dict[str, Multiplier]


def settings(seed: int, **changes: object) -> SparsifySettings:
    common = {
        "steps": STEPS,
        "batch": BATCH,
        "length": LENGTH,
        "weights": "full",
        "learning_rate": RATE,
        "seed": seed,
        "checkpoint_every": STEPS,
    }
    return SparsifySettings(**{**common, **changes})


def models(folder: Path) -> Iterator[tuple[str, int, Model]]:
    """The dense model, the control, and all doses of each seed; trained, or loaded from their folders."""
    dense = gatelens.load(train_small_model(folder))
    texts = write_texts(folder / "text")

    def trained(name: str, asked: SparsifySettings, start: Path | None = None) -> Model:
        if not (folder / name / "result.json").exists():
            sparsify(dense, texts, asked, out=folder / name, start=start)
        return gatelens.load(folder / name)

    yield DENSE, 0, dense
    yield CONTROL, 0, trained("control", settings(0, steps=STEPS * len(DOSES), hold="open"))
    for seed in SEEDS:
        before = None
        for dose in DOSES:
            name = f"keys-{dose:g}-seed-{seed}"
            yield f"{dose:g}", seed, trained(name, settings(seed, keys=dose), before)
            before = folder / name


@torch.no_grad()
def on_task(model: Model, task: CircuitTask) -> tuple[float, float]:
    """Open keys per query and head on the prompts, and the share of right answers."""
    keys = right = 0.0
    for bucket in task.buckets:
        with record_open(model.hf) as record:
            logits = model.hf(input_ids=bucket.clean, use_cache=False).logits[:, -1]
        right += float(task.correct(logits, bucket).sum())
        per_query = record.open_keys if is_sparse(model.hf) else torch.arange(1.0, bucket.clean.shape[1] + 1)
        keys += float(per_query.float().mean()) * len(bucket)
    return keys / len(task), right / len(task)


def measure(name: str, seed: int, model: Model, folder: Path, dense: dict[tuple[str, str], Curve]) -> Iterator[Point]:
    """The circuits of all tasks in one model. The curves of the dense model are stored in `dense`."""
    for task_name in TASKS:
        counts: dict[str, Count | None] = {}
        multipliers = {}
        task = gatelens.task(task_name, model, n=max(PROMPTS.values()), seed=0)
        assert isinstance(task, CircuitTask)
        for level, prompts in PROMPTS.items():
            out = folder / "circuits" / f"{model.name}-{task_name}-{level}"
            asked = CircuitSettings(
                level=level,
                n=prompts,
                held_out=level != "attention",
                threshold=THRESHOLD,
                points=12,
                random_points=0,
                areas="none",
                sample=0,
                describe=0,
            )
            try:
                result = gatelens.find_circuit(model, task_name, asked, out=out)
                counts[level] = result.count
                if name == DENSE:
                    dense[task_name, level] = result.curve
                elif (task_name, level) in dense:
                    multipliers[level] = gatelens.multiplier(dense[task_name, level], result.curve, at=THRESHOLD)
            except GatelensError as error:  # no effect, or a curve that does not reach the threshold
                counts.setdefault(level, None)
                print(f"{model.name}, {task_name}, {level}: {error}", flush=True)
        yield Point(name, seed, task_name, *on_task(model, task), counts, multipliers)


def write_table(points: list[Point], path: Path) -> None:
    text = StringIO(newline="")
    writer = csv.writer(text)
    columns = ("{}", "{} low", "{} high", "{} prompts", "{} multiplier", "{} multiplier low", "{} multiplier high")
    header = [column.format(level) for level in PROMPTS for column in columns]
    writer.writerow(["task", "model", "seed", "keys per query", "right", *header])
    for point in points:
        cells: list[object] = []
        for level, prompts in PROMPTS.items():
            count, multiplier = point.counts[level], point.multipliers.get(level)
            columns_of_count = count.columns() if count else None
            cells += (
                [columns_of_count.count, columns_of_count.count_low, columns_of_count.count_high, prompts]
                if columns_of_count
                else ["", "", "", prompts]
            )
            numbers = (multiplier.ratio, *multiplier.interval) if multiplier else ("", "", "")
            cells += [f"{number:.3g}" if isinstance(number, float) else number for number in numbers]
        writer.writerow([point.task, point.model, point.seed, f"{point.keys:.3f}", f"{point.right:.3f}", *cells])
    replace_file(path, text.getvalue())


def draw(points: list[Point], path: Path) -> None:
    """Counts against keys per query, a panel for each level and task; bars are intervals, lines join a seed's doses."""
    colours = {DENSE: "black", CONTROL: "0.6"} | {f"seed {seed}": f"C{seed}" for seed in SEEDS}
    figure = Figure(figsize=(3 * len(TASKS), 2.4 * len(PROMPTS) + 0.8), layout="constrained")
    axes = figure.subplots(len(PROMPTS), len(TASKS), squeeze=False)
    for row, level in zip(axes, PROMPTS, strict=True):
        for axis, task in zip(row, TASKS, strict=True):
            chains: dict[str, list[tuple[float, int]]] = {}
            for point in points:
                count = point.counts[level]
                if point.task != task or count is None or count.value is None:
                    continue
                low, high = (end if end is not None else count.value for end in count.interval)
                bars = [[max(0, count.value - low)], [max(0, high - count.value)]]
                chain = point.model if point.model in (DENSE, CONTROL) else f"seed {point.seed}"
                chains.setdefault(chain, []).append((point.keys, count.value))
                axis.errorbar(point.keys, count.value, bars, fmt="o", markersize=3, color=colours[chain], linewidth=0.8)
            for chain, values in chains.items():
                axis.plot(*zip(*values, strict=True), color=colours[chain], linewidth=0.8, label=chain)
            axis.margins(y=0.1)
            axis.set(xscale="log", title=task, ylim=(0, None))
        row[0].set_ylabel(f"{LEVELS[level].noun} for {THRESHOLD:.0%}")
    axes[0, -1].legend(fontsize=7, loc="lower right")
    prompts = ", ".join(f"{n} for {LEVELS[level].noun}" for level, n in PROMPTS.items())
    figure.supxlabel("open keys per query and head", fontsize=10)
    figure.suptitle(f"Bars: 95 % intervals over prompts ({prompts})", fontsize=10)
    figure.savefig(path, dpi=130)


def slope(doses: list[tuple[float, float]]) -> float:
    """The least-squares slope of log(count) by log(keys)."""
    x, y = ([math.log(value) for value in column] for column in zip(*doses, strict=True))
    centre = mean(x)
    return sum((a - centre) * b for a, b in zip(x, y, strict=True)) / sum((a - centre) ** 2 for a in x)


def summary(points: list[Point]) -> str:
    """For each task and level: how the count changes when keys are halved, and how many multipliers exclude 1."""
    lines = [
        "| task | level | dense count | control | factor of the count when keys are halved: each seed | "
        "fewer / more than dense, of all doses | right at the sparsest dose, each seed |",
        "|---|---|---|---|---|---|---|",
    ]
    for task in TASKS:
        for level in PROMPTS:
            of_task = [point for point in points if point.task == task]
            counts = {point.model: str(point.counts[level]) for point in of_task}
            doses = [point for point in of_task if point.model not in (DENSE, CONTROL)]
            factors = []
            for seed in SEEDS:
                reached = [(p.keys, c.value) for p in doses if p.seed == seed and (c := p.counts[level]) and c.value]
                if len(reached) > 2:
                    factors.append(f"{2 ** -slope(reached):.2f} ({len(reached)} doses)")
            shown = [p.multipliers[level] for p in doses if level in p.multipliers]
            fewer = sum(m.shows_difference and m.ratio > 1 for m in shown)
            more = sum(m.shows_difference and m.ratio < 1 for m in shown)
            right = ", ".join(f"{p.right:.0%}" for p in doses if p.model == f"{DOSES[-1]:g}")
            lines.append(
                f"| {task} | {level} | {counts.get(DENSE)} | {counts.get(CONTROL)} | {', '.join(factors)} "
                f"| {fewer} / {more} of {len(doses)} | {right} |"
            )
    return "\n".join(lines) + "\n"


def main(folder: Path, out: Path) -> None:
    out.mkdir(parents=True, exist_ok=True)
    dense_curves: dict[tuple[str, str], Curve] = {}
    points: list[Point] = []
    for name, seed, model in models(folder):
        for point in measure(name, seed, model, folder, dense_curves):
            points.append(point)
            counts = ", ".join(f"{level}: {count}" for level, count in point.counts.items())
            print(f"{model.name}, {point.task}: {point.keys:.2f} keys, {point.right:.0%} right; {counts}", flush=True)
        write_table(points, out / "dose-response.csv")
        draw(points, out / "dose-response.png")
        replace_file(out / "summary.md", summary(points))
    for run in (folder / "circuits").glob("*-heads"):  # what `gatelens report` reads
        shutil.copytree(run, out / "cells" / run.name, ignore=shutil.ignore_patterns("example.*"), dirs_exist_ok=True)
    print(summary(points))


if __name__ == "__main__":
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)
    main(Path(sys.argv[1]), Path(sys.argv[2]))
