"""Compare head gating with causal mediation: do the heads with high patching scores facilitate more than all others?"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from scipy import stats

from gatelens.errors import GatelensError
from gatelens.gates.heads import HeadScores
from gatelens.gates.roles import HeadRoles
from gatelens.measures.roles_result import load_roles
from gatelens.model.components import Head
from gatelens.runtime.files import read_json, read_tensors
from gatelens.runtime.run_folder import ASKED, RESULT


@dataclass(frozen=True)
class PatchingComparison:
    """Facilitation of the heads that patching marks and of all others, and Welch's t-test that both are equal.

    Arguments:
        marked: the heads with the largest patching scores, best first.
        facilitation: mean over the marked heads and over seeds.
        others: mean over all other heads and over seeds.
        t: the statistic of the test; not a number if all heads have the same facilitation.
        p: the two-sided p-value.
    """

    marked: tuple[Head, ...]
    facilitation: float
    others: float
    t: float
    p: float


def compare_with_patching(roles: HeadRoles, patching: HeadScores, k: int = 10) -> PatchingComparison:
    """Compare the facilitation of the heads with the largest patching scores with that of all others.

    Patching marks heads that help, which have scores above 0. If it measured only a sample of the heads, the others are
    the rest of the sample.

    Arguments:
        patching: scores of activation patching (`patch_heads`) on the same model and task.
        k: how many heads are marked at most.
    """
    facilitation = roles.facilitation.mean(0)
    if patching.scores.shape != facilitation.shape:
        raise GatelensError(
            f"the roles are of a model with {tuple(facilitation.shape)} layers and heads, but the patching scores are "
            f"of one with {tuple(patching.scores.shape)}: compare runs of the same model."
        )
    if k < 2:
        raise GatelensError(f"k is {k}: a comparison needs at least 2 marked heads.")
    measured = torch.ones_like(facilitation, dtype=torch.bool) if patching.measured is None else patching.measured
    helps = patching.scores.masked_fill(~measured, 0).clamp(min=0)
    best = torch.argsort(helps.flatten(), descending=True, stable=True)[:k]
    best = best[helps.flatten()[best] > 0]
    is_marked = torch.zeros(helps.numel(), dtype=torch.bool)
    is_marked[best] = True
    is_marked = is_marked.view_as(measured)
    is_other = measured & ~is_marked
    if len(best) < 2 or int(is_other.sum()) < 2:
        raise GatelensError(
            f"patching marks {len(best)} of {int(measured.sum())} heads as helping, but a comparison needs at least 2 "
            "heads that are marked and 2 that are not: measure more heads, or mark fewer."
        )
    test = stats.ttest_ind(facilitation[is_marked].numpy(), facilitation[is_other].numpy(), equal_var=False)
    return PatchingComparison(
        tuple(Head(*divmod(place, helps.shape[1])) for place in best.tolist()),
        float(facilitation[is_marked].mean()),
        float(facilitation[is_other].mean()),
        float(test.statistic),
        float(test.pvalue),
    )


def compare_runs(roles_run: str | Path, patching_run: str | Path, k: int = 10) -> PatchingComparison:
    """`compare_with_patching` of two saved runs of the same model and task.

    Arguments:
        roles_run: the folder of a run of ``gatelens gate``.
        patching_run: the folder of a run of ``gatelens circuit --level heads --method patching``.
        k: how many heads are marked at most.
    """
    roles_run, patching_run = Path(roles_run), Path(patching_run)
    roles_asked, patching_asked = (read_json(folder / ASKED) for folder in (roles_run, patching_run))
    if roles_asked.get("kind") != "gate":
        raise GatelensError(f"{roles_run} does not hold head roles: `gatelens gate MODEL TASK` makes such a run.")
    settings = read_json(patching_run / RESULT).get("settings", {})
    if (settings.get("level"), settings.get("method")) != ("heads", "patching"):
        raise GatelensError(
            f"{patching_run} does not hold patched heads: `gatelens circuit MODEL TASK --level heads --method "
            "patching` makes such a run."
        )
    for key, identity in (("model", "fingerprint"), ("task", "name")):
        if roles_asked.get(key, {}).get(identity) != patching_asked.get(key, {}).get(identity):
            raise GatelensError(
                f"{roles_run} and {patching_run} are runs of different {key}s: compare runs of the same {key}."
            )
    by_seed = list(read_tensors(patching_run / "scores.safetensors").values())
    return compare_with_patching(load_roles(roles_run).roles, HeadScores(torch.stack(by_seed).mean(0), "patching"), k)
