"""A user's own task, from a file of JSON lines."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest

from gatelens.errors import GatelensError
from gatelens.tasks import from_spec, task
from gatelens.tasks.base import CircuitTask, ResponseTask

from .conftest import like_model

GOOD = {"clean": "The cat sat on the", "corrupt": "The dog sat on the", "answer": " mat", "wrong": [" sky", " sea"]}


def write(path: Path, *lines: Any) -> str:
    path.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines), encoding="utf-8")
    return str(path)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "my.jsonl"


def test_a_circuit_task(file: Path, gpt2: Any) -> None:
    longer = {**GOOD, "clean": "So the cat sat on the", "corrupt": "So the dog sat on the", "answer": [" mat", " rug"]}
    made = task(write(file, GOOD, "", longer), like_model(gpt2))
    assert isinstance(made, CircuitTask)
    assert [pair.clean for pair in made.pairs] == [GOOD["clean"], longer["clean"]]
    assert [bucket.clean.shape for bucket in made.buckets] == [(1, 5), (1, 6)]
    mat, rug, sky, sea = (gpt2(text).input_ids[0] for text in (" mat", " rug", " sky", " sea"))
    assert made.answer_ids.tolist() == [[mat, -1], [mat, rug]]
    assert made.wrong_ids.tolist() == [[sky, sea]] * 2
    assert from_spec(made.spec(), like_model(gpt2)).fingerprint() == made.fingerprint()
    assert len(task(file, like_model(gpt2), n=1)) == 1
    assert len(task(file, like_model(gpt2), n=64)) == 2


def test_a_response_task(file: Path, gpt2: Any) -> None:
    made = task(write(file, {"prompt": "2 + 2 =", "response": " 4"}), like_model(gpt2))
    assert isinstance(made, ResponseTask)
    assert made.examples[0].response_ids == tuple(gpt2(" 4").input_ids)
    assert from_spec(made.spec(), like_model(gpt2)).fingerprint() == made.fingerprint()


BAD = [
    ("{'clean'}", "not JSON"),
    ("[1]", "not a JSON object"),
    (
        {k: v for k, v in GOOD.items() if k != "corrupt"},
        "no key 'corrupt': a line has the keys clean, corrupt",
    ),
    ({k: v for k, v in GOOD.items() if k != "wrong"}, "no key 'wrong'"),
    ({**GOOD, "clean": 3}, "'clean' must be a string"),
    ({**GOOD, "clean": ""}, "'clean' must be a string that is not empty"),
    ({**GOOD, "answer": []}, "'answer' must be a string or a list"),
    ({**GOOD, "wrong": [" sky", 5]}, "'wrong' must be a string or a list"),
    ({**GOOD, "corrupt": "The rhinoceros sat on the"}, "same number of tokens"),
    ({**GOOD, "corrupt": GOOD["clean"]}, "are the same"),
    ({**GOOD, "answer": " mattress topper"}, "tokens, but an answer must be one token"),
    ({**GOOD, "answer": " sky"}, "the same token as a wrong answer"),
    ({**GOOD, "clean": "The cat inter", "corrupt": "The dog inter", "answer": "national"}, "changes the prompt's own"),
    ({**GOOD, "roles": ["cat"]}, "'roles' must be an object"),
    ({**GOOD, "roles": {"animal": "horse"}}, "the role 'animal' is occurrence 1 of 'horse', which"),
    ({**GOOD, "roles": {"animal": ["cat", 2]}}, "occurrence 2 of 'cat'"),
    ({**GOOD, "roles": {"animal": ["cat", 0]}}, "the role 'animal' must be a text of the clean prompt"),
    ({**GOOD, "roles": {"animal": ""}}, "the role 'animal' must be a text of the clean prompt"),
]


@pytest.mark.parametrize(("line", "message"), BAD, ids=[message for _, message in BAD])
def test_a_bad_line_is_reported_with_its_number(line: Any, message: str, file: Path, gpt2: Any) -> None:
    with pytest.raises(GatelensError, match=rf"1 of 3 lines is bad, so nothing was run(.|\n)*line 3: .*{message}"):
        task(write(file, GOOD, "", line, GOOD), like_model(gpt2))


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ({"prompt": "a"}, "no key 'response'"),
        ({"prompt": "a", "response": ""}, "not empty"),
        ({"prompt": "inter", "response": "national"}, "changes the tokens of the prompt"),
    ],
)
def test_a_bad_response_line(line: Any, message: str, file: Path, gpt2: Any) -> None:
    with pytest.raises(GatelensError, match=rf"line 2: .*{message}"):
        task(write(file, {"prompt": "a", "response": " b"}, line), like_model(gpt2))


def test_skip_bad_leaves_out_bad_lines(file: Path, gpt2: Any, caplog: pytest.LogCaptureFixture) -> None:
    write(file, "nonsense", GOOD, {**GOOD, "corrupt": GOOD["clean"]}, {**GOOD, "answer": " rug"})
    with caplog.at_level(logging.WARNING):
        made = task(file, like_model(gpt2), skip_bad=True)
    assert [pair.answers for pair in made.pairs] == [(" mat",), (" rug",)]  # type: ignore[union-attr]
    assert f"{file}: 2 of 4 lines are bad and left out." in caplog.text
    assert from_spec(made.spec(), like_model(gpt2)).fingerprint() == made.fingerprint()


@pytest.mark.parametrize(
    ("short", "long", "tokens"),
    [
        ({"prompt": "The cat sat on", "response": " the"}, {"prompt": "The cat sat on", "response": " the mat"}, 6),
        (GOOD, {**GOOD, "clean": "So the cat sat on the", "corrupt": "So the dog sat on the"}, 6),
    ],
)
def test_a_line_longer_than_the_context_is_bad(short: Any, long: Any, tokens: int, file: Path, gpt2: Any) -> None:
    model = like_model(gpt2)
    model.context = tokens - 1
    write(file, short, long, short)
    with pytest.raises(GatelensError, match=f"line 2: it has {tokens} tokens, and the model can read {tokens - 1}"):
        task(file, model)
    assert len(task(file, model, skip_bad=True)) == 2
    model.context = tokens
    assert len(task(file, model)) == 3


def test_skip_bad_raises_if_all_lines_are_bad(file: Path, gpt2: Any) -> None:
    with pytest.raises(GatelensError, match=r"12 of 12 lines are bad(.|\n)*and 2 more"):
        task(write(file, *["x"] * 12), like_model(gpt2), skip_bad=True)


def test_a_file_that_cannot_be_read(file: Path, gpt2: Any) -> None:
    with pytest.raises(GatelensError, match="cannot be read"):
        task(file, like_model(gpt2))
    file.write_bytes(b"\xff\xfe\xfa")
    with pytest.raises(GatelensError, match="cannot be read"):
        task(file, like_model(gpt2))
    with pytest.raises(GatelensError, match="has no lines"):
        task(write(file, ""), like_model(gpt2))
