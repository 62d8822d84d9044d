"""CPR and CMD, against a plain implementation of what the MIB circuit track computes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from families import tiny
from toys import planted, planted_task, random_task

from gatelens import Curve, CurveSettings, attribute_edges, attribute_heads, edges_effect, explained_effect, pool
from gatelens.gates.edges import EdgeScores
from gatelens.measures.areas import MIB_SHARES, largest_prefixes, mib_counts
from gatelens.measures.curve_files import load_curve, save_curve
from gatelens.model import Model
from gatelens.model.graph import Graph
from gatelens.tasks.base import CircuitTask

SETTINGS = CurveSettings(points=2, random_points=0, refine=0)


def mib(effects: list[float]) -> tuple[float, float]:
    """The two areas, piece by piece: (x2 - x1) (y1 + y2) / 2."""
    under = from_one = 0.0
    for i in range(len(effects) - 1):
        width = MIB_SHARES[i + 1] - MIB_SHARES[i]
        under += width * (effects[i] + effects[i + 1]) / 2
        from_one += width * (abs(1 - effects[i]) + abs(1 - effects[i + 1])) / 2
    return under, from_one


def by_hand(model: Model, task: CircuitTask, scores: EdgeScores, absolute: bool, per_query_head: bool) -> list[float]:
    """The effect of the top n edges of a plain list, for MIB's shares."""
    graph = scores.graph
    group = graph.n_heads // graph.n_kv_heads
    edges: list[tuple[float, tuple[int, int]]] = []
    for j, name in enumerate(graph.destination_names):
        copies = group if per_query_head and name.endswith((".k", ".v")) else 1
        for i in range(int(graph.reads[j])):
            edges += [(float(scores.scores[i, j]) / copies, (i, j))] * copies
    edges.sort(key=lambda edge: -abs(edge[0]) if absolute else -edge[0])
    effects = []
    for share in MIB_SHARES:
        chosen = [place for _, place in edges[: int(share * len(edges))]]
        mask = torch.zeros(graph.edges.shape, dtype=torch.bool)
        for place in chosen:
            everywhere = sum(other == place for _, other in edges)
            mask[place] = chosen.count(place) == everywhere  # an input that heads share is kept for all or for none
        effects.append(edges_effect(model, task, mask)[0])
    return effects


@pytest.mark.parametrize("ranking", ["signed", "absolute"])
@pytest.mark.parametrize("per_query_head", [False, True])
def test_against_a_plain_implementation(ranking: str, per_query_head: bool) -> None:
    model, task = tiny("llama"), random_task(n=4, lengths=(5, 4))  # heads share keys and values
    scores = attribute_edges(model, task)
    settings = SETTINGS.replace(areas=ranking, per_query_head=per_query_head)
    curve = explained_effect(model, task, scores, settings)
    wanted = by_hand(model, task, scores, ranking == "absolute", per_query_head)
    torch.testing.assert_close(curve.mib.effect, torch.tensor(wanted), atol=2e-4, rtol=1e-4)
    cpr, cmd = mib(wanted)
    assert float(curve.cpr) == pytest.approx(cpr, abs=1e-4)
    assert float(curve.cmd) == pytest.approx(cmd, abs=1e-4)
    assert curve.mib.ranking == ranking
    assert curve.mib.asked[-1] == Graph(3, 4, 4 if per_query_head else 2).n_edges


def test_counts_are_rounded_down() -> None:
    assert mib_counts(32_491) == [32, 64, 162, 324, 649, 1624, 3249, 6498, 16245, 32491]  # GPT-2 small
    assert mib_counts(7) == [0, 0, 0, 0, 0, 0, 0, 1, 3, 7]


def test_gates_that_count_several_times() -> None:
    order, copies = torch.tensor([2, 0, 3, 1]), torch.tensor([1, 2, 3, 1])  # in order: 3, 1, 1, 2
    assert largest_prefixes(order, copies, [0, 2, 3, 4, 6, 7]) == [0, 0, 1, 2, 3, 4]


class TestKnownCurves:
    def curve(self, effects: list[float], prompts: int = 3) -> Curve:
        curve = explained_effect(
            planted(), planted_task(n=prompts), attribute_heads(planted(), planted_task()), SETTINGS
        )
        none, everything = torch.zeros(1, prompts), torch.ones(1, prompts)
        metrics = torch.tensor(effects)[None, :, None].expand(1, -1, prompts)
        return replace(
            curve,
            none=none,
            everything=everything,
            mib=replace(curve.mib, metrics=metrics, none=none, everything=everything),
        )

    def test_a_circuit_that_equals_the_model(self) -> None:
        perfect = self.curve([1.0] * 10)
        assert float(perfect.cpr) == pytest.approx(0.999)
        assert float(perfect.cmd) == pytest.approx(0)
        assert str(perfect.cpr) == "0.999 (0.999 to 0.999; 3 prompts)"

    def test_nothing_until_everything(self) -> None:
        idle = self.curve([0.0] * 9 + [1.0])
        assert float(idle.cpr) == pytest.approx(0.5 / 2)
        assert float(idle.cmd) == pytest.approx(0.499 + 0.5 / 2)

    def test_more_than_the_model(self) -> None:
        double = self.curve([2.0] * 9 + [1.0])
        assert float(double.cpr) == pytest.approx(2 * 0.499 + 1.5 * 0.5)
        assert float(double.cmd) == pytest.approx(0.499 + 0.5 / 2)

    def test_the_interval_is_that_of_resampled_prompts(self) -> None:
        curve = self.curve([1.0] * 10, prompts=40)
        noisy = torch.randn(1, 10, 40, generator=torch.Generator().manual_seed(0)) + 1
        curve = replace(curve, mib=replace(curve.mib, metrics=noisy))
        low, high = curve.cpr.interval
        assert low < float(curve.cpr) < high
        spread = (high - low) / 2 / 1.96  # the standard error of a mean of 40 independent prompts
        weights = torch.tensor([0.5 * (MIB_SHARES[min(i + 1, 9)] - MIB_SHARES[max(i - 1, 0)]) for i in range(10)])
        assert spread == pytest.approx(float((noisy[0] * weights[:, None]).sum(0).std() / 40**0.5), rel=0.15)


def test_without_areas() -> None:
    curve = explained_effect(
        planted(), planted_task(), attribute_edges(planted(), planted_task()), SETTINGS.replace(areas="none")
    )
    assert curve.mib is curve.cpr is curve.cmd is None


def test_seeds_are_pooled_and_saved(tmp_path: Path) -> None:
    model, tasks = planted(), [planted_task(seed=seed) for seed in (0, 1)]
    scores = [attribute_edges(model, task) for task in tasks]
    both = explained_effect(model, tasks, scores, SETTINGS)
    pooled = pool([explained_effect(model, *one, SETTINGS) for one in zip(tasks, scores, strict=True)])
    assert both.mib.metrics.shape == (2, 10, 6)
    assert str(both.cpr) == str(pooled.cpr)
    assert float(both.of_seed(1).cmd) == pytest.approx(
        float(explained_effect(model, tasks[1], scores[1], SETTINGS).cmd)
    )
    save_curve(both, tmp_path)
    again = load_curve(tmp_path)
    assert (str(again.cpr), str(again.cmd), again.mib.ranking) == (str(both.cpr), str(both.cmd), "signed")
