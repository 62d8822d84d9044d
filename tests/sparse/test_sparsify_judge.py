"""Judging a sparse model: what is compared with what, what is printed, what is refused; and which text is read."""

from __future__ import annotations

import copy
import hashlib
import itertools
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from commands import run
from families import prompts, tiny
from simple_settings import SIMPLE

import gatelens
from gatelens.errors import GatelensError
from gatelens.model import Model
from gatelens.sparse.in_model import make_sparse, save_sparse
from gatelens.sparse.mixture import read_training_texts, texts_of
from gatelens.sparse.recording import record_open
from gatelens.sparse.sparsify import SparsifySettings, evaluate, sparsify
from gatelens.sparse.sparsify.judge import named
from gatelens.sparse.text import sequences

HEADS = 12
SMALL: dict[str, Any] = {**SIMPLE, "batch": 2, "length": 8, "target": 1.0}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a text, `dense`, a model of 12 heads, and `adapter`, trained for two steps on the text."""
    folder = tmp_path_factory.mktemp("judge")
    (folder / "words.txt").write_text(" ".join(f"t{int(i)}" for i in prompts(seed=1, rows=1, length=400)[0]))
    model = tiny("llama", num_attention_heads=HEADS, num_hidden_layers=2)
    model.hf.save_pretrained(folder / "dense")
    model.tokenizer.save_pretrained(folder / "dense")
    dense = gatelens.load(folder / "dense", check=False)
    settings = SparsifySettings(steps=2, merge=False, bias=0.3, learning_rate=1e-2, bias_learning_rate=0.1, **SMALL)
    sparsify(dense, folder / "words.txt", settings, out=folder / "adapter")
    return folder


@pytest.fixture
def here(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(folder)
    monkeypatch.setenv("COLUMNS", "80")
    return folder


@pytest.fixture(scope="module")
def sparse() -> Model:
    model = tiny("llama")
    make_sparse(model.hf, 0.0)
    return model


# --- What is read ---


@pytest.fixture
def taken(serve: Callable[[Callable[..., Any]], None]) -> list[int]:
    """The rows taken, so far, of a data set without end."""
    rows: list[int] = []

    def load_dataset(*_: Any, **__: Any) -> Iterator[dict[str, str]]:
        for number in itertools.count():
            assert number < 1000, "read for ever"
            rows.append(number)
            yield {"text": f"t{3 + number % 90} t5 t6"}

    serve(load_dataset)
    return rows


def test_a_data_set_without_end_is_read_in_part(taken: list[int], tmp_path: Path) -> None:
    """Documents have four tokens with their ends: 6 sequences of 8 tokens are 12 documents, for any number of steps."""
    for steps in (1, 3):
        taken.clear()
        settings = SparsifySettings(steps=steps, streamed=6, **SMALL)
        sparsify(tiny("llama"), "some/data", settings, out=tmp_path)
        assert taken == list(range(12))
    assert len((tmp_path / "log.csv").read_text().splitlines()) == 1 + 3  # it was the same run, continued
    with pytest.raises(GatelensError, match="another streamed and text"):
        sparsify(tiny("llama"), "some/data", SparsifySettings(streamed=7, **SMALL), out=tmp_path)


def test_a_file_is_read_whole(here: Path, tmp_path: Path) -> None:
    model = tiny("llama")
    sparsify(model, "words.txt", SparsifySettings(steps=1, streamed=2, **SMALL), out=tmp_path)
    [whole] = read_training_texts(model.tokenizer, texts_of("words.txt"), 8, 2, 1.0)
    assert len(whole.tokens) == 401
    right = hashlib.sha256(whole.fingerprint().encode()).hexdigest()
    assert json.loads((tmp_path / "settings.json").read_text())["text"] == right


def test_held_out_text_that_is_trained_on(here: Path, tmp_path: Path) -> None:
    with pytest.raises(GatelensError, match=r"held-out text words\.txt is also trained on"):
        sparsify(tiny("llama"), here, SparsifySettings(**SMALL), out=tmp_path / "run", held_out="words.txt")
    assert not (tmp_path / "run").exists()


def test_without_held_out_text_the_card_shows_what_was_trained_on(here: Path) -> None:
    found = evaluate(gatelens.load("adapter"), "words.txt", gatelens.load("dense"), length=8, n_sequences=8)["words"]
    row = f"| words (trained on) | 8 x 8 | {found.dense_loss:.4f} | {found.sparse_loss:.4f} |"
    assert row in (here / "adapter" / "README.md").read_text()


# --- Names ---


def test_no_two_texts_have_the_same_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert named("a/test.txt") == {"test": "a/test.txt"}
    assert list(named(["a/test.txt", "b/test.txt", "b/other.txt"])) == ["a/test", "b/test", "other"]
    assert list(named(["x/a/test.txt", "y/a/test.txt", "b/test.txt"])) == ["x/a/test", "y/a/test", "b/test"]
    assert list(named(["a/test.txt", "a/test.md"])) == ["a/test.txt", "a/test.md"]
    assert list(named(["a/test.txt", "test.txt"])) == ["a/test", "test"]
    assert list(named(["c4:en.a", "c4:en.b"])) == ["c4:en.a", "c4:en.b"]
    assert list(named(["a.txt", "a.txt"])) == ["a"]
    assert list(named(".")) == [tmp_path.stem]


# --- What it is compared with ---


def printed_tables(said: str) -> list[list[list[str]]]:
    """The tables that were printed, as rows of cells, without headers."""
    tables: list[list[list[str]]] = []
    for line in said.splitlines():
        if line.startswith("┏"):
            tables.append([])
        if line.startswith("│"):
            tables[-1].append([cell.strip() for cell in line.strip("│").split("│")])
    return tables


def test_every_number_is_printed(
    here: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """In 80 columns, against losses of transformers and edges counted one by one, of sequences 2, 3 and 4."""
    asked = ["evaluate", "adapter", "--text", "words.txt", "--length", "8", "--sequences", "3", "--skip", "1"]
    assert run(monkeypatch, *asked, "--out", str(tmp_path / "all.json")) == 0
    said = capsys.readouterr().out
    assert "…" not in said
    assert max(len(line) for line in said.splitlines()) <= 80
    assert said.startswith("cost: about 6 forward passes of one sequence, ")  # 3 of each model
    sparse, dense = gatelens.load("adapter").hf, gatelens.load("dense").hf
    tokens = sequences(gatelens.load("dense").tokenizer, "words.txt", 8)[1:4]
    with torch.no_grad(), record_open(sparse, edges=True) as record:
        losses = [hf(input_ids=tokens, labels=tokens).loss.item() for hf in (dense, sparse)]
        p, q = (hf(input_ids=tokens).logits.double().softmax(-1) for hf in (dense, sparse))
    kl = (p * (p / q).log()).sum(-1).mean().item()
    edges = record.edges.sum((1, 3, 4)) / (3 * 36)  # (layer, head)
    assert len(edges.unique()) > HEADS  # so that no head can stand for another

    first, sparsity, *by_head = printed_tables(said)
    numbers = [*losses, losses[1] - losses[0], kl, 100 * edges.mean().item()]
    assert first[0][:2] == ["words", "3 x 8"]
    assert [float(cell.strip("%")) for cell in first[0][2:]] == pytest.approx(numbers, abs=0.006)
    keys = record.edges.sum(-1).float()  # open keys of every query: (layer, sequence, head, query)
    idle, without_key = (keys.mean(-1) < 0.05).float().mean(), (keys == 0).float().mean()
    shares = (idle, without_key, record.edges[..., 0].sum() / record.edges.sum())
    assert sparsity == [["words", f"{keys.mean():.2f}", *(f"{share:.1%}" for share in shares)]]
    for layer in range(2):
        rows = [table[layer] for table in by_head]
        assert {(row[0], row[1]) for row in rows} == {(str(layer), f"{edges[layer].mean():.2%}")}
        assert [cell for row in rows for cell in row[2:]] == [f"{share:.1%}" for share in edges[layer].tolist()]

    written = json.loads((tmp_path / "all.json").read_text())
    assert (written["model"], written["dense"]) == ("adapter", "dense")
    found = written["texts"]["words"]
    assert [found["dense_loss"], found["sparse_loss"], found["kl"]] == pytest.approx([*losses, kl], rel=1e-4)
    assert torch.allclose(torch.tensor(found["open_by_head"]), edges, atol=1e-6)


@pytest.mark.parametrize(("words", "sequences"), [([], 8), (["--sequences", "2"], 2), (["--skip", "44"], 6)])
def test_a_quick_look(
    words: list[str], sequences: int, here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """8 sequences of the 50, unless another number is asked for or fewer are left."""
    assert run(monkeypatch, "evaluate", "adapter", "--text", "words.txt", "--length", "8", "--quick", *words) == 0
    said = capsys.readouterr().out
    assert said.startswith(f"cost: about {2 * sequences} forward passes of one sequence, ")
    assert printed_tables(said)[0][0][:2] == ["words", f"{sequences} x 8"]


def test_a_model_that_does_not_tell_its_base(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its weights without gates are not called dense: neither where none is told, nor where it is not here."""
    model = gatelens.load("adapter")
    for name in ("alone", "moved"):
        save_sparse(model.hf, here / name)
        model.tokenizer.save_pretrained(here / name)
    (here / "moved" / "adapter.json").write_text('{"base": "/nowhere/base", "scale": 2}')
    capsys.readouterr()
    for name, note in (("alone", ""), ("moved", "because /nowhere/base, which it was made from, cannot be loaded")):
        assert run(monkeypatch, "evaluate", name, "--text", "words.txt", "--length", "8", "--sequences", "1") == 0
        said = capsys.readouterr()
        assert "without" in said.out
        assert "dense" not in said.out
        assert note in said.err
        assert bool(said.err) == bool(note)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--dense", "adapter"], "adapter is sparse too"),
        (["--length", "0"], "from 2 to 64 tokens"),
        (["--length", "1"], "from 2 to 64 tokens, which is what adapter reads, not 1"),
        (["--length", "65"], "from 2 to 64 tokens"),
        (["--sequences", "-1"], "sequences is -1: it must be at least 0"),
        (["--skip", "-1"], "skip is -1: it must be at least 0"),
        (["--skip", "50"], "has 50 sequences of 8 tokens, and 50 are to be skipped"),
        (["--out", "nowhere/all.json"], "no folder nowhere"),
    ],
)
def test_mistakes(
    words: list[str], says: str, here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = ["evaluate", "adapter", "--no-check", "--text", "words.txt", "--length", "8", *words]
    assert run(monkeypatch, *asked) == 2
    assert says in capsys.readouterr().err


def test_another_vocabulary(sparse: Model, here: Path) -> None:
    with pytest.raises(GatelensError, match="tiny-llama has another vocabulary"):
        evaluate(sparse, "words.txt", tiny("llama", vocab_size=101), length=8)
    other = tiny("llama")
    words = copy.deepcopy(other.tokenizer)
    words.add_tokens(["t100"])
    with pytest.raises(GatelensError, match="another vocabulary"):
        evaluate(sparse, "words.txt", Model("other", other.hf, words, other.anatomy), length=8)
    with pytest.raises(GatelensError, match="n_sequences should be at least 1"):
        evaluate(sparse, "words.txt", length=8, n_sequences=0)


def test_a_dense_model_of_a_shorter_context(sparse: Model, here: Path) -> None:
    with pytest.raises(GatelensError, match="from 2 to 6 tokens"):
        evaluate(sparse, "words.txt", tiny("llama", max_position_embeddings=6), length=8)
