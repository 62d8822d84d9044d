"""What a run leaves behind: a folder of plain files that outlive the code.

``asked.json`` says what was asked, with the fingerprints of model and task; it is written first, and a folder is only
ever continued with the same request. ``result.json`` holds the summary and is written last: a folder that has it is
complete. Tensors are safetensors, curves also CSV.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gatelens.errors import GatelensError
from gatelens.measures.curves import Curve
from gatelens.model import Model
from gatelens.runtime.files import read_json, read_tensors, write_json, write_tensors
from gatelens.runtime.processes import Processes
from gatelens.runtime.versions import versions

ASKED, RESULT = "asked.json", "result.json"


def request(kind: str, model: Model, settings: Any, **tasks: Any) -> dict[str, Any]:
    """What was asked of a job: its kind, the model, its tasks and settings, and the versions that it runs with."""
    return {
        "kind": kind,
        "model": {"name": model.name, "fingerprint": model.fingerprint, "dtype": str(model.dtype)},
        **tasks,
        "settings": {key: value for key, value in asdict(settings).items() if key != "memory_gb"},  # changes no numbers
        "versions": versions(),
    }


def open_folder(out: Path, asked: Mapping[str, Any]) -> bool:
    """Claim a folder for this request; True if it is complete already.

    A folder that holds another request's work is refused, so that no two runs mix.
    """
    if out.exists() and not out.is_dir():
        raise GatelensError(f"{out} is a file: give a folder, or a name that does not exist yet.")
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise GatelensError(f"cannot write to {out}: {error.strerror}. Give another folder.") from error
    wanted = json.loads(json.dumps(asked))
    if not (out / ASKED).exists():
        if any(path.suffix != ".tmp" for path in out.iterdir()):  # an earlier start was killed while it wrote
            raise GatelensError(f"{out} holds other files and no run of gatelens: give an empty or a new folder.")
        write_json(out / ASKED, wanted)
        return False
    there = read_json(out / ASKED)
    for key in sorted({*wanted, *there}):
        if wanted.get(key) != there.get(key):
            raise GatelensError(
                f"{out} holds a run with {key} {_short(there.get(key), wanted.get(key))}, not "
                f"{_short(wanted.get(key), there.get(key))}: ask for the same again to go on, or give another folder."
            )
    return (out / RESULT).exists()


def open_together(out: Path, asked: Mapping[str, Any], processes: Processes) -> bool:
    """`open_folder` by all processes of a run: the main one claims the folder, the others find it claimed."""
    with processes.main_first():
        return open_folder(out, asked)


def save_curve(curve: Curve, folder: Path) -> None:
    """Write a curve as ``curve.safetensors`` (every prompt's metric) and ``curve.csv`` (what is plotted)."""
    tensors = {"asked": torch.tensor(curve.asked), **_tensors(curve)}
    if curve.random is not None:
        tensors |= {f"random.{name}": tensor for name, tensor in _tensors(curve.random).items()}
        tensors["random.asked"] = torch.tensor(curve.random.asked)
    write_tensors(folder / "curve.safetensors", tensors)
    write_json(
        folder / "curve.json",
        {"level": curve.level, "total": curve.total, "ranking": curve.ranking, "source": curve.source},
    )
    with (folder / "curve.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["ranking", "kept", "effect", "low", "high"])
        for name, one in ((curve.ranking, curve), ("random", curve.random)):
            if one is not None:
                rows = zip(*(x.tolist() for x in (one.kept, one.effect, one.low, one.high)), strict=True)
                writer.writerows([name, *(f"{number:.6g}" for number in row)] for row in rows)


def load_curve(folder: str | Path) -> Curve:
    """The curve of a saved run."""
    folder = Path(folder)
    about = read_json(folder / "curve.json")
    tensors = read_tensors(folder / "curve.safetensors")
    try:
        random = _curve(about, tensors, "random.", None) if "random.kept" in tensors else None
        return _curve(about, tensors, "", random)
    except KeyError as error:
        raise GatelensError(f"{folder} holds no whole curve: {error} is missing; run it again.") from error


def _tensors(curve: Curve) -> dict[str, Tensor]:
    return {"kept": curve.kept, "metrics": curve.metrics, "none": curve.none, "everything": curve.everything}


def _curve(about: Mapping[str, Any], tensors: Mapping[str, Tensor], prefix: str, random: Curve | None) -> Curve:
    return Curve(
        level=about["level"],
        total=about["total"],
        asked=tensors[f"{prefix}asked"].tolist(),
        **{name: tensors[f"{prefix}{name}"] for name in ("kept", "metrics", "none", "everything")},
        ranking=about["ranking"],
        source=about["source"],
        random=random,
    )


def _short(value: Any, other: Any) -> str:
    """A value for a message; of two objects only what differs."""
    if isinstance(value, dict) and isinstance(other, dict):
        value = {key: value[key] for key in value if value[key] != other.get(key)}
    return str(value)
