"""Head roles over several runs, as the paper on head gating reports them, beside its published values.

- *shares*: how many heads have a score of 0.5 or more: mean over seeds, in all seeds, in any seed;
- *distribution* of the scores of each kind;
- *correlations* of scores between seeds, between tasks of one model, and between models of one shape;
- *overlap* of the heads of each kind between models of one shape, such as a dense and a sparse one;
- *mediation*: the facilitation of heads that other scores mark (`gatelens.measures.mediation`).

The paper is Nam et al., "Causal Head Gating", arXiv 2505.13737.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from jaxtyping import Float
from pydantic import Field
from torch import Tensor

from gatelens.errors import GatelensError
from gatelens.gates.roles import KINDS, HeadRoles
from gatelens.measures.mediation import PatchingComparison, compare_runs, difference
from gatelens.measures.roles_result import RolesResult, load_roles
from gatelens.runtime.files import make_folder, read_json, write_json
from gatelens.runtime.records import SCHEMA_VERSION, Record, write_lines
from gatelens.runtime.run_folder import ASKED, RESULT
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


class RoleSummaryRecord(Record):
    """The schema of ``roles-summary.json``."""

    shares: list[Share]
    correlations: list[Correlation]
    overlaps: list[Overlap]
    mediation: list[dict[str, object]] = Field(description="comparisons with other scores (`PatchingComparison`)")


@dataclass(frozen=True, eq=False)
class RoleSummary:
    """What several runs of head roles say together.

    Arguments:
        results: the runs.
        mediation: comparisons with other scores, each with the name of its model and task.
        problems: comparisons that could not be made, one sentence each.

    Example:
        summary = gatelens.summarise_runs(["runs/roles", "runs/ioi"])
        summary.shares
    """

    results: list[RolesResult]
    shares: list[Share]
    correlations: list[Correlation]
    overlaps: list[Overlap]
    mediation: list[tuple[str, PatchingComparison]]
    problems: list[str]

    def grid(self) -> dict[str, dict[str, HeadRoles]]:
        """The roles by task and by model, for figures. Of several runs of a model and task, the last counts."""
        grid: dict[str, dict[str, HeadRoles]] = {}
        for result in self.results:
            grid.setdefault(result.task, {})[result.model] = result.roles
        return grid

    def save(self, folder: str | Path) -> None:
        """Write ``roles-summary.json`` and a CSV file of each table."""
        folder = Path(folder)
        make_folder(folder)
        mediation: list[dict[str, object]] = [
            {"run": name, **vars(comparison), "marked": [str(head) for head in comparison.marked]}
            for name, comparison in self.mediation
        ]
        record = RoleSummaryRecord(
            schema_version=SCHEMA_VERSION,
            shares=self.shares,
            correlations=self.correlations,
            overlaps=self.overlaps,
            mediation=mediation,
        )
        write_json(folder / "roles-summary.json", record.model_dump(mode="json"))
        for name, cls, lines in (
            ("shares", Share, self.shares),
            ("correlations", Correlation, self.correlations),
            ("overlaps", Overlap, self.overlaps),
        ):
            write_lines(folder / f"{name}.csv", cls, lines)


def summarise_runs(folders: Sequence[str | Path], above: float = 3.0) -> RoleSummary:
    """Summarise all finished runs of head roles in these folders and below them.

    Runs of circuits of the same model and task are compared with them.

    Arguments:
        folders: run folders, or folders that contain them, such as that of a study.
        above: heads whose score is this many standard deviations above the mean are marked.

    Example:
        summary = gatelens.summarise_runs(["runs/roles", "runs/ioi"])
        summary.save("runs/roles-summary")
    """
    runs = sorted({path.parent for folder in folders for path in Path(folder).rglob(ASKED)})
    finished = [run for run in runs if (run / RESULT).exists()]
    asked = {run: read_json(run / ASKED) for run in finished}
    gates = [run for run in finished if asked[run].get("kind") == "gate"]
    circuits = [run for run in finished if asked[run].get("kind") == "circuit"]
    if not gates:
        places = ", ".join(map(str, folders))
        raise GatelensError(
            f"there is no finished run of head roles in {places}: `gatelens gate MODEL TASK` makes one."
        )
    results = [load_roles(run) for run in gates]
    mediation: list[tuple[str, PatchingComparison]] = []
    problems: list[str] = []
    for (run, result), circuit in itertools.product(zip(gates, results, strict=True), circuits):
        if not difference(asked[run], asked[circuit]):
            try:
                comparison = compare_runs(run, circuit, above=above, over="max")
                mediation.append((f"{result.task} in {result.model}", comparison))
            except GatelensError as error:
                problems.append(f"{run} and {circuit} are not compared: {error}")
    return summarise(results, mediation, problems)


def summarise(
    results: Sequence[RolesResult],
    mediation: Sequence[tuple[str, PatchingComparison]] = (),
    problems: Sequence[str] = (),
) -> RoleSummary:
    """Summarise runs of head roles.

    Arguments:
        results: runs of any models and tasks.
        mediation: comparisons with other scores, each with a name.
        problems: comparisons that could not be made.
    """
    shares = [_share(result, kind) for result in results for kind in KINDS]
    correlations = [*_between_seeds(results), *_between_runs(results)]
    return RoleSummary(list(results), shares, correlations, list(_overlaps(results)), list(mediation), list(problems))


def _share(result: RolesResult, kind: str) -> Share:
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


def _between_seeds(results: Sequence[RolesResult]) -> Iterator[Correlation]:
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
            first=_name(result),
            second=f"{len(by_seed)} seeds, each with the others",
            correlation=sum(pairs) / len(pairs) if pairs else None,
            low=min(pairs, default=None),
            high=max(pairs, default=None),
            heads=by_seed.shape[1],
        )


def _between_runs(results: Sequence[RolesResult]) -> Iterator[Correlation]:
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
            first=_name(a),
            second=_name(b),
            correlation=correlation,
            low=low,
            high=high,
            heads=first.numel(),
        )


def _overlaps(results: Sequence[RolesResult]) -> Iterator[Overlap]:
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


def _name(result: RolesResult) -> str:
    return f"{result.task} in {result.model}"


def _pearson(a: Float[Tensor, " head"], b: Float[Tensor, " head"]) -> float | None:
    value = float(torch.corrcoef(torch.stack([a, b]).double())[0, 1])
    return None if math.isnan(value) else value


def _interval(correlation: float | None, n: int) -> tuple[float | None, float | None]:
    """The 95 % interval of a correlation of n pairs, by Fisher's transformation."""
    if correlation is None or n < 4 or abs(correlation) >= 1:
        return correlation, correlation
    middle, half = math.atanh(correlation), 1.96 / math.sqrt(n - 3)
    return math.tanh(middle - half), math.tanh(middle + half)
