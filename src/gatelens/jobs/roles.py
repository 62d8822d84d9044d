"""Find the role of every head in a task, and prove it by ablation, in a folder that can be continued."""

from __future__ import annotations

import csv
import itertools
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from gatelens.errors import GatelensError
from gatelens.gates.responses import check_responses, share_known
from gatelens.measures.ablation import AblationCurve, ablation_curve, count_of_kind
from gatelens.measures.results import RESULT, open_together, request
from gatelens.methods.head_gating import KINDS, HeadGatingSettings, HeadRoles, fit_head_gates
from gatelens.model import Model
from gatelens.model.components import Head
from gatelens.report.figures import ablation_figure, head_maps, save_figure
from gatelens.runtime.files import read_json, read_tensors, write_json, write_tensors
from gatelens.runtime.journal import Clock, Journal, Progress
from gatelens.runtime.processes import Processes, is_main
from gatelens.sparse.in_model import is_sparse
from gatelens.tasks import task as make_task
from gatelens.tasks.batches import as_responses, split


@dataclass(frozen=True)
class GateSettings(HeadGatingSettings):
    """What to fit on, and how far to ablate."""

    n: int = field(default=128, metadata={"help": "examples to fit gates on"})
    held_out: int = field(default=64, metadata={"help": "further examples, for the ablation"})
    most: int = field(default=50, metadata={"help": "ablate up to so many heads"})
    every: int = field(default=1, metadata={"help": "evaluate each so many numbers of ablated heads"})

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("n", "held_out", "most", "every"):
            if getattr(self, name) < 1:
                raise GatelensError(f"{name} is at least 1, not {getattr(self, name)}.")


@dataclass(frozen=True, eq=False)
class GateResult:
    """Roles of all heads, and the curves that prove them: one for each kind, and one of a random order."""

    model: str
    task: str
    settings: GateSettings
    roles: HeadRoles
    curves: list[AblationCurve]
    known: float | None  # share of the held-out response tokens that are the model's first choice
    seconds: float


def find_roles(
    model: Model,
    task: str,
    settings: GateSettings | None = None,
    *,
    out: str | Path | None = None,
    options: Mapping[str, Any] | None = None,
    progress: Progress | None = None,
) -> GateResult:
    """Fit gates on a task's examples, and ablate heads on others that were held out.

    Started by `accelerate launch`, the processes share the work, and the main one writes the folder.
    """
    settings = settings or GateSettings()
    whole = as_responses(
        make_task(task, model, n=settings.n + settings.held_out, seed=settings.seed, **(options or {}))
    )
    if len(whole) < settings.n + settings.held_out:
        raise GatelensError(
            f"{whole.name} has {len(whole)} examples, fewer than {settings.n} to fit and {settings.held_out} to hold "
            "out: ask for less."
        )
    check_responses(model, whole)  # before the folder is claimed, and all of it: the proof comes hours after the fit
    fitted, tested = split(whole, settings.n)
    folder, processes = None if out is None else Path(out), Processes(model.device)
    pieces = None if folder is None else folder / "pieces"
    clock = Clock(pieces, progress)
    about = {**whole.spec(), "fingerprint": whole.fingerprint()}
    if folder is not None and open_together(folder, request("gate", model, settings, task=about), processes):
        return load_roles(folder)
    journal = Journal(pieces, clock if is_main() else None)
    # 1. Three fits for each seed.
    roles = fit_head_gates(model, fitted, settings, journal=journal)
    # 2. The proof: top heads of each kind, and random ones, ablated.
    most = min(settings.most, model.n_layers * model.n_heads)
    curves = [
        ablation_curve(
            model,
            tested,
            roles,
            kind,
            most,
            every=settings.every,
            batch=settings.batch,
            memory_gb=settings.memory_gb,
            journal=journal,
        )
        for kind in (*KINDS, "random")
    ]
    known = share_known(model, tested, settings.memory_gb)
    result = GateResult(model.name, whole.name, settings, roles, curves, known, clock.seconds)
    if folder is not None and is_main():
        _save(result, model, folder)
    processes.wait()
    return result


def load_roles(folder: str | Path) -> GateResult:
    """A saved result."""
    folder = Path(folder)
    about = read_json(folder / RESULT)
    tensors = read_tensors(folder / "roles.safetensors")
    try:
        settings = about["settings"] | {key: tuple(about["settings"][key]) for key in ("first_rate", "second_rate")}
        roles = HeadRoles(*(tensors[name] for name in ("gates", "plus", "minus", "losses")))
        curves = [
            AblationCurve(
                kind,
                tensors["ablated"].long(),
                tensors[f"changes.{kind}"],
                count_of_kind(roles, kind),
                tensors.get(f"own.{kind}"),  # runs of an earlier version do not have it, or say what is known
            )
            for kind in (*KINDS, "random")
        ]
        known, seconds = about.get("known"), about["seconds"]
        return GateResult(about["model"], about["task"], GateSettings(**settings), roles, curves, known, seconds)
    except (KeyError, TypeError) as error:
        raise GatelensError(f"{folder} holds no head roles of this version ({error}): run it again.") from error


def _save(result: GateResult, model: Model, folder: Path) -> None:
    roles, curves = result.roles, result.curves
    write_tensors(
        folder / "roles.safetensors",
        {
            **{name: getattr(roles, name) for name in (*KINDS, "gates", "plus", "minus", "losses")},
            "ablated": curves[0].ablated,
            **{f"changes.{curve.kind}": curve.changes for curve in curves},
            **{f"own.{curve.kind}": curve.own for curve in curves if curve.own is not None},
        },
    )
    with (folder / "roles.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["head", "kind", "mean", *(f"seed {seed}" for seed in range(len(roles.plus)))])
        for layer, index, kind in itertools.product(range(model.n_layers), range(model.n_heads), KINDS):
            scores = roles.kind(kind)[:, layer, index]
            writer.writerow([Head(layer, index), kind, *(f"{x:.6g}" for x in (scores.mean(), *scores))])
    with (folder / "ablation.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["kind", "ablated", "of kind", "change", "low", "high"])
        for curve in curves:
            columns = (curve.ablated, curve.of_kind, curve.change, curve.low, curve.high)
            rows = zip(*(x.tolist() for x in columns), strict=True)
            writer.writerows([curve.kind, n, *(f"{number:.6g}" for number in numbers)] for n, *numbers in rows)
    means = {kind: roles.kind(kind).mean(0) for kind in KINDS}
    save_figure(head_maps(means, f"{result.task} in {result.model}"), folder / "roles")
    save_figure(ablation_figure({result.task: {result.model: curves}}), folder / "ablation")
    write_json(
        folder / RESULT,
        {
            "model": result.model,
            "sparse": is_sparse(model.hf),
            "task": result.task,
            "settings": asdict(result.settings),
            "summary": roles.summary(),
            "heads of each kind": {curve.kind: curve.heads.tolist() for curve in curves if curve.kind in KINDS},
            "known": result.known,
            "change at the end": {curve.kind: float(curve.change[-1]) for curve in curves},
            "change of their own heads": {
                curve.kind: float(curve.own.mean()) for curve in curves if curve.own is not None
            },
            "seconds": result.seconds,
        },
    )
    shutil.rmtree(folder / "pieces", ignore_errors=True)
