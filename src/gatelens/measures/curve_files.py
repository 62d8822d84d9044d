"""Curves in a run folder: ``curve.safetensors`` (every prompt's metric), ``curve.json`` and ``curve.csv``."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from pydantic import Field
from torch import Tensor

from gatelens.errors import GatelensError
from gatelens.gates.level import Ranking, Source
from gatelens.measures.curves import Curve
from gatelens.runtime.files import read_tensors, write_csv, write_json, write_tensors
from gatelens.runtime.records import SCHEMA_VERSION, Record, read_record

_RANDOM = "random."  # before the names of the baseline's tensors
_TENSORS = ("kept", "metrics", "none", "everything")


class CurveRecord(Record):
    """The schema of ``curve.json``."""

    level: str
    total: int
    ranking: Ranking
    source: Source
    fingerprints: tuple[str, ...] = Field(default=(), description="of the prompts of each task seed")


def save_curve(curve: Curve, folder: Path) -> None:
    """Write a curve and its random baseline."""
    tensors = _tensors(curve)
    if curve.random is not None:
        tensors |= {f"{_RANDOM}{name}": tensor for name, tensor in _tensors(curve.random).items()}
    write_tensors(folder / "curve.safetensors", tensors)
    record = CurveRecord(
        schema_version=SCHEMA_VERSION,
        level=curve.level,
        total=curve.total,
        ranking=curve.ranking,
        source=curve.source,
        fingerprints=curve.fingerprints,
    )
    write_json(folder / "curve.json", record.model_dump(mode="json"))
    named = [(curve.ranking, curve), *([("random", curve.random)] if curve.random is not None else [])]
    points = [
        (name, *numbers)
        for name, line in named
        for numbers in zip(*(x.tolist() for x in (line.kept, line.effect, line.low, line.high)), strict=True)
    ]
    write_csv(folder / "curve.csv", ["ranking", "kept", "effect", "low", "high"], points)


def load_curve(folder: str | Path) -> Curve:
    """Read the curve of a saved run, with its random baseline."""
    folder = Path(folder)
    record = read_record(folder / "curve.json", CurveRecord)
    tensors = read_tensors(folder / "curve.safetensors")
    try:
        random = _curve(record, tensors, _RANDOM, None) if f"{_RANDOM}kept" in tensors else None
        return _curve(record, tensors, "", random)
    except KeyError as error:
        raise GatelensError(f"the curve in {folder} lacks the tensor {error}: run the job again.") from error


def _tensors(curve: Curve) -> dict[str, Tensor]:
    return {"asked": torch.tensor(curve.asked), **{name: getattr(curve, name) for name in _TENSORS}}


def _curve(record: CurveRecord, tensors: Mapping[str, Tensor], prefix: str, random: Curve | None) -> Curve:
    return Curve(
        level=record.level,
        total=record.total,
        asked=tensors[f"{prefix}asked"].tolist(),
        **{name: tensors[f"{prefix}{name}"] for name in _TENSORS},
        ranking=record.ranking,
        source=record.source,
        random=random,
        fingerprints=record.fingerprints,
    )
