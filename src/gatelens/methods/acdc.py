"""ACDC: close the gates one after the other, from the logits down, and keep closed what hardly matters.

A gate stays closed if closing it moves the circuit away from the whole model by less than a threshold. Gates are tested
in reverse of the order in which the model computes them, and a closed gate is never opened again. (Conmy et al., arXiv
2304.14997.)

Three things make the search affordable, and none of them changes a decision:

- All gates below the tested one are still open, so the layers below it equal those of the clean run and are not run.
- Gates that no longer have an effect are not tested: edges into a component all of whose outgoing edges are closed.
- Several tests run as rows of one batch. The rows assume that the next tests end like the last one. After the first
  test that ends otherwise, the rest of the rows is dropped.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from pydantic import Field
from torch import Tensor

from gatelens.gates.level import Level, PatchedGates, S
from gatelens.gates.search import Distance, SearchSettings
from gatelens.methods.registry import Method, MethodSettings, Price, register
from gatelens.model import Model
from gatelens.runtime.context import Context
from gatelens.tasks.base import CircuitTask

_PIECE = 64  # tests in one piece of work


class AcdcSettings(SearchSettings, MethodSettings):
    """Settings of ACDC."""

    tau: float = Field(
        default=0.01, gt=0, description="a gate stays closed if that moves the circuit away by less than this"
    )


def acdc(
    level: Level[S],
    model: Model,
    task: CircuitTask,
    settings: AcdcSettings | None = None,
    *,
    context: Context | None = None,
) -> S:
    """Scores of gates by ACDC, at a level whose gates all prompts share.

    The score of a gate is how much farther closing it moved the circuit from the whole model when the gate was tested,
    in nats or in units of the metric; 0 if the circuit came closer, or if the gate had no effect any more. So the
    circuit of ACDC is the set of all gates whose score is at least ``tau``, and it is the top k of every ranking. Gates
    with lower scores are closed, so their order says little.

    Example:
        scores = acdc(EDGES, model, task, AcdcSettings(tau=0.005))
        circuit = scores.scores >= 0.005

    Returns:
        Scores of the level. Cost of a test: the layers from the gate to the logits, about ``level.cost.patch`` forwards
        on average.
    """
    settings = settings or AcdcSettings()
    return _Search(level, model, task, settings, context or Context()).scores()


class _Search:
    """One call of `acdc`. Gates are positions in the flattened shape of the level."""

    def __init__(
        self, level: Level[Any], model: Model, task: CircuitTask, settings: AcdcSettings, context: Context
    ) -> None:
        self.level, self.model, self.task, self.context = level, model, task, context
        self.tau = settings.tau
        self.shape = level.shape(model, 0)
        self.distance = Distance(level, model, task, settings.objective, context)
        self.rows_at_once = level.rows_at_once(model)

    def scores(self) -> Any:
        [positions] = self.level.positions(self.model)
        order = positions.flip(0)
        exists = torch.zeros(torch.Size(self.shape).numel(), dtype=torch.bool).index_fill_(0, order, True)
        circuit, scores = exists.clone(), torch.zeros(len(exists), dtype=self.model.wide_dtype)
        reached, pieces, distance = 0, 0, 0.0
        self.context.begin(f"search {self.level.noun}", len(order))
        while True:
            # 1. The next gates that still have an effect. A gate without an effect never gets one again.
            circuit = self.level.prune(self.model, circuit.view(1, *self.shape)).flatten()
            places = reached + circuit[order[reached:]].nonzero()[:_PIECE, 0]
            if not len(places):
                break
            gates = order[places]
            # 2. Their tests. The last number is the distance of the circuit after them.
            tested = self.context.piece(f"{self.level.name}-{pieces}", partial(self._test, circuit, gates, distance))
            # 3. The circuit without those that hardly matter.
            changes, distance = tested[:-1], float(tested[-1])
            scores[gates] = changes.clamp(min=0).to(scores)
            circuit[gates[changes < self.tau]] = False
            reached, pieces = int(places[-1]) + 1, pieces + 1
            self.context.journal.reach(reached)
        self.context.journal.reach(len(order))
        found = PatchedGates([scores], [scores], [exists], f"acdc (tau {self.tau:g})", is_sample=False)
        return self.level.patched(self.model, self.task, found)

    def _test(
        self, circuit: Bool[Tensor, " size"], gates: Int[Tensor, " gate"], distance: float
    ) -> Float[Tensor, " _number"]:
        """Test gates in their order.

        Arguments:
            circuit: the open gates before the first test.
            distance: that of this circuit.

        Returns:
            How much farther closing each gate moved the circuit; then the distance of the circuit after all tests.
        """
        circuit, changes = circuit.clone(), list[float]()
        expect_closed, rows = True, 1
        while len(changes) < len(gates):
            tried = gates[len(changes) : len(changes) + rows]
            after = self.distance(self._rows(circuit, tried, expect_closed)).tolist()
            as_expected = True
            for gate, distance_without in zip(tried.tolist(), after, strict=True):
                changes.append(distance_without - distance)
                closed = changes[-1] < self.tau
                if closed:
                    circuit[gate], distance = False, distance_without
                as_expected = closed == expect_closed
                if not as_expected:
                    break
            rows = min(2 * rows, self.rows_at_once) if as_expected else 1
            expect_closed = closed
        return torch.tensor([*changes, distance], dtype=torch.float64)

    def _rows(
        self, circuit: Bool[Tensor, " size"], tried: Int[Tensor, " row"], expect_closed: bool
    ) -> Bool[Tensor, "row ..."]:
        """The circuit without one gate in each row and, if these are expected to be closed, without those before it."""
        rows = circuit.repeat(len(tried), 1)
        for number, row in enumerate(rows):
            row[tried[: number + 1] if expect_closed else tried[number]] = False
        return rows.unflatten(1, self.shape)


ACDC = register(
    Method(
        name="acdc",
        score=acdc,
        price=lambda level, settings: Price(each=2, per_gate=level.cost.patch),
        paper="Conmy et al., arXiv 2304.14997",
        help="close gates from the logits down, and keep closed what hardly matters",
        levels=("heads", "edges"),
        settings=AcdcSettings,
    )
)
