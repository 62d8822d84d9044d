"""Text sources, and sequences cut from them."""

from __future__ import annotations

import importlib.util
import json
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch
from families import tokenizer

from gatelens import text
from gatelens.errors import GatelensError
from gatelens.text import documents, sequences

WORDS = [f"t{i}" for i in range(3, 33)]
END = 2


def test_a_file_is_cut_into_sequences(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text(" ".join(WORDS))
    found = sequences(tokenizer(), path, 7)  # 30 words and an end: 31 tokens
    assert torch.equal(found, torch.arange(3, 31).view(4, 7))
    assert sequences(tokenizer(), str(path), 7, most=2).shape == (2, 7)


def test_documents_are_joined_by_an_end(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text("\n\n".join(json.dumps({"text": line, "id": 1}) for line in ("t3 t4", "t5", "t6")))
    assert sequences(tokenizer(), path, 3).tolist() == [[3, 4, END], [5, END, 6]]


def test_a_folder_is_read_in_order_of_names(tmp_path: Path) -> None:
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "b.md").write_text("t5")
    (tmp_path / "c.txt").write_text("t4")
    (tmp_path / "a.jsonl").write_text('{"text": "t3"}')
    (tmp_path / "z.png").write_bytes(b"\x89PNG")
    assert list(documents(tmp_path)) == ["t3", "t4", "t5"]


def test_long_documents_are_read_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.txt"
    path.write_text("".join(f"{word} {word}\n" for word in WORDS))
    whole = sequences(tokenizer(), path, 5)
    monkeypatch.setattr(text, "PIECE", 4)
    assert torch.equal(sequences(tokenizer(), path, 5), whole)


def test_a_data_set_is_streamed_no_further_than_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    read = []

    def load_dataset(name: str, config: str | None, split: str, streaming: bool) -> Any:
        asked.append((name, config, split, streaming))
        for number in range(3, 90):
            read.append(number)
            yield {"text": f"t{number}"}

    module = types.ModuleType("datasets")
    module.load_dataset = load_dataset  # type: ignore[attr-defined]
    module.__spec__ = importlib.util.spec_from_loader("datasets", None)
    monkeypatch.setitem(sys.modules, "datasets", module)
    assert sequences(tokenizer(), "wikitext:wikitext-2-raw-v1:test", 4, most=2).tolist() == [[3, 2, 4, 2], [5, 2, 6, 2]]
    assert asked == [("wikitext", "wikitext-2-raw-v1", "test", True)]
    assert read == [3, 4, 5, 6]
    next(documents("someone/data"))
    assert asked[-1] == ("someone/data", None, "train", True)


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("short.txt", b"t3 t4", "has 3 tokens, less than one sequence of 8"),
        ("latin.txt", b"caf\xe9", "UTF-8"),
        ("broken.jsonl", b'{"text": "t3"}\n{"words": "t4"}', "line 2 of"),
        ("broken.jsonl", b'{"text": "t3"}\nt4', "line 2 of"),
        ("absent.txt", None, "no text"),
        ("./absent", None, "no text"),
    ],
)
def test_what_cannot_be_read(name: str, content: bytes | None, says: str, tmp_path: Path) -> None:
    path = tmp_path / name
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(GatelensError, match=says):
        sequences(tokenizer(), path, 8)


def test_an_empty_folder(tmp_path: Path) -> None:
    with pytest.raises(GatelensError, match="holds no text"):
        list(documents(tmp_path))


def test_without_datasets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(GatelensError, match=r"gatelens\[datasets\]"):
        list(documents("someone/data"))
