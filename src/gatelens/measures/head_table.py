"""What some heads do in a task: a line for each head, for the terminal, a notebook and the page.

Everything is measured at the answer position, the last one of each prompt:

- *score*: how much the metric falls if only this head reads the corrupt run (exact patching), mean over prompts, with a
  95 % bootstrap interval over prompts. Positive: the head helps.
- *share*: score / (metric with all heads - metric with none), a ratio of means over prompts.
- *looks at*: the share of its attention that goes to each token role of the task; in a sparse model, only to open keys.
- *writes*: the tokens that its output z W_O, read through the final norm and the unembedding, makes most probable in
  the first prompt; and the same direct logits of the right and the wrong answers, mean over prompts.
- *kind*: what the standard probes say (`gatelens.gates.probes`), and kinds that depend on the task. An *answer mover*
  looks at the right answer in the prompt and makes it more probable than the wrong one (in IOI: a name mover); a
  *negative answer mover* makes it less probable. A *wrong-answer suppressor* looks at the wrong answer and makes the
  right one more probable. A head *rests* if it looks at the first token.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from pydantic import Field

from gatelens.model.components import Head
from gatelens.runtime.files import write_json
from gatelens.runtime.records import SCHEMA_VERSION, Record, read_record
from gatelens.runtime.settings import Settings
from gatelens.runtime.shown import Shown
from gatelens.tasks.token_roles import FIRST, LAST, OTHER

MOVER, NEGATIVE_MOVER = "answer mover", "negative answer mover"
SUPPRESSOR, REST = "wrong-answer suppressor", "first-token rest"
PROBE_LEAST = 0.4
"""A head is of a probed kind if the probe has at least this value."""
MOVER_LEAST = 0.2
"""A mover or suppressor looks at an answer in the prompt with at least this share of its attention."""
DIRECT_LEAST = 0.1
"""A mover or suppressor changes the logit of right against wrong answers directly by at least this much."""
REST_LEAST = 0.7
"""A head rests if at least this share of its attention goes to the first token."""
HEADS_FILE = "heads.json"


class HeadLine(Settings):
    """What one head does. The top of this module says what each number means.

    Example:
        line = gatelens.describe(model, task, ["L9H6"])["L9H6"]
        line.score, line.looks_at(), line.writes, line.kinds
    """

    head: str = Field(description="its name, such as L9H6")
    score: float = Field(description="fall of the metric without the head, mean over prompts")
    low: float = Field(description="lower end of the score's 95 % interval")
    high: float = Field(description="upper end of the score's 95 % interval")
    share: float = Field(description="score / effect of all heads together")
    looks: dict[str, float] = Field(description="token role -> share of the attention of the answer position")
    at_answer: float = Field(description="share of attention on tokens that are a right answer")
    at_wrong: float = Field(description="share of attention on tokens that are a wrong answer")
    writes: tuple[str, ...] = Field(description="the tokens with the largest direct logits in the first prompt")
    answer: float = Field(description="direct logit of the right answers, minus the mean over the vocabulary")
    wrong: float = Field(description="direct logit of the wrong answers, minus the mean over the vocabulary")
    probes: dict[str, float] = Field(default_factory=dict, description="probe -> value, 0 to 1")
    open_keys: float | None = Field(default=None, description="open keys of the answer position; None: a dense model")

    @property
    def kinds(self) -> tuple[str, ...]:
        """The kinds of head that fit, the most telling one first."""
        kinds, direct = [], self.answer - self.wrong
        if self.at_answer >= MOVER_LEAST and abs(direct) >= DIRECT_LEAST:
            kinds.append(MOVER if direct > 0 else NEGATIVE_MOVER)
        elif self.at_wrong >= MOVER_LEAST and direct >= DIRECT_LEAST:
            kinds.append(SUPPRESSOR)
        kinds += sorted((name for name, value in self.probes.items() if value >= PROBE_LEAST), key=self._by_probe)
        if self.looks.get(FIRST, 0.0) >= REST_LEAST:
            kinds.append(REST)
        return tuple(kinds)

    def _by_probe(self, name: str) -> float:
        return -self.probes[name]

    def looks_at(self, most: int = 3, least: float = 0.05) -> list[tuple[str, float]]:
        """The roles that get most of the attention, most first: at most this many, and none below ``least``."""
        ordered = sorted(self.looks.items(), key=lambda item: -item[1])
        return [(role, share) for role, share in ordered if share >= least][:most]


class HeadTableRecord(Record):
    """The schema of ``heads.json``."""

    model: str
    task: str
    prompts: int = Field(description="prompts that everything was measured on")
    metric: str = Field(description="what scores are measured in: a difference of logits or of probabilities")
    effect: float = Field(description="metric with all heads minus metric with none, mean over prompts")
    lines: tuple[HeadLine, ...]
    dense: HeadTableRecord | None = Field(default=None, description="the same heads in the dense model, if it was run")


@dataclass(frozen=True, repr=False)
class HeadTable(Shown):
    """What some heads do in a task, the highest absolute score first. `gatelens.describe` makes it.

    Arguments:
        prompts: the number of prompts.
        metric: what scores are measured in.
        effect: metric with all heads minus metric with none.
        dense: heads of the dense model that this sparse one is compared with, if there is one: the same heads, or those
            that a run of the dense model has described.

    Example:
        table = gatelens.describe(sparse, task, ["L9H6", "L10H0"], dense=model)
        table["L9H6"].score, table.dense["L9H6"].score
        table.to_pandas()
    """

    model: str
    task: str
    prompts: int
    metric: str
    effect: float
    lines: tuple[HeadLine, ...]  # one for each head
    dense: HeadTable | None = None

    drawn_by = "gatelens.report.plots:plot_head_table"

    def __len__(self) -> int:
        return len(self.lines)

    def __getitem__(self, head: str | Head) -> HeadLine:
        line = self.line(head)
        if line is None:
            raise KeyError(f"no head {head} in this table: it has {', '.join(line.head for line in self.lines)}")
        return line

    def line(self, head: str | Head) -> HeadLine | None:
        """What a head does; None if it is not in the table."""
        return next((line for line in self.lines if line.head == str(head)), None)

    def beside(self, dense: HeadTable | None) -> HeadTable:
        """The same table with that of the dense model beside it."""
        return replace(self, dense=dense)

    def headline(self) -> str:
        return f"what heads do: {self.task} in {self.model}, {self.prompts} prompts, {self.metric}"

    def records(self) -> list[dict[str, Any]]:
        """One record for each head, with a column for each number; for both models if there is a dense one."""
        if self.dense is None:
            return [_record(line) for line in self.lines]
        pairs = [(table.model, table.line(own.head)) for own in self.lines for table in (self.dense, self)]
        return [{"model": model, **_record(line)} for model, line in pairs if line is not None]


def save_head_table(table: HeadTable, folder: Path) -> None:
    """Write ``heads.json``."""
    write_json(folder / HEADS_FILE, _as_record(table).model_dump(mode="json"))


def load_head_table(folder: Path) -> HeadTable | None:
    """Read ``heads.json``; None if the run has none."""
    return _from_record(read_record(folder / HEADS_FILE, HeadTableRecord)) if (folder / HEADS_FILE).exists() else None


def _as_record(table: HeadTable) -> HeadTableRecord:
    dense = None if table.dense is None else _as_record(table.dense)
    return HeadTableRecord(schema_version=SCHEMA_VERSION, **{**vars(table), "dense": dense})


def _from_record(record: HeadTableRecord) -> HeadTable:
    dense = None if record.dense is None else _from_record(record.dense)
    return HeadTable(record.model, record.task, record.prompts, record.metric, record.effect, record.lines, dense)


def bootstrap_mean(values: torch.Tensor, draws: int = 1000) -> tuple[float, float]:
    """The 95 % interval of the mean of some numbers (prompt,), by resampling them."""
    drawn = torch.randint(len(values), (draws, len(values)), generator=torch.Generator().manual_seed(0))
    means = values.double()[drawn].mean(1)
    low, high = torch.quantile(means, torch.tensor([0.025, 0.975], dtype=torch.float64)).tolist()
    return low, high


def ordered_roles(names: Sequence[str]) -> list[str]:
    """The roles in the order in which they are listed: those that the task names, then the others."""
    return sorted(names, key=lambda name: name in (FIRST, LAST, OTHER))


def _record(line: HeadLine) -> dict[str, Any]:
    looks: Mapping[str, float] = {f"looks at {role}": line.looks[role] for role in ordered_roles(list(line.looks))}
    plain = line.model_dump(exclude={"looks", "probes", "writes", "open_keys"})
    opened = {} if line.open_keys is None else {"open_keys": line.open_keys}
    return {**plain, "writes": " ".join(line.writes), "kind": ", ".join(line.kinds), **looks, **opened, **line.probes}
