"""What sparsity costs in several runs of sparse post-training: a table and a figure, from their logs.

A frontier compares recipes: loss and KL on held-out text against open keys per query, at equal training tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from gatelens.errors import GatelensError
from gatelens.report._reading import sparsify_run
from gatelens.report._runs import SparsifyRun
from gatelens.report.figures import frontier_figure, save_figure
from gatelens.report.figures._training import judged_texts
from gatelens.runtime.files import make_folder, write_csv

COLUMNS = ("keys per query", "above dense", "kl", "idle heads")


@dataclass(frozen=True)
class FrontierPoint:
    """One evaluation of one run on one held-out text. Losses are in nats per token.

    Arguments:
        tokens: how many tokens one process had trained on.
        keys: open keys per query and head.
        above_dense: loss above that of the dense model.
        kl: KL divergence from the dense model.
        idle: share of heads that are idle on a sequence, 0..1; None in logs of earlier versions.
    """

    run: str
    step: int
    tokens: int
    text: str
    keys: float
    above_dense: float
    kl: float
    idle: float | None


def frontier(folders: Sequence[str | Path], out: str | Path, formats: Sequence[str] = ("png",)) -> list[FrontierPoint]:
    """Read the evaluations of some runs, and write `frontier.csv` and a figure.

    Arguments:
        folders: run folders of `sparsify`, finished or not. Runs have the names of their folders.
        out: the folder to write to.
        formats: of the figure: any of png, svg and pdf.

    Returns:
        All points, run by run and text by text.

    Example:
        frontier(["runs/lora-8", "runs/lora-16"], "runs/frontier")
    """
    runs = {_name(folder, folders): sparsify_run(Path(folder)) for folder in folders}
    points = [point for name, run in runs.items() for point in _points(name, run)]
    if not points:
        raise GatelensError(
            f"none of {', '.join(map(str, folders))} has evaluated held-out text yet: train with --held-out, and wait "
            "for the first evaluation (--judge-every)."
        )
    make_folder(Path(out))
    save_figure(frontier_figure({name: run.judged for name, run in runs.items()}), Path(out) / "frontier", formats)
    header = list(FrontierPoint.__dataclass_fields__)
    write_csv(Path(out) / "frontier.csv", header, (list(vars(point).values()) for point in points))
    return points


def _points(name: str, run: SparsifyRun) -> list[FrontierPoint]:
    settings = run.asked["settings"]
    per_step = settings["batch"] * settings["length"] * settings["accumulate"]
    points = []
    for text in judged_texts(run.judged):
        for record in run.judged:
            keys, above_dense, kl, idle = (record.get(f"{text} {column}") for column in COLUMNS)
            if keys is not None and above_dense is not None and kl is not None:
                step = int(record["step"])
                points.append(FrontierPoint(name, step, step * per_step, text, keys, above_dense, kl, idle))
    return points


def _name(folder: str | Path, folders: Sequence[str | Path]) -> str:
    """The last part of a path, or more of it if two runs have the same last part."""
    parts = Path(folder).resolve().parts
    others = [Path(other).resolve().parts for other in folders if Path(other).resolve().parts != parts]
    depth = next((n for n in range(1, len(parts)) if all(parts[-n:] != other[-n:] for other in others)), len(parts))
    return "/".join(parts[-depth:])
