"""Prompts of response tasks: an instruction, worked examples and a query."""

from collections.abc import Sequence
from random import Random
from typing import NamedTuple

from gatelens.errors import GatelensError

# As in the code of the paper on head gating, worked examples come from this many of the shortest items of a data set.
SET_ASIDE = 10


class Item(NamedTuple):
    """A query with its response, which begins with its leading space if it has one.

    Arguments:
        query: what is asked; it ends where the response begins.
        instruction: the first line of the prompt; empty if there is none.
        alone: whether the query is the beginning of a text, before which worked examples make no sense.
    """

    query: str
    response: str
    instruction: str = ""
    alone: bool = False


def prompt(item: Item, worked: Sequence[Item] = ()) -> tuple[str, str]:
    """The prompt and the response of an item, after some worked examples."""
    lines = [item.instruction] if item.instruction else []
    lines += [example.query + example.response for example in worked]
    return "\n".join([*lines, item.query]), item.response


def prompts_with_shots(random: Random, items: Sequence[Item], n: int, shots: int, source: str) -> list[tuple[str, str]]:
    """Draw n prompts from a data set, in random order.

    Worked examples are drawn from the shortest items, which are then not asked for. Items that stand alone have none.

    Arguments:
        items: the items of the data set.
        shots: worked examples in each prompt.
        source: the name of the data set, for the error.
    """
    asked, shown = list(items), []
    shots = 0 if any(item.alone for item in items) else shots
    if shots:
        by_length = sorted(range(len(items)), key=lambda i: len(items[i].query) + len(items[i].response))
        aside = {*by_length[: max(SET_ASIDE, shots)]}
        shown = [items[i] for i in sorted(aside)]
        asked = [item for i, item in enumerate(items) if i not in aside]
    besides = f" besides {len(shown)} that are shown as examples" if shots else ""
    drawn = take(random, asked, n, source, besides)
    return [prompt(item, random.sample(shown, shots)) for item in drawn]


def take(random: Random, items: Sequence[Item], n: int, source: str, besides: str = "") -> list[Item]:
    """Draw n different items in random order. Raise an error if there are fewer.

    Arguments:
        source: the name of the data set, for the error.
        besides: what else the data set has, for the error.
    """
    if n > len(items):
        raise GatelensError(
            f"{source} has {len(items)} usable items{besides} and {n} were asked for: choose a smaller n."
        )
    return random.sample(items, len(items))[:n]


def check_shots(shots: int) -> None:
    """Raise an error if the number of worked examples is below 0."""
    if not isinstance(shots, int) or shots < 0:
        raise GatelensError(f"shots is {shots}: it must be a whole number of at least 0.")
