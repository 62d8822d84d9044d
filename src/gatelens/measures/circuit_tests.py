"""Test a circuit: what each of its gates is worth, and the hypothesis tests of `gatelens.measures.hypotheses`.

Everything is measured on circuits in rows, piece by piece, so that a killed run resumes.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path

import torch
from jaxtyping import Float
from pydantic import Field
from torch import Tensor

from gatelens.gates.scores import Scores
from gatelens.measures.counts import Sample
from gatelens.measures.head_table import bootstrap_mean
from gatelens.measures.hypotheses import ALPHA, HypothesisTest, equivalence, independence, minimality
from gatelens.measures.top_k import Circuits, Members
from gatelens.runtime.context import Context
from gatelens.runtime.files import write_json
from gatelens.runtime.records import SCHEMA_VERSION, Record, read_record, write_lines
from gatelens.runtime.settings import Settings

MOST_DROPPED = 64
"""Of a larger circuit, this many gates are dropped, evenly spread over its ranking."""
RANDOM_ADDITIONS = 50
"""Random additions that the gates of a circuit are compared with."""
TESTED_PROMPTS = 32
"""Gates are dropped on at most this many prompts."""
_ROWS = 8  # circuits in one piece of work
_FILE, _TABLE = "tests.json", "minimality.csv"


class DroppedGate(Settings):
    """What a circuit loses without one of its gates."""

    gate: str = Field(description="the name of the gate; its rank if prompts have their own gates")
    lost: float = Field(description="effect of the circuit minus its effect without the gate")
    low: float = Field(description="lower end of the 95 % interval over prompts")
    high: float = Field(description="upper end of the 95 % interval over prompts")
    p: float = Field(description="of the hypothesis that it matters more than 90 % of gates that are added at random")

    def __str__(self) -> str:
        return f"{self.lost:+.3f} ({self.low:+.3f} to {self.high:+.3f}; p = {self.p:.2g})"


class CircuitTests(Record):
    """The tests of a circuit: the schema of ``tests.json``."""

    equivalence: HypothesisTest
    independence: HypothesisTest
    gates: int = Field(description="gates in the circuit, after those without an effect are removed")
    dropped: tuple[DroppedGate, ...] = Field(description="the gates that were dropped one by one, best first")
    additions: int = Field(description="random additions that these gates were compared with")
    prompts: int = Field(description="prompts that gates were dropped on")

    @property
    def needless(self) -> list[DroppedGate]:
        """The gates that the minimality test calls needless: p below 0.05 divided by the number of gates tested."""
        return [gate for gate in self.dropped if gate.p < ALPHA / len(self.dropped)]

    @property
    def minimality(self) -> str:
        """The outcome of the minimality test, as it is printed."""
        if not self.dropped:
            return "- (the circuit has no gate)"
        outcome = f"fails: {len(self.needless)} needless" if self.needless else "passes"
        return f"{outcome} ({len(self.dropped)} of {self.gates:,} gates dropped; {Sample(self.prompts)})"


def check_circuit(
    circuits: Circuits, scores: Scores, k: int, everything: Float[Tensor, " prompt"], *, context: Context | None = None
) -> CircuitTests:
    """Test the circuit of the top k: equivalence, independence, and the worth of each gate.

    Arguments:
        circuits: the circuits of a ranking.
        scores: the scores that were ranked, for the names of gates.
        everything: the metric of the whole model.

    Returns:
        The tests. Cost: three circuits on all prompts; on 32 prompts at most, one circuit for each gate that is dropped
        (64 at most), and 100 for random additions.
    """
    context = context or Context()
    # 1. The circuit and all other gates against the whole model.
    members = circuits.members(k)
    others = [order[~torch.isin(order, kept)] for order, kept in zip(circuits.orders, members, strict=True)]
    none = [order[:0] for order in circuits.orders]
    kept, rest, closed = _metrics(circuits, [members, others, none], "circuit", context)
    # 2. On a few prompts: what the circuit loses without each gate, and without a gate that was added at random.
    few = circuits.first_prompts(TESTED_PROMPTS)
    members = few.members(k)
    n_members = max(map(len, members))
    ranks = _spread(n_members, MOST_DROPPED)
    without = _metrics(few, [_without(members, rank) for rank in ranks], "drop a gate", context)
    inflated, smaller = _additions(few, members)
    added, removed = (_metrics(few, *rows, context) for rows in ((inflated, "add"), (smaller, "remove")))
    changes = kept[: len(few.task)] - without
    # 3. As in the paper, a gate matters by the mean absolute change of the metric.
    p_values = minimality(changes.abs().mean(1), (added - removed).abs().mean(1)).tolist()
    possible = float((everything - closed).mean())  # of all prompts, which a job has checked to differ from 0
    return CircuitTests(
        schema_version=SCHEMA_VERSION,
        equivalence=equivalence(kept, everything),
        independence=independence(rest, everything, circuits.task.seed),
        gates=n_members,
        dropped=tuple(
            _dropped(_name(scores, members, rank), change / possible, p)
            for rank, change, p in zip(ranks, changes, p_values, strict=True)
        ),
        additions=len(inflated),
        prompts=len(few.task),
    )


def tests_cost(n_prompts: int, per_circuit: float) -> float:
    """Forward passes of one prompt that `check_circuit` takes at most."""
    return per_circuit * (3 * n_prompts + min(TESTED_PROMPTS, n_prompts) * (MOST_DROPPED + 2 * RANDOM_ADDITIONS))


def save_tests(tests: CircuitTests, folder: Path) -> None:
    """Write ``tests.json``, and ``minimality.csv`` with a line for each gate that was dropped."""
    write_json(folder / _FILE, tests.model_dump(mode="json"))
    write_lines(folder / _TABLE, DroppedGate, tests.dropped)


def load_tests(folder: Path) -> CircuitTests | None:
    """Read ``tests.json``; None if the run has none."""
    return read_record(folder / _FILE, CircuitTests) if (folder / _FILE).exists() else None


def _metrics(circuits: Circuits, rows: Sequence[Members], name: str, context: Context) -> Float[Tensor, "row prompt"]:
    """The metric of circuits that are given by their members."""
    parts = [
        (f"{name.replace(' ', '-')}-{start}", partial(circuits.metric_with, circuits=rows[start : start + _ROWS]))
        for start in range(0, len(rows), _ROWS)
    ]
    return circuits.measure(f"tests: {name}", parts, context)


def _spread(total: int, most: int) -> list[int]:
    """All numbers below the total, or as many as asked for, evenly spread from the first to the last."""
    return sorted({round(i * (total - 1) / (most - 1)) for i in range(most)}) if total > most else list(range(total))


def _without(members: Members, rank: int) -> list[Tensor]:
    """The circuit without its gate of this rank, in each gate set."""
    return [torch.cat([kept[:rank], kept[rank + 1 :]]) for kept in members]


def _additions(circuits: Circuits, members: Members) -> tuple[list[Members], list[Members]]:
    """Circuits with a random addition, and the same circuits without one random gate of the addition."""
    generator = torch.Generator().manual_seed(circuits.task.seed)
    inflated: list[Members] = []
    smaller: list[Members] = []
    for _ in range(RANDOM_ADDITIONS):
        larger, less = [], []
        for order, kept in zip(circuits.orders, members, strict=True):
            others = order[~torch.isin(order, kept)]
            added = circuits.level.random_addition(circuits.model, kept, others, generator)
            removed = int(torch.randint(max(1, len(added)), (1,), generator=generator))
            larger.append(torch.cat([kept, added]))
            less.append(torch.cat([kept, added[:removed], added[removed + 1 :]]))
        inflated.append(larger)
        smaller.append(less)
    return inflated, smaller


def _name(scores: Scores, members: Members, rank: int) -> str:
    """The name of a gate, or its rank if prompts have their own gates."""
    return scores.gate(0, int(members[0][rank]))[1] if scores.level.shared else f"rank {rank + 1} of each prompt"


def _dropped(name: str, lost: Float[Tensor, " prompt"], p: float) -> DroppedGate:
    low, high = bootstrap_mean(lost)
    return DroppedGate(gate=name, lost=float(lost.mean()), low=low, high=high, p=p)
