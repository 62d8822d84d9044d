"""Addition of two-digit numbers, one digit of the sum at a time: "37 + 45 = 8" -> "2".

Every digit must be one token. If the tokenizer joins digits, the numbers are written with spaces between the digits:
"3 7 + 4 5 = 8" -> " 2". The tokenizer also decides whether the space before a digit belongs to the digit's token or is
a token of its own, which then ends the prompt.
"""

from dataclasses import dataclass
from operator import attrgetter

from gatelens.errors import GatelensError
from gatelens.tasks import Entry
from gatelens.tasks.base import CircuitTask
from gatelens.tasks.build import circuit_task
from gatelens.tasks.draw import distinct, generator
from gatelens.tasks.token_roles import mark
from gatelens.tasks.tokens import Pair, Tokenizer, continuations, encode, marked_pair

DIGITS = "0123456789"
PLACES = ("tens", "ones")
SHOTS = 3
# The token roles of the digits of the last sum, in their order.
DIGIT_ROLES = ("first tens", "first ones", "second tens", "second ones", "sum tens")


@dataclass(frozen=True)
class Style:
    """How numbers are written, and whether the space before a digit belongs to the prompt or to the answer."""

    between: str  # text between the digits of a number
    space_in_prompt: bool  # True: the space ends the prompt; False: the space begins the answer

    def write(self, a: int, b: int) -> str:
        """The whole sum with its result."""
        first, second, total = (self.between.join(str(number)) for number in (a, b, a + b))
        return f"{first} + {second} = {total}"

    def until(self, a: int, b: int, place: str) -> str:
        """The sum up to the digit at this place, without the digit."""
        text = self.write(a, b)[:-1]
        if place == "tens":
            text = text[: -1 - len(self.between)]
        return text if self.space_in_prompt else text.rstrip(" ")

    def answer(self, digit: str) -> str:
        """The digit as the text that follows the prompt."""
        return digit if self.space_in_prompt else f" {digit}"


STYLES = (Style("", True), Style(" ", False), Style(" ", True))


def build(tokenizer: Tokenizer, n: int, seed: int, *, digit: str = "tens") -> CircuitTask:
    """Sums below 100, after three worked sums.

    Metric: the logit of the right digit minus the largest logit of the other nine digits. The corrupt prompt has
    another second number, and so another right digit.

    Arguments:
        digit: the digit of the sum to predict, "tens" or "ones".
    """
    random = generator("addition", seed)
    style = _style(tokenizer)

    def numbers() -> tuple[int, int]:
        a = random.randrange(10, 80)
        return a, random.randrange(10, 100 - a)

    def right_digit(a: int, b: int) -> str:
        return str(a + b)[PLACES.index(digit)]

    def draw() -> Pair:
        shots = [style.write(*numbers()) for _ in range(SHOTS)]
        a, b = numbers()
        other = random.choice([c for c in range(10, 100 - a) if right_digit(a, c) != right_digit(a, b)])
        worked = mark("\n".join(shots), "worked sums")
        clean, corrupt = (f"{worked}\n{_mark_digits(style.until(a, second, digit))}" for second in (b, other))
        wrong = tuple(style.answer(d) for d in DIGITS if d != right_digit(a, b))
        return marked_pair(clean, corrupt, (style.answer(right_digit(a, b)),), wrong)

    return circuit_task(tokenizer, "addition", seed, distinct(n, draw, key=attrgetter("clean")), digit=digit)


def _mark_digits(text: str) -> str:
    """The unfinished sum with the token role of every digit."""
    roles = iter(DIGIT_ROLES)
    return "".join(mark(letter, next(roles)) if letter in DIGITS else letter for letter in text)


def _style(tokenizer: Tokenizer) -> Style:
    """The first style in which every digit is one token at both places."""
    for style in STYLES:
        prompts = [style.until(37, 45, place) for place in PLACES for _ in DIGITS]
        answers = [style.answer(digit) for _ in PLACES for digit in DIGITS]
        added = continuations(tokenizer, prompts, encode(tokenizer, prompts), answers)
        if all(ids is not None and len(ids) == 1 for ids in added):
            return style
    raise GatelensError(
        "addition needs a tokenizer that writes every digit as one token, and this tokenizer does not: choose another "
        "model."
    )


TASK = Entry(
    build,
    "circuit",
    "Two-digit addition: predict one digit of the sum.",
    ("51 + 11 = 62\n37 + 45 = ", "8"),
    choices={"digit": PLACES},
)
