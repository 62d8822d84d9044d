"""The effect of all gates, against plain runs; what is noise, and what the model cannot do."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from families import tiny
from toys import make_task, planted, planted_task, random_task

from gatelens import CircuitSettings, GatelensError, Model, find_circuit, load_circuit
from gatelens.errors import GatelensWarning
from gatelens.gates import LEVELS
from gatelens.measures.whole_effect import WholeEffect, behaviour_warning, noise_problem, whole_effect
from gatelens.runtime.context import Context
from gatelens.tasks.base import CircuitTask

FEW = {"method": "eap", "points": 4, "random_points": 2, "sample": 0, "describe": 0, "areas": "none"}


def plain(model: Model, task: CircuitTask, corrupt: bool) -> torch.Tensor:
    """The metric of plain Hugging Face runs on the clean or the corrupt prompts."""
    metrics = torch.empty(len(task))
    for bucket in task.buckets:
        with torch.no_grad():
            logits = model.hf(bucket.corrupt if corrupt else bucket.clean).logits[:, -1].float()
        metrics[bucket.which] = task.metric(logits, bucket)
    return metrics


def no_noise() -> CircuitTask:
    """Random prompts whose right answer is what a random model prefers on the clean prompt."""
    model, task = tiny("llama"), random_task(n=5, lengths=(6, 5))
    prompts = []
    for bucket in task.buckets:
        with torch.no_grad():
            clean, corrupt = (model.hf(tokens).logits[:, -1] for tokens in (bucket.clean, bucket.corrupt))
        for i in range(len(bucket)):
            moved = clean[i] - corrupt[i]
            ends = int(moved.argmax()), int(moved.argmin())
            prompts.append((bucket.clean[i].tolist(), bucket.corrupt[i].tolist(), *ends))
    return make_task(prompts)


class TestWholeEffect:
    @pytest.mark.parametrize("level", LEVELS)
    @pytest.mark.parametrize("memory_gb", [4.0, 1e-5])
    def test_open_gates_are_the_clean_run(self, level: str, memory_gb: float) -> None:
        model, task = tiny("llama"), random_task(n=5, lengths=(6, 4))
        effect = whole_effect(LEVELS[level], model, task, context=Context(memory_gb))
        torch.testing.assert_close(effect.everything, plain(model, task, corrupt=False), atol=1e-5, rtol=1e-4)

    def test_edges_that_are_all_closed_are_the_corrupt_run(self) -> None:
        model, task = tiny("gpt2"), random_task(n=4, lengths=(6, 4))
        effect = whole_effect(LEVELS["edges"], model, task)
        torch.testing.assert_close(effect.none, plain(model, task, corrupt=True), atol=1e-5, rtol=1e-4)

    def test_is_that_of_a_curve(self) -> None:
        model, task = tiny("llama"), no_noise()
        effect = whole_effect(LEVELS["heads"], model, task)
        curve = find_circuit(model, task, CircuitSettings(**FEW)).curve
        torch.testing.assert_close(effect.none, curve.none[0])
        torch.testing.assert_close(effect.everything, curve.everything[0])

    def test_is_noise_if_the_interval_contains_0(self) -> None:
        both = WholeEffect(torch.zeros(8), torch.tensor([1.0, -1] * 4))
        above = WholeEffect(torch.zeros(8), torch.linspace(1, 2, 8))
        assert (both.is_noise, above.is_noise) == (True, False)
        assert WholeEffect(torch.linspace(1, 2, 8), torch.zeros(8)).is_noise is False  # below 0 for sure
        assert (both.mean, above.mean, both.answered, above.answered) == (0.0, pytest.approx(1.5), 0.5, 1.0)
        low, high = above.interval
        # The standard error of the mean of 8 such numbers is 0.115.
        assert (low, high) == pytest.approx((1.5 - 2 * 0.115, 1.5 + 2 * 0.115), abs=0.03)
        assert str(above) == f"+1.5 ({low:+.3g} to {high:+.3g}; 8 prompts)"
        assert WholeEffect(torch.zeros(2), torch.tensor([1.0, -1])).is_noise  # two prompts have an interval
        one = WholeEffect(torch.zeros(1), torch.ones(1))
        assert (one.is_noise, str(one)) == (False, "+1 (no interval; 1 prompt)")

    def test_one_noisy_seed_is_enough(self) -> None:
        noise, clear = (WholeEffect(torch.zeros(4), torch.tensor(x)) for x in ([1.0, -1, 1, -1], [1.0, 1, 1, 2]))
        task = random_task()
        assert noise_problem([clear], LEVELS["heads"], "small", task) is None
        problem = noise_problem([clear, noise], LEVELS["heads"], "small", task)
        assert problem is not None
        assert problem.startswith("all heads of small together change the metric of toy by +0 (-1 to +1; 4 prompts)")

    def test_the_behaviour_of_all_seeds_counts(self) -> None:
        half, all_right = (WholeEffect(torch.zeros(4), torch.tensor(x)) for x in ([1.0, -1, 1, -1], [1.0, 1, 1, 2]))
        assert behaviour_warning([all_right, half], "small", random_task()) is None
        assert str(behaviour_warning([half, half], "small", random_task())).startswith("small answers 50% of toy")


class TestJob:
    @pytest.mark.parametrize("level", LEVELS)
    def test_noise_is_refused_and_nothing_is_left(self, level: str, tmp_path: Path) -> None:
        settings = CircuitSettings(level=level, **FEW)
        with pytest.raises(GatelensError, match=r"cannot be told from 0.*12 prompts|12 prompts.*cannot be told from 0"):
            find_circuit(tiny("llama"), random_task(n=12, lengths=(5,)), settings, out=tmp_path / "out")
        assert not (tmp_path / "out").exists()

    def test_noise_can_be_allowed_and_resumed(self, tmp_path: Path) -> None:
        """The option changes no number, so that a folder which was begun with it is not removed without it."""
        model, task, out = tiny("llama"), random_task(n=12, lengths=(5,)), tmp_path / "out"
        settings = CircuitSettings(**FEW)
        with pytest.warns(GatelensWarning, match="cannot be told from 0"):
            result = find_circuit(model, task, settings.replace(allow_noise=True), out=out)
        assert result.curve.effect.isfinite().all()
        assert find_circuit(model, task, settings, out=out).count == result.count  # complete: only read
        (out / "result.json").unlink()
        with pytest.raises(GatelensError, match="cannot be told from 0"):
            find_circuit(model, task, settings, out=out)
        assert (out / "asked.json").exists()

    def test_other_files_in_the_folder_stay(self, tmp_path: Path) -> None:
        (tmp_path / "asked.1.tmp").write_text("{")
        with pytest.raises(GatelensError, match="cannot be told from 0"):
            find_circuit(tiny("llama"), random_task(n=12, lengths=(5,)), CircuitSettings(**FEW), out=tmp_path)
        assert [path.name for path in tmp_path.iterdir()] == ["asked.1.tmp"]

    def test_a_model_without_the_behaviour_gives_a_warning(self, tmp_path: Path) -> None:
        """The planted circuit answers all prompts, and none if right and wrong answers are exchanged."""
        model, task = planted(), planted_task()
        prompts = [
            (
                bucket.clean[i].tolist(),
                bucket.corrupt[i].tolist(),
                int(task.wrong_ids[n, 0]),
                int(task.answer_ids[n, 0]),
            )
            for bucket in task.buckets
            for i, n in enumerate(bucket.which.tolist())
        ]
        with pytest.warns(GatelensWarning, match="planted answers 0% of toy correctly, less than 70%"):
            result = find_circuit(model, make_task(prompts), CircuitSettings(**FEW), out=tmp_path / "out")
        assert result.answered == load_circuit(tmp_path / "out").answered == 0
        assert find_circuit(model, task, CircuitSettings(**FEW)).answered == 1
