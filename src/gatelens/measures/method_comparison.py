"""Compare methods: for each of them the gates needed, MIB's areas, the cost, and the agreement with exact patching.

Lines are made from saved circuits, so a study, a report and a notebook show the same numbers.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from pydantic import Field

from gatelens.gates import level_named
from gatelens.measures.areas import AreaColumns, area_columns
from gatelens.measures.circuit_result import CircuitResult
from gatelens.measures.counts import CountColumns
from gatelens.measures.score_check import Agreement


class MethodLine(CountColumns, AreaColumns, Agreement):
    """One method on one task and model: a line of ``methods.csv``."""

    level: str
    task: str
    model: str
    method: str
    options: str = Field(default="", description="settings of the method that were given")
    ranking: str = Field(default="", description="how scores were ordered")
    selection: str = Field(default="", description="how circuits took gates in this order")
    source: str = Field(default="", description="what closed gates read")
    threshold: float = Field(description="the explained effect at which gates are counted")
    total: int = Field(description="number of gates")
    cost: float | None = Field(
        default=None, description="cost of the scores in forward passes of each prompt (a forward-backward is two)"
    )
    needed: str = Field(description="the count as it is printed, with its interval and the number of prompts")


@dataclass(frozen=True)
class MethodRank:
    """How a method does over all tasks and models of a level.

    Methods are compared only where they have the same ranking, selection, source and threshold. A method that was run
    several times there, with other options, has the smallest of its counts.

    Arguments:
        rank: its mean rank by the gates needed, from 1; a method that does not reach the threshold is last, and
            equal counts share their rank.
        cells: how many tasks and models (and rankings, selections, sources, thresholds) the rank is a mean over.
        best: in how many of them no method needs fewer gates.
        cost: the median cost of its scores, in forward passes of each prompt; None if it is not known.
    """

    level: str
    method: str
    rank: float
    cells: int
    best: int
    cost: float | None


def method_lines(results: Iterable[CircuitResult]) -> list[MethodLine]:
    """One line for each result, by level, task and model; the method that needs the fewest gates comes first.

    Results of a level at which all have the same method are left out, because there is nothing to compare.
    """
    lines = [_line(result) for result in results]
    methods: dict[str, set[str]] = {}
    for line in lines:
        methods.setdefault(line.level, set()).add(line.method)
    compared = [line for line in lines if len(methods[line.level]) > 1]
    place = {key: i for i, key in enumerate(dict.fromkeys((x.level, x.task, x.model) for x in compared))}
    return sorted(compared, key=lambda x: (place[x.level, x.task, x.model], _count(x), x.method))


def method_ranks(lines: Sequence[MethodLine]) -> list[MethodRank]:
    """The methods of each level, the best mean rank first. Only tasks and models that all methods have are ranked."""
    ranks: list[MethodRank] = []
    for level in dict.fromkeys(line.level for line in lines):
        own = [line for line in lines if line.level == level]
        methods = {line.method for line in own}
        cells: dict[tuple[str | float, ...], dict[str, float]] = {}
        for line in own:
            same = (line.task, line.model, line.ranking, line.selection, line.source, line.threshold)
            counts = cells.setdefault(same, {})
            counts[line.method] = min(_count(line), counts.get(line.method, float("inf")))
        complete = [counts for counts in cells.values() if set(counts) == methods]
        of_level = [_rank(level, method, complete, own) for method in methods] if complete else []
        ranks += sorted(of_level, key=lambda rank: (rank.rank, rank.method))
    return ranks


def _rank(level: str, method: str, cells: Sequence[dict[str, float]], lines: Sequence[MethodLine]) -> MethodRank:
    places = [_place(counts[method], list(counts.values())) for counts in cells]
    best = sum(counts[method] == min(counts.values()) < float("inf") for counts in cells)
    costs = [line.cost for line in lines if line.method == method and line.cost is not None]
    return MethodRank(
        level, method, statistics.fmean(places), len(cells), best, statistics.median(costs) if costs else None
    )


def _place(count: float, counts: Sequence[float]) -> float:
    """The rank of a count among all, from 1; equal counts share the mean of their ranks."""
    return 1 + sum(other < count for other in counts) + (counts.count(count) - 1) / 2


def _count(line: MethodLine) -> float:
    return float("inf") if line.count is None else line.count


def _line(result: CircuitResult) -> MethodLine:
    settings, curve = result.settings, result.curve
    columns = {name: getattr(result.validity, name) for name in Agreement.model_fields}
    return MethodLine(
        level=settings.level,
        task=result.task,
        model=result.model,
        method=settings.method,
        options=" ".join(settings.method_options),
        ranking=settings.ranking,
        selection=settings.selection,
        source=settings.source,
        threshold=settings.threshold,
        total=curve.total,
        cost=_cost(result),
        needed=str(result.count),
        **columns,
        **dict(result.count.columns()),
        **dict(area_columns(curve.cpr, curve.cmd)),
    )


def _cost(result: CircuitResult) -> float | None:
    """What scoring cost for each prompt, in forward passes, by the price of the method."""
    if result.graph is None:
        return None
    settings, n_prompts = result.settings, result.curve.ranked_on or result.curve.sample.prompts
    price = settings.chosen_method.price(level_named(settings.level), settings.method_settings)
    return price.forwards(n_prompts, result.graph.n_layers, result.curve.total) / n_prompts
