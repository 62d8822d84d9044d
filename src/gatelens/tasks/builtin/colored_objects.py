"""Colored objects: three things have different colors, and the question is about one of them.

"There is a red pen, a blue cup and a green book on the table. The cup is" -> " blue".
The behaviour is that of the task "Reasoning about Colored Objects" of BIG-bench (arXiv 2206.04615).
"""

from operator import attrgetter

from gatelens.tasks import Entry
from gatelens.tasks._words import words
from gatelens.tasks.base import CircuitTask
from gatelens.tasks.build import circuit_task
from gatelens.tasks.draw import distinct, generator
from gatelens.tasks.token_roles import mark
from gatelens.tasks.tokens import Pair, Tokenizer, marked_pair, preferably_single, single_tokens

# Every word follows "a", so no word begins with a vowel.
COLORS = words("red blue green yellow black white brown pink purple silver gold gray")
THINGS = words(
    "pen cup book key box hat bag ball card coin ring watch phone lamp plate brush bottle candle knife spoon"
)
SURFACES = ("table", "desk", "floor", "shelf", "bed", "counter")
TEMPLATES = (
    "There is a {0}, a {1} and a {2} on the {surface}. The {thing} is",
    "On the {surface} I see a {0}, a {1} and a {2}. What color is the {thing}? The {thing} is",
    "I bought a {0}, a {1} and a {2}. I put the {thing} on the {surface}. The {thing} was",
)


def build(tokenizer: Tokenizer, n: int, seed: int) -> CircuitTask:
    """A question about one of three things.

    Metric: the logit of the thing's color minus the largest logit of the other two colors. The corrupt prompt asks
    about another of the three things.
    """
    random = generator("colored-objects", seed)
    colors = single_tokens(tokenizer, COLORS, "colors", least=3)
    things = single_tokens(tokenizer, THINGS, "things", least=3)
    surfaces = preferably_single(tokenizer, SURFACES)

    def draw() -> Pair:
        shown_things, shown_colors = random.sample(things, 3), random.sample(colors, 3)
        template, surface = random.choice(TEMPLATES), random.choice(surfaces)
        asked, asked_instead = random.sample(range(3), 2)
        described = [
            f"{mark(color, f'{of} color')} {mark(thing, f'{of} thing')}"
            for color, thing, of in zip(shown_colors, shown_things, _asked_or_other(asked), strict=True)
        ]
        clean, corrupt = (
            template.format(*described, surface=surface, thing=mark(shown_things[i], "thing in question"))
            for i in (asked, asked_instead)
        )
        wrong = tuple(f" {color}" for color in shown_colors if color != shown_colors[asked])
        return marked_pair(clean, corrupt, (f" {shown_colors[asked]}",), wrong, template)

    return circuit_task(tokenizer, "colored-objects", seed, distinct(n, draw, key=attrgetter("clean")))


def _asked_or_other(asked: int) -> list[str]:
    """For each of the three things, whether the question is about it: the start of the token roles."""
    return ["asked" if i == asked else "other" for i in range(3)]


TASK = Entry(
    build,
    "circuit",
    "Three things have different colors: say the color of one of them.",
    ("There is a red pen, a blue cup and a green book on the table. The cup is", " blue"),
)
