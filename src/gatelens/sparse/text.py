"""Text as tokens: from a file, a folder, a JSON-lines file or a hub data set to sequences of equal length."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor

from gatelens.errors import GatelensError
from gatelens.model.first_token import begin, first_tokens

TextSource = str | Path
"""A text file, a folder of text files, a JSON-lines file, or the name of a hub data set."""
JSON_LINES = (".jsonl", ".ndjson")  # one document per line
SUFFIXES = (".txt", ".md", ".rst", *JSON_LINES)
PIECE = 100_000  # characters that are tokenized at a time


@dataclass(frozen=True, eq=False)
class TokenText:
    """The tokens of a text, document by document.

    Every document begins with the first token of the model, if it has one, and ends with an end-of-text token.
    """

    tokens: list[int]
    starts: list[int]  # where each document begins


def sequences(
    tokenizer: Any, source: TextSource, length: int, n_sequences: int | None = None
) -> Int[Tensor, "sequence {length}"]:
    """The text of a source cut into sequences of equal length.

    If the model has a first token, every sequence begins with it. An incomplete sequence at the end is dropped.

    Arguments:
        n_sequences: the largest number of sequences; None reads the whole source.
    """
    tokens = read_tokens(tokenizer, source, length, None if n_sequences is None else n_sequences * length).tokens
    return torch.tensor(cut(tokens, length, first_tokens(tokenizer))[:n_sequences])


def read_tokens(tokenizer: Any, source: TextSource, least: int, enough: int | None = None) -> TokenText:
    """The tokens of a source.

    Arguments:
        least: raise an error if the source has fewer tokens.
        enough: stop reading after the document with this token, so that a data set is not streamed further.
    """
    first = first_tokens(tokenizer)
    end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    tokens: list[int] = []
    starts: list[int] = []
    for document in documents(source):
        ids: list[int] = []
        for piece in _pieces(document):
            ids += tokenizer(piece, add_special_tokens=False, verbose=False)["input_ids"]
        starts.append(len(tokens))
        tokens += begin(ids, first) + end
        if enough is not None and len(tokens) >= enough:
            break
    if not cut(tokens[: least + 1], least, first):
        raise GatelensError(
            f"the text {source} has {len(tokens)} tokens, less than one sequence of {least}: "
            "give more text or a smaller length."
        )
    return TokenText(tokens, starts)


def cut(tokens: list[int], length: int, first: list[int]) -> list[list[int]]:
    """Cut tokens into sequences of equal length. One that begins inside a document gets the first tokens too."""
    cut: list[list[int]] = []
    start = 0
    while True:
        begins = tokens[start : start + len(first)] == first
        end = start + length - (0 if begins else len(first))
        if end > len(tokens) or end <= start:
            return cut
        cut.append(begin(tokens[start:end], first))
        start = end


def documents(source: TextSource) -> Iterator[str]:
    """The documents of a source.

    A JSON-lines file and a data set have a document in the field `text` of each record. A data set is written as
    `name`, `name:config` or `name:config:split`; the split is `train` by default.
    """
    paths = files(source)
    if paths is None:
        yield from _hub_documents(str(source))
    else:
        for path in paths:
            yield from _file_documents(path)


def files(source: TextSource) -> list[Path] | None:
    """The files that a source is read from, or None for a hub data set, which is streamed."""
    path = Path(source)
    if path.is_dir():
        inside = sorted(file for file in path.rglob("*") if file.suffix in SUFFIXES and file.is_file())
        if not inside:
            raise GatelensError(f"the folder {path} holds no text: it has no file that ends in {', '.join(SUFFIXES)}.")
        return inside
    if path.exists():
        return [path]
    if path.suffix in SUFFIXES or path.is_absolute() or str(source).startswith((".", "~")):
        raise GatelensError(
            f"there is no text {source}: give a file, a folder, a JSON-lines file or a hub data set that exists."
        )
    return None


def keep_apart(trained: Iterable[TextSource], held_out: Iterable[TextSource]) -> None:
    """Raise an error if held-out text is trained on: the same file, by any path, or the same split of a data set."""
    seen = {part for source in trained for part in _parts(source)}
    for source in held_out:
        if shared := [part for part in _parts(source) if part in seen]:
            raise GatelensError(
                f"the held-out text {source} is also trained on ({shared[0]}): hold out text that is not in --text."
            )


def _parts(source: TextSource) -> list[str]:
    """The files of a source, or the address of a data set."""
    paths = files(source)
    return [":".join(_address(str(source)))] if paths is None else [str(path.resolve()) for path in paths]


def _file_documents(path: Path) -> Iterator[str]:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise GatelensError(f"cannot read the text {path} ({error}): give a readable file in UTF-8.") from error
    if path.suffix not in JSON_LINES:
        yield text
        return
    for number, line in enumerate(text.split("\n"), 1):  # not splitlines: JSON strings may hold other line separators
        if line.strip():
            try:
                record = json.loads(line)
            except ValueError as error:
                raise GatelensError(
                    f"line {number} of {path} is not JSON ({error}): every line should hold an object."
                ) from error
            yield _document(record, f"line {number} of {path}")


def _document(record: Any, place: str) -> str:
    text = record.get("text") if isinstance(record, dict) else None
    if not isinstance(text, str):
        raise GatelensError(f"{place} has no field 'text' with a string: gatelens reads documents from this field.")
    return text


def check_source(source: TextSource) -> None:
    """Raise an error if there is no such text. Nothing is read, and a data set is looked up on the hub."""
    if files(source) is None:
        _check_data_set(str(source))


def _hub_documents(name: str) -> Iterator[str]:
    _check_data_set(name)
    from datasets import load_dataset

    address, config, split = _address(name)
    try:
        for number, record in enumerate(load_dataset(address, config or None, split=split, streaming=True), 1):
            yield _document(record, f"record {number} of the data set {name}")
    except GatelensError:
        raise
    except Exception as error:  # the hub and the readers of its formats raise errors of many types
        raise _no_data_set(name, error) from error


def _check_data_set(name: str) -> None:
    """Raise an error if there is no such data set: at once, where streaming it would try for a minute."""
    if importlib.util.find_spec("datasets") is None:
        raise GatelensError(
            f"there is no file or folder {name}; to stream it as a hub data set, run "
            "`pip install 'gatelens[datasets]'`."
        )
    from huggingface_hub import HfApi

    address = _address(name)[0]
    if not Path(address).exists():  # a folder of this name is opened by the package datasets
        try:
            HfApi().dataset_info(address)
        except Exception as error:  # errors of the network have many types
            raise _no_data_set(name, error) from error


def _no_data_set(name: str, error: Exception) -> GatelensError:
    reason = " ".join(str(error).split())[:200]
    return GatelensError(
        f"there is no file or folder {name}, and no data set of this name could be read from the hub ({reason}): "
        "check the name and the network."
    )


def _address(name: str) -> tuple[str, str, str]:
    """The name, the config (empty if it is not given) and the split of a hub data set."""
    address, config, split = [*name.split(":"), "", ""][:3]
    return address, config, split or "train"


def _pieces(document: str) -> Iterator[str]:
    """A long document in pieces that end at the end of a line: tokenizers are slow on very long strings."""
    start = 0
    while start < len(document):
        stop = document.find("\n", start + PIECE)
        stop = len(document) if stop < 0 else stop + 1
        yield document[start:stop]
        start = stop
