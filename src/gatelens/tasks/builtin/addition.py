"""Addition of two-digit numbers, one digit of the sum at a time: "37 + 45 = 8" -> "2".

A digit must be one token. Where the tokenizer joins digits, numbers are written with spaces: "3 7 + 4 5 = 8" -> " 2".
Whether the space before a digit is part of its token, or a token of its own that ends the prompt, is the tokenizer's.
"""

from dataclasses import dataclass
from operator import attrgetter

from gatelens.errors import GatelensError
from gatelens.tasks.base import CircuitTask, circuit_task
from gatelens.tasks.draw import choose, distinct, generator
from gatelens.tasks.tokens import Pair, Tokenizer, continuations, encode

DIGITS = "0123456789"
PLACES = ("tens", "ones")
SHOTS = 3


@dataclass(frozen=True)
class Style:
    """How numbers are written, and on which side of the seam the space before a digit falls."""

    between: str  # text between the digits of a number
    space_in_prompt: bool  # the space before the digit ends the prompt, else it begins the answer

    def write(self, a: int, b: int) -> str:
        first, second, total = (self.between.join(str(number)) for number in (a, b, a + b))
        return f"{first} + {second} = {total}"

    def until(self, a: int, b: int, place: str) -> str:
        """The sum up to the digit at this place."""
        text = self.write(a, b)[:-1]
        if place == "tens":
            text = text[: -1 - len(self.between)]
        return text if self.space_in_prompt else text.rstrip(" ")

    def answer(self, digit: str) -> str:
        return digit if self.space_in_prompt else f" {digit}"


STYLES = (Style("", True), Style(" ", False), Style(" ", True))


def build(tokenizer: Tokenizer, n: int, seed: int, *, digit: str = "tens") -> CircuitTask:
    """Sums below 100 after three worked ones; `digit` is the one asked for, "tens" or "ones".

    Metric: logit of the right digit minus the largest logit of the other nine. The corrupt prompt has another second
    number, and so another digit.
    """
    choose("digit", digit, PLACES)
    random = generator("addition", seed)
    style = _style(tokenizer)

    def numbers() -> tuple[int, int]:
        a = random.randrange(10, 80)
        return a, random.randrange(10, 100 - a)

    def right(a: int, b: int) -> str:
        return str(a + b)[PLACES.index(digit)]

    def draw() -> Pair:
        shots = [style.write(*numbers()) for _ in range(SHOTS)]
        a, b = numbers()
        other = random.choice([c for c in range(10, 100 - a) if right(a, c) != right(a, b)])
        clean, corrupt = ("\n".join([*shots, style.until(a, second, digit)]) for second in (b, other))
        wrong = tuple(style.answer(d) for d in DIGITS if d != right(a, b))
        return Pair(clean, corrupt, (style.answer(right(a, b)),), wrong)

    return circuit_task(tokenizer, "addition", seed, distinct(n, draw, key=attrgetter("clean")), digit=digit)


def _style(tokenizer: Tokenizer) -> Style:
    """The first style in which each digit is one token at both places."""
    for style in STYLES:
        prompts = [style.until(37, 45, place) for place in PLACES for _ in DIGITS]
        answers = [style.answer(digit) for _ in PLACES for digit in DIGITS]
        added = continuations(tokenizer, prompts, encode(tokenizer, prompts), answers)
        if all(ids is not None and len(ids) == 1 for ids in added):
            return style
    raise GatelensError("addition needs a tokenizer that can write each digit as one token; this one cannot.")
