"""A llama2.c checkpoint that is made here: random weights, and a tokenizer whose merges come from a few sentences."""

from __future__ import annotations

import itertools
import struct
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np

SIZES = {"dim": 16, "hidden": 24, "layers": 2, "heads": 4, "kv_heads": 2}
MERGES, LENGTH = 60, 64


def write_llama2c(folder: Path, sentences: Sequence[str]) -> None:
    """Write ``model.bin`` and ``tok.bin``."""
    pieces = _pieces(sentences)
    dim, hidden, layers, heads, kv_heads = SIZES.values()
    size = dim // heads
    # In the order of run.c. The last part, the rotations, is not read.
    shapes = [
        (len(pieces), dim), (layers, dim), (layers, dim, dim), (layers, kv_heads * size, dim),
        (layers, kv_heads * size, dim), (layers, dim, dim), (layers, dim), (layers, hidden, dim), (layers, dim, hidden),
        (layers, hidden, dim), (dim,), (LENGTH, size),
    ]  # fmt: skip
    numbers = np.random.default_rng(0).normal(scale=0.5, size=sum(int(np.prod(shape)) for shape in shapes))
    header = struct.pack("<7i", dim, hidden, layers, heads, kv_heads, len(pieces), LENGTH)
    (folder / "model.bin").write_bytes(header + numbers.astype("<f4").tobytes())
    listed = b"".join(struct.pack("<fi", score, len(piece)) + piece for piece, score in pieces)
    (folder / "tok.bin").write_bytes(struct.pack("<i", max(len(piece) for piece, _ in pieces)) + listed)


def _pieces(sentences: Sequence[str]) -> list[tuple[bytes, float]]:
    """Three special tokens, all bytes, the characters of the sentences and the most common merges, with scores."""
    texts = [list(f" {sentence}") for sentence in sentences]
    merged: list[str] = []
    for _ in range(MERGES):
        pairs = Counter(pair for text in texts for pair in itertools.pairwise(text))
        (left, right), _ = max(pairs.items(), key=lambda item: (item[1], item[0]))
        merged.append(left + right)
        for text in texts:
            for at in range(len(text) - 2, -1, -1):
                if text[at : at + 2] == [left, right]:
                    text[at : at + 2] = [left + right]
    characters = sorted({character for sentence in sentences for character in f" {sentence}" if character.isascii()})
    special = ["<unk>", "\n<s>\n", "\n</s>\n", *(f"<0x{byte:02X}>" for byte in range(256))]
    plain = [(piece, 0.0) for piece in special] + [(character, -1e6) for character in characters]
    unique = [piece for piece in dict.fromkeys(merged) if piece.isascii()]
    return [(piece.encode(), score) for piece, score in plain + [(p, -float(i)) for i, p in enumerate(unique)]]
