"""Exact patching: close one gate at a time and measure the metric.

Every score is ``metric with the gate open - metric with it closed``, mean over prompts. Noising starts from the clean
run and closes one gate; denoising starts from the corrupt run and opens one.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache, partial
from typing import Any, Literal

import torch
from jaxtyping import Int
from torch import Tensor

from gatelens.errors import GatelensError
from gatelens.gates import ATTENTION, EDGES, HEADS
from gatelens.gates.attention import AttentionScores
from gatelens.gates.attribution import standard_errors
from gatelens.gates.edges import EdgeScores
from gatelens.gates.heads import HeadScores
from gatelens.gates.level import Level, PatchedGates, S
from gatelens.methods.registry import Method, Price, by_keywords, register
from gatelens.model import Model
from gatelens.runtime.context import Context
from gatelens.tasks.base import Bucket, CircuitTask
from gatelens.tasks.batches import batches

Direction = Literal["noising", "denoising"]
DENOISING = "patching (denoising)"
"""The method of scores by denoising, in `Scores.method`."""
_PIECE = 64  # at most this many rows in one piece of work


def patch(
    level: Level[S],
    model: Model,
    task: CircuitTask,
    direction: Direction = "noising",
    sample: int | None = None,
    *,
    seed: int = 0,
    gates: Sequence[Int[Tensor, " _gate"]] | None = None,
    context: Context | None = None,
) -> S:
    """The exact score of every gate of a level, of a random sample of gates, or of given gates.

    Arguments:
        direction: ``noising`` replaces one gate's clean value by the corrupt one, and the score is what the metric
            loses; ``denoising`` replaces it by the clean value in the corrupt run, and the score is what the metric
            gains. Do not rank gates by denoising: it finds gates that are enough alone, and circuits of such gates need
            far more of them.
        sample: how many gates to patch (for levels where each prompt has its own gates: in each prompt); None patches
            all.
        seed: decides the sample.
        gates: the gates to patch instead of a sample: their positions in each flattened gate set, in the order of
            `Scores.gate_sets`.

    Returns:
        Scores of the level. Cost: 2 forwards, and ``level.cost.patch`` forwards for each gate.

    Example:
        scores = gatelens.patch(gatelens.gates.EDGES, model, task, sample=16)
    """
    if direction not in ("noising", "denoising"):
        raise GatelensError(f"no direction '{direction}': gates are patched by 'noising' or by 'denoising'.")
    if gates is not None and sample is not None:
        raise GatelensError(f"a sample of {sample} gates and given gates were asked for: give one of them.")
    return _Patching(level, model, task, direction, sample, seed, gates, context or Context()).scores()


def patch_heads(
    model: Model,
    task: CircuitTask,
    direction: Direction = "noising",
    sample: int | None = None,
    *,
    seed: int = 0,
    context: Context | None = None,
) -> HeadScores:
    """`patch` at the level of heads. Cost: 2 forwards, and about half a forward for each head.

    Arguments:
        direction, sample, seed: as for `patch`.

    Example:
        scores = gatelens.patch_heads(model, task)
        scores.top(3)  # [((23, 3), "L23H3", 1.82), ...]
    """
    return patch(HEADS, model, task, direction, sample, seed=seed, context=context)


def patch_edges(
    model: Model, task: CircuitTask, sample: int | None = None, *, seed: int = 0, context: Context | None = None
) -> EdgeScores:
    """`patch` at the level of edges. Cost: 2 forwards, and for each edge the layers above its destination.

    Arguments:
        sample, seed: as for `patch`.

    Example:
        scores = gatelens.patch_edges(model, task, sample=16)
    """
    return patch(EDGES, model, task, sample=sample, seed=seed, context=context)


def patch_attention(
    model: Model, task: CircuitTask, sample: int | None = None, *, seed: int = 0, context: Context | None = None
) -> AttentionScores:
    """`patch` at the level of attention edges. Cost: 4 forwards, and one for each edge of the prompt with the most.

    Arguments:
        sample, seed: as for `patch`.

    Example:
        scores = gatelens.patch_attention(model, task, sample=16)
    """
    return patch(ATTENTION, model, task, sample=sample, seed=seed, context=context)


class _Patching:
    """One call of `patch`."""

    def __init__(
        self,
        level: Level[Any],
        model: Model,
        task: CircuitTask,
        direction: Direction,
        sample: int | None,
        seed: int,
        gates: Sequence[Tensor] | None,
        context: Context,
    ) -> None:
        self.level, self.model, self.task, self.direction = level.on(task), model, task, direction
        self.sample, self.seed, self.gates, self.context = sample, seed, gates, context
        self.rows_at_once = level.rows_at_once(model)
        self.batches = batches(task, partial(patch_numbers, self.level, model), context)
        self.runs = lru_cache(maxsize=1)(self._runs)
        # Flattened gate sets, as `Scores.gate_sets` orders them.
        self.sums: list[Tensor] = []
        self.magnitudes: list[Tensor] = []  # sums of absolute values, for gates that prompts share
        self.squares: list[Tensor] = []  # sums of squares, for the same gates
        self.measured: list[Tensor] = []
        self.set_of_prompt: dict[int, int] = {}

    def scores(self) -> Any:
        # 1. Which gate each row closes, for every batch.
        closed = [self._closed_positions(batch) for batch in self.batches]
        cuts = [
            (f"{self.level.name}-{i}-{n}", batch, rows)
            for i, (batch, positions) in enumerate(zip(self.batches, closed, strict=True))
            for n, rows in enumerate(positions.split(self._piece_rows()))
        ]
        self.context.begin(f"patch {self.level.noun}", len(cuts))
        # 2. What the metric loses in every row, added to the gate that the row closes.
        pieces = self.context.pieces([(name, partial(self._lost, batch, rows)) for name, batch, rows in cuts])
        for (_, batch, rows), lost in zip(cuts, pieces, strict=True):
            self._add(batch, rows, lost)
        # 3. The scores of the level.
        n_prompts = len(self.task) if self.level.shared else 1
        means = [total / n_prompts for total in self.sums]
        magnitudes = [total / n_prompts for total in self.magnitudes] if self.level.shared else [x.abs() for x in means]
        errors = [
            standard_errors(mean, squares / n_prompts, n_prompts)
            for mean, squares in zip(means, self.squares, strict=True)
        ]
        method, is_sample = f"patching ({self.direction})", self.sample is not None or self.gates is not None
        gates = PatchedGates(means, magnitudes, self.measured, method, is_sample, errors)
        return self.level.patched(self.model, self.task, gates)

    def _runs(self, batch: Bucket) -> tuple[Any, Any]:
        """The run in which gates are patched, and the run that closed gates read."""
        clean, corrupt = (self.level.capture(self.model, tokens) for tokens in (batch.clean, batch.corrupt))
        return (clean, corrupt) if self.direction == "noising" else (corrupt, clean)

    def _closed_positions(self, batch: Bucket) -> Tensor:
        """The position of the gate that each row closes: (row,), or (row, prompt) if prompts have their own gates.

        Also makes the gate sets that scores are added to.
        """
        size = torch.Size(self.level.shape(self.model, batch.clean.shape[1])).numel()
        if self.level.shared:
            [positions] = self.level.positions(self.model)
            closed = self._chosen(0, positions, self.seed)
            if not self.sums:
                self._new_set(size, closed)
            return closed
        chosen = []
        for prompt, positions in zip(
            batch.which.tolist(), self.level.positions(self.model, *self.runs(batch)), strict=True
        ):
            chosen.append(self._chosen(len(self.sums), positions, self.seed * 1_000_003 + prompt))
            self.set_of_prompt[prompt] = len(self.sums)
            self._new_set(size, chosen[-1])
        # All prompts need the same number of rows: a prompt with fewer gates closes its last gate again, and a prompt
        # without gates closes one that does not exist.
        n_rows = max(map(len, chosen))
        last = [closed[-1:] if len(closed) else torch.zeros(1, dtype=torch.int64) for closed in chosen]
        filled = [
            torch.cat([closed, end.expand(n_rows - len(closed))]) for closed, end in zip(chosen, last, strict=True)
        ]
        return torch.stack(filled, 1)

    def _chosen(self, number: int, positions: Tensor, seed: int) -> Tensor:
        """The gates to patch of the gate set with this number, in the order in which the model computes them."""
        if self.gates is not None:
            return positions[torch.isin(positions, self.gates[number])]
        return positions[_choose(len(positions), self.sample, seed)]

    def _new_set(self, size: int, measured: Tensor) -> None:
        for totals in (self.sums, self.magnitudes, self.squares):
            totals.append(torch.zeros(size, dtype=self.model.wide_dtype))
        self.measured.append(torch.zeros(size, dtype=torch.bool).index_fill_(0, measured, True))

    def _piece_rows(self) -> int:
        return max(1, _PIECE // self.rows_at_once) * self.rows_at_once if not self.level.shared else self.rows_at_once

    def _lost(self, batch: Bucket, closed: Tensor) -> Tensor:
        """What the metric loses in each row: (row, prompt)."""
        start, other = self.runs(batch)
        level, shape = self.level.on(self.task, batch), self.level.shape(self.model, batch.clean.shape[1])
        tokens = batch.clean if self.direction == "noising" else batch.corrupt
        lost: list[Tensor] = []
        for rows in closed.split(self.rows_at_once):
            gates = torch.ones(*rows.shape, torch.Size(shape).numel()).scatter_(-1, rows[..., None], 0)
            gates = gates.unflatten(-1, shape)
            reads = level.reads(other)
            logits = level.run(self.model, tokens, gates, reads, start=start, context=self.context)
            lost.append(self.task.metric(start.logits, batch) - self.task.metric(logits, batch))
        return torch.cat(lost) if self.direction == "noising" else -torch.cat(lost)

    def _add(self, batch: Bucket, rows: Tensor, lost: Tensor) -> None:
        """Add what the metric lost (row, prompt) to the gates that the rows closed."""
        if self.level.shared:
            self.sums[0][rows] += lost.sum(1).to(self.sums[0])
            self.magnitudes[0][rows] += lost.abs().sum(1).to(self.sums[0])
            self.squares[0][rows] += lost.square().sum(1).to(self.sums[0])
            return
        for column, prompt in enumerate(batch.which.tolist()):
            number = self.set_of_prompt[prompt]
            values = lost[:, column].to(self.sums[number])
            self.sums[number][rows[:, column]] = values.where(self.measured[number][rows[:, column]], 0)


def patch_numbers(level: Level[Any], model: Model, length: int) -> int:
    """How many numbers patching holds for one prompt: two captured runs, and a batch of rows with its logits."""
    row = level.row_numbers(model, length) + 2 * int(model.hf.config.vocab_size)
    return 2 * level.closed_numbers(model, length) + level.rows_at_once(model) * row


def _choose(n: int, sample: int | None, seed: int) -> list[int]:
    """All numbers below n, or a random sample of them in ascending order, which only the seed decides."""
    if sample is None or sample >= n:
        return list(range(n))
    return sorted(torch.randperm(n, generator=torch.Generator().manual_seed(seed))[:sample].tolist())


PATCHING = register(
    Method(
        name="patching",
        score=by_keywords(patch),
        price=lambda level, settings: Price(per_gate=level.cost.patch),
        paper="Wang et al., arXiv 2211.00593",
        help="exact: close every gate alone",
        exact=True,
    )
)
