"""Readers of public data sets in their published formats, from local files or from the Hugging Face hub.

A `source` is a path or a hub id. A path is a .json file (a list, or a task.json of BIG-Bench), a .jsonl file, a
.parquet file, or a folder of .parquet files. A hub id can be followed by the configuration and the split, after colons:
"nyu-mll/blimp:anaphor_gender_agreement", "openai/gsm8k:main:test", "nvidia/OpenMathInstruct-2:default:train_1M". A
reader turns one record into an item, or into None if the record cannot be used.
"""

import heapq
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from random import Random
from typing import Any

from gatelens.errors import GatelensError
from gatelens.runtime.inputs import parse_json
from gatelens.tasks._prompts import Item, prompts_with_shots

Record = dict[str, Any]
Reader = Callable[[Record], Item | None]

LETTERS = "ABCDE"
# The split to use if none is asked for. The validation split comes first because test splits often have no labels.
SPLITS = ("validation", "test", "train")


def from_source(
    random: Random, source: str, reader: Reader, n: int, *, shots: int = 0, shortest: int | None = None
) -> list[tuple[str, str]]:
    """Draw n different (prompt, response) pairs from the source, in random order.

    Arguments:
        shots: worked examples in each prompt.
        shortest: draw only from this many of the shortest items.
    """
    return prompts_with_shots(random, read(source, reader, shortest), n, shots, source)


def read(source: str, reader: Reader, shortest: int | None = None) -> list[Item]:
    """All records of the source that can be used. Raise an error if the source has another format.

    Arguments:
        shortest: only this many items, those with the fewest characters in query and response. Of items with the same
            query, the first counts.
    """
    try:
        items = (item for record in records(source) if (item := reader(record)) is not None)
        return list(items) if shortest is None else _shortest(items, shortest)
    except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
        raise GatelensError(
            f"{source} does not have the format of {FORMATS[reader]}: reading a record raised {error!r}."
        ) from error


def _shortest(items: Iterable[Item], n: int) -> list[Item]:
    first = {item.query: item for item in _unseen(items)}
    return heapq.nsmallest(n, first.values(), key=lambda item: len(item.query) + len(item.response))


def _unseen(items: Iterable[Item]) -> Iterator[Item]:
    seen: set[str] = set()
    for item in items:
        if item.query not in seen:
            seen.add(item.query)
            yield item


def records(source: str) -> Iterable[Record]:
    """All records of a local file or folder, or of a data set on the hub."""
    path = Path(source)
    if tables := sorted(path.glob("*.parquet")):
        return _from_parquet(tables)
    if path.is_file() and path.suffix == ".parquet":
        return _from_parquet([path])
    if path.is_file():
        return _from_json(path.read_text(encoding="utf-8"))
    if path.suffix or path.exists() or not re.fullmatch(r"[\w.-]+/[\w.-]+(:[\w.-]+){0,2}", source):
        raise GatelensError(
            f"no file {source}: give an existing .json, .jsonl or .parquet file, or a hub id such as openai/gsm8k:main."
        )
    return _from_hub(*source.split(":"))


def _from_json(text: str) -> list[Record]:
    """The records of a JSON list, of JSON lines, or of a task.json of BIG-Bench (`_from_big_bench`)."""
    if text.lstrip().startswith("["):
        return list(parse_json(text))
    try:
        whole = parse_json(text)
    except ValueError:
        return [parse_json(line) for line in text.splitlines() if line.strip()]
    return _from_big_bench(whole) if isinstance(whole, dict) and "examples" in whole else [whole]


def _from_big_bench(task: Record) -> list[Record]:
    """The examples of a task.json, each with the task's instruction: its prefix or, without one, its description."""
    instruction = " ".join(str(task.get("task_prefix") or task.get("description") or "").split())
    return [{**example, "instruction": instruction} for example in task["examples"]]


def _from_parquet(paths: Sequence[Path]) -> Iterator[Record]:
    try:
        from pyarrow import ArrowInvalid, parquet
    except ImportError as error:
        raise GatelensError(
            f"reading {paths[0]} needs the package `pyarrow`: pip install 'gatelens[datasets]'."
        ) from error
    for path in paths:
        try:
            for batch in parquet.ParquetFile(path).iter_batches():
                yield from batch.to_pylist()
        except (ArrowInvalid, OSError) as error:
            raise GatelensError(f"{path} is not a readable parquet file ({error}): download it again.") from error


def _from_hub(name: str, config: str | None = None, split: str | None = None) -> Iterable[Record]:
    try:
        import datasets
    except ImportError as error:
        raise GatelensError(
            f"reading {name} from the hub needs the package `datasets`: pip install 'gatelens[datasets]'."
        ) from error
    try:
        if split is None:
            splits = datasets.load_dataset(name, config)
            split = next((split for split in SPLITS if split in splits), None)
            if split is None:
                raise GatelensError(
                    f"{name} has the splits {', '.join(splits)}: name one, as {name}:CONFIGURATION:SPLIT."
                )
            return (dict(record) for record in splits[split])
        # Only this split is downloaded.
        return (dict(record) for record in datasets.load_dataset(name, config, split=split))
    except GatelensError:
        raise
    except Exception as error:  # the library raises many types for the network, an unknown id, configuration or split
        raise GatelensError(
            f"{name} could not be read from the hub ({type(error).__name__}: {error}): check the id, the split and the "
            "network, or download the data set and give the path of the file."
        ) from error


def sentences(record: Record) -> Item | None:
    """A minimal pair of BLiMP, or an example of a task of BIG-Bench."""
    return _blimp(record) if "sentence_good" in record else _big_bench(record)


def _big_bench(record: Record) -> Item:
    """BIG-Bench: an input and its target, as in a task.json (`_from_big_bench`) or as on the hub (lists of targets).

    If there are several targets, the first counts. Of scored options, the best counts.
    """
    query = record["input"] if "input" in record else record["inputs"]
    targets = record.get("target", record.get("targets"))
    if targets:
        answer = targets if isinstance(targets, str) else targets[0]
    else:
        scores = record.get("target_scores") or dict(
            zip(record["multiple_choice_targets"], record["multiple_choice_scores"], strict=True)
        )
        answer = max(scores, key=lambda option: scores[option])
    return Item(f"Q: {query.strip()}\nA:", f" {answer.strip()}", record.get("instruction", ""))


def _blimp(record: Record) -> Item | None:
    """BLiMP: the first words, which the good and the bad sentence share -> the rest of the good sentence.

    None if the two sentences differ in their first word.
    """
    good, bad = record["sentence_good"].split(), record["sentence_bad"].split()
    shared = next((i for i, (a, b) in enumerate(zip(good, bad, strict=False)) if a != b), min(len(good), len(bad)))
    if not 0 < shared < len(good):
        return None
    return Item(" ".join(good[:shared]), " " + " ".join(good[shared:]), alone=True)


def commonsense_qa(record: Record) -> Item | None:
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


def math_problem(record: Record) -> Item | None:
    """GSM8K (question, and answer with #### before the result), SVAMP (Body, Question, Equation, Answer) or
    OpenMathInstruct-2 (problem, generated_solution, expected_answer).

    Solutions are used as published. In one record of SVAMP, chal-680, the equation does not give the answer. None if a
    record of OpenMathInstruct-2 has no answer.
    """
    if "generated_solution" in record:
        return _open_math(record)
    return _svamp(record) if "Body" in record else _gsm8k(record)


def _open_math(record: Record) -> Item | None:
    if not str(record["expected_answer"]).strip():
        return None
    return Item(f"Question: {record['problem'].strip()}\nAnswer:", f" {record['generated_solution'].strip()}", IN_LATEX)


def _gsm8k(record: Record) -> Item:
    # The published solutions contain notes for a calculator, <<16-3-4=9>>, which are not part of the text.
    solution, answer = re.sub(r"<<.*?>>", "", record["answer"]).split("####")
    return word_problem(record["question"], solution.strip(), answer.strip())


def _svamp(record: Record) -> Item:
    body = record["Body"].strip()
    problem = f"{body}{'' if body.endswith(('.', ',', '?', '!')) else ','} {record['Question'].strip()}"
    equation = re.sub(r"(\d+)\.0\b", r"\1", record["Equation"].strip())
    equation = equation[1:-1].strip() if equation.startswith("(") else equation
    answer = f"{float(record['Answer']):.10g}"
    return word_problem(problem, f"{equation} = {answer}.", answer)


def multiple_choice(question: str, options: Sequence[str], right: int) -> Item:
    """A question with lettered options -> the letter of the right option."""
    lines = [f"{letter}. {option}" for letter, option in zip(LETTERS, options, strict=True)]
    query = "\n".join([f"Question: {question}", *lines, "Answer:"])
    return Item(query, f" {LETTERS[right]}", "Choose the right answer.")


def word_problem(problem: str, solution: str, answer: object) -> Item:
    """A word problem -> its worked solution, which ends with the answer."""
    return Item(f"Question: {problem}\nAnswer:", f" {solution} The answer is {answer}.")


def word_pair(record: Record) -> Item:
    """Function-vector pairs: an input word -> its output word."""
    return Item(str(record["input"]), str(record["output"]))


IN_LATEX = r"Solve each problem step by step. Write formulas in LaTeX and the final answer in \boxed{}."
FORMATS: dict[Reader, str] = {
    sentences: "BLiMP or BIG-Bench",
    commonsense_qa: "CommonsenseQA",
    math_problem: "GSM8K, SVAMP or OpenMathInstruct-2",
    word_pair: "function-vector pairs",
}
