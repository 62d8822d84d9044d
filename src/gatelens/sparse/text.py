"""Text as tokens: from a file, a folder, a JSON-lines file or a hub data set to sequences of equal length."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gatelens.errors import GatelensError

Source = str | Path
ROWS = (".jsonl", ".ndjson")  # a document in each line
SUFFIXES = (".txt", ".md", ".rst", *ROWS)
PIECE = 100_000  # characters tokenised at a time


def sequences(tokenizer: Any, source: Source, length: int, most: int | None = None) -> Tensor:
    """The text of a source cut into sequences: int64 (sequence, length), at most `most` of them.

    Documents follow one another, an end-of-text token between them; what is left over at the end is dropped. Reading
    stops when there are enough, so that a streamed data set is read no further than needed.
    """
    end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    tokens: list[int] = []
    for document in documents(source):
        for piece in _pieces(document):
            tokens += tokenizer(piece, add_special_tokens=False, verbose=False)["input_ids"]
        tokens += end
        if most is not None and len(tokens) >= most * length:
            break
    found = len(tokens) // length
    if found == 0:
        raise GatelensError(
            f"the text {source} has {len(tokens)} tokens, less than one sequence of {length}: "
            "give more text or a smaller length."
        )
    return torch.tensor(tokens[: found * length]).view(found, length)[:most]


def documents(source: Source) -> Iterator[str]:
    """The documents of a source: a text file, a folder of them, a JSON-lines file, or a hub data set.

    A JSON-lines file and a data set have a document in the field `text` of each row. A data set is written as
    `name`, `name:config` or `name:config:split`, the split being `train` unless given.
    """
    found = files(source)
    if found is None:
        yield from _hub(str(source))
    else:
        for file in found:
            yield from _file(file)


def files(source: Source) -> list[Path] | None:
    """The files that a source is read from, or None for a hub data set, which is streamed."""
    path = Path(source)
    if path.is_dir():
        found = sorted(file for file in path.rglob("*") if file.suffix in SUFFIXES and file.is_file())
        if not found:
            raise GatelensError(f"the folder {path} holds no text: it has no file that ends in {', '.join(SUFFIXES)}.")
        return found
    if path.exists():
        return [path]
    if path.suffix in SUFFIXES or path.is_absolute() or str(source).startswith((".", "~")):
        raise GatelensError(
            f"no text {source}: give a file, a folder, a JSON-lines file or a hub data set that exists."
        )
    return None


def keep_apart(trained: Iterable[Source], held_out: Iterable[Source]) -> None:
    """Refuse held-out text that is trained on: the same file by whatever path, or the same split of a data set."""
    seen = {part for source in trained for part in _parts(source)}
    for source in held_out:
        if both := [part for part in _parts(source) if part in seen]:
            raise GatelensError(
                f"the held-out text {source} is trained on too ({both[0]}): hold out text that is no part of --text."
            )


def _parts(source: Source) -> list[str]:
    found = files(source)
    return [":".join(_address(str(source)))] if found is None else [str(file.resolve()) for file in found]


def _file(path: Path) -> Iterator[str]:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise GatelensError(f"cannot read the text {path} ({error}): give a readable file in UTF-8.") from error
    if path.suffix not in ROWS:
        yield text
        return
    for number, line in enumerate(text.split("\n"), 1):  # strings may hold what else Unicode calls the end of a line
        if line.strip():
            try:
                row = json.loads(line)
            except ValueError as error:
                raise GatelensError(
                    f"line {number} of {path} is no JSON ({error}): give an object in every line."
                ) from error
            yield _document(row, f"line {number} of {path}")


def _document(row: Any, where: str) -> str:
    text = row.get("text") if isinstance(row, dict) else None
    if not isinstance(text, str):
        raise GatelensError(f"{where} has no field 'text' with a string in it, where gatelens reads a document.")
    return text


def _hub(name: str) -> Iterator[str]:
    if importlib.util.find_spec("datasets") is None:
        raise GatelensError(
            f"no file or folder {name}; to stream it as a hub data set, run `pip install 'gatelens[datasets]'`."
        )
    from datasets import load_dataset

    where, config, split = _address(name)
    try:
        for number, row in enumerate(load_dataset(where, config or None, split=split, streaming=True), 1):
            yield _document(row, f"row {number} of the data set {name}")
    except GatelensError:
        raise
    except Exception as error:  # the hub and its readers raise errors of many kinds
        reason = " ".join(str(error).split())[:200]
        raise GatelensError(
            f"no file or folder {name}, and the hub does not give it as a data set ({reason}): check the name."
        ) from error


def _address(name: str) -> tuple[str, str, str]:
    """The name, the config ("" for the only one) and the split of a hub data set."""
    where, config, split = [*name.split(":"), "", ""][:3]
    return where, config, split or "train"


def _pieces(document: str) -> Iterator[str]:
    """A long document in pieces that end at a line's end: tokenisers are slow on very long strings."""
    start = 0
    while start < len(document):
        stop = document.find("\n", start + PIECE)
        stop = len(document) if stop < 0 else stop + 1
        yield document[start:stop]
        start = stop
