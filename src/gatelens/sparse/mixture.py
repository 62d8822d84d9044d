"""Mixtures of texts to train on: how often each text is read, and what is asked of the model on it.

A mixture file is TOML. Paths are relative to the file:

    [[text]]
    name = "novels"
    sources = ["austen.txt", "dickens"]   # text files, folders, JSON-lines files, hub data sets
    share = 0.7                           # of the sequences; the shares of all texts are divided by their sum
    kl = 0.5                              # share of the KL divergence in the loss; the rest is cross-entropy

    [[text]]
    name = "chats"
    sources = ["chats.jsonl"]
    share = 0.3
    kl = 1.0

A sequence of running text begins anywhere in it. A sequence of a JSON-lines file or of a data set begins with a
document, and the documents after it follow until the sequence is full.
"""

from __future__ import annotations

import hashlib
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Int
from pydantic import Field, ValidationError
from torch import Tensor

from gatelens.errors import GatelensError
from gatelens.model.first_token import begin, first_tokens
from gatelens.runtime.settings import Settings, explain
from gatelens.sparse.text import JSON_LINES, TextSource, check_source, cut, files, read_tokens


class Text(Settings):
    """One text of a mixture."""

    name: str = Field(description="Name of the text, for logs.")
    sources: tuple[str, ...] = Field(
        min_length=1, description="Text files, folders, JSON-lines files or hub data sets."
    )
    share: float | None = Field(
        None, gt=0, description="How often it is read, relative to other texts; by default its number of tokens."
    )
    kl: float | None = Field(
        None, ge=0, le=1, description="Share of the KL divergence in the loss on this text; by default that of the run."
    )


class MixtureFile(Settings):
    """The contents of a mixture file."""

    text: tuple[Text, ...] = Field(min_length=1, description="The texts.")


@dataclass(frozen=True, eq=False)
class TrainingText:
    """The tokens of one text of a mixture.

    Arguments:
        starts: where a sequence may begin; None is anywhere.
        first: the tokens that every sequence begins with, if the model has any.
        share: how often the text is read, relative to others.
        kl: share of the KL divergence in the loss, 0..1.
    """

    name: str
    tokens: Int[Tensor, " token"]
    starts: Int[Tensor, " document"] | None
    share: float
    kl: float
    first: tuple[int, ...] = ()

    def sequence(self, random: np.random.Generator, length: int) -> Int[Tensor, " {length}"]:
        """A sequence from a random place."""
        last = len(self.tokens) - length
        if self.starts is None:
            start = int(random.integers(last + 1))
        else:  # a sequence that begins with one of the last documents begins earlier, so that it is full
            start = min(int(self.starts[int(random.integers(len(self.starts)))]), last)
        tokens: list[int] = self.tokens[start : start + length].tolist()
        return torch.tensor(begin(tokens, list(self.first))[:length])

    def beginning(self, length: int, n_sequences: int) -> Int[Tensor, "sequence {length}"]:
        """The first sequences of the text, one after the other."""
        return torch.tensor(cut(self.tokens[: n_sequences * length].tolist(), length, list(self.first)))

    def fingerprint(self) -> str:
        """A hash of everything that training reads."""
        digest = hashlib.sha256(self.tokens.numpy().tobytes())
        digest.update(b"anywhere" if self.starts is None else self.starts.numpy().tobytes())
        digest.update(f"{self.share} {self.kl}".encode())
        return digest.hexdigest()


def texts_of(text: TextSource | Text | Sequence[TextSource | Text]) -> list[Text]:
    """The texts that are named: a mixture file stands for its texts, and any other source for itself."""
    named = [text] if isinstance(text, str | Path | Text) else list(text)
    texts: list[Text] = []
    for each in named:
        if isinstance(each, Text):
            texts.append(each)
        elif Path(each).suffix == ".toml":
            texts += read_mixture(Path(each))
        else:
            texts.append(Text(name=Path(each).stem or str(each), sources=(str(each),)))
    return texts


def check_texts(texts: Sequence[TextSource]) -> None:
    """Raise an error if a text, or a source of a mixture, does not exist. Nothing is read but mixture files."""
    for text in texts_of(texts):
        for source in text.sources:
            check_source(source)


def read_mixture(path: Path) -> list[Text]:
    """The texts of a mixture file. Paths of sources are relative to the file."""
    try:
        contents: dict[str, Any] = tomllib.loads(path.read_text(encoding="utf-8"))
        mixture = MixtureFile.model_validate({**contents, "text": tuple(contents.get("text", ()))})
    except (OSError, UnicodeDecodeError) as error:
        raise GatelensError(f"cannot read the mixture {path} ({error}): give a TOML file.") from error
    except tomllib.TOMLDecodeError as error:
        raise GatelensError(f"{path} is not valid TOML: {error}.") from error
    except ValidationError as error:
        raise GatelensError(explain(error, MixtureFile, f"{path}: ")) from error
    return [text.replace(sources=tuple(_relative(path, source) for source in text.sources)) for text in mixture.text]


def _relative(file: Path, source: str) -> str:
    """A source of a mixture file as the rest of gatelens opens it; the name of a data set stays as it is."""
    path = file.parent / source
    return str(path) if path.exists() else source


def read_training_texts(
    tokenizer: Any, texts: Sequence[Text], length: int, streamed: int, kl: float
) -> list[TrainingText]:
    """Read the tokens of all texts.

    Arguments:
        length: the longest sequence; every source must have at least so many tokens.
        streamed: how many sequences of this length are read of each data set. Files are read whole.
        kl: share of the KL divergence in the loss on texts that do not have their own.
    """
    return [
        training_text
        for text in texts
        for training_text in _read_text(tokenizer, text, length, streamed, text.kl if text.kl is not None else kl)
    ]


def _read_text(tokenizer: Any, text: Text, length: int, streamed: int, kl: float) -> list[TrainingText]:
    """One text for all sources that are running text, and one for all sources that are documents.

    Each is read as often as it has tokens, so that together they have the share of the text.
    """
    running: list[Tensor] = []
    documents: list[Tensor] = []
    starts: list[Tensor] = []
    for source in text.sources:
        paths = files(source)
        read = read_tokens(tokenizer, source, length, streamed * length if paths is None else None)
        if paths is None or all(path.suffix in JSON_LINES for path in paths):
            starts.append(torch.tensor(read.starts) + sum(map(len, documents)))
            documents.append(torch.tensor(read.tokens))
        else:
            running.append(torch.tensor(read.tokens))
    total, first = sum(map(len, (*running, *documents))), tuple(first_tokens(tokenizer))
    share = float(total) if text.share is None else text.share

    def part(tokens: list[Tensor], where: Tensor | None) -> TrainingText:
        joined = torch.cat(tokens).to(torch.int32)
        return TrainingText(text.name, joined, where, share * len(joined) / total, kl, first)

    parts = [part(running, None)] if running else []
    return parts + ([part(documents, torch.cat(starts))] if documents else [])
