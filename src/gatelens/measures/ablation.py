"""The proof of head roles: ablate the top heads of a kind, and see what becomes of the target response."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from gatelens.errors import GatelensError
from gatelens.gates.responses import check_responses, parts_at_once, response_log_probs
from gatelens.methods.head_gating import HeadRoles
from gatelens.model import Model
from gatelens.runtime.journal import Journal
from gatelens.runtime.processes import Processes
from gatelens.tasks.base import CircuitTask, ResponseBatch, ResponseTask
from gatelens.tasks.batches import as_responses


@dataclass(frozen=True, eq=False)
class AblationCurve:
    """Change in log-probability of the target response against the number of ablated heads.

    The change is log p(ablated) - log p(retained), summed over the response's tokens, mean over examples: below 0 means
    that the heads are needed. The band is a bootstrap over seeds (95 %).
    """

    kind: str  # facilitation, irrelevance, interference, or random
    ablated: Tensor  # (point,) heads forced to 0
    changes: Tensor  # (seed, point)
    heads: Tensor  # (seed,) how many heads are of this kind (a score of 0.5 or more); of a random order, all
    own: Tensor | None = None  # (seed,) the change with just these ablated, or as many of them as at the last point

    @property
    def change(self) -> Tensor:
        """Mean over seeds: (point,)."""
        return self.changes.mean(0)

    @property
    def low(self) -> Tensor:
        return self._quantile(0.025)

    @property
    def high(self) -> Tensor:
        return self._quantile(0.975)

    @property
    def of_kind(self) -> Tensor:
        """How many of the ablated heads are of this kind, mean over seeds: (point,).

        Where that is below the number of ablated heads the kind has run out, and the rest are only the next in order.
        """
        return torch.minimum(self.ablated, self.heads[:, None]).float().mean(0)

    def _quantile(self, q: float) -> Tensor:
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
    memory_gb: float = 4.0,
    journal: Journal | None = None,
) -> AblationCurve:
    """Force the first n heads of a kind's ranking to 0 against forcing them to 1, everything else at G+, n = 0..most.

    kind: facilitation, irrelevance, interference, or ``random`` for a random order: the baseline.
    every: evaluate each so many n. Where fewer than `most` heads are of the kind, just these are ablated too.
    Cost: 2 forwards for each n above 0 and seed; started by `accelerate launch`, every process does its share.
    """
    journal = journal or Journal()
    n_heads = model.n_layers * model.n_heads
    if not 1 <= most <= n_heads:
        raise GatelensError(f"{model.name} has {n_heads} heads: ablate 1 to {n_heads} of them, not {most}.")
    if every < 1:
        raise GatelensError(f"every is at least 1, not {every}.")
    points = sorted({*range(0, most + 1, every), most})
    heads = count_of_kind(roles, kind)
    orders = [ablation_order(roles, kind, seed) for seed in range(len(roles.plus))]
    responses = as_responses(task)
    check_responses(model, responses)
    batches = list(responses.batches(batch))
    pieces = [(seed, i) for seed in range(len(orders)) for i in range(len(batches))]
    processes = Processes(model.device)
    mine = processes.share(len(pieces))
    journal.begin(f"ablate {kind}", len(mine))

    def change(seed: int, part: ResponseBatch) -> Tensor:
        """Sum over the batch's examples: (point + 1,), the last with the kind's own heads ablated.

        With no head ablated nothing changes, which takes no forward.
        """
        wanted = [*points, min(int(heads[seed]), most)]
        counts = sorted({0, *wanted})
        plus, order = roles.plus[seed], orders[seed]
        rows = torch.stack([forced(plus, order[:n], value) for value in (0.0, 1.0) for n in counts[1:]])
        changes = torch.zeros(len(counts), dtype=model.wide_dtype)
        with torch.no_grad():
            for some in parts_at_once(model, part, len(rows)):
                ablated, retained = response_log_probs(model, some, rows, memory_gb=memory_gb).chunk(2)
                changes[1:] += (ablated - retained).sum(1).cpu()
        return changes[[counts.index(n) for n in wanted]]

    width = len(points) + 1
    sums = torch.zeros(len(mine), width)
    for row, (seed, i) in enumerate(pieces[number] for number in mine):
        sums[row] = journal.piece(f"{kind}-{seed}-{i}", partial(change, seed, batches[i]), (width,))
    means = processes.gather(sums, len(pieces)).view(len(orders), len(batches), width).sum(1) / len(responses)
    return AblationCurve(kind, torch.tensor(points), means[:, :-1], heads, means[:, -1])


def count_of_kind(roles: HeadRoles, kind: str) -> Tensor:
    """How many heads are of a kind: (seed,). A random order has no kind, so all of them are."""
    marked = torch.ones_like(roles.plus, dtype=torch.bool) if kind == "random" else roles.is_kind(kind)
    return marked.flatten(1).sum(1)


def ablation_order(roles: HeadRoles, kind: str, seed: int) -> Tensor:
    """Places of the heads from the first to ablate to the last: (layer * head,)."""
    if kind == "random":
        return torch.randperm(roles.plus[0].numel(), generator=torch.Generator().manual_seed(seed))
    return torch.argsort(roles.kind(kind)[seed].flatten(), descending=True, stable=True)


def forced(gates: Tensor, heads: Tensor, value: float) -> Tensor:
    """Gates (layer, head) with some heads forced to a value."""
    changed = gates.flatten().clone()
    changed[heads] = value
    return changed.view_as(gates)
