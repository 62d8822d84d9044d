"""Ablation curves, contrastive gates and the comparison with patching, on the model whose roles are known."""

from __future__ import annotations

import pytest
import torch
from copying import COPIES, SPOILS, copying_model, copying_task
from scipy import stats

from gatelens import GatelensError
from gatelens.ablation import AblationCurve, ablation_curve, ablation_order
from gatelens.gates.responses import response_log_probs
from gatelens.mediation import compare_with_patching
from gatelens.methods.contrast import ContrastSettings, fit_contrast
from gatelens.methods.head_gating import KINDS, HeadRoles
from gatelens.scores import HeadScores
from gatelens.tasks.base import Example, ResponseTask

pytestmark = pytest.mark.filterwarnings("ignore::gatelens.errors.GatelensWarning")


@pytest.fixture(scope="module")
def roles() -> HeadRoles:
    """Roles by hand: the truth, a little different in the second seed."""
    plus, minus = torch.full((2, 2, 4), 0.9), torch.full((2, 2, 4), 0.1)
    for head, rank in zip(COPIES, (0.99, 0.95), strict=True):
        minus[:, head.layer, head.index] = rank
    plus[:, SPOILS.layer, SPOILS.index] = 0.05
    plus[1] *= 0.9
    return HeadRoles(plus.clone(), plus, minus, torch.zeros(3, 1, 2))


@pytest.mark.parametrize("kind", [*KINDS, "random"])
def test_a_curve_equals_forcing_gates_by_hand(roles: HeadRoles, kind: str) -> None:
    model, task = copying_model(), copying_task(6)
    curve = ablation_curve(model, task, roles, kind, most=3, batch=4)
    (batch,) = task.batches(6)
    for seed in range(2):
        order = ablation_order(roles, kind, seed)
        for n in range(4):
            ablated, retained = roles.plus[seed].clone(), roles.plus[seed].clone()
            for place in order[:n].tolist():
                ablated[place // 4, place % 4], retained[place // 4, place % 4] = 0, 1
            sums = response_log_probs(model, batch, torch.stack([ablated, retained])).mean(1)
            assert curve.changes[seed, n].item() == pytest.approx((sums[0] - sums[1]).item(), abs=1e-4)


def test_each_kind_does_what_its_name_says(roles: HeadRoles) -> None:
    model, task = copying_model(), copying_task(6)
    needed, idle, harmful = (ablation_curve(model, task, roles, kind, most=2).change for kind in KINDS)
    assert needed[2] < -5
    assert idle.abs().max() < 1e-4
    assert harmful[1] > 5


def test_the_order_goes_by_the_kind_and_random_orders_differ(roles: HeadRoles) -> None:
    assert ablation_order(roles, "facilitation", 0)[:2].tolist() == [0, 1]
    assert ablation_order(roles, "interference", 0)[0].item() == 2
    assert sorted(ablation_order(roles, "random", 0).tolist()) == list(range(8))
    assert ablation_order(roles, "random", 0).tolist() != ablation_order(roles, "random", 1).tolist()


def test_every_leaves_out_points_but_not_the_last(roles: HeadRoles) -> None:
    curve = ablation_curve(copying_model(), copying_task(2), roles, most=5, every=3)
    assert curve.ablated.tolist() == [0, 3, 5]


def test_the_band_covers_the_seeds() -> None:
    curve = AblationCurve("random", torch.tensor([0, 1]), torch.tensor([[0.0, -1.0], [0.0, -3.0]]))
    assert curve.change.tolist() == [0.0, -2.0]
    assert curve.low.tolist() == [0.0, -3.0]
    assert curve.high.tolist() == [0.0, -1.0]


@pytest.mark.parametrize(("kind", "most"), [("helpfulness", 2), ("facilitation", 0), ("facilitation", 9)])
def test_bad_requests_are_refused(roles: HeadRoles, kind: str, most: int) -> None:
    with pytest.raises(GatelensError):
        ablation_curve(copying_model(), copying_task(2), roles, kind, most)


def test_contrastive_gates_keep_one_response_and_lose_the_other() -> None:
    # The first word is copied by one head and the second by another: one can be kept without the other.
    whole = copying_task(32)
    first = [Example(e.prompt, e.response, e.prompt_ids, e.response_ids[:1]) for e in whole.examples]
    second = [
        Example(e.prompt, e.response, (*e.prompt_ids, e.response_ids[0]), e.response_ids[1:]) for e in whole.examples
    ]
    keep, lose = ResponseTask("first", 0, first), ResponseTask("second", 0, second)
    found = fit_contrast(copying_model(), keep, lose, ContrastSettings(seeds=2, updates=80, batch=8, rate=(0.5, 0.1)))
    assert (found.gates[:, 0, 0] > 0.8).all()
    assert (found.gates[:, 0, 1] < 0.2).all()
    assert (found.keep > -0.5).all()
    assert (found.lose < -1.5).all()


def test_too_few_examples_to_hold_out() -> None:
    task = copying_task(1)
    with pytest.raises(GatelensError, match="too few to hold out"):
        fit_contrast(copying_model(), task, task, ContrastSettings(seeds=1, updates=1))


def test_the_comparison_with_patching_is_a_t_test(roles: HeadRoles) -> None:
    scores = torch.zeros(2, 4)
    scores[0, 0], scores[0, 1], scores[1, 3] = 3.0, 2.0, -9.0  # large and harmful is not what patching marks
    found = compare_with_patching(roles, HeadScores(scores, "patching (noising)"), k=2)
    assert found.marked == COPIES
    means = roles.facilitation.mean(0).flatten()
    test = stats.ttest_ind(means[:2].numpy(), means[2:].numpy(), equal_var=False)
    assert (found.t, found.p) == (pytest.approx(test.statistic), pytest.approx(test.pvalue))
    assert found.facilitation > found.others
