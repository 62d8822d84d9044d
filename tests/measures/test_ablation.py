"""Ablation curves, contrastive gates and the comparison with patching, on the model whose roles are known."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Literal

import pytest
import torch
from copying import COPIES, SPOILS, copying_model, copying_task
from scipy import stats

from gatelens import CircuitSettings, GatelensError, Model, find_circuit
from gatelens.cli import main
from gatelens.gates.heads import HeadScores
from gatelens.gates.responses import response_log_probs
from gatelens.gates.roles import KINDS, HeadRoles
from gatelens.jobs.contrast import find_contrast
from gatelens.jobs.roles import find_roles
from gatelens.measures.ablation import AblationCurve, ablation_curve, ablation_order
from gatelens.measures.contrast_result import TwoTaskSettings, load_contrast
from gatelens.measures.mediation import compare_runs, compare_with_patching
from gatelens.measures.roles_result import RolesSettings
from gatelens.methods.contrast import ContrastSettings, fit_contrast
from gatelens.model.components import Head
from gatelens.runtime.files import read_json, read_tensors, write_json, write_tensors
from gatelens.tasks.base import Example, ResponseTask
from gatelens.tasks.batches import split

pytestmark = pytest.mark.filterwarnings("ignore::gatelens.errors.GatelensWarning")


@pytest.fixture(scope="module")
def roles() -> HeadRoles:
    """The known roles, with slightly different gates in the second seed."""
    plus, minus = torch.full((2, 2, 4), 0.9), torch.full((2, 2, 4), 0.1)
    for head, rank in zip(COPIES, (0.99, 0.95), strict=True):
        minus[:, head.layer, head.index] = rank
    plus[:, SPOILS.layer, SPOILS.index] = 0.05
    plus[1] *= 0.9
    return HeadRoles(1 - plus, plus, minus, torch.zeros(3, 1, 2))


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


def test_a_curve_tells_how_many_ablated_heads_are_of_its_kind(roles: HeadRoles) -> None:
    # The spoiler interferes in both seeds; in the second seed one more head just reaches 0.5.
    plus = roles.plus.clone()
    plus[1, 1, 3] = 0.5
    changed = replace(roles, plus=plus)
    curve = ablation_curve(copying_model(), copying_task(2), changed, "interference", most=3)
    assert curve.heads.tolist() == [1, 2]
    assert curve.of_kind.tolist() == [0.0, 1.0, 1.5, 1.5]
    assert curve.own is not None
    assert torch.equal(curve.own, curve.changes[[0, 1], [1, 2]])
    assert curve.own[0] != curve.changes[0, 2]  # the next head in the order would change it
    anything = ablation_curve(copying_model(), copying_task(2), changed, "random", most=3)
    assert anything.of_kind.tolist() == [0.0, 1.0, 2.0, 3.0]


@pytest.mark.parametrize(("most", "every", "ends"), [(3, 3, [1, 2]), (1, 1, [1, 1])])
def test_a_kind_s_own_heads_are_ablated_whatever_the_points(
    roles: HeadRoles, most: int, every: int, ends: list[int]
) -> None:
    plus = roles.plus.clone()
    plus[1, 1, 3] = 0.5  # one interfering head in the first seed, two in the second
    changed = replace(roles, plus=plus)
    model, task = copying_model(), copying_task(2)
    own = ablation_curve(model, task, changed, "interference", most, every=every).own
    by_one = ablation_curve(model, task, changed, "interference", most=3).changes
    assert own is not None
    torch.testing.assert_close(own, by_one[[0, 1], ends])


def test_a_kind_without_heads_changes_nothing(roles: HeadRoles) -> None:
    open_ = replace(roles, plus=torch.full_like(roles.plus, 0.9))
    own = ablation_curve(copying_model(), copying_task(2), open_, "interference", most=3).own
    assert own is not None
    assert own.tolist() == [0.0, 0.0]


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
    changes = torch.tensor([[0.0, -1.0], [0.0, -3.0]])
    curve = AblationCurve("random", torch.tensor([0, 1]), changes, torch.tensor([8, 8]))
    assert curve.change.tolist() == [0.0, -2.0]
    assert curve.low.tolist() == [0.0, -3.0]
    assert curve.high.tolist() == [0.0, -1.0]


@pytest.mark.parametrize(("kind", "most"), [("helpfulness", 2), ("facilitation", 0), ("facilitation", 9)])
def test_bad_requests_are_refused(roles: HeadRoles, kind: str, most: int) -> None:
    with pytest.raises(GatelensError):
        ablation_curve(copying_model(), copying_task(2), roles, kind, most)


@pytest.mark.parametrize("objective", ["difference", "hinge"])
def test_contrastive_gates_keep_one_response_and_lose_the_other(objective: Literal["difference", "hinge"]) -> None:
    # Different heads copy the first and the second word, so one can be kept without the other.
    whole = copying_task(32)
    first = [Example(e.prompt, e.response, e.prompt_ids, e.response_ids[:1]) for e in whole.examples]
    second = [
        Example(e.prompt, e.response, (*e.prompt_ids, e.response_ids[0]), e.response_ids[1:]) for e in whole.examples
    ]
    keep, lose = ResponseTask("first", 0, first), ResponseTask("second", 0, second)
    settings = ContrastSettings(seeds=2, updates=40, batch=8, rate=(0.5, 0.1), objective=objective)
    contrast = fit_contrast(copying_model(), keep, lose, settings)
    assert (contrast.gates[:, 0, 0] > 0.8).all()
    assert (contrast.gates[:, 0, 1] < 0.2).all()
    assert (contrast.keep > -0.5).all()
    assert (contrast.lose < -1.5).all()
    assert contrast.accuracy is not None
    assert (contrast.accuracy.keep > 0.9).all()
    assert (contrast.accuracy.lose < 0.5).all()
    assert min(contrast.accuracy.keep_open, contrast.accuracy.lose_open) < 0.9  # open, one head spoils the answers


def test_contrast_is_measured_on_held_out_examples_by_plain_forwards() -> None:
    model, keep = copying_model(), copying_task(8)
    lose = replace(keep, examples=[replace(x, response_ids=x.response_ids[::-1]) for x in keep.examples])
    contrast = fit_contrast(model, keep, lose, ContrastSettings(seeds=1, updates=2, held_out=0.25))
    for task, measured in ((keep, contrast.keep_open), (lose, contrast.lose_open)):
        wanted = [
            model.hf(torch.tensor([x.prompt_ids + x.response_ids]))
            .logits[0]
            .log_softmax(-1)[[2, 3], list(x.response_ids)]
            for x in split(task, 6)[1].examples
        ]
        assert measured == pytest.approx(torch.stack(wanted).sum(1).mean().item(), abs=1e-4)
    assert contrast.lose.item() != pytest.approx(contrast.lose_open, abs=0.1)


def test_contrast_does_not_depend_on_how_examples_are_split_into_batches() -> None:
    # Every second response to lose is wrong, so its NLL is above the ceiling from the start; the others are below it.
    keep = copying_task(16)
    turned = [replace(x, response_ids=x.response_ids[:: (-1) ** i]) for i, x in enumerate(keep.examples)]
    lose, settings = replace(keep, examples=turned), ContrastSettings(seeds=2, updates=6, batch=8, rate=(0.5, 0.5))
    whole = fit_contrast(copying_model(), keep, lose, settings)
    parts = fit_contrast(copying_model(), keep, lose, settings.replace(batch=2, accumulate=4))
    torch.testing.assert_close(parts.gates, whole.gates, atol=1e-5, rtol=0)
    torch.testing.assert_close(parts.losses, whole.losses, atol=1e-5, rtol=0)


def test_examples_are_split_by_the_seed_and_not_by_their_place() -> None:
    task = ResponseTask("numbers", 0, [Example(str(i), " x", (i,), (0,)) for i in range(40)])
    first, rest = split(task, 30)
    assert (len(first), len(rest)) == (30, 10)
    for part in (first, rest):
        assert part.examples == [
            example for example in task.examples if example in part.examples
        ]  # in the order of the task
    assert {*first.examples, *rest.examples} == {*task.examples}
    assert 0 < sum(example in rest.examples for example in task.examples[30:]) < 10
    assert split(task, 30)[1].examples == rest.examples != split(replace(task, seed=1), 30)[1].examples


def test_contrastive_gates_are_not_fitted_on_what_is_held_out() -> None:
    task, settings = copying_task(8), ContrastSettings(seeds=1, updates=3, held_out=0.25)
    held_out = split(task, 6)[1].examples
    turned = [replace(x, response_ids=x.response_ids[::-1]) if x in held_out else x for x in task.examples]
    other = ResponseTask("other", 0, turned)
    first, second = (fit_contrast(copying_model(), x, x, settings) for x in (task, other))
    assert torch.equal(first.gates, second.gates)
    assert not torch.equal(first.keep, second.keep)
    assert not torch.equal(first.lose, second.lose)


def test_two_ways_of_asking_from_the_command_to_the_file(
    trained_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "[red]run"  # this name is data, not markup
    command = ["gatelens", "contrast", str(trained_folder), "word-pairs", "word-pairs", "--out", str(run)]
    command += ["--keep-option", "ask=instruction", "--lose-option", "ask=examples", "--n", "8"]
    command += ["--seeds", "2", "--updates", "2", "--batch", "2"]
    monkeypatch.setattr("sys.argv", command)
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 0
    printed = capsys.readouterr().out
    assert f"written to {run}" in printed
    again = load_contrast(run)
    assert again.contrast.gates.shape[0] == 2
    assert f"{again.contrast.keep_open:+.2f} -> {again.contrast.keep.mean():+.2f}" in printed
    lines = (run / "gates.csv").read_text().splitlines()
    assert len(lines) == 1 + again.contrast.gates[0].numel()
    assert not (run / "pieces").exists()


def test_a_contrast_of_version_0_1_still_opens(trained: Model, tmp_path: Path) -> None:
    settings = TwoTaskSettings(n=4, seeds=1, updates=1)
    result = find_contrast(trained, "syntax", "induction", settings, out=tmp_path)
    saved = read_json(tmp_path / "result.json")
    assert saved.pop("schema_version") == 2
    names = {"keep_open": "keep open", "lose_open": "lose open", "keep_gated": "kept", "lose_gated": "lost"}
    write_json(tmp_path / "result.json", {names.get(key, key): value for key, value in saved.items()})
    again = load_contrast(tmp_path)
    assert (again.keep, again.lose, again.settings) == (result.keep, result.lose, settings)
    assert (again.contrast.keep_open, again.contrast.lose_open) == (
        result.contrast.keep_open,
        result.contrast.lose_open,
    )
    assert torch.equal(again.contrast.gates, result.contrast.gates)
    assert again.contrast.accuracy is not None
    assert result.contrast.accuracy is not None
    assert torch.equal(again.contrast.accuracy.keep, result.contrast.accuracy.keep)
    assert torch.equal(again.contrast.accuracy.lose, result.contrast.accuracy.lose)


def test_a_contrast_without_accuracy_opens(trained: Model, tmp_path: Path) -> None:
    """Version 0.1 did not measure it."""
    find_contrast(trained, "syntax", "induction", TwoTaskSettings(n=4, seeds=1, updates=1), out=tmp_path)
    write_json(tmp_path / "result.json", {**read_json(tmp_path / "result.json"), "accuracy": {}})
    tensors = read_tensors(tmp_path / "contrast.safetensors")
    names = [name for name in tensors if not name.startswith("accuracy.")]
    write_tensors(tmp_path / "contrast.safetensors", {name: tensors[name] for name in names})
    assert load_contrast(tmp_path).contrast.accuracy is None


def test_a_task_cannot_be_kept_and_lost_at_once(trained: Model, tmp_path: Path) -> None:
    with pytest.raises(GatelensError, match="syntax cannot be kept and lost at once: give two tasks that differ"):
        find_contrast(trained, "syntax", "syntax", TwoTaskSettings(n=8), out=tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_too_few_examples_to_hold_out() -> None:
    task = copying_task(1)
    with pytest.raises(GatelensError, match="too few to hold out"):
        fit_contrast(copying_model(), task, task, ContrastSettings(seeds=1, updates=1))


def test_a_refused_contrast_leaves_its_folder_free(trained: Model, tmp_path: Path) -> None:
    with pytest.raises(GatelensError, match="too few to hold out"):
        find_contrast(trained, "syntax", "syntax", TwoTaskSettings(n=2, seeds=1, updates=1), out=tmp_path / "run")
    own = tmp_path / "own.jsonl"
    own.write_text('{"prompt": "Once upon a", "response": " time"}\n' * 5)
    with pytest.raises(GatelensError, match="5 examples, fewer than the 8 asked for"):
        find_contrast(trained, "syntax", str(own), TwoTaskSettings(n=8, seeds=1, updates=1), out=tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_the_comparison_with_patching_is_a_t_test(roles: HeadRoles) -> None:
    scores = torch.zeros(2, 4)
    scores[0, 0], scores[0, 1], scores[1, 3] = (
        3.0,
        2.0,
        -9.0,
    )  # patching does not mark a harmful head, however large its score
    comparison = compare_with_patching(roles, HeadScores(scores, "patching (noising)"), k=2)
    assert comparison.marked == COPIES
    means = roles.facilitation.mean(0).flatten()
    test = stats.ttest_ind(means[:2].numpy(), means[2:].numpy(), equal_var=False)
    assert (comparison.t, comparison.p) == (pytest.approx(test.statistic), pytest.approx(test.pvalue))
    assert comparison.facilitation > comparison.others


def test_patching_marks_only_heads_that_it_measured_and_that_help(roles: HeadRoles) -> None:
    scores = torch.tensor([[3.0, 2.0, -1.0, 0.0], [9.0, 0.5, 0.0, -2.0]])
    measured = torch.ones(2, 4, dtype=torch.bool)
    measured[1, :2] = False  # these are not in the sample
    minus = (torch.arange(16.0) / 16).square().view(2, 2, 4)  # every head has another value
    comparison = compare_with_patching(
        replace(roles, minus=minus), HeadScores(scores, "patching (noising)", measured), k=5
    )
    assert comparison.marked == COPIES
    means = minus.mean(0)
    assert comparison.facilitation == pytest.approx((means[0, 0] + means[0, 1]).item() / 2)
    assert comparison.others == pytest.approx((means[0, 2] + means[0, 3] + means[1, 2] + means[1, 3]).item() / 4)


def test_a_head_has_the_mean_of_the_scores_that_measured_it(roles: HeadRoles) -> None:
    scores = torch.tensor([[4.0, 3.0, 2.0, 0.0], [0.0, 0.0, 0.0, 0.0]]), torch.tensor([[0.0] * 4, [9.0, 8.0, 0.0, 1.0]])
    first = torch.tensor([[True, True, True, False], [False] * 4])
    samples = [HeadScores(own, "patching (noising)", seen) for own, seen in zip(scores, (first, ~first), strict=True)]
    comparison = compare_with_patching(roles, samples, k=3)
    assert comparison.marked == (Head(1, 0), Head(1, 1), Head(0, 0))
    assert comparison.n_heads == 8


def test_a_comparison_needs_heads_on_both_sides(roles: HeadRoles) -> None:
    with pytest.raises(GatelensError, match="1 of 8 heads are marked"):
        compare_with_patching(
            roles, HeadScores(torch.eye(2, 4)[:1].repeat(2, 1) * torch.tensor([[1], [0]]), "patching")
        )


def test_saved_runs_are_compared(trained: Model, tmp_path: Path) -> None:
    result = find_roles(
        trained, "induction", RolesSettings(seeds=2, updates=2, n=4, held_out=2, most=1), out=tmp_path / "g"
    )
    settings = CircuitSettings(method="patching", n=4, points=3, sample=0, allow_noise=True)
    circuit = find_circuit(trained, "induction", settings, out=tmp_path / "c")
    (scores,) = circuit.scores
    assert isinstance(scores, HeadScores)
    direct = compare_with_patching(result.roles, replace(scores, method="patching"), k=3)  # as the file names it
    assert compare_runs(tmp_path / "g", tmp_path / "c", k=3) == direct
    few = {"n": 4, "points": 3, "sample": 0, "describe": 0, "allow_noise": True}
    for level in ("edges", "attention"):
        settings = CircuitSettings(level=level, method="eap", seeds=2, **few)
        circuit = find_circuit(trained, "induction", settings, out=tmp_path / level)
        comparison = compare_runs(tmp_path / "g", tmp_path / level, k=3, over="max")
        assert (comparison.level, comparison.n_heads) == (level, trained.n_layers * trained.n_heads)
        weights = torch.stack([scores.head_weights() for scores in circuit.scores]).mean(0)  # type: ignore[misc]
        best = weights.flatten().argsort(descending=True)[:3].tolist()
        assert comparison.marked == tuple(Head(*divmod(place, trained.n_heads)) for place in best)
        best_of_fits = result.roles.facilitation.amax(0).flatten()[best]
        assert comparison.facilitation == pytest.approx(best_of_fits.mean().item())
    find_circuit(trained, "induction", CircuitSettings(method="eap", **few), out=tmp_path / "o", options={"length": 4})
    with pytest.raises(GatelensError, match=r"g and .*o are runs of different tasks: compare runs of the same task"):
        compare_runs(tmp_path / "g", tmp_path / "o")
    with pytest.raises(GatelensError, match="c does not hold head roles: `gatelens gate"):
        compare_runs(tmp_path / "c", tmp_path / "g")
    with pytest.raises(GatelensError, match="g does not hold a circuit: `gatelens circuit"):
        compare_runs(tmp_path / "g", tmp_path / "g")


def test_heads_far_above_the_mean_are_marked(roles: HeadRoles) -> None:
    scores = torch.tensor([[5.0, 0.1, 0.0, -0.1], [4.9, 0.2, -0.2, 0.1]])
    mean, deviation = scores.mean(), scores.std()
    assert mean + deviation < 4.9 < mean + 2 * deviation
    comparison = compare_with_patching(roles, HeadScores(scores, "patching"), above=1)
    assert comparison.marked == (Head(0, 0), Head(1, 0))
    assert "1 standard deviations above the mean" in comparison.rule
    with pytest.raises(GatelensError, match="0 of 8 heads are marked"):
        compare_with_patching(roles, HeadScores(scores, "patching"), above=2)
