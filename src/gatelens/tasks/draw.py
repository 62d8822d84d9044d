"""Random draws that are the same on every machine: the task's name and the seed decide everything."""

from collections.abc import Callable, Iterator, Sequence
from random import Random
from typing import TypeVar

Item = TypeVar("Item")

# After this many draws in a row that had all been drawn before, `distinct` assumes that there is nothing new to draw.
EXHAUSTED = 200


def generator(name: str, seed: int) -> Random:
    """The random number generator of a task. Different tasks with the same seed draw independently."""
    return Random(f"{name} {seed}")


def distinct(n: int, draw: Callable[[], Item], key: Callable[[Item], str]) -> list[Item]:
    """Draw n items whose keys all differ. When nothing new is left to draw, all items may be drawn again.

    Arguments:
        n: the number of items.
        draw: returns one random item.
        key: the text that must differ between items, usually the prompt.
    """
    items: list[Item] = []
    seen: set[str] = set()
    misses = 0
    while len(items) < n:
        item = draw()
        if key(item) in seen and misses < EXHAUSTED:
            misses += 1
            continue
        if key(item) in seen:
            seen.clear()
        misses = 0
        seen.add(key(item))
        items.append(item)
    return items


def others(random: Random, pool: Sequence[Item], n: int, exclude: Sequence[Item]) -> list[Item]:
    """Draw n different items of the pool that are not in `exclude`."""
    excluded = set(exclude)
    return random.sample([item for item in pool if item not in excluded], n)


def rounds(random: Random, items: Sequence[Item]) -> Iterator[Item]:
    """Yield the items in random order, forever. No item is repeated before all others have been yielded."""
    while True:
        yield from random.sample(items, len(items))
