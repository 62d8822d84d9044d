"""Text sources, and sequences cut from them."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from families import tokenizer
from huggingface_hub import HfApi

from gatelens.errors import GatelensError
from gatelens.sparse import text
from gatelens.sparse.mixture import check_texts
from gatelens.sparse.text import documents, keep_apart, sequences

WORDS = [f"t{i}" for i in range(3, 33)]
END = 2


def test_a_file_is_cut_into_sequences(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text(" ".join(WORDS))
    found = sequences(tokenizer(), path, 7)  # 30 words and an end: 31 tokens
    assert torch.equal(found, torch.arange(3, 31).view(4, 7))
    assert sequences(tokenizer(), str(path), 7, n_sequences=2).shape == (2, 7)


def test_a_sequence_inside_a_document_gets_the_first_token_too() -> None:
    assert text.cut(list(range(10)), 4, [0]) == [[0, 1, 2, 3], [0, 4, 5, 6], [0, 7, 8, 9]]
    assert text.cut([0, 1, 2, 0, 3, 4, 5], 3, [0]) == [[0, 1, 2], [0, 3, 4]]


def test_documents_are_joined_by_an_end(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text("\n\n".join(json.dumps({"text": line, "id": 1}) for line in ("t3 t4", "t5", "t6")))
    assert sequences(tokenizer(), path, 3).tolist() == [[3, 4, END], [5, END, 6]]


@pytest.mark.parametrize("ending", ["jsonl", "ndjson"])
def test_only_a_newline_ends_a_row(ending: str, tmp_path: Path) -> None:
    """JSON allows what Unicode calls line and paragraph separators, and the next line, inside a string."""
    right = ["t3\u2028t4", "t5\u2029t6", "t7\x85t8\x0c", "t9"]
    rows = [json.dumps({"text": row}, ensure_ascii=False) for row in right]
    path = tmp_path / f"a.{ending}"
    path.write_bytes("\r\n".join(rows).encode())
    assert list(documents(path)) == right


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


def test_a_data_set_is_streamed_no_further_than_needed(serve: Callable[[Callable[..., Any]], None]) -> None:
    asked: list[Any] = []
    read = []

    def load_dataset(name: str, config: str | None, split: str, streaming: bool) -> Any:
        asked.append((name, config, split, streaming))
        for number in range(3, 90):
            read.append(number)
            yield {"text": f"t{number}"}

    serve(load_dataset)
    assert sequences(tokenizer(), "wikitext:wikitext-2-raw-v1:test", 4, n_sequences=2).tolist() == [
        [3, 2, 4, 2],
        [5, 2, 6, 2],
    ]
    assert asked == [("wikitext", "wikitext-2-raw-v1", "test", True)]
    assert read == [3, 4, 5, 6]
    next(documents("someone/data"))
    assert asked[-1] == ("someone/data", None, "train", True)
    serve(lambda *_, **__: [{"text": "t3"}, {"text": None}])
    with pytest.raises(GatelensError, match="record 2 of the data set someone/data has no field 'text' with a string"):
        list(documents("someone/data"))


def test_a_data_set_that_the_hub_does_not_have_is_not_streamed(
    serve: Callable[[Callable[..., Any]], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_: HfApi, address: str) -> None:
        raise ConnectionError(f"no answer for {address}")

    serve(lambda *_, **__: pytest.fail("the data set was streamed"))
    monkeypatch.setattr(HfApi, "dataset_info", refuse)
    with pytest.raises(GatelensError, match=r"no file or folder missing, and .* \(no answer for missing\)"):
        next(documents("missing"))
    with pytest.raises(GatelensError, match=r"no answer for missing"):
        check_texts(["missing"])


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("short.txt", b"t3 t4", "has 3 tokens, less than one sequence of 8"),
        ("latin.txt", b"caf\xe9", "UTF-8"),
        ("broken.jsonl", b'{"text": "t3"}\n{"words": "t4"}', "line 2 of"),
        ("broken.jsonl", b'{"text": "t3"}\nt4', "line 2 of"),
        ("null.jsonl", b'{"text": "t3"}\n{"text": null}', "line 2 of .* has no field 'text' with a string"),
        ("number.ndjson", b'{"text": 3}', "line 1 of .* has no field 'text' with a string"),
        ("list.jsonl", b'["text"]', "line 1 of .* has no field 'text' with a string"),
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


def test_held_out_text_is_no_part_of_the_training_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("a/x.txt", "a/y.txt", "b/x.txt"):
        Path(name).parent.mkdir(exist_ok=True)
        Path(name).write_text("t3")
    Path("link").symlink_to("a")
    keep_apart(["a"], ["b", "b/x.txt", "a/../b"])
    keep_apart(["some/data", "some/data:c:train"], ["some/data::test", "some/data:d:train"])
    for trained, held, says in (
        (["b", "a/x.txt"], ["a/x.txt"], r"held-out text a/x\.txt is also trained on \(.*a/x\.txt\)"),
        (["b", "a"], [tmp_path / "a" / "y.txt"], r"a/y\.txt"),
        (["b/x.txt"], ["a", tmp_path], r"b/x\.txt"),
        (["a/x.txt"], ["link"], r"held-out text link is also trained on"),
        (["some/data"], ["some/data::train"], "some/data::train is also trained on"),
    ):
        with pytest.raises(GatelensError, match=says):
            keep_apart(trained, held)  # type: ignore[arg-type]


def test_an_empty_folder(tmp_path: Path) -> None:
    with pytest.raises(GatelensError, match="holds no text"):
        list(documents(tmp_path))


def test_without_datasets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(GatelensError, match=r"gatelens\[datasets\]"):
        list(documents("someone/data"))
