"""Random draws that are the same on every machine: a seed and a task's name decide everything."""

from collections.abc import Callable, Iterator, Sequence
from random import Random
from typing import Any, TypeVar

from gatelens.errors import GatelensError

Item = TypeVar("Item")

# This many draws in a row that all gave something seen before: there is nothing new left to draw.
EXHAUSTED = 200


def generator(name: str, seed: int) -> Random:
    """The source of all random choices of a task; different tasks with the same seed draw independently."""
    return Random(f"{name} {seed}")


def distinct(n: int, draw: Callable[[], Item], key: Callable[[Item], str]) -> list[Item]:
    """n draws whose keys (the prompts) all differ; once there is nothing new, a second round begins, and so on."""
    drawn: list[Item] = []
    seen: set[str] = set()
    misses = 0
    while len(drawn) < n:
        item = draw()
        if key(item) in seen and misses < EXHAUSTED:
            misses += 1
            continue
        if key(item) in seen:
            seen.clear()
        misses = 0
        seen.add(key(item))
        drawn.append(item)
    return drawn


def others(random: Random, pool: Sequence[Item], n: int, but: Sequence[Item]) -> list[Item]:
    """n different items of the pool, none of them in `but`."""
    taken = set(but)
    return random.sample([item for item in pool if item not in taken], n)


def rounds(random: Random, items: Sequence[Item]) -> Iterator[Item]:
    """The items in random order for ever, none of them again before all have come."""
    while True:
        yield from random.sample(items, len(items))


def choose(option: str, value: Any, among: Sequence[str]) -> None:
    """Check that an option has one of its values."""
    if value not in among:
        raise GatelensError(f"no {option} {value!r}: it is one of {', '.join(among)}.")
