"""The folder of a sparsify run: what continues it, what it refuses, and that it holds a whole model or none."""

from __future__ import annotations

import copy
import csv
import json
import resource
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from families import prompts, tiny
from filelock import FileLock
from simple_settings import SIMPLE
from torch import Tensor

import gatelens
from gatelens.errors import GatelensError, GatelensWarning
from gatelens.model import Model
from gatelens.report.figures import frontier_figure, training_figure
from gatelens.runtime.files import read_numbers
from gatelens.sparse.calibration import calibrate
from gatelens.sparse.in_model import gate_biases, gate_values, make_sparse, save_sparse
from gatelens.sparse.sparsify import SparsifySettings, evaluate, sparsify
from gatelens.sparse.sparsify._folder import FILE
from gatelens.sparse.sparsify._log import Log
from gatelens.sparse.sparsify._training import Training

SMALL: dict[str, Any] = {**SIMPLE, "batch": 2, "length": 8, "checkpoint_every": 1, "target": 1.0}
FAST: dict[str, Any] = {**SMALL, "learning_rate": 1e-2, "bias_learning_rate": 0.5}
COOLING: dict[str, Any] = {**FAST, "cooldown": 0.5}
STILL: dict[str, Any] = {**SMALL, "learning_rate": 1e-12, "bias_learning_rate": 1e-12}


@pytest.fixture(scope="module")
def two_steps(base: Model, text: Path, held: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("made") / "run"
    sparsify(base, text, SparsifySettings(steps=2, **FAST), out=folder, held_out=held)
    return folder


@pytest.fixture
def run(two_steps: Path, tmp_path: Path) -> Path:
    """A folder with a finished run of two steps, to do with as a test likes."""
    return Path(shutil.copytree(two_steps, tmp_path / "run"))


def logits(hf: Any) -> Tensor:
    with torch.no_grad():
        return hf(input_ids=prompts()).logits


def load(folder: Path) -> Model:
    return gatelens.load(folder, check=False)


@contextmanager
def largest_file(size: int) -> Iterator[None]:
    """A limit on the size of files stands in for a full disk: the system refuses the write half-way."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


# --- A bias on a schedule ---


@pytest.mark.parametrize("bias_steps", [2, 3])
def test_a_finished_schedule_stays_at_its_end(
    base: Model, text: Path, held: Path, tmp_path: Path, bias_steps: int
) -> None:
    """Also when the same command is given again, which makes no step."""
    kind: dict[str, Any] = {"learn_bias": False, "bias": 4.0, "bias_end": -1.0, "bias_steps": bias_steps}
    settings = SparsifySettings(steps=3, **kind, **SMALL)
    for _ in range(2):
        sparse = sparsify(base, text, settings, out=tmp_path, held_out=held)
        assert gate_biases(sparse.hf).unique().tolist() == [-1.0]
        assert gate_biases(load(tmp_path).hf).unique().tolist() == [-1.0]
    judgement = evaluate(sparse, held, base, length=8, n_sequences=8)["words"]
    assert Log(tmp_path, 3, name="judged").records[-1]["words open"] == pytest.approx(judgement.open_share, rel=1e-5)


def test_half_a_schedule(base: Model, text: Path, tmp_path: Path) -> None:
    settings = SparsifySettings(steps=2, learn_bias=False, bias=4.0, bias_end=0.0, bias_steps=4, **SMALL)
    assert gate_biases(sparsify(base, text, settings).hf).unique().tolist() == [2.0]


# --- What is written ---


def test_an_adapter_of_an_adapter(base: Model, text: Path, tmp_path: Path) -> None:
    settings = SparsifySettings(steps=2, merge=False, **FAST)
    sparsify(base, text, settings, out=tmp_path / "one")
    one = load(tmp_path / "one")
    two = sparsify(one, text, settings, out=tmp_path / "two")
    assert (logits(one.hf) - logits(base.hf)).abs().max() > 0.01
    torch.testing.assert_close(logits(load(tmp_path / "two").hf), logits(two.hf), rtol=1e-5, atol=1e-5)
    assert two.source == str(tmp_path / "two")


def test_a_base_outside_the_working_directory(
    trained_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    story = tmp_path / "story.txt"
    story.write_text("Anna went to the park and bought a map. " * 5)
    monkeypatch.chdir(trained_folder.parent)
    model = gatelens.load(trained_folder.name, check=False)
    monkeypatch.chdir(tmp_path)
    made = sparsify(model, story, SparsifySettings(steps=1, merge=False, **FAST), out="sparse")
    torch.testing.assert_close(logits(load(Path("sparse")).hf), logits(made.hf), rtol=1e-5, atol=1e-5)


def test_full_weights_do_not_outlive_an_adapter(base: Model, text: Path, run: Path) -> None:
    longer = sparsify(base, text, SparsifySettings(steps=4, merge=False, **FAST), out=run)
    assert not list(run.glob("model*"))
    torch.testing.assert_close(logits(load(run).hf), logits(longer.hf), rtol=1e-5, atol=1e-5)
    assert torch.equal(gate_biases(load(run).hf), gate_biases(longer.hf))


def test_a_result_killed_half_way_is_no_model(
    base: Model, text: Path, run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """New weights with the old biases would be no model that was ever trained."""
    (run / "adapter.json").unlink()
    replace = Path.replace

    def killed(self: Path, target: Path) -> Path:
        if self.name == "config.json":
            raise KeyboardInterrupt
        return replace(self, target)

    monkeypatch.setattr(Path, "replace", killed)
    with pytest.raises(KeyboardInterrupt):
        sparsify(base, text, SparsifySettings(steps=3, **FAST), out=run)
    assert (run / "model.safetensors").exists()
    assert not (run / "config.json").exists()
    monkeypatch.setattr(Path, "replace", replace)
    whole = sparsify(base, text, SparsifySettings(steps=3, **FAST), out=run)
    assert torch.equal(logits(load(run).hf), logits(whole.hf))


def test_the_card_is_of_what_is_written(base: Model, text: Path, held: Path, tmp_path: Path) -> None:
    """In bfloat16 merging rounds: the adapter beside its base is another model than the merged one."""
    narrow = gatelens.load(base.source, dtype=torch.bfloat16, check=False)
    sparsify(narrow, text, SparsifySettings(steps=2, **FAST), out=tmp_path, held_out=held)
    written = gatelens.load(tmp_path, dtype=torch.bfloat16, check=False)
    judgement = evaluate(written, held, narrow, length=8, n_sequences=8)["words"]
    numbers = f"{judgement.sparse_loss:.4f} | {judgement.above_dense:+.4f} | {judgement.kl:.4f} "
    numbers += f"| {judgement.keys_per_query:.2f} | {100 * judgement.open_share:.2f} %"
    assert numbers in (tmp_path / "README.md").read_text()


def test_adapters_of_embeddings_are_refused(text: Path) -> None:
    for tied, name, says in [
        (True, "lm_head", "also the input embeddings"),
        (True, "embed_tokens", "names embeddings"),
        (False, "embed_tokens", "names embeddings"),
    ]:
        with pytest.raises(GatelensError, match=says):
            sparsify(tiny("llama", tie_word_embeddings=tied), text, SparsifySettings(projections=(name,), **SMALL))
    sparsify(
        tiny("llama", tie_word_embeddings=False), text, SparsifySettings(steps=1, projections=("lm_head",), **FAST)
    )


def test_a_sparse_model_made_sparser(base: Model, text: Path, held: Path, tmp_path: Path) -> None:
    sparse = copy.deepcopy(base)
    make_sparse(sparse.hf, 0.5)
    for changes in ({"bias": 7.0}, {"bias_end": 0.0, "learn_bias": False}):
        with pytest.raises(GatelensError, match="sparse already and keeps its biases"):
            sparsify(sparse, text, SparsifySettings(**SMALL, **changes), out=tmp_path / "refused")  # type: ignore[arg-type]
    assert not (tmp_path / "refused").exists()
    again = sparsify(sparse, text, SparsifySettings(steps=1, **STILL), out=tmp_path / "run", held_out=held)
    torch.testing.assert_close(gate_biases(again.hf), torch.full((3, 4), 0.5))
    card = (tmp_path / "run" / "README.md").read_text()
    assert "| base's loss |" in card
    assert "was sparse already" in card
    assert "dense loss" not in card
    assert "| +0.0000 | 0.0000 |" in card.replace("-0.0000", "+0.0000")


@pytest.mark.parametrize("merge", [True, False])
def test_probability_gates_made_sparser(base: Model, text: Path, tmp_path: Path, merge: bool) -> None:
    """All parts of the gates are trained, saved and loaded, with full weights or with the adapter."""
    folder, settings = tmp_path / "gated", SparsifySettings(steps=2, merge=merge, **FAST)
    gated = copy.deepcopy(base)
    make_sparse(gated.hf, **vars(calibrate(gated.hf, [prompts()], 0.9)))
    save_sparse(gated.hf, folder)
    gated.tokenizer.save_pretrained(folder)
    before = gate_values(gated.hf)
    sparse = sparsify(load(folder), text, settings, out=tmp_path / "run")
    again = load(tmp_path / "run")
    torch.testing.assert_close(logits(again.hf), logits(sparse.hf), rtol=1e-5, atol=1e-5)
    for name in ("bias", "query", "key", "rest"):
        trained = getattr(gate_values(sparse.hf), name)
        assert not torch.equal(trained, getattr(before, name))
        assert torch.equal(getattr(gate_values(again.hf), name), trained)
    assert not any(p.requires_grad for p in sparse.hf.parameters())


# --- What continues a run ---


def test_fewer_steps_than_were_made(base: Model, text: Path, run: Path) -> None:
    before = (run / "README.md").read_text()
    with pytest.raises(GatelensError, match="a run of 2 steps, and 1 are asked for"):
        sparsify(base, text, SparsifySettings(steps=1, **FAST), out=run)
    assert (run / "README.md").read_text() == before


def test_a_cooldown_knows_its_steps(base: Model, text: Path, tmp_path: Path) -> None:
    sparsify(base, text, SparsifySettings(steps=1, **COOLING), out=tmp_path)
    with pytest.raises(GatelensError, match="1 steps, and its schedule depends on the number of steps"):
        sparsify(base, text, SparsifySettings(steps=2, **COOLING), out=tmp_path)
    with pytest.raises(GatelensError, match=r"same to resume it\.$"):
        sparsify(base, text, SparsifySettings(steps=1, rank=3, **COOLING), out=tmp_path)
    sparsify(base, text, SparsifySettings(steps=1, **COOLING), out=tmp_path)


def test_settings_that_cannot_be_read(base: Model, text: Path, run: Path) -> None:
    path, settings = run / "settings.json", SparsifySettings(steps=2, **FAST)
    theirs = json.loads(path.read_text())
    newer = {**theirs, "settings": {**theirs["settings"], "momentum": 1}}
    for content, says in [
        ("", "empty or damaged"),
        ("[]", "empty or damaged"),
        (json.dumps({**theirs, "settings": {"steps": "two"}}), "empty or damaged"),
        (json.dumps(newer), r"another version of gatelens.*\(momentum\)"),
    ]:
        path.write_text(content)
        with pytest.raises(GatelensError, match=says):
            sparsify(base, text, settings, out=run)
        assert path.read_text() == content
    del theirs["settings"]["most_loss"]  # an earlier version had fewer
    path.write_text(json.dumps(theirs))
    sparsify(base, text, settings, out=run)


def test_held_out_text_may_change(base: Model, text: Path, held: Path, run: Path, tmp_path: Path) -> None:
    """What was judged stays; a text has no number where it was not looked at."""
    other = tmp_path / "other.txt"
    other.write_text(held.read_text())
    [first] = Log(run, 9, name="judged").records
    sparsify(base, text, SparsifySettings(steps=3, **FAST), out=run, held_out=[held, other])
    sparsify(base, text, SparsifySettings(steps=4, **FAST), out=run, held_out=other)
    rows = Log(run, 9, name="judged").records
    assert rows[0] == first
    assert [row["step"] for row in rows] == [2, 3, 4]
    assert [{key.split()[0] for key in row} - {"step"} for row in rows] == [{"words"}, {"words", "other"}, {"other"}]
    assert rows[1]["words open"] == rows[1]["other open"]
    judged = read_numbers(run / "judged.csv")[1]
    assert judged == rows
    above, _ = training_figure(read_numbers(run / "log.csv")[1], judged).axes
    lines = {str(line.get_label()): np.asarray(line.get_xdata()).tolist() for line in above.get_lines()}
    assert lines["words: above dense"] == [2, 3]
    assert lines["other: above dense"] == [3, 4]
    assert frontier_figure({"run": judged})


def test_a_damaged_checkpoint_is_passed_over(base: Model, text: Path, run: Path, tmp_path: Path) -> None:
    for name in ("optimizer.safetensors", "weights.safetensors", "state.json"):
        copied = Path(shutil.copytree(run, tmp_path / name))
        (copied / "checkpoints" / "step-000002" / name).write_bytes(b"xx")
        with pytest.warns(GatelensWarning, match=r"step-000002 is damaged.*resumes from step 1"):
            sparsify(base, text, SparsifySettings(steps=2, **FAST), out=copied)
        for log in ("loss", "expected_open"):
            assert [row[log] for row in Log(copied, 9).records] == [row[log] for row in Log(run, 9).records]
        assert torch.equal(logits(load(copied).hf), logits(load(run).hf))
    for state in run.rglob("state.json"):
        state.write_text("")
    with pytest.raises(GatelensError, match=r"damaged.*no other checkpoint to resume from"):
        sparsify(base, text, SparsifySettings(steps=2, **FAST), out=run)


def test_two_runs_in_one_folder_are_kept_apart(
    base: Model, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    step, settings = Training.step, SparsifySettings(steps=1, **FAST)

    def started_again(self: Training, number: int) -> Any:
        with pytest.raises(GatelensError, match="another process is working in"):
            sparsify(base, text, settings, out=tmp_path)
        return step(self, number)

    monkeypatch.setattr(Training, "step", started_again)
    sparsify(base, text, settings, out=tmp_path)
    assert not (tmp_path / ".lock").exists()
    result = json.loads((tmp_path / "result.json").read_text())
    assert result["steps"] == 1
    assert list(result["texts"]) == ["trained (trained on)"]


def test_a_run_that_begins_meanwhile_is_not_taken_for_other_files(
    base: Model, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another process writes its request and its log just after this one has looked for a request."""
    exists = Path.exists

    def begun_meanwhile(path: Path) -> bool:
        there = exists(path)
        if path.name == FILE and not exists(tmp_path / "log.csv"):
            (tmp_path / "log.csv").write_text("")
        return there

    monkeypatch.setattr(Path, "exists", begun_meanwhile)
    with FileLock(tmp_path / ".lock"), pytest.raises(GatelensError, match="another process is working in"):
        sparsify(base, text, SparsifySettings(steps=1, **FAST), out=tmp_path)


def test_the_log_of_a_resumed_run_is_that_of_a_run_at_once(
    base: Model, text: Path, held: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = SparsifySettings(steps=3, judge_every=1, **FAST)
    sparsify(base, text, settings, out=tmp_path / "at once", held_out=held)
    step, stopped = Training.step, []

    def stop_once(self: Training, number: int) -> Any:
        if number == 2 and not stopped:
            stopped.append(number)
            raise KeyboardInterrupt
        return step(self, number)

    monkeypatch.setattr(Training, "step", stop_once)
    with pytest.raises(KeyboardInterrupt):
        sparsify(base, text, settings, out=tmp_path / "resumed", held_out=held)
    sparsify(base, text, settings, out=tmp_path / "resumed", held_out=held)
    for name in ("log.csv", "log.json", "judged.csv", "judged.json"):
        at_once, resumed = (log_without_speed(tmp_path / out / name) for out in ("at once", "resumed"))
        assert len(at_once) == 3
        assert at_once == resumed


def log_without_speed(path: Path) -> list[str]:
    """The records of a log as they are written, without the only number that a second run changes."""
    if path.suffix == ".json":
        records = json.loads(path.read_text())
    else:
        records = list(csv.DictReader(path.read_text().splitlines()))
    return [str({name: value for name, value in record.items() if name != "tokens_per_second"}) for record in records]


def test_a_checkpoint_of_an_earlier_version(base: Model, text: Path, run: Path) -> None:
    """It stored a pickle, which is not read; a new run starts from its weights."""
    for checkpoint in (run / "checkpoints").iterdir():
        (checkpoint / "optimizer.safetensors").rename(checkpoint / "optimizer.pt")
    with pytest.raises(GatelensError, match=r"stored a pickle.*start='.*run' begins"):
        sparsify(base, text, SparsifySettings(steps=3, **FAST), out=run)
    sparsify(base, text, SparsifySettings(steps=1, **FAST), out=run.parent / "next", start=run)


# --- Starting from another run ---


def test_a_start_is_remembered(base: Model, text: Path, run: Path, tmp_path: Path) -> None:
    out, settings = tmp_path / "next", SparsifySettings(steps=1, **STILL)
    sparsify(base, text, settings, out=out, start=run)
    assert json.loads((out / "settings.json").read_text())["start"] == "../run"
    assert f"weights and learned biases of the run {run}" in (out / "README.md").read_text()
    with pytest.raises(GatelensError, match="another start"):
        sparsify(base, text, settings, out=out)
    with pytest.raises(GatelensError, match="another start"):
        sparsify(base, text, settings, out=out, start=tmp_path)
    shutil.rmtree(run)  # no longer needed
    again = sparsify(base, text, SparsifySettings(steps=2, **STILL), out=out, start=run)
    assert gate_biases(again.hf).std() > 0
    theirs = json.loads((out / "settings.json").read_text())
    del theirs["start"]  # an earlier version did not say
    (out / "settings.json").write_text(json.dumps(theirs))
    sparsify(base, text, SparsifySettings(steps=2, **STILL), out=out)
    assert "start" not in json.loads((out / "settings.json").read_text())


def test_a_start_that_is_refused_claims_no_folder(base: Model, text: Path, run: Path, tmp_path: Path) -> None:
    for changes, start, says in [
        ({"learn_bias": False}, run, "have learned biases, which this run does not train"),
        ({"projections": ("q_proj",)}, run, "lora_A.* which this run does not train"),
        ({"rank": 4}, run, "do not have .* in the shape"),
        ({}, tmp_path, "no checkpoint to start from"),
    ]:
        with pytest.raises(GatelensError, match=says):
            sparsify(base, text, SparsifySettings(**STILL, **changes), out=tmp_path / "next", start=start)  # type: ignore[arg-type]
        assert not (tmp_path / "next").exists()


# --- A full disk, and what else cannot be ---


def test_a_full_disk_at_the_result(base: Model, text: Path, run: Path) -> None:
    before, size = logits(load(run).hf), (run / "model.safetensors").stat().st_size
    with largest_file(size - 1), pytest.raises(GatelensError, match=r"cannot write to .* free some disk space"):
        sparsify(base, text, SparsifySettings(steps=2, **FAST), out=run)
    assert torch.equal(logits(load(run).hf), before)
    assert not (run / ".result.part").exists()


def test_tensorboard_needs_a_folder(base: Model, text: Path) -> None:
    with pytest.raises(GatelensError, match="needs a folder"):
        sparsify(base, text, SparsifySettings(steps=1, **SMALL), track="tensorboard")


# --- Settings ---


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"bias": float("nan")}, "bias is nan: it must be a finite number"),
        ({"target": float("inf")}, "target is inf: it must be a finite number"),
        ({"learning_rate": float("nan")}, "learning_rate is nan: it must be a finite number"),
        ({"most_loss": 0.2, "hold": "loss"}, "most_loss is 0.2: it must be unset unless hold is 'keys'"),
    ],
)
def test_settings_are_checked(changes: Any, says: str) -> None:
    with pytest.raises(GatelensError, match=says):
        SparsifySettings(**changes)


def test_the_learning_rate_depends_on_what_is_trained() -> None:
    assert SparsifySettings().learning_rate == 8e-4
    assert SparsifySettings(weights="full").learning_rate == 1e-5
    assert SparsifySettings(weights="full", learning_rate=1e-2).learning_rate == 1e-2
    assert SparsifySettings().changed({"learning_rate": 8e-4}) == []
    assert SparsifySettings(weights="full").changed({"weights": "full", "learning_rate": 1e-3}) == ["learning_rate"]
