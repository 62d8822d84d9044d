"""Common sense: a question with five options in random order; the response is the letter of the right one.

The questions are in common_sense.txt, one a line: question|right option|four wrong ones. Read from a file or the hub
instead (`source`), the set is CommonsenseQA (Talmor et al., arXiv 1811.00937): see `readers`.
"""

from functools import cache
from importlib.resources import files
from operator import itemgetter
from random import Random

from gatelens.tasks._readers import commonsense_qa, from_source, multiple_choice
from gatelens.tasks.base import ResponseTask, response_task
from gatelens.tasks.draw import distinct, generator, rounds
from gatelens.tasks.tokens import Tokenizer


@cache
def questions() -> tuple[tuple[str, ...], ...]:
    """Each built-in question, its right option and the four wrong ones."""
    text = files("gatelens.tasks.builtin").joinpath("common_sense.txt").read_text(encoding="utf-8")
    return tuple(tuple(line.split("|")) for line in text.splitlines())


def build(tokenizer: Tokenizer, n: int, seed: int, *, source: str | None = None) -> ResponseTask:
    """Five-way multiple choice, built in or CommonsenseQA from `source`; the response is " A" to " E"."""
    random = generator("common-sense", seed)
    if source is None:
        deck = rounds(random, questions())
        items = distinct(n, lambda: _shuffled(random, next(deck)), key=itemgetter(0))
        return response_task(tokenizer, "common-sense", seed, items)
    items = from_source(random, source, commonsense_qa, n)
    return response_task(tokenizer, "common-sense", seed, items, source=source)


def _shuffled(random: Random, item: tuple[str, ...]) -> tuple[str, str]:
    question, right, *wrong = item
    options = random.sample([right, *wrong], 5)
    return multiple_choice(question, options, options.index(right))
