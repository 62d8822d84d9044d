"""Curves in a run folder: ``curve.safetensors`` (every prompt's metric), ``curve.json`` and ``curve.csv``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from pydantic import Field
from torch import Tensor

from gatelens.gates.level import Source
from gatelens.gates.scores import Ranking
from gatelens.gates.selection import TOP
from gatelens.measures.curves import Curve
from gatelens.runtime.files import read_tensors, write_csv, write_json, write_tensors
from gatelens.runtime.records import SCHEMA_VERSION, Record, read_record

_RANDOM, _MIB = "random.", "mib."  # before the names of the tensors of the baseline and of the circuits on MIB's grid
_TENSORS = ("kept", "metrics", "none", "everything")


class CurveRecord(Record):
    """The schema of ``curve.json``."""

    level: str
    total: int
    ranking: Ranking
    source: Source
    selection: str = TOP
    fingerprints: tuple[str, ...] = Field(default=(), description="of the prompts of each task seed")
    mib_ranking: Ranking | None = Field(
        default=None, description="of the circuits for CPR and CMD; None: there are none"
    )
    ranked_on: int = Field(default=0, description="other prompts that gates were ranked on; 0: the same prompts")


def save_curve(curve: Curve, folder: Path) -> None:
    """Write a curve, its random baseline and its circuits on MIB's grid."""
    tensors = _tensors(curve)
    for prefix, other in ((_RANDOM, curve.random), (_MIB, curve.mib)):
        if other is not None:
            tensors |= {f"{prefix}{name}": tensor for name, tensor in _tensors(other).items()}
    write_tensors(folder / "curve.safetensors", tensors)
    record = CurveRecord(
        schema_version=SCHEMA_VERSION,
        level=curve.level,
        total=curve.total,
        ranking=curve.ranking,
        source=curve.source,
        selection=curve.selection,
        fingerprints=curve.fingerprints,
        mib_ranking=None if curve.mib is None else curve.mib.ranking,
        ranked_on=curve.ranked_on,
    )
    write_json(folder / "curve.json", record.model_dump(mode="json"))
    write_csv(folder / "curve.csv", CURVE_COLUMNS, curve_lines(curve))


CURVE_COLUMNS = ("ranking", "kept", "effect", "low", "high", "prompts", "seeds", "ranked_on")
"""The columns of a curve as a table."""


def curve_lines(curve: Curve) -> list[tuple[Any, ...]]:
    """The points of a curve and of its random baseline as the lines of a table, with the columns `CURVE_COLUMNS`."""
    named = [(curve.ranking, curve), *([("random", curve.random)] if curve.random is not None else [])]
    sample = curve.sample
    return [
        (name, *numbers, sample.prompts, sample.seeds, sample.ranked_on)
        for name, line in named
        for numbers in zip(*(x.tolist() for x in (line.kept, line.effect, line.low, line.high)), strict=True)
    ]


def load_curve(folder: str | Path) -> Curve:
    """Read the curve of a saved run, with its random baseline and its circuits on MIB's grid."""
    folder = Path(folder)
    record = read_record(folder / "curve.json", CurveRecord)
    tensors = read_tensors(folder / "curve.safetensors")
    curve = _curve(record, tensors, "")
    random, mib = (
        _curve(record, tensors, prefix) if f"{prefix}kept" in tensors else None for prefix in (_RANDOM, _MIB)
    )
    if mib is not None:
        mib = replace(mib, ranking=record.mib_ranking or "signed")
    return replace(curve, random=random, mib=mib, ranked_on=record.ranked_on)


def _tensors(curve: Curve) -> dict[str, Tensor]:
    return {"asked": torch.tensor(curve.asked), **{name: getattr(curve, name) for name in _TENSORS}}


def _curve(record: CurveRecord, tensors: Mapping[str, Tensor], prefix: str) -> Curve:
    kept, metrics, none, everything = (tensors[f"{prefix}{name}"] for name in _TENSORS)
    return Curve(
        level=record.level,
        total=record.total,
        asked=tensors[f"{prefix}asked"].tolist(),
        kept=kept,
        metrics=metrics,
        none=none,
        everything=everything,
        ranking=record.ranking,
        source=record.source,
        selection=record.selection,
        fingerprints=record.fingerprints,
    )
