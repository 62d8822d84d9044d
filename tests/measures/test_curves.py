"""Curves of made-up metrics, computed by hand: effects, counts with intervals, multipliers and bands."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import Tensor

from gatelens import GatelensError, multiplier
from gatelens.measures.counts import Interval
from gatelens.measures.curves import Curve, pool


def made_up(effects: list[float], kept: list[float] | None = None, level: str = "heads") -> Curve:
    """A curve of one prompt, whose metric is -1 with nothing kept and 3 with everything."""
    effect = torch.tensor([0.0, *effects, 1.0])
    metrics = (4 * effect - 1)[None, :, None]
    places = torch.arange(len(effect)).float() if kept is None else torch.tensor([0.0, *kept])
    return Curve(level, 99, list(range(len(effect))), places, metrics, metrics[:, 0], metrics[:, -1])


class TestEffect:
    def test_is_a_ratio_of_means_over_prompts(self) -> None:
        none, everything = torch.tensor([[1.0, -1.0]]), torch.tensor([[2.0, 4.0]])
        metrics = torch.stack([none, torch.tensor([[1.5, 0.0]]), everything], 1)
        curve = Curve("heads", 2, [0, 1, 2], torch.arange(3.0), metrics, none, everything)
        # (0.75 - 0) / (3 - 0), and not the mean of 0.5 and 0.2
        assert curve.effect.tolist() == pytest.approx([0, 0.25, 1])

    def test_several_seeds_count_alike(self) -> None:
        a, b = made_up([0.2]), made_up([0.6])
        b = Curve(b.level, b.total, b.asked, b.kept + 2, 10 * b.metrics, 10 * b.none, 10 * b.everything)
        both = pool([a, b])
        assert both.effect.tolist() == pytest.approx([0, 0.4, 1])
        assert both.kept.tolist() == [1, 2, 3]
        assert both.none.shape == (2, 1)

    def test_curves_over_other_grids_are_not_pooled(self) -> None:
        with pytest.raises(GatelensError, match="same grid"):
            pool([made_up([0.2]), made_up([0.2, 0.3])])


class TestCountAt:
    @pytest.mark.parametrize(
        ("effects", "count"),
        [
            ([0.2, 0.95, 0.96], 2),  # there and stays
            ([0.95, 0.5, 0.95, 0.97], 3),  # a first visit that does not stay
            ([0.95, 0.91, 0.5, 0.92], 1),  # the next point is enough
            ([0.5, 0.6], 3),  # only the whole model
            ([0.9, 0.9], 1),  # the threshold itself counts
            ([1.3, 1.2], 1),
        ],
    )
    def test_by_hand(self, effects: list[float], count: float) -> None:
        assert made_up(effects).count_at(0.9) == count

    def test_counts_what_is_really_kept(self) -> None:
        count = made_up([0.2, 0.95, 0.96], kept=[0, 7, 8, 20]).count_at(0.9)
        assert count == 7
        assert isinstance(count, int)

    def test_a_curve_that_never_gets_there(self) -> None:
        curve = made_up([0.5])
        short = Curve("heads", 9, [0, 1], curve.kept[:2], curve.metrics[:, :2], curve.none, curve.everything)
        assert short.count_at(0.9) is None
        with pytest.raises(GatelensError, match=r"does not reach 0\.9"):
            multiplier(short, curve)


KS = torch.arange(61.0)


def saturating(rates: Tensor, heights: Tensor, noise: Tensor, fingerprint: str = "") -> Curve:
    """A curve over 0 to 60 gates. Each prompt's metric rises to its height, faster for a small rate."""
    shape = (1 - torch.exp(-KS / rates[:, None])) / (1 - torch.exp(-KS[-1] / rates[:, None]))
    metrics = heights[:, None] * shape + noise
    metrics[:, [0, -1]] -= noise[:, [0, -1]]
    metrics = metrics.T[None]
    ends = metrics[:, 0], metrics[:, -1]
    return Curve("heads", 60, list(range(61)), KS, metrics, *ends, fingerprints=(fingerprint,) if fingerprint else ())


def drawn(n: int, seed: int, times: float = 1.0, fingerprint: str = "") -> Curve:
    """The curve of n prompts of a known population. ``times`` makes every prompt need so many times more gates."""
    generator = torch.Generator().manual_seed(seed)
    rates, heights = 6 + 12 * torch.rand(n, generator=generator), 3 + 1.5 * torch.randn(n, generator=generator)
    return saturating(times * rates, heights, 0.2 * torch.randn(n, 61, generator=generator), fingerprint)


class TestInterval:
    """A population of prompts whose count is known: what do samples of it say?"""

    def test_contains_the_true_count_in_95_of_100_samples(self) -> None:
        truth = drawn(20_000, seed=-1).count_at(0.9)
        intervals = [drawn(48, seed).count_interval(0.9) for seed in range(100)]
        assert sum(low <= truth <= high for low, high in intervals) >= 90
        # It is not so wide that it says nothing, and it is narrower with more prompts.
        widths = [high - low for low, high in intervals]
        more = [high - low for low, high in (drawn(192, seed).count_interval(0.9) for seed in range(20))]
        assert 2 * sum(more) / 20 == pytest.approx(sum(widths) / 100, rel=0.2)

    def test_two_runs_with_other_prompts_agree_within_their_intervals(self) -> None:
        intervals = [drawn(48, seed).count_interval(0.9) for seed in range(100)]
        pairs = list(zip(intervals[::2], intervals[1::2], strict=True))
        assert sum(a.low <= b.high and b.low <= a.high for a, b in pairs) >= 48

    def test_is_that_of_a_plain_bootstrap(self) -> None:
        curve = drawn(24, seed=3)
        counts = []
        generator = torch.Generator().manual_seed(7)
        for _ in range(1500):
            which = torch.randint(24, (24,), generator=generator)
            chosen = {name: getattr(curve, name)[..., which] for name in ("metrics", "none", "everything")}
            counts.append(float(replace(curve, **chosen).count_at(0.9)))
        low, high = torch.tensor(counts).quantile(torch.tensor([0.025, 0.975]))
        ours = curve.count_interval(0.9)
        assert abs(ours.low - low) <= 1
        assert abs(ours.high - high) <= 1
        assert ours.high - ours.low > 5

    def test_seeds_that_disagree_widen_it(self) -> None:
        one, other = (drawn(32, seed, times) for seed, times in ((0, 1.0), (1, 1.6)))
        both = pool([one, other])
        assert both.count_interval(0.9).low <= one.count_at(0.9) < other.count_at(0.9) <= both.count_interval(0.9).high

    def test_is_open_if_some_draws_do_not_reach_the_threshold(self) -> None:
        """Half of the prompts get to 0.95 with the last gate of the grid, the others only to 0.86."""
        last = torch.tensor([0.95, 0.86] * 6)
        metrics = torch.stack([torch.zeros(12), last / 2, last, last])[None]
        curve = Curve("heads", 9, [0, 1, 2, 3], torch.arange(4.0), metrics, metrics[:, 0], torch.ones(1, 12))
        assert curve.count_at(0.9) == 2
        assert curve.count_interval(0.9) == Interval(2.0, None)
        assert str(curve.counted(0.9)) == "2 (2 or more; 12 prompts)"
        assert curve.count_interval(0.8) == Interval(2.0, 2.0)
        assert curve.count_at(0.92) is None
        assert str(curve.counted(0.92)) == "not reached (2 or more; 12 prompts)"
        assert str(curve.counted(0.96)) == "not reached (12 prompts)"

    def test_a_draw_in_which_the_effect_turns_round_does_not_count_as_reached(self) -> None:
        """One prompt has all of the effect. A draw without it has an effect of the other sign."""
        everything = torch.tensor([[8.0, -1.0, -1.0, -1.0]])
        metrics = torch.stack([torch.zeros(1, 4), 0.95 * everything, everything], 1)
        curve = Curve("heads", 2, [0, 1, 2], torch.arange(3.0), metrics, metrics[:, 0], everything)
        assert curve.count_interval(0.9) == Interval(1.0, None)

    def test_one_prompt_has_none(self) -> None:
        assert str(made_up([0.2, 0.95]).counted(0.9)) == "2 (no interval; 1 prompt)"
        assert made_up([0.2, 0.95]).counted(0.9).columns().count_high is None


class TestMultiplier:
    def test_interval_contains_the_true_ratio(self) -> None:
        truth = drawn(20_000, -1, 1.3).count_at(0.9) / drawn(20_000, -1).count_at(0.9)
        intervals = [multiplier(drawn(48, seed, 1.3, "a"), drawn(48, seed, 1.0, "a")).interval for seed in range(100)]
        assert sum(low <= truth <= high for low, high in intervals) >= 90

    def test_pairing_takes_out_what_both_models_share(self) -> None:
        """Every prompt needs 1.3 times as many gates in the dense model. Prompts differ much more than that."""
        dense, sparse = drawn(48, 0, 1.3, "same prompts"), drawn(48, 0, 1.0, "same prompts")
        paired = multiplier(dense, sparse)
        unpaired = multiplier(dense, replace(sparse, fingerprints=("other prompts",)))
        unknown = multiplier(replace(dense, fingerprints=()), replace(sparse, fingerprints=()))
        assert (paired.paired, unpaired.paired, unknown.paired) == (True, False, False)
        assert unknown.interval == unpaired.interval
        assert paired.interval.high - paired.interval.low < 0.75 * (unpaired.interval.high - unpaired.interval.low)
        assert paired.shows_difference
        assert "not paired" not in str(paired)
        assert "not paired" in str(unpaired)

    def test_no_difference_is_called_so(self) -> None:
        same = multiplier(drawn(32, 0), drawn(32, 1))
        assert same.interval.low < 1 < same.interval.high
        assert not same.shows_difference
        assert str(same).endswith("no difference shown")

    def test_draws_that_do_not_reach_the_threshold_open_the_interval(self) -> None:
        last = torch.tensor([0.95, 0.86] * 6)
        metrics = torch.stack([torch.zeros(12), last / 2, last, last])[None]
        short = partial(Curve, "heads", 9, [0, 1, 2, 3], torch.arange(4.0))
        curve = short(metrics, metrics[:, 0], torch.ones(1, 12), fingerprints=("a",))
        fast = short(torch.ones(1, 4, 12), torch.zeros(1, 12), torch.ones(1, 12), fingerprints=("a",))
        fast.metrics[:, 0] = 0
        assert multiplier(curve, fast).interval == Interval(2.0, None)  # the dense count has no upper end
        assert multiplier(fast, curve).interval == Interval(0.0, 0.5)  # nor has the sparse one
        assert multiplier(curve, curve).interval == Interval(0.0, None)  # in some draws both are unknown

    def test_is_dense_over_sparse(self) -> None:
        dense, sparse = made_up([0.1, 0.2, 0.3, 0.95]), made_up([0.1, 0.95])
        assert multiplier(dense, sparse).ratio == 2.0
        assert multiplier(sparse, dense).ratio == 0.5
        assert multiplier(dense, sparse, at=0.05).ratio == 1.0

    def test_of_two_levels(self) -> None:
        with pytest.raises(GatelensError, match="heads and a curve of edges"):
            multiplier(made_up([0.5]), made_up([0.5], level="edges"))


class TestBand:
    def test_one_seed_is_a_bootstrap_over_prompts(self) -> None:
        torch.manual_seed(0)
        none, everything = torch.randn(1, 12) - 2, torch.randn(1, 12) + 2
        metrics = torch.stack([none, torch.randn(1, 12), everything], 1)
        curve = Curve("heads", 2, [0, 1, 2], torch.arange(3.0), metrics, none, everything)
        draws = []
        for _ in range(4000):
            which = torch.randint(12, (12,))
            draws.append((metrics[0, 1] - none[0])[which].mean() / (everything - none)[0][which].mean())
        wanted = torch.stack(draws).quantile(torch.tensor([0.025, 0.975]))
        found = torch.stack([curve.low[1], curve.high[1]])
        torch.testing.assert_close(found, wanted, atol=0.1 * float(wanted.diff()), rtol=0)
        assert curve.low[1] < curve.effect[1] < curve.high[1]
        for band in (curve.low, curve.high):  # the ends are no estimates
            assert band[[0, 2]].tolist() == pytest.approx([0, 1])

    def test_several_seeds_are_drawn_too(self) -> None:
        """Seeds that disagree widen the band: with one prompt each there is nothing else to draw."""
        both = pool([made_up([0.2]), made_up([0.8])])
        assert both.low[1] == pytest.approx(0.2)
        assert both.high[1] == pytest.approx(0.8)
        assert made_up([0.2]).low[1] == made_up([0.2]).high[1]

    def test_is_the_same_every_time(self) -> None:
        curves = [made_up([0.2]), made_up([0.8])]
        assert torch.equal(pool(curves).low, pool(curves).low)


def test_a_draw_whose_effect_has_the_other_sign_has_no_count() -> None:
    """The effects of two prompts are 4 and -2: a draw of the second one only has no count."""
    none, everything = torch.tensor([[5.0, 5]]), torch.tensor([[9.0, 3]])
    metrics = torch.stack([none, everything], 1)
    curve = Curve("heads", 12, [0, 12], torch.tensor([0.0, 12]), metrics, none, everything)
    draws = torch.tensor([[[1.0, 1]], [[2.0, 0]], [[0.0, 2]]])
    assert curve.drawn_counts(draws, 0.9).tolist() == [12, 12, float("inf")]
