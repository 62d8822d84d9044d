"""The text that is trained on: mixed sequences, and text that the dense model writes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from families import VOCAB, tiny
from torch import Tensor

from gatelens.runtime.journal import Journal
from gatelens.sparse.sparsify import _own_text
from gatelens.sparse.sparsify._sequences import TrainingSequences


def test_sequences_are_a_mixture_in_a_random_order() -> None:
    text, own = torch.arange(10)[:, None], 100 + torch.arange(4)[:, None]
    mixture = TrainingSequences(text, own, own_share=0.4, seed=3)
    read = mixture.batch(range(50))[:, 0].tolist()
    for start in range(0, 50, 5):
        assert sum(x >= 100 for x in read[start : start + 5]) == 2
    texts = [x for x in read if x < 100]
    assert [sorted(texts[i : i + 10]) for i in range(0, 30, 10)] == [list(range(10))] * 3
    assert texts[:10] != texts[10:20]
    owns = [x for x in read if x >= 100]
    assert sorted(owns[:4]) == [100, 101, 102, 103]
    assert mixture.batch(range(20, 30))[:, 0].tolist() == read[20:30]
    assert TrainingSequences(text, own, own_share=0.4, seed=4).batch(range(50))[:, 0].tolist() != read
    assert TrainingSequences(text, own[:0], own_share=0.4, seed=3).batch(range(10))[:, 0].max() < 100


def test_no_piece_of_own_text_is_written_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    # All chats begin alike: what follows must not.
    model, text = tiny("llama"), torch.arange(64).view(8, 8) % VOCAB
    monkeypatch.setattr(_own_text, "_chat_opening", lambda tokenizer: [1, 2, 3])
    monkeypatch.setattr(_own_text, "PIECE", 4)
    widths = set()
    openings = _own_text._openings

    def watch(*args: Any) -> Tensor:
        opening = openings(*args)
        if args[3] % 3 == 1:
            widths.add(opening.shape[1])
        return opening

    monkeypatch.setattr(_own_text, "_openings", watch)
    written = _own_text.write_text(model, text, count=96, length=16, seed=0, journal=Journal())
    assert len({tuple(row) for row in written.tolist()}) == 96
    assert widths == set(range(1, 9))
