"""Public data sets in their published formats, from files and from a stand-in for the hub."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from gatelens.errors import GatelensError
from gatelens.tasks import _readers as readers
from gatelens.tasks import task
from gatelens.tasks.base import ResponseTask

from .conftest import SHARED, like_model

DATA = SHARED / "data"
real_data = pytest.mark.skipif(not DATA.is_dir(), reason="the public data sets are not on this machine")


def read(name: str, tokenizer: Any, source: Path | str, **options: Any) -> ResponseTask:
    made = task(name, like_model(tokenizer), source=str(source), **options)
    assert isinstance(made, ResponseTask)
    return made


@real_data
@pytest.mark.parametrize("path", sorted((DATA / "blimp").glob("*.jsonl")), ids=lambda path: path.stem)
def test_blimp(path: Path, gpt2: Any) -> None:
    good = {record["sentence_good"] for record in readers.records(str(path))}
    made = read("syntax", gpt2, path, n=300)
    assert all(example.prompt + example.response in good for example in made.examples)


@real_data
def test_blimp_splits_where_the_sentences_differ() -> None:
    for record in readers.records(str(DATA / "blimp" / "anaphor_gender_agreement.jsonl"))[:200]:
        prompt, response = readers.blimp(record) or ("", "")
        assert prompt == record["one_prefix_prefix"]
        assert response.strip(" .") == record["one_prefix_word_good"]


@real_data
def test_commonsense_qa(gpt2: Any) -> None:
    made = read("common-sense", gpt2, DATA / "commonsense" / "csqa-valid.jsonl", n=1000)
    answers = {}
    for record in readers.records(str(DATA / "commonsense" / "csqa-valid.jsonl")):
        texts = {choice["label"]: choice["text"] for choice in record["question"]["choices"]}
        answers[f"{record['question']['stem']} {sorted(texts.values())}"] = texts[record["answerKey"]]
    for example in made.examples:
        lines = example.prompt.split("\n")
        texts = {line[0]: line[3:] for line in lines[-6:-1]}
        stem = "\n".join(lines[1:-6]).removeprefix("Question: ")
        assert texts[example.response.strip()] == answers[f"{stem} {sorted(texts.values())}"]


@real_data
def test_gsm8k(gpt2: Any) -> None:
    made = read("math", gpt2, DATA / "math" / "gsm8k-test.jsonl", n=1319)
    answers = {
        record["question"]: record["answer"].split("####")[1].strip()
        for record in readers.records(str(DATA / "math" / "gsm8k-test.jsonl"))
    }
    for example in made.examples:
        question = example.prompt.removeprefix("Question: ").removesuffix("\nAnswer:")
        assert example.response.endswith(f" The answer is {answers[question]}.")
        assert "<<" not in example.response
        assert "####" not in example.response


@real_data
def test_svamp(gpt2: Any) -> None:
    made = read("math", gpt2, DATA / "math" / "svamp.json", n=1000)
    contradictions = 0
    for example in made.examples:
        equation, answer = re.fullmatch(r" (.*) = (\S+)\. The answer is \2\.", example.response).groups()  # type: ignore[union-attr]
        assert re.fullmatch(r"[-+*/() .\d]+", equation)
        contradictions += eval(equation) != pytest.approx(float(answer), abs=1e-4)
    assert contradictions == 1  # chal-680, which is published like this


@real_data
@pytest.mark.parametrize("path", sorted((DATA / "function_vectors").glob("*.json")), ids=lambda path: path.stem)
def test_function_vector_pairs(path: Path, gpt2: Any) -> None:
    pairs = {(record["input"], record["output"]) for record in readers.records(str(path))}
    for ask in ("instruction", "examples"):
        made = read("word-pairs", gpt2, path, n=50, ask=ask)
        for example in made.examples:
            query = example.prompt.split("\n")[-1].removesuffix(" ->")
            assert (query, example.response[1:]) in pairs


def test_a_relation_without_a_known_instruction_needs_one(tmp_path: Path, gpt2: Any) -> None:
    path = tmp_path / "animal-sound.json"
    path.write_text(json.dumps([{"input": f"animal{i}", "output": f"sound{i}"} for i in range(9)]))
    with pytest.raises(GatelensError, match="no instruction is known for animal-sound"):
        read("word-pairs", gpt2, path, n=3)
    made = read("word-pairs", gpt2, path, n=3, instruction="Say its sound.")
    assert made.examples[0].prompt.startswith("Say its sound.\nanimal")
    assert len(read("word-pairs", gpt2, path, n=3, ask="examples")) == 3


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("math", '{"question": "1 + 1?"}', "does not have the format of GSM8K or SVAMP"),
        ("math", '{"question": "1 + 1?", "answer": "2"}', "does not have the format of GSM8K or SVAMP"),
        ("common-sense", '{"question": "?", "answerKey": "A"}', "does not have the format of CommonsenseQA"),
        ("syntax", "[1, 2]", "does not have the format of BLiMP"),
        ("syntax", "sentence_good", "does not have the format of BLiMP"),
        ("word-pairs", '[{"word": "hot"}]', "does not have the format of function-vector pairs"),
        ("math", "", "0 usable items and 1 were asked for"),
    ],
)
def test_a_file_in_another_format_is_an_error(name: str, text: str, message: str, tmp_path: Path, gpt2: Any) -> None:
    path = tmp_path / "set.jsonl"
    path.write_text(text)
    with pytest.raises(GatelensError, match=message):
        read(name, gpt2, path, n=1)


@pytest.mark.parametrize("source", ["nowhere.jsonl", "no/such/file.json", "gsm8k", "a/b:c:d:e", "a b/c"])
def test_a_source_that_is_neither_file_nor_hub_id(source: str, gpt2: Any) -> None:
    with pytest.raises(GatelensError, match=f"no file {source}"):
        read("math", gpt2, source, n=1)


def stand_in(monkeypatch: pytest.MonkeyPatch, result: Any) -> list[Any]:
    """Install a `datasets` whose load_dataset returns or raises `result`. Return the list of its calls' arguments."""
    asked: list[Any] = []

    def load_dataset(*arguments: Any) -> Any:
        asked.append(arguments)
        if isinstance(result, Exception):
            raise result
        return result

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load_dataset))
    return asked


def test_the_hub_gives_a_split_and_the_hubs_own_format(monkeypatch: pytest.MonkeyPatch, gpt2: Any) -> None:
    record = {"question": "Why?", "choices": {"label": list("ABCDE"), "text": list("vwxyz")}, "answerKey": "C"}
    asked = stand_in(monkeypatch, {"train": [], "validation": [record], "test": [{**record, "answerKey": ""}]})
    made = read("common-sense", gpt2, "tau/commonsense_qa", n=1)
    assert made.examples[0].prompt == "Choose the right answer.\nQuestion: Why?\nA. v\nB. w\nC. x\nD. y\nE. z\nAnswer:"
    assert made.examples[0].response == " C"
    with pytest.raises(GatelensError, match="0 usable items"):
        read("common-sense", gpt2, "tau/commonsense_qa:default:test", n=1)
    with pytest.raises(GatelensError, match="no split 'dev' in tau/commonsense_qa: its splits are train, val"):
        read("common-sense", gpt2, "tau/commonsense_qa:default:dev", n=1)
    assert asked == [("tau/commonsense_qa", None), *[("tau/commonsense_qa", "default")] * 2]


def test_a_hub_that_does_not_answer_is_an_error(monkeypatch: pytest.MonkeyPatch, gpt2: Any) -> None:
    stand_in(monkeypatch, ConnectionError("no route"))
    with pytest.raises(GatelensError, match=r"openai/gsm8k could not be read from the hub .*no route.*check the id"):
        read("math", gpt2, "openai/gsm8k:main", n=1)


def test_without_the_package_the_error_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch, gpt2: Any) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(GatelensError, match=r"pip install 'gatelens\[datasets\]'"):
        read("math", gpt2, "openai/gsm8k:main", n=1)
