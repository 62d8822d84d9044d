"""Common sense: a question with five options in random order; the response is the letter of the right option.

The built-in questions are in common_sense.txt, one on each line: question|right option|four wrong options. With
`source`, the questions are those of CommonsenseQA (Talmor et al., arXiv 1811.00937), read from a file or from the hub.
"""

from functools import cache
from importlib.resources import files
from operator import itemgetter
from random import Random

from gatelens.tasks import Entry
from gatelens.tasks._readers import commonsense_qa, from_source, multiple_choice
from gatelens.tasks.base import ResponseTask, response_task
from gatelens.tasks.draw import distinct, generator, rounds
from gatelens.tasks.tokens import Tokenizer


@cache
def questions() -> tuple[tuple[str, ...], ...]:
    """The built-in questions: each with its right option and then its four wrong options."""
    text = files("gatelens.tasks.builtin").joinpath("common_sense.txt").read_text(encoding="utf-8")
    return tuple(tuple(line.split("|")) for line in text.splitlines())


def build(tokenizer: Tokenizer, n: int, seed: int, *, source: str | None = None) -> ResponseTask:
    """Multiple choice with five options; the response is " A" to " E".

    Arguments:
        source: a file or hub id of CommonsenseQA. The default is the built-in questions.
    """
    random = generator("common-sense", seed)
    if source is None:
        deck = rounds(random, questions())
        items = distinct(n, lambda: _shuffled(random, next(deck)), key=itemgetter(0))
        return response_task(tokenizer, "common-sense", seed, items)
    items = from_source(random, source, commonsense_qa, n)
    return response_task(tokenizer, "common-sense", seed, items, source=source)


def _shuffled(random: Random, item: tuple[str, ...]) -> tuple[str, str]:
    """The question with its options in random order."""
    question, right, *wrong = item
    options = random.sample([right, *wrong], 5)
    return multiple_choice(question, options, options.index(right))


TASK = Entry(
    build,
    "response",
    "Multiple choice with five options: give the letter. Built-in questions or CommonsenseQA.",
    (
        "Choose the right answer.\nQuestion: What barks?\nA. cow\nB. dog\nC. fish\nD. bird\nE. horse\nAnswer:",
        " B",
    ),
)
