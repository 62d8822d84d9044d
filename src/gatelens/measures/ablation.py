"""Test head roles by ablation: how does the log-probability of the response change without the top heads of a kind?"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from gatelens.errors import GatelensError
from gatelens.gates.response_checks import check_responses
from gatelens.gates.responses import cut, response_log_probs
from gatelens.gates.roles import HeadRoles
from gatelens.model import Model
from gatelens.runtime.context import Context
from gatelens.runtime.processes import Processes
from gatelens.runtime.shown import Shown
from gatelens.tasks.base import CircuitTask, ResponseBatch, ResponseTask
from gatelens.tasks.batches import as_responses


@dataclass(frozen=True, eq=False, repr=False)
class AblationCurve(Shown):
    """Change in the log-probability of the target response against the number of ablated heads.

    The change is log p(ablated) - log p(retained), summed over the response's tokens, mean over examples. Below 0, the
    task needs the heads.

    Arguments:
        kind: facilitation, irrelevance, interference, or random.
        ablated: how many heads are forced to 0 at each point.
        changes: the change at each point, for each seed.
        heads: how many heads are of this kind (a score of 0.5 or more). For a random order, all heads count.
        own: the change if exactly the heads of this kind are ablated, but not more heads than at the last point. None
            in runs of early versions.

    Example:
        drop = gatelens.ablation_curve(model, held_out_task, roles, kind="facilitation", most=8)
        drop.change[-1]  # nats, after 8 heads
        drop.plot()
    """

    kind: str
    ablated: Int[Tensor, " point"]
    changes: Float[Tensor, "seed point"]
    heads: Int[Tensor, " seed"]
    own: Float[Tensor, " seed"] | None = None

    drawn_by = "gatelens.report.plots:plot_ablation"

    def records(self) -> list[dict[str, Any]]:
        columns = {"ablated": self.ablated, "change": self.change, "low": self.low, "high": self.high}
        points = zip(*(values.tolist() for values in columns.values()), strict=True)
        return [{"kind": self.kind, **dict(zip(columns, point, strict=True))} for point in points]

    def headline(self) -> str:
        return f"change in log-probability of the response, heads by {self.kind}, {len(self.changes)} seeds"

    @property
    def change(self) -> Float[Tensor, " point"]:
        """Mean over seeds."""
        return self.changes.mean(0)

    @property
    def low(self) -> Float[Tensor, " point"]:
        """Lower end of the 95 % interval of a bootstrap over seeds."""
        return self._quantile(0.025)

    @property
    def high(self) -> Float[Tensor, " point"]:
        """Upper end of the 95 % interval of a bootstrap over seeds."""
        return self._quantile(0.975)

    @property
    def of_kind(self) -> Float[Tensor, " point"]:
        """How many of the ablated heads are of this kind, mean over seeds.

        If fewer than all ablated heads are, no head of this kind was left, and the next heads in the order were taken.
        """
        return torch.minimum(self.ablated, self.heads[:, None]).float().mean(0)

    def _quantile(self, q: float) -> Float[Tensor, " point"]:
        seeds = len(self.changes)
        drawn = torch.randint(seeds, (1000, seeds), generator=torch.Generator().manual_seed(0))
        return torch.quantile(self.changes[drawn].mean(1), q, dim=0)


def ablation_curve(
    model: Model,
    task: ResponseTask | CircuitTask,
    roles: HeadRoles,
    kind: str = "facilitation",
    most: int = 50,
    *,
    every: int = 1,
    batch: int = 16,
    context: Context | None = None,
) -> AblationCurve:
    """Force the first n heads in the order of a kind to 0, against forcing them to 1; all other gates stay at G+.

    With several processes (`accelerate launch`), they share the work.

    Example:
        drop = gatelens.ablation_curve(model, held_out_task, roles, kind="facilitation", most=50)

    Arguments:
        task: examples that the roles were not fitted on.
        kind: facilitation, irrelevance, interference, or ``random`` for a random order, which is the baseline.
        most: the largest n. If fewer heads are of this kind, ablating exactly these heads is measured too.
        every: the step between two values of n.
        batch: examples in a batch.
        context: the memory budget, and where finished pieces are saved so that a killed run resumes.

    Returns:
        One curve for each seed of the roles. Cost: 2 forwards for each n above 0 and seed.
    """
    context = context or Context()
    points = _points(model, most, every)
    heads = count_of_kind(roles, kind)
    orders = [ablation_order(roles, kind, seed) for seed in range(len(roles.plus))]
    responses = as_responses(task)
    check_responses(model, responses)
    batches = list(responses.batches(batch))
    context.begin(f"ablate {kind}", len(orders) * len(batches))
    changes: list[tuple[str, Callable[[], Tensor]]] = []
    for seed, order in enumerate(orders):
        counts = [*points, min(int(heads[seed]), most)]  # the last is for `own`
        for number, part in enumerate(batches):
            change = partial(_change, model, part, roles.plus[seed], order, counts, context)
            changes.append((f"{kind}-{seed}-{number}", change))
    shared = replace(context, processes=Processes(model.device))
    sums = torch.stack(shared.pieces(changes, (len(points) + 1,))).float()
    means = sums.view(len(orders), len(batches), -1).sum(1) / len(responses)
    return AblationCurve(kind, torch.tensor(points), means[:, :-1], heads, means[:, -1])


def _points(model: Model, most: int, every: int) -> list[int]:
    """The numbers of heads to ablate."""
    n_heads = model.n_layers * model.n_heads
    if not 1 <= most <= n_heads:
        raise GatelensError(f"{model.name} has {n_heads} heads, so {most} cannot be ablated: give 1 to {n_heads}.")
    if every < 1:
        raise GatelensError(f"every is {every}: it must be at least 1.")
    return sorted({*range(0, most + 1, every), most})


def _change(
    model: Model,
    batch: ResponseBatch,
    plus: Float[Tensor, "layer head"],
    order: Int[Tensor, " place"],
    counts: Sequence[int],
    context: Context,
) -> Float[Tensor, " count"]:
    """The change for each number of ablated heads, summed over the examples of a batch."""
    distinct = sorted({0, *counts})  # ablating no head changes nothing and needs no forward
    rows = torch.stack([forced(plus, order[:n], value) for value in (0.0, 1.0) for n in distinct[1:]])
    sums = torch.zeros(len(rows), dtype=torch.float64)  # of the log-probabilities of all examples
    at_once, parts = cut(model, batch, len(rows), grad=False, context=context)
    with torch.no_grad():
        for part, some in itertools.product(parts, torch.arange(len(rows)).split(at_once)):
            sums[some] += response_log_probs(model, part, rows[some]).sum(1).cpu()
    ablated, retained = sums.chunk(2)
    changes = torch.cat([torch.zeros(1), ablated - retained]).to(model.wide_dtype)
    return changes[[distinct.index(n) for n in counts]]


def count_of_kind(roles: HeadRoles, kind: str) -> Int[Tensor, " seed"]:
    """How many heads are of a kind. A random order has no kind, so all heads count."""
    is_kind = torch.ones_like(roles.plus, dtype=torch.bool) if kind == "random" else roles.is_kind(kind)
    return is_kind.flatten(1).sum(1)


def ablation_order(roles: HeadRoles, kind: str, seed: int) -> Int[Tensor, " place"]:
    """The order in which heads are ablated, as positions in the flattened (layer, head)."""
    if kind == "random":
        return torch.randperm(roles.plus[0].numel(), generator=torch.Generator().manual_seed(seed))
    return torch.argsort(roles.kind(kind)[seed].flatten(), descending=True, stable=True)


def forced(
    gates: Float[Tensor, "layer head"], heads: Int[Tensor, " place"], value: float
) -> Float[Tensor, "layer head"]:
    """Gates with some heads forced to a value.

    Arguments:
        heads: positions in the flattened gates.
    """
    changed = gates.flatten().clone()
    changed[heads] = value
    return changed.view_as(gates)
