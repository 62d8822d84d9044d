"""Readers of public sets in their published formats, from a local file or from the Hugging Face hub.

A `source` is a path (.json with a list, or .jsonl) or a hub id, with configuration and split after colons where they
are needed: "nyu-mll/blimp:anaphor_gender_agreement", "openai/gsm8k:main:test". A reader turns one record into
(prompt, response), or None where the record has no use as such.
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
# Where a hub set has several splits and none is asked for; labels of test splits are often withheld.
SPLITS = ("validation", "test", "train")


def from_source(random: Random, source: str, reader: Reader, n: int) -> list[tuple[str, str]]:
    """n different (prompt, response) of the source, in random order."""
    return take(random, read(source, reader), n, source)


def read(source: str, reader: Reader) -> list[tuple[str, str]]:
    """All of the source that is of use; an error where it is in another format."""
    try:
        return [item for record in records(source) if (item := reader(record)) is not None]
    except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
        raise GatelensError(
            f"{source} is not in the format of {reader.__name__.replace('_', ' ')}: {error!r}."
        ) from error


def take(random: Random, items: Sequence[Any], n: int, source: str) -> list[Any]:
    """n different items in random order; an error if there are not so many."""
    if n > len(items):
        raise GatelensError(f"{source} has {len(items)} usable items and {n} were asked for: take a smaller n.")
    return random.sample(items, len(items))[:n]


def records(source: str) -> list[Record]:
    """All records of a local file or hub set."""
    path = Path(source)
    if path.is_file():
        text = path.read_text(encoding="utf-8")
        if text.lstrip().startswith("["):
            return list(json.loads(text))
        return [json.loads(line) for line in text.splitlines() if line.strip()]
    if path.suffix or path.exists() or not re.fullmatch(r"[\w.-]+/[\w.-]+(:[\w.-]+){0,2}", source):
        raise GatelensError(f"no file {source}: give a .json or .jsonl file, or a hub id such as openai/gsm8k:main.")
    return _from_hub(*source.split(":"))


def _from_hub(name: str, config: str | None = None, split: str | None = None) -> list[Record]:
    try:
        import datasets
    except ImportError as error:
        raise GatelensError(
            f"reading {name} from the hub needs the package datasets: pip install 'gatelens[datasets]'."
        ) from error
    try:
        found = datasets.load_dataset(name, config)
    except Exception as error:  # network, unknown id or configuration: the library has many kinds
        raise GatelensError(
            f"{name} could not be read from the hub ({type(error).__name__}: {error}): check the id and the "
            f"network, or download the set and give the file."
        ) from error
    split = split or next((split for split in SPLITS if split in found), None)
    if split not in found:
        raise GatelensError(f"no split {split!r} in {name}: it has {', '.join(found)}.")
    return [dict(record) for record in found[split]]


def blimp(record: Record) -> tuple[str, str] | None:
    """BLiMP: the words that the good and the bad sentence share at the start -> the rest of the good one.

    None where they differ from the first word on.
    """
    good, bad = record["sentence_good"].split(), record["sentence_bad"].split()
    shared = next((i for i, (a, b) in enumerate(zip(good, bad, strict=False)) if a != b), min(len(good), len(bad)))
    if not 0 < shared < len(good):
        return None
    return " ".join(good[:shared]), " " + " ".join(good[shared:])


def commonsense_qa(record: Record) -> tuple[str, str] | None:
    """CommonsenseQA, as published (nested question) or as on the hub (lists of labels and texts).

    None where the answer is withheld, as in the test split.
    """
    if not record["answerKey"]:
        return None
    if isinstance(record["question"], dict):
        question, choices = record["question"]["stem"], record["question"]["choices"]
        labels, options = [c["label"] for c in choices], [c["text"] for c in choices]
    else:
        question, labels, options = record["question"], record["choices"]["label"], record["choices"]["text"]
    return multiple_choice(question, options, labels.index(record["answerKey"]))


def math_problem(record: Record) -> tuple[str, str]:
    """GSM8K (question, answer with a line of #### at its end) or SVAMP (Body, Question, Equation, Answer).

    Solutions are taken as published; in one of SVAMP's 1,000, chal-680, the equation does not give the answer.
    """
    return _svamp(record) if "Body" in record else _gsm8k(record)


def _gsm8k(record: Record) -> tuple[str, str]:
    # The published solutions carry notes for a calculator, <<16-3-4=9>>, which are no part of the text.
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
    """A question with lettered options -> the letter of the right one."""
    lines = [f"{letter}. {option}" for letter, option in zip(LETTERS, options, strict=True)]
    return "\n".join(["Choose the right answer.", f"Question: {question}", *lines, "Answer:"]), f" {LETTERS[right]}"


def word_problem(problem: str, solution: str, answer: object) -> tuple[str, str]:
    """A word problem -> its worked solution, which ends with the answer."""
    return f"Question: {problem}\nAnswer:", f" {solution} The answer is {answer}."


def word_pair(record: Record) -> tuple[str, str]:
    """Function-vector pairs (Todd et al., arXiv 2310.15213): an input word and its output word."""
    return str(record["input"]), str(record["output"])
