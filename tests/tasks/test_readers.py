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
from gatelens.tasks import from_spec, task
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
    for record in list(readers.records(str(DATA / "blimp" / "anaphor_gender_agreement.jsonl")))[:200]:
        item = readers.sentences(record)
        assert item is not None
        prompt, response, *_ = item
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
        assert lines[0] == "Choose the right answer."
        assert lines[7].startswith("Answer: ")  # one worked example
        stem = "\n".join(lines[8:-6]).removeprefix("Question: ")
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


TASK_JSON = {
    "name": "verbs",
    "description": "Give the past\n tense.",
    "examples": [
        {"input": "walk", "target": "walked"},
        {"input": " see ", "target": ["saw", "seen"]},
        {"input": "The key", "target_scores": {"are": 0, "is": 1}},
        *({"input": f"a longer verb {i}", "target": f"done {i}"} for i in range(12)),
    ],
}


def test_big_bench_has_an_instruction_and_one_worked_example(tmp_path: Path, gpt2: Any) -> None:
    path = tmp_path / "task.json"
    path.write_text(json.dumps(TASK_JSON, indent=2))
    made = read("syntax", gpt2, path, n=5)
    for example in made.examples:
        instruction, worked, worked_answer, query, blank = example.prompt.split("\n")
        assert (instruction, blank) == ("Give the past tense.", "A:")
        assert query.startswith("Q: a longer verb ")  # the ten shortest are shown, and are not asked
        assert example.response == f" done {query.split()[-1]}"
        assert worked != query
        assert worked_answer.startswith("A: ")
    with pytest.raises(GatelensError, match="5 usable items besides 10 that are shown as examples and 6 were asked"):
        read("syntax", gpt2, path, n=6)
    by_query = {example.prompt: example.response for example in read("syntax", gpt2, path, n=15, shots=0).examples}
    assert by_query["Give the past tense.\nQ: see\nA:"] == " saw"
    assert by_query["Give the past tense.\nQ: The key\nA:"] == " is"
    path.write_text(json.dumps({**TASK_JSON, "task_prefix": "Past tense:"}))
    assert read("syntax", gpt2, path, n=1).examples[0].prompt.startswith("Past tense:\nQ: ")


def test_big_bench_as_on_the_hub(monkeypatch: pytest.MonkeyPatch, gpt2: Any) -> None:
    record = {"inputs": "The keys", "targets": ["are"], "multiple_choice_targets": [], "multiple_choice_scores": []}
    scored = {"inputs": "The key", "targets": [], "multiple_choice_targets": ["are", "is"]}
    stand_in(monkeypatch, {"validation": [record, {**scored, "multiple_choice_scores": [0, 1]}]})
    made = read("syntax", gpt2, "tasksource/bigbench:agreement", n=2, shots=0)
    assert {(x.prompt, x.response) for x in made.examples} == {("Q: The keys\nA:", " are"), ("Q: The key\nA:", " is")}


OPEN_MATH = [
    {"problem": "What is 1 + 1?", "generated_solution": r"It is $\boxed{2}$.", "expected_answer": "2"},
    {"problem": "What is 1 + 1?", "generated_solution": "Two.", "expected_answer": "2"},
    {"problem": "A much longer problem?", "generated_solution": "A long solution. " * 9, "expected_answer": "7"},
    {"problem": "No answer?", "generated_solution": "None.", "expected_answer": ""},
    {"problem": "What is 2 + 3?", "generated_solution": "Five.", "expected_answer": "5"},
]


@pytest.mark.parametrize("form", ["jsonl", "parquet", "folder"])
def test_open_math_instruct(form: str, tmp_path: Path, gpt2: Any) -> None:
    source = tmp_path / f"train.{form}"
    if form == "jsonl":
        source.write_text("\n".join(json.dumps(record) for record in OPEN_MATH))
    else:
        parquet = pytest.importorskip("pyarrow.parquet")
        table = pytest.importorskip("pyarrow").Table.from_pylist
        if form == "folder":
            source.mkdir()
            parquet.write_table(table(OPEN_MATH[:2]), source / "train-0.parquet")
            parquet.write_table(table(OPEN_MATH[2:]), source / "train-1.parquet")
        else:
            parquet.write_table(table(OPEN_MATH), source)
    made = read("math", gpt2, source, n=2, shortest=2)
    assert {example.response for example in made.examples} == {r" It is $\boxed{2}$.", " Five."}  # the first of each
    assert all(example.prompt.startswith("Solve each problem step by step.") for example in made.examples)
    assert all(example.prompt.endswith("?\nAnswer:") for example in made.examples)
    assert from_spec(made.spec(), like_model(gpt2)).fingerprint() == made.fingerprint()
    with pytest.raises(GatelensError, match="4 usable items and 5 were asked for"):
        read("math", gpt2, source, n=5)


def test_the_built_in_stories_have_no_shortest(gpt2: Any) -> None:
    with pytest.raises(GatelensError, match="shortest is for a source"):
        task("math", like_model(gpt2), n=1, shortest=3)


def test_a_damaged_parquet_file_is_one_sentence(tmp_path: Path, gpt2: Any) -> None:
    pytest.importorskip("pyarrow")
    (tmp_path / "x.parquet").write_bytes(b"PAR1 nothing")
    with pytest.raises(GatelensError, match=r"x\.parquet is not a readable parquet file"):
        read("math", gpt2, tmp_path / "x.parquet", n=1)


def test_a_relation_without_a_known_instruction_needs_one(tmp_path: Path, gpt2: Any) -> None:
    path = tmp_path / "animal-sound.json"
    path.write_text(json.dumps([{"input": f"animal{i}", "output": f"sound{i}"} for i in range(9)]))
    with pytest.raises(GatelensError, match="no instruction is known for animal-sound"):
        read("word-pairs", gpt2, path, n=3)
    made = read("word-pairs", gpt2, path, n=3, instruction="Say its sound.")
    assert made.examples[0].prompt.startswith("Say its sound.\nanimal")
    assert len(read("word-pairs", gpt2, path, n=3, ask="examples", shots=8)) == 3
    with pytest.raises(GatelensError, match="has 8 other pairs for 10 worked examples: ask for fewer shots"):
        read("word-pairs", gpt2, path, n=3, ask="examples")


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("math", '{"question": "1 + 1?"}', "does not have the format of GSM8K, SVAMP or OpenMathInstruct-2"),
        (
            "math",
            '{"question": "1 + 1?", "answer": "2"}',
            "does not have the format of GSM8K, SVAMP or OpenMathInstruct-2",
        ),
        ("common-sense", '{"question": "?", "answerKey": "A"}', "does not have the format of CommonsenseQA"),
        ("syntax", "[1, 2]", "does not have the format of BLiMP or BIG-Bench"),
        ("syntax", "sentence_good", "does not have the format of BLiMP or BIG-Bench"),
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

    def load_dataset(*arguments: Any, split: str | None = None) -> Any:
        asked.append((*arguments, split))
        if isinstance(result, Exception):
            raise result
        if split is not None and split not in result:
            raise ValueError(f"Unknown split {split!r}. Should be one of {list(result)}.")
        return result if split is None else result[split]

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load_dataset))
    return asked


def test_the_hub_gives_a_split_and_the_hubs_own_format(monkeypatch: pytest.MonkeyPatch, gpt2: Any) -> None:
    record = {"question": "Why?", "choices": {"label": list("ABCDE"), "text": list("vwxyz")}, "answerKey": "C"}
    asked = stand_in(monkeypatch, {"train": [], "validation": [record], "test": [{**record, "answerKey": ""}]})
    made = read("common-sense", gpt2, "tau/commonsense_qa", n=1, shots=0)
    assert made.examples[0].prompt == "Choose the right answer.\nQuestion: Why?\nA. v\nB. w\nC. x\nD. y\nE. z\nAnswer:"
    assert made.examples[0].response == " C"
    with pytest.raises(GatelensError, match="0 usable items"):
        read("common-sense", gpt2, "tau/commonsense_qa:default:test", n=1)
    with pytest.raises(GatelensError, match=r"tau/commonsense_qa could not be read .* Unknown split 'dev'"):
        read("common-sense", gpt2, "tau/commonsense_qa:default:dev", n=1)
    name = "tau/commonsense_qa"
    assert asked == [(name, None, None), (name, "default", "test"), (name, "default", "dev")]
    stand_in(monkeypatch, {"dev": [record]})
    with pytest.raises(GatelensError, match=f"{name} has the splits dev: name one, as {name}:CONFIGURATION:SPLIT"):
        read("common-sense", gpt2, name, n=1)


def test_a_hub_that_does_not_answer_is_an_error(monkeypatch: pytest.MonkeyPatch, gpt2: Any) -> None:
    stand_in(monkeypatch, ConnectionError("no route"))
    with pytest.raises(GatelensError, match=r"openai/gsm8k could not be read from the hub .*no route.*check the id"):
        read("math", gpt2, "openai/gsm8k:main", n=1)


def test_without_the_package_the_error_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch, gpt2: Any) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(GatelensError, match=r"pip install 'gatelens\[datasets\]'"):
        read("math", gpt2, "openai/gsm8k:main", n=1)
