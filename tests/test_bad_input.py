"""Inputs that once ended with a traceback, each with the sentence that it gives now."""

from __future__ import annotations

import csv
import json
import shutil
import struct
import sys
from pathlib import Path

import pytest
import torch
from commands import run
from families import tiny
from response_examples import any_task
from safetensors.torch import load_file, save_file

sys.path.insert(0, str(Path(__file__).parents[1]))

import gatelens
from fuzz import samples
from gatelens import GatelensError
from gatelens.gates.heads import HeadScores
from gatelens.jobs.study.file import read_study
from gatelens.report.page import write_report
from gatelens.runtime.files import write_csv

DEEP = "[" * 100_000 + "]" * 100_000


def refused(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """What the command line says about a command that it refuses."""
    assert run(monkeypatch, *words) == 2
    said = capsys.readouterr().err
    assert "Traceback" not in said
    return " ".join(said.split())


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A copy of the tiny model, to damage."""
    return Path(shutil.copytree(samples.model_folder(), tmp_path / "model"))


@pytest.mark.parametrize(
    ("line", "says"),
    [
        (json.dumps({**samples.CIRCUIT_LINE, "clean": "t3 \ud800 t5"}), "half of a surrogate pair"),
        ('{"clean": ' + DEEP + "}", "nested too deeply"),
        ('{"clean": ' + "7" * 5000 + "}", "not JSON that can be read"),
    ],
)
def test_lines_of_an_own_task(tmp_path: Path, line: str, says: str) -> None:
    path = tmp_path / "mine.jsonl"
    path.write_text(line + "\n" + json.dumps(samples.CIRCUIT_LINE))
    with pytest.raises(GatelensError, match=says):
        gatelens.task(path, samples.model())
    assert len(gatelens.task(path, samples.model(), skip_bad=True)) == 1


@pytest.mark.parametrize("path", ["a\0b", "n" * 300, "a/" * 3000, "\ud800"])
def test_paths_that_cannot_exist(path: str, tmp_path: Path) -> None:
    for use in (
        gatelens.load,
        lambda name: gatelens.task(name, samples.model()),
        read_study,
        lambda name: write_report([samples.good_run()], name),
        lambda name: write_report([name], tmp_path / "report"),
    ):
        with pytest.raises(GatelensError, match="cannot be the name of a file or folder") as refusal:
            use(path)
        assert len(str(refusal.value)) < 500


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--seed", "1" + "0" * 20], "it must be below 2^63"),
        (["--n", "1000000000"], "a task has 1 to 1,000,000 prompts"),
        (["--n", "9" * 400], "a task has 1 to 1,000,000 prompts"),
    ],
)
def test_numbers_of_tasks(
    options: list[str], says: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["tasks", "induction", "--model", str(samples.model_folder()), *options]
    assert says in refused(monkeypatch, capsys, *words)


@pytest.mark.parametrize("call", ["attribute_heads", "patch_edges", "describe", "explained_effect"])
def test_tasks_without_corrupt_prompts(call: str) -> None:
    model = tiny("gpt2")
    scores = {"describe": (["L0H0"],), "explained_effect": (HeadScores(torch.rand(3, 4), "any"),)}.get(call, ())
    with pytest.raises(GatelensError, match="the task any has no corrupt prompts: give a circuit task"):
        getattr(gatelens, call)(model, any_task(2), *scores)


@pytest.mark.parametrize("memory", ["inf", "nan", "-1", "0"])
def test_a_memory_budget_is_a_finite_number(
    memory: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    model = str(samples.model_folder())
    for words in (["circuit", model, "induction"], ["effect", model, "induction", "graph.json"]):
        assert "memory" in refused(monkeypatch, capsys, *words, "--memory-gb", memory)


def test_a_tokenizer_with_more_words_than_the_model(folder: Path) -> None:
    path = folder / "tokenizer.json"
    tokenizer = json.loads(path.read_text())
    tokenizer["model"]["vocab"]["extra"] = 100
    path.write_text(json.dumps(tokenizer))
    with pytest.raises(GatelensError, match="has 101 tokens and the model 100"):
        gatelens.load(folder)


def test_special_tokens_that_the_model_does_not_have(folder: Path, tmp_path: Path) -> None:
    """Gemma 3 has one for images: it opens, and only a prompt with this token is refused."""
    words = samples.model().tokenizer.__class__.from_pretrained(folder)
    words.add_special_tokens({"additional_special_tokens": ["<image>"], "pad_token": "<padding>"})
    words.save_pretrained(folder)
    model = gatelens.load(folder)
    path = tmp_path / "mine.jsonl"
    path.write_text(json.dumps(samples.RESPONSE_LINE))
    assert gatelens.task(path, model).pad_id == 0  # type: ignore[union-attr]
    path.write_text(json.dumps({"prompt": "t3 <image>", "response": " t4"}))
    with pytest.raises(GatelensError, match=r"has the token '<image>' \(10[01]\), and the model knows 100 tokens"):
        gatelens.task(path, model)


@pytest.mark.parametrize("header", [(-8, 8, 1, 2, 1, 12, 16), (8, 8, 1, 3, 1, 12, 16), (8, 8, 1, 2, -1, 12, 16)])
def test_sizes_of_a_llama2c_header(tmp_path: Path, header: tuple[int, ...]) -> None:
    for name, data in samples.llama2c_files().items():
        (tmp_path / name).write_bytes(data)
    data = samples.llama2c_files()["model.bin"]
    (tmp_path / "model.bin").write_bytes(struct.pack("<7i", *header) + data[28:])
    with pytest.raises(GatelensError, match=r"does not fit together|is not a model file"):
        gatelens.load(tmp_path / "model.bin")


@pytest.mark.parametrize("field", ["vocab_size", "hidden_size", "num_hidden_layers", "intermediate_size"])
def test_a_config_that_asks_for_far_more_than_the_weights_have(folder: Path, field: str) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), field: 2**31}))
    with pytest.raises(GatelensError):
        gatelens.load(folder)


@pytest.mark.parametrize("chain", [1, 2])
def test_adapters_that_are_their_own_base(tmp_path: Path, chain: int) -> None:
    folders = [tmp_path / str(number) for number in range(chain)]
    for number, folder in enumerate(folders):
        folder.mkdir()
        for name, data in samples.adapter_files().items():
            (folder / name).write_bytes(data)
        about = json.loads((folder / "adapter.json").read_text())
        base = str(folders[(number + 1) % chain])
        (folder / "adapter.json").write_text(json.dumps({**about, "base": base}))
    for use in (gatelens.load, lambda name: gatelens.loading.made_from(str(name))):
        with pytest.raises(GatelensError, match=r"names itself as its base|name each other as their bases"):
            use(folders[0])


def test_not_a_number_is_not_a_result(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    weights = load_file(folder / "model.safetensors")
    weights["model.norm.weight"][0] = torch.nan
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    assert "fails the check at load" in refused(monkeypatch, capsys, "inspect", str(folder))
    out = tmp_path / "out"
    words = ["circuit", str(folder), "induction", "--no-check", "--n", "2", "--out", str(out), "--sample", "0"]
    assert "NaN or infinity" in refused(monkeypatch, capsys, *words)
    assert not (out / "result.json").exists()
    assert "NaN or infinity" in refused(
        monkeypatch, capsys, "tasks", "induction", "--model", str(folder), "--no-check", "--n", "2"
    )


def test_a_study_that_is_nested_too_deeply(tmp_path: Path) -> None:
    path = tmp_path / "study.toml"
    path.write_text("a = " + DEEP)
    with pytest.raises(GatelensError, match="nested too deeply"):
        read_study(path)


def test_cells_have_names_that_a_folder_can_have(tmp_path: Path) -> None:
    (tmp_path / "model").symlink_to(samples.model_folder())
    labels = ["m" * 300, "m" * 301]
    path = tmp_path / "study.toml"
    path.write_text("[models]\n" + "".join(f'{label} = "model"\n' for label in labels) + '[circuit]\ntasks = ["ioi"]\n')
    names = [cell.name for cell in read_study(path).cells]
    assert len(set(names)) == 2
    assert max(map(len, names)) < 200


def test_one_bad_run_does_not_stop_a_report(tmp_path: Path) -> None:
    """A lone surrogate in a name, and a number that JSON cannot have: one is shown, the other is left out."""
    for name, data in samples.run_files().items():
        path = tmp_path / "runs" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    result = tmp_path / "runs" / "heads" / "result.json"
    result.write_text(json.dumps({**json.loads(result.read_text()), "model": "a \ud800 b"}))
    result = tmp_path / "runs" / "edges" / "result.json"
    result.write_text(json.dumps({**json.loads(result.read_text()), "seconds": float("nan")}))
    report = write_report([samples.good_run(), tmp_path / "runs"], tmp_path / "report")
    assert str(samples.good_run()) in report.runs
    assert [problem for problem in report.problems if "seconds" in problem]
    assert report.path.read_text(encoding="utf-8").count("a ? b") > 0


@pytest.mark.parametrize("start", ["=", "+", "-", "@"])
def test_a_name_is_not_a_formula(tmp_path: Path, start: str) -> None:
    write_csv(tmp_path / "table.csv", ["name", "number"], [(f"{start}1+1", -1.5), ("plain", -2)])
    with (tmp_path / "table.csv").open(newline="") as file:
        assert list(csv.reader(file)) == [["name", "number"], [f"'{start}1+1", "-1.5"], ["plain", "-2"]]
