"""Text as tokens: from a file, a folder, a JSON-lines file or a hub data set to sequences of equal length."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gatelens.errors import GatelensError

Source = str | Path
SUFFIXES = (".txt", ".md", ".rst", ".jsonl")
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
    path = Path(source)
    if path.is_dir():
        files = sorted(file for file in path.rglob("*") if file.suffix in SUFFIXES and file.is_file())
        if not files:
            raise GatelensError(f"the folder {path} holds no text: it has no file that ends in {', '.join(SUFFIXES)}.")
        for file in files:
            yield from _file(file)
    elif path.exists():
        yield from _file(path)
    elif path.suffix in SUFFIXES or path.is_absolute() or str(source).startswith((".", "~")):
        raise GatelensError(
            f"no text {source}: give a file, a folder, a JSON-lines file or a hub data set that exists."
        )
    else:
        yield from _hub(str(source))


def _file(path: Path) -> Iterator[str]:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise GatelensError(f"cannot read the text {path} ({error}): give a readable file in UTF-8.") from error
    if path.suffix != ".jsonl":
        yield text
        return
    for number, line in enumerate(text.splitlines(), 1):
        if line.strip():
            try:
                yield str(json.loads(line)["text"])
            except (ValueError, KeyError, TypeError) as error:
                raise GatelensError(
                    f"line {number} of {path} is no JSON object with a field 'text': give one in every line."
                ) from error


def _hub(name: str) -> Iterator[str]:
    if importlib.util.find_spec("datasets") is None:
        raise GatelensError(
            f"no file or folder {name}; to stream it as a hub data set, run `pip install 'gatelens[datasets]'`."
        )
    from datasets import load_dataset

    where, config, split = [*name.split(":"), "", ""][:3]
    try:
        for row in load_dataset(where, config or None, split=split or "train", streaming=True):
            yield str(row["text"])
    except KeyError as error:
        raise GatelensError(f"the data set {name} has no field {error}: gatelens reads the field 'text'.") from error
    except Exception as error:  # the hub and its readers raise errors of many kinds
        reason = " ".join(str(error).split())[:200]
        raise GatelensError(
            f"no file or folder {name}, and the hub does not give it as a data set ({reason}): check the name."
        ) from error


def _pieces(document: str) -> Iterator[str]:
    """A long document in pieces that end at a line's end: tokenisers are slow on very long strings."""
    start = 0
    while start < len(document):
        stop = document.find("\n", start + PIECE)
        stop = len(document) if stop < 0 else stop + 1
        yield document[start:stop]
        start = stop
