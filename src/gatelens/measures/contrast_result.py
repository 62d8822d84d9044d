"""The result of ``gatelens contrast``: gates that keep one task and lose another, in a folder.

``result.json``            the summary (`ContrastRecord`)
``contrast.safetensors``   gates, losses and log-probabilities of every seed
``gates.csv``              the gate of every head, for each seed
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from pydantic import ConfigDict, Field, model_validator
from torch import Tensor

from gatelens.gates.roles import Contrast, ContrastAccuracy
from gatelens.methods.contrast import ContrastSettings
from gatelens.model.components import Head
from gatelens.runtime.context import MEMORY_GB, MEMORY_HELP
from gatelens.runtime.files import read_tensors, write_csv, write_tensors
from gatelens.runtime.rank import is_main
from gatelens.runtime.records import SCHEMA_VERSION, Record, read_record
from gatelens.runtime.run_folder import RESULT, RunFolder
from gatelens.runtime.settings import EXECUTION
from gatelens.runtime.shown import Shown
from gatelens.tasks import MOST_PROMPTS

_TENSORS = "contrast.safetensors"
_BY_SEED = ("gates", "losses", "keep", "lose")


class TwoTaskSettings(ContrastSettings):
    """The settings of `find_contrast` and ``gatelens contrast``: how many examples to take, and how to fit."""

    n: int = Field(64, ge=2, le=MOST_PROMPTS, description="examples of each task, including those that are held out")
    memory_gb: float = Field(MEMORY_GB, gt=0, description=MEMORY_HELP, json_schema_extra=EXECUTION)

    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        name: {**values, "n": n}
        for (name, values), n in zip(ContrastSettings.presets.items(), (64, 32, 256), strict=True)
    }


@dataclass(frozen=True, eq=False, repr=False)
class ContrastResult(Shown):
    """Contrastive gates of two tasks.

    Arguments:
        model: the name of the model.
        keep: the name and options of the task whose responses are kept.
        lose: the name and options of the task whose responses are lost.
        seconds: how long the run took, including starts that were killed.

    Example:
        result = gatelens.load_contrast("runs/contrast")
        result.contrast.gates.mean(0)  # (layer, head)
        result.plot()
    """

    model: str
    keep: str
    lose: str
    settings: TwoTaskSettings
    contrast: Contrast  # the gates, and what they do to both tasks
    seconds: float

    drawn_by = "gatelens.report.plots:plot_contrast_result"

    def records(self) -> list[dict[str, Any]]:
        """The gate of every head, mean over seeds and range; the most open gates come first."""
        heads = [
            {"head": str(head), "gate": mean, "lowest": min(of_seeds), "highest": max(of_seeds)}
            for head, mean, *of_seeds in _gate_records(self.contrast.gates)
        ]
        return sorted(heads, key=lambda record: -record["gate"])

    def headline(self) -> str:
        contrast = self.contrast
        return (
            f"keep {self.keep} (log p {contrast.keep_open:+.2f} -> {contrast.keep.mean():+.2f}), "
            f"lose {self.lose} (log p {contrast.lose_open:+.2f} -> {contrast.lose.mean():+.2f}) in {self.model}"
        )


class ContrastRecord(Record):
    """The schema of ``result.json``. Log-probabilities under the gates are means over seeds."""

    model_config = ConfigDict(allow_inf_nan=True)  # a log-probability may overflow

    model: str
    keep: str
    lose: str
    settings: TwoTaskSettings
    seconds: float = Field(ge=0)
    keep_open: float = Field(description="log-probability of the responses to keep, all gates open")
    lose_open: float = Field(description="log-probability of the responses to lose, all gates open")
    keep_gated: float | None = Field(None, description="log-probability of the responses to keep, under the gates")
    lose_gated: float | None = Field(None, description="log-probability of the responses to lose, under the gates")
    accuracy: dict[str, float] = Field(
        {}, description="share of response tokens predicted: keep, lose (under the gates), keep_open, lose_open"
    )

    @model_validator(mode="before")
    @classmethod
    def _from_version_1(cls, values: Any) -> Any:
        """Files of gatelens 0.1 have other keys."""
        if not isinstance(values, Mapping) or "schema_version" in values:
            return values
        return {_VERSION_1_KEYS.get(key, key): value for key, value in values.items()}


_VERSION_1_KEYS = {"keep open": "keep_open", "lose open": "lose_open", "kept": "keep_gated", "lost": "lose_gated"}


def save_contrast(result: ContrastResult, run: RunFolder) -> None:
    """Write a result to its run folder and finish the run. With several processes, all of them must call this."""
    contrast = result.contrast
    if run.path is not None and is_main():
        tensors = {name: getattr(contrast, name) for name in _BY_SEED}
        if contrast.accuracy is not None:
            tensors |= {f"accuracy.{name}": getattr(contrast.accuracy, name) for name in ("keep", "lose")}
        write_tensors(run.path / _TENSORS, tensors)
        seeds = [f"seed {seed}" for seed in range(len(contrast.gates))]
        write_csv(run.path / "gates.csv", ["head", "mean", *seeds], _gate_records(contrast.gates))
    record = ContrastRecord(
        schema_version=SCHEMA_VERSION,
        **{name: getattr(result, name) for name in ("model", "keep", "lose", "settings", "seconds")},
        keep_open=contrast.keep_open,
        lose_open=contrast.lose_open,
        keep_gated=float(contrast.keep.mean()),
        lose_gated=float(contrast.lose.mean()),
        accuracy=_mean_accuracies(contrast.accuracy),
    )
    run.finish(record.model_dump(mode="json"))


def load_contrast(folder: str | Path) -> ContrastResult:
    """The saved result of ``gatelens contrast`` or `find_contrast`. Results of version 0.1 are read too.

    Example:
        contrast = gatelens.load_contrast("runs/contrast").contrast
    """
    folder = Path(folder)
    record = read_record(folder / RESULT, ContrastRecord)
    tensors = read_tensors(folder / _TENSORS)
    accuracy = None
    if record.accuracy:
        accuracy = ContrastAccuracy(
            keep=tensors["accuracy.keep"],
            lose=tensors["accuracy.lose"],
            keep_open=record.accuracy["keep_open"],
            lose_open=record.accuracy["lose_open"],
        )
    gates, losses, keep, lose = (tensors[name] for name in _BY_SEED)
    contrast = Contrast(gates, losses, keep, lose, record.keep_open, record.lose_open, accuracy)
    return ContrastResult(record.model, record.keep, record.lose, record.settings, contrast, record.seconds)


def _mean_accuracies(accuracy: ContrastAccuracy | None) -> dict[str, float]:
    """The accuracies of a result, means over seeds."""
    if accuracy is None:
        return {}
    return {
        "keep": float(accuracy.keep.mean()),
        "lose": float(accuracy.lose.mean()),
        "keep_open": accuracy.keep_open,
        "lose_open": accuracy.lose_open,
    }


def _gate_records(gates: Tensor) -> Iterator[list[Any]]:
    """The lines of gates.csv."""
    for layer, index in itertools.product(*map(range, gates.shape[1:])):
        of_head = gates[:, layer, index]
        yield [Head(layer, index), float(of_head.mean()), *of_head.tolist()]
