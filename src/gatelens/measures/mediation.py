"""Compare head gating with other scores of heads: do the heads that they mark facilitate more than all others?

The other scores come from causal mediation (activation patching) or from any other method, at any level: those of edges
and attention edges are summed over each head (`Scores.head_weights`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from jaxtyping import Bool, Float, Int
from scipy import stats
from torch import Tensor

from gatelens.errors import GatelensError
from gatelens.gates.roles import HeadRoles
from gatelens.gates.scores import Scores
from gatelens.measures.circuit_result import load_circuit, load_scores
from gatelens.measures.roles_result import load_roles
from gatelens.model.components import Head
from gatelens.runtime.files import read_json
from gatelens.runtime.run_folder import ASKED

Over = Literal["mean", "max"]
"""How the facilitation of a head is taken over the fits of a task: their mean or, as published, their maximum."""


@dataclass(frozen=True)
class PatchingComparison:
    """Facilitation of the heads that other scores mark and of all others, and Welch's t-test that both are equal.

    Arguments:
        marked: the heads with the largest scores, best first.
        facilitation: mean over the marked heads.
        others: mean over all other heads.
        t: the statistic of the test; not a number if all heads have the same facilitation.
        p: the two-sided p-value.
        rule: which heads are marked, in words.
        over: how the facilitation of a head is taken over the fits.
        n_heads: how many heads were compared.
        method: what the heads were scored by.
        level: the level of the scores.

    Example:
        comparison = gatelens.compare_with_patching(roles, scores, k=4)
        comparison.marked, comparison.facilitation, comparison.others, comparison.p
    """

    marked: tuple[Head, ...]
    facilitation: float
    others: float
    t: float
    p: float
    rule: str = ""
    over: Over = "mean"
    n_heads: int = 0
    method: str = ""
    level: str = "heads"


def compare_with_patching(
    roles: HeadRoles,
    patching: Scores | Sequence[Scores],
    k: int = 10,
    *,
    above: float | None = None,
    over: Over = "mean",
) -> PatchingComparison:
    """Compare the facilitation of the heads with the largest scores with that of all others.

    Only heads with a score above 0 are marked: at the level of heads, these are heads that help. At other levels a head
    has the sum of the absolute scores of its gates. If only a sample of the heads was scored, the others are the rest
    of the sample.

    Example:
        comparison = compare_with_patching(roles, patch_heads(model, task), above=3, over="max")

    Arguments:
        patching: scores on the same model and task, at any level, by any method; several are averaged.
        k: how many heads are marked at most.
        above: mark all heads whose score is this many standard deviations above the mean of all heads, instead of k
            heads. The paper marks the heads of function vectors with 3.
        over: how the facilitation of a head is taken over the fits.
    """
    all_scores = [patching] if isinstance(patching, Scores) else list(patching)
    facilitation = roles.facilitation.mean(0) if over == "mean" else roles.facilitation.amax(0)
    weights, measured = _head_weights(all_scores)
    if weights.shape != facilitation.shape:
        raise GatelensError(
            f"the roles are of a model with {tuple(facilitation.shape)} layers and heads, but the scores are of one "
            f"with {tuple(weights.shape)}: compare runs of the same model."
        )
    if k < 2:
        raise GatelensError(f"k is {k}: a comparison needs at least 2 marked heads.")
    best, rule = _marked(weights, measured, k, above)
    is_marked = torch.zeros(weights.numel(), dtype=torch.bool)
    is_marked[best] = True
    is_marked = is_marked.view_as(measured)
    is_other = measured & ~is_marked
    if len(best) < 2 or int(is_other.sum()) < 2:
        raise GatelensError(
            f"{len(best)} of {int(measured.sum())} heads are marked ({rule}), but a comparison needs at least 2 heads "
            "that are marked and 2 that are not: score more heads, or mark others."
        )
    test = stats.ttest_ind(facilitation[is_marked].numpy(), facilitation[is_other].numpy(), equal_var=False)
    return PatchingComparison(
        tuple(Head(*divmod(place, weights.shape[1])) for place in best.tolist()),
        float(facilitation[is_marked].mean()),
        float(facilitation[is_other].mean()),
        float(test.statistic),
        float(test.pvalue),
        rule,
        over,
        int(measured.sum()),
        all_scores[0].method,
        all_scores[0].level.name,
    )


def _marked(
    weights: Float[Tensor, "layer head"], measured: Bool[Tensor, "layer head"], k: int, above: float | None
) -> tuple[Int[Tensor, " place"], str]:
    """The positions of the marked heads in the flattened scores, best first; and the rule in words."""
    helps = weights.masked_fill(~measured, 0).clamp(min=0).flatten()
    order = torch.argsort(helps, descending=True, stable=True)
    if above is None:
        best = order[:k]
        return best[helps[best] > 0], f"the {k} heads with the largest scores"
    own = weights[measured]
    least = max(0.0, float(own.mean() + above * own.std()))
    return order[helps[order] > least], f"scores {above:g} standard deviations above the mean"


def _head_weights(all_scores: Sequence[Scores]) -> tuple[Float[Tensor, "layer head"], Bool[Tensor, "layer head"]]:
    """What ranks heads, mean over the scores that have a score of the head; and which heads have one."""
    weights: list[Tensor] = []
    measured: list[Tensor] = []
    for scores in all_scores:
        weight = scores.head_weights()
        if weight is None:
            raise GatelensError(f"{scores.level.noun} do not belong to heads: compare scores of another level.")
        exists = scores.gate_sets()[0].exists
        weights.append(weight.float())
        measured.append(exists if exists.shape == weight.shape else torch.ones_like(weight, dtype=torch.bool))
    times = torch.stack(measured).sum(0)
    total = (torch.stack(weights) * torch.stack(measured)).sum(0)
    return total / times.clamp(min=1), times > 0


def compare_runs(
    roles_run: str | Path,
    scores_run: str | Path,
    k: int = 10,
    *,
    above: float | None = None,
    over: Over = "mean",
) -> PatchingComparison:
    """`compare_with_patching` of two saved runs of the same model and task.

    Arguments:
        roles_run: the folder of a run of ``gatelens gate``.
        scores_run: the folder of a run of ``gatelens circuit``, at any level and by any method. ``--level heads
            --method patching`` is causal mediation.
        k, above, over: as for `compare_with_patching`.

    Example:
        comparison = gatelens.compare_runs("runs/roles", "runs/ioi", k=4)
        comparison.facilitation, comparison.others, comparison.p
    """
    roles_run, scores_run = Path(roles_run), Path(scores_run)
    roles_asked, scores_asked = (read_json(folder / ASKED) for folder in (roles_run, scores_run))
    for folder, asked, kind, noun in (
        (roles_run, roles_asked, "gate", "head roles"),
        (scores_run, scores_asked, "circuit", "a circuit"),
    ):
        if asked.get("kind") != kind:
            raise GatelensError(f"{folder} does not hold {noun}: `gatelens {kind} MODEL TASK` makes such a run.")
    if key := difference(roles_asked, scores_asked):
        raise GatelensError(
            f"{roles_run} and {scores_run} are runs of different {key}s: compare runs of the same {key}."
        )
    circuit = load_circuit(scores_run)
    scores = load_scores(scores_run, circuit.settings, circuit.graph)
    return compare_with_patching(load_roles(roles_run).roles, scores, k, above=above, over=over)


def difference(first: Mapping[str, Any], second: Mapping[str, Any]) -> str:
    """What two requests are not both about: "model", "task", or "" if both are the same.

    Prompts may differ: gates and scores are not fitted and measured on the same number of them.
    """
    for key, identity in (("model", "fingerprint"), ("task", "name"), ("task", "options")):
        if first.get(key, {}).get(identity) != second.get(key, {}).get(identity):
            return key
    return ""
