"""The result of ``gatelens relations``: contrastive gates, judged on relations that they were not fitted on.

``result.json``             the summary (`RelationsRecord`)
``relations.safetensors``   gates, losses and accuracies of every fit and seed
``relations.csv``           the accuracies of every fit, with their range over seeds
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from pydantic import Field
from torch import Tensor

from gatelens.gates.roles import Contrast, ContrastAccuracy
from gatelens.methods.contrast import ContrastLossSettings
from gatelens.runtime.context import MEMORY_GB, MEMORY_HELP
from gatelens.runtime.files import read_tensors, write_csv, write_tensors
from gatelens.runtime.rank import is_main
from gatelens.runtime.records import SCHEMA_VERSION, Record, read_record
from gatelens.runtime.run_folder import RESULT, RunFolder
from gatelens.runtime.settings import EXECUTION, Settings
from gatelens.runtime.shown import Shown
from gatelens.tasks import MOST_PROMPTS

_TENSORS = "relations.safetensors"
_BY_SEED = ("gates", "losses", "keep", "lose")
_COLUMNS = ("held out", "keep", "lose", "asked by", "role", "accuracy", "lowest", "highest", "all gates open")


class RelationsSettings(ContrastLossSettings):
    """The settings of `find_relations` and ``gatelens relations``."""

    n: int = Field(64, ge=1, le=MOST_PROMPTS, description="word pairs of each relation")
    shots: int = Field(10, ge=1, description="worked examples of the way that asks by examples")
    instruction_shots: int = Field(
        1, ge=0, description="worked examples after an instruction; the authors' code has 1, which shows the format"
    )
    memory_gb: float = Field(MEMORY_GB, gt=0, description=MEMORY_HELP, json_schema_extra=EXECUTION)

    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        name: {**values, "n": n}
        for (name, values), n in zip(ContrastLossSettings.presets.items(), (64, 16, 64), strict=True)
    }


@dataclass(frozen=True, eq=False)
class HeldOutRelation:
    """Gates that were fitted on all relations but one, and what they do to this one.

    Arguments:
        relation: the relation that was held out.
        keep: the way of asking that is kept.
        lose: the way of asking that is lost.
        contrast: the gates and their effect on the relation that was held out.

    Example:
        for fit in gatelens.load_relations("runs/relations").fits:
            print(fit.relation, fit.keep, fit.accuracy.keep, fit.accuracy.lose)
    """

    relation: str
    keep: str
    lose: str
    contrast: Contrast

    @property
    def accuracy(self) -> ContrastAccuracy:
        """How often the responses of the relation are predicted, asked for in both ways."""
        assert self.contrast.accuracy is not None
        return self.contrast.accuracy


@dataclass(frozen=True, eq=False, repr=False)
class RelationsResult(Shown):
    """Contrastive gates for each way of asking and each relation that was held out.

    Arguments:
        model: the name of the model.
        fits: one for each way that is kept, and for each relation that was held out.
        seconds: how long the run took, including starts that were killed.

    Example:
        result = gatelens.load_relations("runs/relations")
        result.to_pandas()
    """

    model: str
    settings: RelationsSettings
    fits: list[HeldOutRelation]
    seconds: float

    drawn_by = "gatelens.report.plots:plot_relations_result"

    def records(self) -> list[dict[str, Any]]:
        """The accuracies of every fit in the way that is kept and in the way that is lost, with their range."""
        return [dict(zip(_COLUMNS, line, strict=True)) for line in _records(self)]

    def headline(self) -> str:
        seeds = self.settings.seeds
        return f"accuracy on relations that were held out in {self.model}, mean over {seeds} seed{'s' * (seeds > 1)}"


class FitRecord(Settings):
    """A fit in ``result.json``. Accuracies under the gates are means over seeds."""

    relation: str
    keep: str
    lose: str
    keep_open: float = Field(description="log-probability of the responses to keep, all gates open")
    lose_open: float = Field(description="log-probability of the responses to lose, all gates open")
    keep_accuracy: float
    lose_accuracy: float
    keep_accuracy_open: float
    lose_accuracy_open: float


class RelationsRecord(Record):
    """The schema of ``result.json``."""

    model: str
    settings: RelationsSettings
    seconds: float = Field(ge=0)
    fits: list[FitRecord]


def save_relations(result: RelationsResult, run: RunFolder) -> None:
    """Write a result to its run folder and finish the run. With several processes, all of them must call this."""
    if run.path is not None and is_main():
        tensors: dict[str, Tensor] = {}
        for number, fit in enumerate(result.fits):
            tensors |= {f"{number}.{name}": getattr(fit.contrast, name) for name in _BY_SEED}
            tensors |= {f"{number}.{name} accuracy": getattr(fit.accuracy, name) for name in ("keep", "lose")}
        write_tensors(run.path / _TENSORS, tensors)
        write_csv(run.path / "relations.csv", _COLUMNS, _records(result))
    record = RelationsRecord(
        schema_version=SCHEMA_VERSION,
        model=result.model,
        settings=result.settings,
        seconds=result.seconds,
        fits=[_fit_record(fit) for fit in result.fits],
    )
    run.finish(record.model_dump(mode="json"))


def load_relations(folder: str | Path) -> RelationsResult:
    """The saved result of ``gatelens relations`` or `find_relations`.

    Example:
        fits = gatelens.load_relations("runs/relations").fits
    """
    folder = Path(folder)
    record = read_record(folder / RESULT, RelationsRecord)
    tensors = read_tensors(folder / _TENSORS)
    fits: list[HeldOutRelation] = []
    for number, fit in enumerate(record.fits):
        accuracy = ContrastAccuracy(
            tensors[f"{number}.keep accuracy"],
            tensors[f"{number}.lose accuracy"],
            fit.keep_accuracy_open,
            fit.lose_accuracy_open,
        )
        gates, losses, keep, lose = (tensors[f"{number}.{name}"] for name in _BY_SEED)
        contrast = Contrast(gates, losses, keep, lose, fit.keep_open, fit.lose_open, accuracy)
        fits.append(HeldOutRelation(fit.relation, fit.keep, fit.lose, contrast))
    return RelationsResult(record.model, record.settings, fits, record.seconds)


def _fit_record(fit: HeldOutRelation) -> FitRecord:
    return FitRecord(
        relation=fit.relation,
        keep=fit.keep,
        lose=fit.lose,
        keep_open=fit.contrast.keep_open,
        lose_open=fit.contrast.lose_open,
        keep_accuracy=float(fit.accuracy.keep.mean()),
        lose_accuracy=float(fit.accuracy.lose.mean()),
        keep_accuracy_open=fit.accuracy.keep_open,
        lose_accuracy_open=fit.accuracy.lose_open,
    )


def _records(result: RelationsResult) -> Iterator[list[Any]]:
    """The lines of relations.csv."""
    for fit in result.fits:
        for role, way, gated, opened in (
            ("keep", fit.keep, fit.accuracy.keep, fit.accuracy.keep_open),
            ("lose", fit.lose, fit.accuracy.lose, fit.accuracy.lose_open),
        ):
            numbers = (float(gated.mean()), float(gated.min()), float(gated.max()), opened)
            yield [fit.relation, fit.keep, fit.lose, way, role, *numbers]
