"""Common sense: a worked example and a question with five options in random order; the response is the right letter.

The built-in questions are in common_sense.txt, one on each line: question|right option|four wrong options. With
`source`, the questions are those of CommonsenseQA (Talmor et al., arXiv 1811.00937), read from a file or from the hub.
"""

from functools import cache
from importlib.resources import files
from operator import itemgetter
from random import Random

from gatelens.tasks import Entry
from gatelens.tasks._prompts import SET_ASIDE, Item, check_shots, prompt
from gatelens.tasks._readers import commonsense_qa, from_source, multiple_choice
from gatelens.tasks.base import ResponseTask
from gatelens.tasks.build import response_task
from gatelens.tasks.draw import distinct, generator, rounds
from gatelens.tasks.tokens import Tokenizer


@cache
def questions() -> tuple[tuple[str, ...], ...]:
    """The built-in questions: each with its right option and then its four wrong options."""
    text = files("gatelens.tasks.builtin").joinpath("common_sense.txt").read_text(encoding="utf-8")
    return tuple(tuple(line.split("|")) for line in text.splitlines())


def build(tokenizer: Tokenizer, n: int, seed: int, *, shots: int = 1, source: str | None = None) -> ResponseTask:
    """Multiple choice with five options; the response is " A" to " E".

    Arguments:
        shots: worked examples before the query. They are drawn from the ten shortest questions, which are then not
            asked.
        source: a file or hub id of CommonsenseQA. The default is the built-in questions.
    """
    check_shots(shots)
    random = generator("common-sense", seed)
    options = {"shots": shots} if shots != 1 else {}
    if source is not None:
        items = from_source(random, source, commonsense_qa, n, shots=shots)
        return response_task(tokenizer, "common-sense", seed, items, source=source, **options)
    by_length = sorted(questions(), key=lambda item: sum(map(len, item)))
    shown = by_length[: max(SET_ASIDE, shots)] if shots else []
    deck = rounds(random, [item for item in questions() if item not in shown])

    def draw() -> tuple[str, str]:
        query, *worked = (_shuffled(random, item) for item in (next(deck), *random.sample(shown, shots)))
        return prompt(query, worked)

    return response_task(tokenizer, "common-sense", seed, distinct(n, draw, key=itemgetter(0)), **options)


def _shuffled(random: Random, item: tuple[str, ...]) -> Item:
    """The question with its options in random order."""
    question, right, *wrong = item
    options = random.sample([right, *wrong], 5)
    return multiple_choice(question, options, options.index(right))


TASK = Entry(
    build,
    "response",
    "Multiple choice with five options, after one example: give the letter. Built-in questions or CommonsenseQA.",
    (
        "Choose the right answer.\n"
        "Question: What do bees make?\nA. milk\nB. honey\nC. silk\nD. bread\nE. cheese\nAnswer: B\n"
        "Question: What barks?\nA. cow\nB. dog\nC. fish\nD. bird\nE. horse\nAnswer:",
        " B",
    ),
)
