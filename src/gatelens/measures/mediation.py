"""Do learned gates and causal mediation agree? The facilitation of heads that patching marks, against the others'."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from scipy import stats

from gatelens.errors import GatelensError
from gatelens.gates.scores import HeadScores
from gatelens.jobs.roles import load_roles
from gatelens.measures.results import ASKED, RESULT
from gatelens.methods.head_gating import HeadRoles
from gatelens.model.components import Head
from gatelens.runtime.files import read_json, read_tensors


@dataclass(frozen=True)
class Agreement:
    """Facilitation (mean over seeds) of marked heads and of all others, and Welch's t-test that they are equal."""

    marked: tuple[Head, ...]
    facilitation: float  # mean over the marked heads
    others: float  # mean over all other heads
    t: float  # not a number where facilitation is the same for all
    p: float  # two-sided


def compare_runs(gates: str | Path, patching: str | Path, k: int = 10) -> Agreement:
    """`compare_with_patching` of saved runs: of ``gatelens gate``, and of ``gatelens circuit --method patching``."""
    gates, patching = Path(gates), Path(patching)
    if read_json(gates / ASKED).get("kind") != "gate":
        raise GatelensError(f"{gates} holds no head roles: `gatelens gate MODEL TASK` makes such a run.")
    roles, there = load_roles(gates).roles, read_json(patching / RESULT)
    settings = there.get("settings", {})
    if (settings.get("level"), settings.get("method")) != ("heads", "patching"):
        raise GatelensError(
            f"{patching} holds no patched heads: `gatelens circuit MODEL TASK --level heads --method patching` makes "
            "such a run."
        )
    for what, key in (("model", "fingerprint"), ("task", "name")):
        mine, other = (read_json(folder / ASKED).get(what, {}).get(key) for folder in (gates, patching))
        if mine != other:
            raise GatelensError(f"{gates} and {patching} are runs of different {what}s: compare runs of the same one.")
    scores = read_tensors(patching / "scores.safetensors").values()  # of each task seed
    return compare_with_patching(roles, HeadScores(torch.stack(list(scores)).mean(0), "patching"), k)


def compare_with_patching(roles: HeadRoles, patching: HeadScores, k: int = 10) -> Agreement:
    """The facilitation of the (up to) k heads with the largest patching scores, against that of the others.

    Patching marks heads that help: those with scores above 0. Where it measured a sample of heads, the others are the
    rest of the sample.
    """
    scores = roles.facilitation.mean(0)
    if patching.scores.shape != scores.shape:
        raise GatelensError("roles and patching scores are not of the same model: their layers or heads differ.")
    if k < 2:
        raise GatelensError(f"mark at least 2 heads, not {k}.")
    measured = torch.ones_like(scores, dtype=torch.bool) if patching.measured is None else patching.measured
    helps = patching.scores.masked_fill(~measured, 0).clamp(min=0)
    best = HeadScores(helps, patching.method).top(k)
    marked = [head for head in best if helps[head.layer, head.index] > 0]
    chosen = torch.zeros_like(measured)
    for head in marked:
        chosen[head.layer, head.index] = True
    rest = measured & ~chosen
    if len(marked) < 2 or int(rest.sum()) < 2:
        raise GatelensError(
            f"patching marks {len(marked)} of {int(measured.sum())} heads as helping: a comparison needs 2 that are "
            "marked and 2 that are not. Measure more heads, or mark fewer."
        )
    test = stats.ttest_ind(scores[chosen].numpy(), scores[rest].numpy(), equal_var=False)
    return Agreement(
        tuple(marked),
        float(scores[chosen].mean()),
        float(scores[rest].mean()),
        float(test.statistic),
        float(test.pvalue),
    )
