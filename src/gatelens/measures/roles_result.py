"""The result of ``gatelens gate``: the role of every head in a task and the ablation curves that test it, in a folder.

``result.json``         the summary (`RolesRecord`)
``roles.safetensors``   gates, scores, losses and the ablation curves of every seed
``roles.csv``           the score of every head, for each kind and seed
``ablation.csv``        the ablation curves, with their intervals
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from pydantic import ConfigDict, Field, model_validator

from gatelens.gates.roles import KINDS, HeadRoles
from gatelens.measures.ablation import AblationCurve, count_of_kind
from gatelens.methods.head_gating import HeadGatingSettings
from gatelens.model.components import Head
from gatelens.runtime.context import MEMORY_GB, MEMORY_HELP
from gatelens.runtime.files import read_tensors, write_csv, write_tensors
from gatelens.runtime.rank import is_main
from gatelens.runtime.records import SCHEMA_VERSION, Record, read_record
from gatelens.runtime.run_folder import RESULT, RunFolder
from gatelens.runtime.settings import EXECUTION
from gatelens.runtime.shown import Shown
from gatelens.tasks import MOST_PROMPTS

ORDERS = (*KINDS, "random")
"""The orders in which heads are ablated, one curve for each."""
_TENSORS = "roles.safetensors"


class RolesSettings(HeadGatingSettings):
    """The settings of `find_roles` and ``gatelens gate``: what to fit on, how, and how many heads to ablate."""

    n: int = Field(128, ge=1, le=MOST_PROMPTS, description="examples to fit gates on")
    held_out: int = Field(32, ge=1, le=MOST_PROMPTS, description="further examples for the ablation")
    most: int = Field(50, ge=1, le=1_000_000, description="ablate up to this many heads")
    every: int = Field(10, ge=1, description="step between two numbers of ablated heads")
    memory_gb: float = Field(MEMORY_GB, gt=0, description=MEMORY_HELP, json_schema_extra=EXECUTION)

    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        name: {**HeadGatingSettings.presets[name], "n": n, "held_out": held_out, "most": 50, "every": every}
        for name, n, held_out, every in (
            ("standard", 128, 32, 10),
            ("quick", 64, 8, 25),
            ("published", 1024, 64, 5),
        )
    }


@dataclass(frozen=True, eq=False, repr=False)
class RolesResult(Shown):
    """The roles of all heads in a task, and the ablation curves that test them.

    Arguments:
        model: the name of the model.
        sparse: whether the attention of the model is gated.
        task: the name of the task.
        curves: one for each kind, and one of a random order.
        known: the share of the held-out response tokens that are the model's first choice; None in runs of early
            versions.
        seconds: how long the run took, including starts that were killed.

    Example:
        result = gatelens.load_roles("runs/roles")
        result.roles.facilitation.mean(0)  # (layer, head)
        result.plot()
    """

    model: str
    sparse: bool
    task: str
    settings: RolesSettings
    roles: HeadRoles  # the scores of every head
    curves: list[AblationCurve]
    known: float | None
    seconds: float

    drawn_by = "gatelens.report.plots:plot_roles_result"

    def records(self) -> list[dict[str, Any]]:
        """The points of all ablation curves."""
        return [record for curve in self.curves for record in curve.records()]

    def headline(self) -> str:
        return f"{self.task} in {self.model}: ablation of heads by role; .roles has the roles"


class RolesRecord(Record):
    """The schema of ``result.json``."""

    model_config = ConfigDict(allow_inf_nan=True)  # a log-probability may overflow

    model: str
    task: str
    sparse: bool
    settings: RolesSettings
    known: float | None = None
    seconds: float = Field(ge=0)
    # Computed from the tensors, for those who read the file.
    summary: dict[str, dict[str, float]] = Field(
        {}, description="share of heads of each kind in all seeds, in any seed"
    )
    heads_of_kind: dict[str, list[int]] = Field({}, description="number of heads of each kind, for each seed")
    last_change: dict[str, float] = Field({}, description="change at the last point of each curve")
    own_change: dict[str, float] = Field({}, description="change if exactly the heads of a kind are ablated")

    @model_validator(mode="before")
    @classmethod
    def _from_version_1(cls, values: Any) -> Any:
        """Files of gatelens 0.1 have other keys, and the first of them do not say whether the model is sparse."""
        if not isinstance(values, Mapping) or "schema_version" in values:
            return values
        renamed = {_VERSION_1_KEYS.get(key, key): value for key, value in values.items()}
        return {"sparse": "sparse" in str(values.get("model")), **renamed}


_VERSION_1_KEYS = {
    "heads of each kind": "heads_of_kind",
    "change at the end": "last_change",
    "change of their own heads": "own_change",
}


def save_roles(result: RolesResult, run: RunFolder) -> None:
    """Write a result to its run folder and finish the run. With several processes, all of them must call this."""
    if run.path is not None and is_main():
        roles, curves = result.roles, result.curves
        write_tensors(
            run.path / _TENSORS,
            {
                **{name: getattr(roles, name) for name in (*KINDS, "gates", "plus", "minus", "losses")},
                "ablated": curves[0].ablated,
                **{f"changes.{curve.kind}": curve.changes for curve in curves},
                **{f"own.{curve.kind}": curve.own for curve in curves if curve.own is not None},
            },
        )
        seeds = [f"seed {seed}" for seed in range(len(roles.plus))]
        write_csv(run.path / "roles.csv", ["head", "kind", "mean", *seeds], _score_records(roles))
        header = ["kind", "ablated", "of kind", "change", "low", "high"]
        write_csv(run.path / "ablation.csv", header, _curve_records(curves))
    run.finish(_record(result).model_dump(mode="json"))


def load_roles(folder: str | Path) -> RolesResult:
    """The saved result of ``gatelens gate`` or `find_roles`. Results of version 0.1 are read too.

    Example:
        roles = gatelens.load_roles("runs/roles").roles
    """
    folder = Path(folder)
    record = read_record(folder / RESULT, RolesRecord)
    tensors = read_tensors(folder / _TENSORS)
    roles = HeadRoles(*(tensors[name] for name in ("gates", "plus", "minus", "losses")))
    curves = [
        AblationCurve(
            kind,
            tensors["ablated"].long(),
            tensors[f"changes.{kind}"],
            count_of_kind(roles, kind),
            tensors.get(f"own.{kind}"),
        )
        for kind in ORDERS
    ]
    return RolesResult(
        record.model, record.sparse, record.task, record.settings, roles, curves, record.known, record.seconds
    )


def _record(result: RolesResult) -> RolesRecord:
    curves = result.curves
    return RolesRecord(
        schema_version=SCHEMA_VERSION,
        model=result.model,
        sparse=result.sparse,
        task=result.task,
        settings=result.settings,
        known=result.known,
        seconds=result.seconds,
        summary=result.roles.summary(),
        heads_of_kind={curve.kind: curve.heads.tolist() for curve in curves if curve.kind in KINDS},
        last_change={curve.kind: float(curve.change[-1]) for curve in curves},
        own_change={curve.kind: float(curve.own.mean()) for curve in curves if curve.own is not None},
    )


def _score_records(roles: HeadRoles) -> Iterator[list[Any]]:
    """The lines of roles.csv."""
    _, n_layers, n_heads = roles.plus.shape
    for layer, index, kind in itertools.product(range(n_layers), range(n_heads), KINDS):
        scores = roles.kind(kind)[:, layer, index]
        yield [Head(layer, index), kind, float(scores.mean()), *scores.tolist()]


def _curve_records(curves: list[AblationCurve]) -> Iterator[list[Any]]:
    """The lines of ablation.csv."""
    for curve in curves:
        columns = (curve.ablated, curve.of_kind, curve.change, curve.low, curve.high)
        for numbers in zip(*(column.tolist() for column in columns), strict=True):
            yield [curve.kind, *numbers]
