"""Fit gates that keep one task's responses and lose another's, in a folder that can be continued."""

from __future__ import annotations

import csv
import itertools
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from gatelens.errors import GatelensError
from gatelens.gates.responses import check_responses
from gatelens.measures.results import RESULT, open_together, request
from gatelens.methods.contrast import Contrast, ContrastSettings, fit_contrast, hold_out
from gatelens.model import Model
from gatelens.model.components import Head
from gatelens.report.figures import head_maps, save_figure
from gatelens.runtime.files import read_json, read_tensors, write_json, write_tensors
from gatelens.runtime.journal import Clock, Journal, Progress
from gatelens.runtime.processes import Processes, is_main
from gatelens.tasks import task as make_task
from gatelens.tasks.batches import as_responses


@dataclass(frozen=True)
class TwoTaskSettings(ContrastSettings):
    """How many examples to take of each task, and how to fit."""

    n: int = field(default=64, metadata={"help": "examples of each task, those held out included"})

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.n < 2:
            raise GatelensError(f"n is at least 2, one example to fit and one to hold out, not {self.n}.")


@dataclass(frozen=True, eq=False)
class ContrastResult:
    """Contrastive gates of two tasks."""

    model: str
    keep: str
    lose: str
    settings: TwoTaskSettings
    contrast: Contrast
    seconds: float


def find_contrast(
    model: Model,
    keep: str,
    lose: str,
    settings: TwoTaskSettings | None = None,
    *,
    out: str | Path | None = None,
    keep_options: Mapping[str, Any] | None = None,
    lose_options: Mapping[str, Any] | None = None,
    progress: Progress | None = None,
) -> ContrastResult:
    """Fit gates on examples of both tasks, and evaluate them on others that were held out.

    Started by `accelerate launch`, the processes share the seeds, and the main one writes the folder.
    """
    settings = settings or TwoTaskSettings()
    keeps, loses = (
        as_responses(make_task(name, model, n=settings.n, seed=settings.seed, **(options or {})))
        for name, options in ((keep, keep_options), (lose, lose_options))
    )
    for one in (keeps, loses):
        if len(one) < settings.n:
            raise GatelensError(
                f"{one.name} has {len(one)} examples, fewer than the {settings.n} asked for: ask for less."
            )
        check_responses(model, one)
        hold_out(one, settings.held_out)  # refuses what cannot be split, before the folder is claimed
    folder, processes = None if out is None else Path(out), Processes(model.device)
    pieces = None if folder is None else folder / "pieces"
    clock = Clock(pieces, progress)
    about = [{**one.spec(), "fingerprint": one.fingerprint()} for one in (keeps, loses)]
    if folder is not None and open_together(folder, request("contrast", model, settings, tasks=about), processes):
        return load_contrast(folder)
    journal = Journal(pieces, clock if is_main() else None)
    contrast = fit_contrast(model, keeps, loses, settings, journal=journal)
    kept, lost = (_shown(one.name, one.options) for one in (keeps, loses))
    result = ContrastResult(model.name, kept, lost, settings, contrast, clock.seconds)
    if folder is not None and is_main():
        _save(result, folder)
    processes.wait()
    return result


def load_contrast(folder: str | Path) -> ContrastResult:
    """A saved result."""
    folder = Path(folder)
    about = read_json(folder / RESULT)
    tensors = read_tensors(folder / "contrast.safetensors")
    try:
        settings = TwoTaskSettings(**{**about["settings"], "rate": tuple(about["settings"]["rate"])})
        fitted = {name: tensors[name] for name in ("gates", "losses", "keep", "lose")}
        contrast = Contrast(**fitted, keep_open=about["keep open"], lose_open=about["lose open"])
        return ContrastResult(about["model"], about["keep"], about["lose"], settings, contrast, about["seconds"])
    except (KeyError, TypeError) as error:
        raise GatelensError(f"{folder} holds no contrast of this version ({error}): run it again.") from error


def _save(result: ContrastResult, folder: Path) -> None:
    found = result.contrast
    tensors = {name: getattr(found, name) for name in ("gates", "losses", "keep", "lose")}
    write_tensors(folder / "contrast.safetensors", tensors)
    with (folder / "gates.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["head", "mean", *(f"seed {seed}" for seed in range(len(found.gates)))])
        for layer, index in itertools.product(*map(range, found.gates.shape[1:])):
            gates = found.gates[:, layer, index]
            writer.writerow([Head(layer, index), *(f"{x:.6g}" for x in (gates.mean(), *gates))])
    title = f"keep {result.keep}, lose {result.lose}, in {result.model}"
    save_figure(head_maps({"gates": found.gates.mean(0)}, title, "mean gate"), folder / "gates")
    write_json(
        folder / RESULT,
        {
            **{name: getattr(result, name) for name in ("model", "keep", "lose", "seconds")},
            "settings": asdict(result.settings),
            "keep open": found.keep_open,
            "lose open": found.lose_open,
            "kept": float(found.keep.mean()),
            "lost": float(found.lose.mean()),
        },
    )
    shutil.rmtree(folder / "pieces", ignore_errors=True)


def _shown(name: str, options: Mapping[str, Any]) -> str:
    """A task's name, with the options that tell it from another task of that name."""
    given = ", ".join(f"{key}={value}" for key, value in options.items() if value is not None)
    return f"{name} ({given})" if given else name
