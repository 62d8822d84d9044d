"""Statistics of head roles: shares of heads, correlations and overlaps of runs, and heads that other scores mark."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence

import torch
from jaxtyping import Float
from pydantic import Field
from torch import Tensor

from gatelens.gates.roles import KINDS
from gatelens.measures.mediation import PatchingComparison
from gatelens.measures.roles_result import RolesResult
from gatelens.runtime.settings import Settings

BINS = 10
"""The distribution of scores has this many equal bins from 0 to 1."""

# Shares of heads with a score of 0.5 or more: over the Llama 3 models of the paper; in all ten and in any of the ten
# seeds of Llama-3.1-8B.
PUBLISHED = {
    ("syntax", "facilitation"): {"share": 0.256, "all_seeds": 0.014, "any_seed": 0.685},
    ("common-sense", "facilitation"): {"share": 0.274, "all_seeds": 0.187, "any_seed": 0.603},
    ("math", "facilitation"): {"share": 0.526, "all_seeds": 0.253, "any_seed": 0.750},
    ("syntax", "irrelevance"): {"share": 0.630},
    ("common-sense", "irrelevance"): {"share": 0.646},
    ("math", "irrelevance"): {"share": 0.390},
}


class Share(Settings):
    """How many heads of a run are of a kind: their score is 0.5 or more."""

    model: str
    task: str
    kind: str
    heads: int = Field(description="number of heads of the model")
    seeds: int
    examples: int = Field(description="examples that the gates were fitted on")
    share: float = Field(description="share of heads, mean over seeds")
    lowest: float = Field(description="share of heads in the seed that has fewest")
    highest: float = Field(description="share of heads in the seed that has most")
    all_seeds: float = Field(description="share of heads that are of the kind in all seeds")
    any_seed: float = Field(description="share of heads that are of the kind in any seed")
    distribution: tuple[float, ...] = Field(description="share of the scores of all seeds in each tenth from 0 to 1")
    published: dict[str, float] = Field(description="published values of share, all_seeds and any_seed")

    def flat(self) -> dict[str, object]:
        """A line of shares.csv: each bin and each published value has its own column."""
        line = {name: value for name, value in self if name not in ("distribution", "published")}
        bins = {f"scores {i / BINS:g} to {(i + 1) / BINS:g}": part for i, part in enumerate(self.distribution)}
        published = {f"published {name}": self.published.get(name) for name in ("share", "all_seeds", "any_seed")}
        return line | bins | published


class Correlation(Settings):
    """Pearson's correlation of the scores of heads."""

    between: str = Field(description="seeds, tasks or models")
    kind: str
    first: str
    second: str
    correlation: float | None = Field(description="None if all scores of one side are equal")
    low: float | None = Field(description="between seeds: the smallest of all pairs; otherwise 95 % interval (Fisher)")
    high: float | None
    heads: int = Field(description="number of heads that are compared")


class Overlap(Settings):
    """Heads that are of a kind in at least half of the seeds, in two models of the same shape."""

    task: str
    kind: str
    first: str
    second: str
    in_first: int
    in_second: int
    in_both: int
    by_chance: float = Field(description="expected number in both if the heads were drawn at random")


class Mediation(Settings):
    """Facilitation of the heads that other scores mark, and of all others (`PatchingComparison`)."""

    run: str = Field(description="the task and the model")
    method: str = Field(description="what the heads were scored by")
    level: str = Field(description="the level of the scores")
    rule: str = Field(description="which heads are marked")
    marked: str = Field(description="the marked heads, best first")
    n_marked: int
    n_heads: int
    over: str = Field(description="how the facilitation of a head is taken over the seeds")
    facilitation: float = Field(description="mean over the marked heads")
    others: float = Field(description="mean over all other heads")
    t: float | None = Field(description="of Welch's t-test; None if all heads have the same facilitation")
    p: float | None = Field(description="two-sided")

    @classmethod
    def of(cls, run: str, comparison: PatchingComparison) -> Mediation:
        values = vars(comparison) | {
            "marked": " ".join(map(str, comparison.marked)),
            "n_marked": len(comparison.marked),
            "t": _number(comparison.t),
            "p": _number(comparison.p),
        }
        return cls(run=run, **values)


def share_of_kind(result: RolesResult, kind: str) -> Share:
    is_kind, scores = result.roles.is_kind(kind), result.roles.kind(kind)
    by_seed = is_kind.float().flatten(1).mean(1)
    counts = torch.histc(scores.float(), BINS, 0, 1)
    return Share(
        model=result.model,
        task=result.task,
        kind=kind,
        heads=is_kind[0].numel(),
        seeds=len(is_kind),
        examples=result.settings.n,
        share=float(by_seed.mean()),
        lowest=float(by_seed.min()),
        highest=float(by_seed.max()),
        all_seeds=float(is_kind.all(0).float().mean()),
        any_seed=float(is_kind.any(0).float().mean()),
        distribution=tuple((counts / scores.numel()).tolist()),
        published=PUBLISHED.get((result.task, kind), {}),
    )


def between_seeds(results: Sequence[RolesResult]) -> Iterator[Correlation]:
    """The correlation of each run's seeds: the mean, the smallest and the largest of all pairs."""
    for result, kind in itertools.product(results, KINDS):
        by_seed = result.roles.kind(kind).flatten(1)
        found = [_pearson(a, b) for a, b in itertools.combinations(by_seed, 2)]
        pairs = [value for value in found if value is not None]
        if not found:
            continue
        yield Correlation(
            between="seeds",
            kind=kind,
            first=run_name(result),
            second=f"{len(by_seed)} seeds, each with the others",
            correlation=sum(pairs) / len(pairs) if pairs else None,
            low=min(pairs, default=None),
            high=max(pairs, default=None),
            heads=by_seed.shape[1],
        )


def between_runs(results: Sequence[RolesResult]) -> Iterator[Correlation]:
    """Correlations of mean scores: of two tasks in one model, and of one task in two models of the same shape."""
    for (a, b), kind in itertools.product(itertools.combinations(results, 2), KINDS):
        first, second = (result.roles.kind(kind).mean(0) for result in (a, b))
        if first.shape != second.shape or (a.model == b.model) == (a.task == b.task):
            continue
        correlation = _pearson(first.flatten(), second.flatten())
        low, high = _interval(correlation, first.numel())
        yield Correlation(
            between="tasks" if a.model == b.model else "models",
            kind=kind,
            first=run_name(a),
            second=run_name(b),
            correlation=correlation,
            low=low,
            high=high,
            heads=first.numel(),
        )


def overlaps(results: Sequence[RolesResult]) -> Iterator[Overlap]:
    for (a, b), kind in itertools.product(itertools.combinations(results, 2), KINDS):
        if a.task != b.task or a.model == b.model or a.roles.plus.shape[1:] != b.roles.plus.shape[1:]:
            continue
        first, second = (result.roles.is_kind(kind).float().mean(0) >= 0.5 for result in (a, b))
        yield Overlap(
            task=a.task,
            kind=kind,
            first=a.model,
            second=b.model,
            in_first=int(first.sum()),
            in_second=int(second.sum()),
            in_both=int((first & second).sum()),
            by_chance=float(first.sum()) * float(second.sum()) / first.numel(),
        )


def run_name(result: RolesResult) -> str:
    """The task and the model of a run, in words."""
    return f"{result.task} in {result.model}"


def _pearson(a: Float[Tensor, " head"], b: Float[Tensor, " head"]) -> float | None:
    return _number(float(torch.corrcoef(torch.stack([a, b]).double())[0, 1]))


def _number(value: float) -> float | None:
    """None instead of nan, which JSON does not have."""
    return None if math.isnan(value) else value


def _interval(correlation: float | None, n: int) -> tuple[float | None, float | None]:
    """The 95 % interval of a correlation of n pairs, by Fisher's transformation."""
    if correlation is None or n < 4 or abs(correlation) >= 1:
        return correlation, correlation
    middle, half = math.atanh(correlation), 1.96 / math.sqrt(n - 3)
    return math.tanh(middle - half), math.tanh(middle + half)
