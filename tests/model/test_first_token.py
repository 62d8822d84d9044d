"""The first token of texts: in tasks, in running text, from the files of a model, and the warning at load."""

from __future__ import annotations

import copy
import json
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from families import tiny, tokenizer
from tokenizers import processors

import gatelens
from gatelens import Model
from gatelens.errors import GatelensWarning
from gatelens.loading import _checks
from gatelens.loading._checks import check_model
from gatelens.model.first_token import adding_first_token, begin, first_tokens
from gatelens.runtime.journal import Journal
from gatelens.sparse.sparsify import _own_text
from gatelens.sparse.text import sequences
from gatelens.tasks.tokens import Pair, encode, tokenise

FIRST, END = 1, 2


def with_template(single: str) -> Any:
    """The tokenizer of the tiny models, which puts special tokens around a text as the template says."""
    made = copy.deepcopy(tokenizer())
    made.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single=single, special_tokens=[("<s>", FIRST), ("</s>", END)]
    )
    return made


@pytest.mark.parametrize(
    ("template", "expected"),
    [("$A", []), ("<s> $A", [FIRST]), ("$A </s>", []), ("<s> $A </s>", [FIRST]), ("</s> <s> $A", [END, FIRST])],
)
def test_what_a_tokenizer_adds_before_a_text(template: str, expected: list[int]) -> None:
    assert first_tokens(with_template(template)) == expected


@pytest.mark.parametrize("template", ["$A", "<s> $A", "<s> $A </s>"])
def test_a_prompt_has_the_first_token_once_and_no_token_at_its_end(template: str) -> None:
    made = with_template(template)
    first = [FIRST] if "<s>" in template else []
    assert encode(made, ["t3 t4", "<s> t5", ""]) == [[*first, 3, 4], [1, 5], first]
    (pair,), problems = tokenise(made, [Pair("t3 t4", "t5 t4", (" t6",), (" t7",))])
    assert pair is not None
    assert not problems
    assert (pair.clean, pair.corrupt, pair.answers, pair.wrong) == ([*first, 3, 4], [*first, 5, 4], [6], [7])


def test_every_sequence_and_every_document_begins_with_the_first_token(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text("\n".join(json.dumps({"text": text}) for text in ("t3 t4 t5 t6", "t7", "t8 t9 t10", "t11")))
    # The stream is 1 3 4 5 6 2 1 7 2 1 8 9 10 2 1 11 2, and a sequence that is cut inside a document gets another 1.
    expected = [[1, 3, 4, 5], [1, 6, 2, 1], [1, 7, 2, 1], [1, 8, 9, 10], [1, 2, 1, 11]]
    assert sequences(with_template("<s> $A"), path, 4).tolist() == expected
    assert sequences(with_template("<s> $A </s>"), path, 4, n_sequences=2).tolist() == expected[:2]
    assert sequences(with_template("$A"), path, 4).tolist() == [[3, 4, 5, 6], [2, 7, 2, 8], [9, 10, 2, 11]]


def test_a_document_that_has_the_token_gets_no_second_one(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("<s> t3 t4 t5")
    assert sequences(with_template("<s> $A"), path, 5).tolist() == [[1, 3, 4, 5, 2]]
    assert begin([3], []) == [3]


@pytest.mark.parametrize("template", ["$A", "<s> $A", "</s> <s> $A"])
def test_text_that_the_model_writes_begins_with_the_first_token_once(
    template: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In all three kinds of pieces: from a token of the vocabulary, from tokens of the text, and from a chat."""
    model = replace(tiny("llama"), tokenizer=with_template(template))
    first = first_tokens(model.tokenizer)
    text = torch.tensor([*first, 3, 4, *first, 5, 6])
    monkeypatch.setattr(_own_text, "_chat_opening", lambda tokenizer: [7, 8])
    written = _own_text.write_text(model, text, 3 * _own_text.PIECE, len(first) + 4, 0, Journal())
    begins, follows = written[:, : len(first)], written[:, len(first) :]
    assert begins.tolist() == [first] * len(written)
    one, from_text, chat = follows.split(_own_text.PIECE)
    assert not {*one[:, 0].tolist()} & {0, FIRST, END}
    assert {*from_text[:, 0].tolist()} <= {3, 4, 5, 6}
    assert chat[:, :2].tolist() == [[7, 8]] * _own_text.PIECE


@pytest.mark.parametrize(("asked", "adds"), [(None, []), (False, []), (True, [FIRST])])
def test_the_config_of_a_tokenizer_is_followed(asked: bool | None, adds: list[int], tmp_path: Path) -> None:
    """Also if there is a tokenizer.json, for which transformers ignores the setting."""
    tiny("llama").hf.save_pretrained(tmp_path)
    tokenizer().save_pretrained(tmp_path)
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    if asked is not None:
        (tmp_path / "tokenizer_config.json").write_text(json.dumps({**config, "add_bos_token": asked}))
    loaded = gatelens.load(tmp_path, check=False)
    assert first_tokens(loaded.tokenizer) == adds
    loaded.tokenizer.save_pretrained(tmp_path / "again")  # what sparsify and convert do
    gatelens.load(tmp_path, check=False).hf.save_pretrained(tmp_path / "again")
    assert first_tokens(gatelens.load(tmp_path / "again", check=False).tokenizer) == adds


def test_what_the_tokenizer_adds_by_itself_comes_first() -> None:
    assert first_tokens(adding_first_token(with_template("</s> $A"), True)) == [END]
    assert first_tokens(adding_first_token(with_template("<s> $A"), False)) == [FIRST]
    nameless = copy.deepcopy(tokenizer())
    nameless.bos_token = None
    assert first_tokens(adding_first_token(nameless, True)) == []


class Knows(torch.nn.Module):
    """Predicts the next token with a loss near 0 if the text begins as it should, and otherwise the present token."""

    def __init__(self, needs_first: bool) -> None:
        super().__init__()
        self.config = type("Config", (), {"vocab_size": 100})()
        self.needs_first = needs_first
        self.embedding = torch.nn.Embedding(100, 1)

    def get_input_embeddings(self) -> torch.nn.Embedding:
        return self.embedding

    def forward(self, input_ids: torch.Tensor, use_cache: bool) -> Any:
        logits = torch.zeros(1, input_ids.shape[1], 100)
        begins = int(input_ids[0, 0]) == FIRST
        shift = 1 if begins == self.needs_first else 0
        for place in range(input_ids.shape[1] - 1):
            logits[0, place, input_ids[0, place + shift]] = 9.0
        return type("Output", (), {"logits": logits})()


@pytest.mark.parametrize("needs_first", [True, False])
@pytest.mark.parametrize("adds_first", [True, False])
def test_the_check_warns_if_the_choice_is_much_the_worse(
    needs_first: bool, adds_first: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_checks, "_SENTENCE", " ".join(f"t{index}" for index in range(3, 15)))
    made = with_template("<s> $A" if adds_first else "$A")
    model = Model("mine", Knows(needs_first), made, tiny("llama").anatomy)
    monkeypatch.setattr(Model, "device", torch.device("cpu"))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        _checks._compare_first_tokens(model)
    texts = [str(warning.message) for warning in caught if warning.category is GatelensWarning]
    if needs_first == adds_first:
        assert texts == []
    else:
        adds, better = ("does not add", "with") if needs_first else ("adds", "without")
        assert texts[0].startswith(
            f"the tokenizer of mine {adds} '<s>' at the beginning of a text, but {better} it the model predicts a "
            "sentence much better (loss 0.0 instead of 9.0 nats per token)"
        )


def test_models_without_language_do_not_warn(family: Model, recwarn: pytest.WarningsRecorder) -> None:
    check_model(family)
    assert [warning for warning in recwarn if warning.category is GatelensWarning] == []


def test_smollm2_has_no_first_token(smollm2: Model, recwarn: pytest.WarningsRecorder) -> None:
    assert first_tokens(smollm2.tokenizer) == []
    check_model(smollm2)
    assert [warning for warning in recwarn if warning.category is GatelensWarning] == []
