"""The summary of head roles over runs, against numbers that are worked out by hand."""

from __future__ import annotations

import csv
import itertools
import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from commands import run
from scipy import stats

from gatelens import CircuitSettings, GatelensError, Model, find_circuit
from gatelens.gates.roles import HeadRoles
from gatelens.jobs.roles import find_roles
from gatelens.measures.mediation import PatchingComparison
from gatelens.measures.role_statistics import Mediation
from gatelens.measures.role_summary import summarise, summarise_runs
from gatelens.measures.roles_result import RolesResult, RolesSettings
from gatelens.model.components import Head
from gatelens.report.figures import role_distribution_figure

pytestmark = pytest.mark.filterwarnings("ignore::gatelens.errors.GatelensWarning")


def result(minus: list[list[float]], model: str = "small", task: str = "syntax") -> RolesResult:
    """A run with one layer, facilitation as given (seed, head), and G+ open."""
    fitted = torch.tensor(minus)[:, None, :]
    roles = HeadRoles(fitted, torch.full_like(fitted, 0.96), fitted, torch.zeros(3, 1, len(minus)))
    return RolesResult(model, False, task, RolesSettings(seeds=len(minus), n=7), roles, [], None, 0.0)


def test_shares_and_distribution_are_counted() -> None:
    summary = summarise([result([[0.9, 0.5, 0.1, 0.05], [0.8, 0.2, 0.3, 0.95]])])
    facilitation = summary.shares[0]
    assert facilitation.kind == "facilitation"
    assert (facilitation.heads, facilitation.seeds, facilitation.examples) == (4, 2, 7)
    assert (facilitation.share, facilitation.lowest, facilitation.highest) == (0.5, 0.5, 0.5)
    assert (facilitation.all_seeds, facilitation.any_seed) == (0.25, 0.75)
    assert facilitation.distribution == pytest.approx([1 / 8, 1 / 8, 1 / 8, 1 / 8, 0, 1 / 8, 0, 0, 1 / 8, 2 / 8])
    assert facilitation.published == {"share": 0.256, "all_seeds": 0.014, "any_seed": 0.685}
    assert [share.share for share in summary.shares if share.kind == "interference"] == [0.0]
    assert summarise([result([[0.9, 0.1]], task="induction")]).shares[0].published == {}


def test_each_bin_and_each_published_value_has_its_own_column(tmp_path: Path) -> None:
    summarise([result([[0.9, 0.5, 0.1, 0.05], [0.8, 0.2, 0.3, 0.95]])]).save(tmp_path)
    facilitation, irrelevance, interference = csv.DictReader((tmp_path / "shares.csv").open())
    bins = [float(facilitation[f"scores {low / 10:g} to {(low + 1) / 10:g}"]) for low in range(10)]
    assert bins == pytest.approx([1 / 8, 1 / 8, 1 / 8, 1 / 8, 0, 1 / 8, 0, 0, 1 / 8, 2 / 8])
    assert [facilitation[f"published {name}"] for name in ("share", "any_seed")] == ["0.256", "0.685"]
    assert (irrelevance["published share"], irrelevance["published any_seed"]) == ("0.63", "")
    assert interference["published share"] == ""
    assert all(not value.startswith(("(", "{", "[")) for value in facilitation.values())


def test_equal_facilitation_is_saved_without_a_statistic() -> None:
    comparison = PatchingComparison((Head(0, 1), Head(0, 2)), 0.5, 0.5, float("nan"), float("nan"), n_heads=4)
    line = Mediation.of("ioi in small", comparison)
    assert (line.marked, line.n_marked, line.t, line.p) == ("L0H1 L0H2", 2, None, None)


def test_correlations_are_those_of_scipy() -> None:
    a = result([[0.9, 0.4, 0.1, 0.2, 0.3], [0.8, 0.3, 0.3, 0.1, 0.2], [0.1, 0.9, 0.2, 0.4, 0.8]])
    b = result([[0.7, 0.6, 0.2, 0.1, 0.5]], task="math")
    c = result([[0.6, 0.9, 0.3, 0.1, 0.4]], model="other")
    d = result([[0.6, 0.9]], model="narrow")  # of another shape: nothing to compare
    lines = {
        (line.between, line.first, line.second): line
        for line in summarise([a, b, c, d]).correlations
        if line.kind == "facilitation"
    }
    assert {between for between, *_ in lines} == {"seeds", "tasks", "models"}
    assert len(lines) == 3
    minus = a.roles.minus[:, 0]
    pairs = [stats.pearsonr(x, y).statistic for x, y in itertools.combinations(minus.numpy(), 2)]
    seeds = lines["seeds", "syntax in small", "3 seeds, each with the others"]
    assert (seeds.correlation, seeds.low, seeds.high) == pytest.approx((sum(pairs) / 3, min(pairs), max(pairs)))
    for key, other in (
        (("tasks", "syntax in small", "math in small"), b),
        (("models", "syntax in small", "syntax in other"), c),
    ):
        expected = stats.pearsonr(minus.mean(0).numpy(), other.roles.minus[0, 0].numpy())
        low, high = expected.confidence_interval(0.95)
        line = lines[key]
        assert (line.correlation, line.low, line.high) == pytest.approx((expected.statistic, low, high), abs=1e-4)
        assert line.heads == 5


def test_equal_scores_have_no_correlation() -> None:
    summary = summarise([result([[0.5, 0.5, 0.5], [0.1, 0.2, 0.3]])])
    assert summary.correlations[0].correlation is None


def test_the_interval_of_a_perfect_correlation_is_a_point() -> None:
    """Of scores whose correlation has no rounding error. Fisher's transformation of 1 is infinite."""
    ours = [[0.25, 0.25, 0.5, 0.75, 0.75]]
    first, *_ = summarise([result(ours), result(ours, task="math")]).correlations
    assert (first.kind, first.correlation, first.low, first.high) == ("facilitation", 1.0, 1.0, 1.0)


def test_heads_of_a_kind_in_two_models_are_counted() -> None:
    dense = result([[0.9, 0.9, 0.1, 0.1], [0.9, 0.1, 0.1, 0.1]])
    sparse = result([[0.9, 0.1, 0.9, 0.1], [0.1, 0.1, 0.9, 0.1]], model="sparse")
    overlap = summarise([dense, sparse]).overlaps[0]
    assert (overlap.first, overlap.second, overlap.kind) == ("small", "sparse", "facilitation")
    # In at least half of the seeds: heads 0 and 1, and heads 0 and 2.
    assert (overlap.in_first, overlap.in_second, overlap.in_both, overlap.by_chance) == (2, 2, 1, 1.0)


def test_one_command_reads_all_runs_below_a_folder(
    trained: Model,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    settings = RolesSettings(seeds=2, updates=2, batch=2, n=4, held_out=2, most=1)
    roles = find_roles(trained, "induction", settings, out=tmp_path / "runs" / "gates")
    find_circuit(
        trained,
        "induction",
        CircuitSettings(method="eap", n=2, points=3, sample=0, describe=0, allow_noise=True),
        out=tmp_path / "runs" / "circuit",
    )
    monkeypatch.setenv("COLUMNS", "200")
    words = ["roles", str(tmp_path / "runs"), "--above", "0.5", "--out", str(tmp_path / "summary")]
    assert run(monkeypatch, *words) == 0
    printed = capsys.readouterr().out
    assert "share of heads with a score of 0.5 or more" in printed
    assert "facilitation of the heads that other scores mark, maximum over seeds" in printed
    saved = json.loads((tmp_path / "summary" / "roles-summary.json").read_text())
    (comparison,) = saved["mediation"]
    assert (comparison["over"], comparison["level"], comparison["run"]) == (
        "max",
        "heads",
        f"induction in {trained.name}",
    )
    (in_table,) = csv.DictReader((tmp_path / "summary" / "mediation.csv").open())
    assert in_table["marked"] == comparison["marked"]
    assert len(comparison["marked"].split()) == comparison["n_marked"] == int(in_table["n_marked"])
    assert float(in_table["p"]) == pytest.approx(comparison["p"], rel=1e-4)
    lines = list(csv.DictReader((tmp_path / "summary" / "shares.csv").open()))
    assert float(lines[0]["share"]) == pytest.approx(
        roles.roles.is_kind("facilitation").float().mean().item(), rel=1e-4
    )
    assert (tmp_path / "summary" / "distribution.png").stat().st_size > 1000
    with pytest.raises(GatelensError, match="there is no finished run of head roles in"):
        summarise_runs([tmp_path / "summary"])
    summary = summarise_runs([tmp_path / "runs"], above=99)
    assert not summary.mediation
    assert f"0 of {trained.n_layers * trained.n_heads} heads are marked" in summary.problems[0]


def test_the_figure_draws_the_empirical_distribution() -> None:
    roles = result([[0.1, 0.3], [0.3, 0.9]]).roles
    other = replace(roles, minus=1 - roles.minus)
    figure = role_distribution_figure({"syntax": {"a": roles, "b": other}, "math": {"a": roles}})
    line = next(line for line in figure.axes[0].get_lines() if line.get_label() == "facilitation")
    x, y = line.get_data()
    steps = {round(float(a), 4): float(b) for a, b in zip(x, y, strict=True)}  # the last value at each score
    assert (steps[0.1], steps[0.3], steps[0.9]) == (0.25, 0.75, 1.0)
    assert any(text.get_text() == "no result" for text in figure.axes[3].texts)
    with pytest.raises(GatelensError, match="needs the roles of at least one task"):
        role_distribution_figure({})
