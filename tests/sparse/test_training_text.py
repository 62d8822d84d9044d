"""The text that is trained on: mixed sequences, and text that the dense model writes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from families import VOCAB, tiny, tokenizer
from tokenizers.processors import TemplateProcessing
from torch import Tensor

from gatelens.errors import GatelensError
from gatelens.runtime.journal import Journal
from gatelens.sparse.mixture import TrainingText, read_training_texts, texts_of
from gatelens.sparse.sparsify import _own_text
from gatelens.sparse.sparsify._sequences import TrainingSequences


def test_texts_are_read_by_their_shares() -> None:
    texts = [
        TrainingText("low", torch.arange(50), None, share=1.0, kl=0.2),
        TrainingText("high", 100 + torch.arange(50), None, share=3.0, kl=0.9),
    ]
    numbers = [(number, 0) for number in range(400)]
    batch = TrainingSequences(texts, seed=3).batch(numbers, 5)
    assert torch.equal(batch.tokens - batch.tokens[:, :1], torch.arange(5).expand(400, 5))  # running text
    assert torch.equal(batch.text == 1, batch.tokens[:, 0] >= 100)
    assert batch.kl.tolist() == pytest.approx([(0.2, 0.9)[text] for text in batch.text.tolist()])
    assert 0.68 < (batch.text == 1).float().mean() < 0.82  # 0.75 with a standard deviation of 0.022
    assert len(set(batch.tokens[:, 0].tolist())) > 80  # of 92 places
    again = TrainingSequences(texts, seed=3).batch(numbers[7:9], 5)
    assert torch.equal(again.tokens, batch.tokens[7:9])
    assert not torch.equal(TrainingSequences(texts, seed=4).batch(numbers, 5).tokens, batch.tokens)


def test_sequences_of_documents_begin_with_one() -> None:
    starts = torch.tensor([0, 7, 12, 29])
    text = TrainingText("documents", torch.arange(30), starts, share=1.0, kl=1.0)
    firsts = set(TrainingSequences([text], 0).batch([(n, 0) for n in range(60)], 6).tokens[:, 0].tolist())
    assert firsts == {0, 7, 12, 24}  # the last document is too short: the sequence begins earlier


def test_a_first_token_begins_every_sequence() -> None:
    text = TrainingText("words", torch.arange(10, 40), None, share=1.0, kl=1.0, first=(1,))
    tokens = TrainingSequences([text], 0).batch([(n, 0) for n in range(20)], 6).tokens
    assert tokens.shape == (20, 6)
    assert (tokens[:, 0] == 1).all()
    assert torch.equal(tokens[:, 2:] - tokens[:, 1:2], torch.arange(1, 5).expand(20, 4))


def test_a_mixture_file(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("t3 t4 t5 t6 t7 t8")
    (tmp_path / "b.jsonl").write_text('{"text": "t9 t10 t11"}\n{"text": "t12 t13"}\n')
    file = tmp_path / "mixture.toml"
    file.write_text(
        '[[text]]\nname = "words"\nsources = ["a.txt"]\nshare = 3\nkl = 0.25\n'
        '[[text]]\nname = "documents"\nsources = ["b.jsonl"]\n'
    )
    words, documents = read_training_texts(tokenizer(), texts_of(file), 4, 1, kl=0.5)
    assert (words.name, words.starts, words.share, words.kl) == ("words", None, 3.0, 0.25)
    assert words.tokens.tolist() == [3, 4, 5, 6, 7, 8, 2]
    assert documents.starts is not None
    assert (documents.starts.tolist(), documents.share, documents.kl) == ([0, 4], 7.0, 0.5)
    assert documents.tokens.tolist() == [9, 10, 11, 2, 12, 13, 2]
    changed = TrainingText("words", words.tokens, None, 3.0, 0.3)
    assert words.fingerprint() != changed.fingerprint()


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("[[text]\n", "is not valid TOML"),
        ("", "text is .*: it must have at least 1"),
        ('[[text]]\nname = "a"\n', r"text\.0\.sources is missing"),
        ('[[text]]\nname = "a"\nsources = ["x"]\nkl = 2\n', r"text\.0\.kl is 2.*at most 1"),
        ('[[text]]\nname = "a"\nsources = ["x"]\nweight = 2\n', r"no setting 'weight'.*share"),
    ],
)
def test_a_mixture_that_is_wrong(tmp_path: Path, content: str, says: str) -> None:
    file = tmp_path / "mixture.toml"
    file.write_text(content)
    with pytest.raises(GatelensError, match=says):
        texts_of(file)


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


def test_a_chat_begins_with_the_tokens_of_its_template_only() -> None:
    """The template writes the first token itself: the tokenizer must not add another one."""
    chat = tokenizer()
    chat.backend_tokenizer.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    assert chat("t5")["input_ids"] == [1, 5]
    assert _own_text._chat_opening(chat) == []
    chat.chat_template = "{{ bos_token }} t3 {{ messages[0]['content'] }} t4"
    assert _own_text._chat_opening(chat) == [1, 3]
