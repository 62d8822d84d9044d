"""Training text from the real `datasets` package, which reads a folder of JSON lines as it reads a hub data set."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from families import prompts, tiny

from gatelens.errors import GatelensError
from gatelens.sparse.sparsify import SparsifySettings, sparsify
from gatelens.sparse.sparsify._log import Log
from gatelens.sparse.text import documents, sequences


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory, with a data set `words` of two splits."""
    pytest.importorskip("datasets", reason="the package datasets is not installed")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "words").mkdir()
    for seed, split in enumerate(("train", "test")):
        rows = [" ".join(f"t{int(i)}" for i in row) for row in prompts(seed=seed, rows=20, length=12)]
        (tmp_path / "words" / f"{split}.jsonl").write_text("\n".join(json.dumps({"text": row}) for row in rows))
    return tmp_path


def test_a_split_is_streamed(folder: Path) -> None:
    for split in ("train", "test"):
        right = [json.loads(line)["text"] for line in (folder / "words" / f"{split}.jsonl").read_text().splitlines()]
        assert list(documents(f"words:default:{split}")) == right
    with pytest.raises(GatelensError, match="no data set of this name"):
        list(documents("words:default:validation"))
    (folder / "words" / "train.jsonl").write_text('{"words": "t3"}\n')
    (folder / "words" / "test.jsonl").unlink()
    with pytest.raises(GatelensError, match="has no field 'text'"):
        list(documents("words:default:train"))


def test_a_data_set_trains_as_its_file_does(folder: Path) -> None:
    model = tiny("llama")
    settings = SparsifySettings(steps=2, batch=2, length=8)
    for name, source in (("set", "words:default:train"), ("file", "words/train.jsonl")):
        sparsify(model, source, settings, out=folder / name)
    set_, file = (Log(folder / name, 10).records for name in ("set", "file"))
    assert [row["loss"] for row in set_] == [row["loss"] for row in file]
    assert len(sequences(model.tokenizer, "words:default:test", 8)) == 20 * 13 // 8
