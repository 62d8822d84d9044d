"""Readers of public data sets in their published formats, from a local file or from the Hugging Face hub.

A `source` is a path (a .json file with a list, or a .jsonl file) or a hub id. A hub id can be followed by the
configuration and the split, after colons: "nyu-mll/blimp:anaphor_gender_agreement", "openai/gsm8k:main:test". A reader
turns one record into (prompt, response), or into None if the record cannot be used.
"""

import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from random import Random
from typing import Any

from gatelens.errors import GatelensError

Record = dict[str, Any]
Reader = Callable[[Record], tuple[str, str] | None]

LETTERS = "ABCDE"
# The split to use if none is asked for. The validation split comes first because test splits often have no labels.
SPLITS = ("validation", "test", "train")


def from_source(random: Random, source: str, reader: Reader, n: int) -> list[tuple[str, str]]:
    """Draw n different (prompt, response) pairs from the source, in random order."""
    return take(random, read(source, reader), n, source)


def read(source: str, reader: Reader) -> list[tuple[str, str]]:
    """All records of the source that can be used. Raise an error if the source has another format."""
    try:
        return [item for record in records(source) if (item := reader(record)) is not None]
    except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
        raise GatelensError(
            f"{source} does not have the format of {FORMATS[reader]}: reading a record raised {error!r}."
        ) from error


def take(random: Random, items: Sequence[Any], n: int, source: str) -> list[Any]:
    """Draw n different items in random order. Raise an error if there are fewer."""
    if n > len(items):
        raise GatelensError(f"{source} has {len(items)} usable items and {n} were asked for: choose a smaller n.")
    return random.sample(items, len(items))[:n]


def records(source: str) -> list[Record]:
    """All records of a local file or of a data set on the hub."""
    path = Path(source)
    if path.is_file():
        text = path.read_text(encoding="utf-8")
        if text.lstrip().startswith("["):
            return list(json.loads(text))
        return [json.loads(line) for line in text.splitlines() if line.strip()]
    if path.suffix or path.exists() or not re.fullmatch(r"[\w.-]+/[\w.-]+(:[\w.-]+){0,2}", source):
        raise GatelensError(
            f"no file {source}: give an existing .json or .jsonl file, or a hub id such as openai/gsm8k:main."
        )
    return _from_hub(*source.split(":"))


def _from_hub(name: str, config: str | None = None, split: str | None = None) -> list[Record]:
    try:
        import datasets
    except ImportError as error:
        raise GatelensError(
            f"reading {name} from the hub needs the package `datasets`: pip install 'gatelens[datasets]'."
        ) from error
    try:
        splits = datasets.load_dataset(name, config)
    except Exception as error:  # the library raises many types for the network, an unknown id or configuration
        raise GatelensError(
            f"{name} could not be read from the hub ({type(error).__name__}: {error}): check the id and the network, "
            f"or download the data set and give the path of the file."
        ) from error
    split = split or next((split for split in SPLITS if split in splits), None)
    if split not in splits:
        raise GatelensError(f"no split {split!r} in {name}: its splits are {', '.join(splits)}.")
    return [dict(record) for record in splits[split]]


def blimp(record: Record) -> tuple[str, str] | None:
    """BLiMP: the first words, which the good and the bad sentence share -> the rest of the good sentence.

    None if the two sentences differ in their first word.
    """
    good, bad = record["sentence_good"].split(), record["sentence_bad"].split()
    shared = next((i for i, (a, b) in enumerate(zip(good, bad, strict=False)) if a != b), min(len(good), len(bad)))
    if not 0 < shared < len(good):
        return None
    return " ".join(good[:shared]), " " + " ".join(good[shared:])


def commonsense_qa(record: Record) -> tuple[str, str] | None:
    """CommonsenseQA: as published (a nested question) or as on the hub (lists of labels and texts).

    None if the record has no answer, as in the test split.
    """
    if not record["answerKey"]:
        return None
    if isinstance(record["question"], dict):
        question, choices = record["question"]["stem"], record["question"]["choices"]
        labels, options = [choice["label"] for choice in choices], [choice["text"] for choice in choices]
    else:
        question, labels, options = record["question"], record["choices"]["label"], record["choices"]["text"]
    return multiple_choice(question, options, labels.index(record["answerKey"]))


def math_problem(record: Record) -> tuple[str, str]:
    """GSM8K (question, and answer with #### before the result) or SVAMP (Body, Question, Equation, Answer).

    Solutions are used as published. In one record of SVAMP, chal-680, the equation does not give the answer.
    """
    return _svamp(record) if "Body" in record else _gsm8k(record)


def _gsm8k(record: Record) -> tuple[str, str]:
    # The published solutions contain notes for a calculator, <<16-3-4=9>>, which are not part of the text.
    solution, answer = re.sub(r"<<.*?>>", "", record["answer"]).split("####")
    return word_problem(record["question"], solution.strip(), answer.strip())


def _svamp(record: Record) -> tuple[str, str]:
    body = record["Body"].strip()
    problem = f"{body}{'' if body.endswith(('.', ',', '?', '!')) else ','} {record['Question'].strip()}"
    equation = re.sub(r"(\d+)\.0\b", r"\1", record["Equation"].strip())
    equation = equation[1:-1].strip() if equation.startswith("(") else equation
    answer = f"{float(record['Answer']):.10g}"
    return word_problem(problem, f"{equation} = {answer}.", answer)


def multiple_choice(question: str, options: Sequence[str], right: int) -> tuple[str, str]:
    """A question with lettered options -> the letter of the right option."""
    lines = [f"{letter}. {option}" for letter, option in zip(LETTERS, options, strict=True)]
    return "\n".join(["Choose the right answer.", f"Question: {question}", *lines, "Answer:"]), f" {LETTERS[right]}"


def word_problem(problem: str, solution: str, answer: object) -> tuple[str, str]:
    """A word problem -> its worked solution, which ends with the answer."""
    return f"Question: {problem}\nAnswer:", f" {solution} The answer is {answer}."


def word_pair(record: Record) -> tuple[str, str]:
    """Function-vector pairs: an input word -> its output word."""
    return str(record["input"]), str(record["output"])


FORMATS: dict[Reader, str] = {
    blimp: "BLiMP",
    commonsense_qa: "CommonsenseQA",
    math_problem: "GSM8K or SVAMP",
    word_pair: "function-vector pairs",
}
