"""Colored objects: three things of different colors, and a question about one of them.

"There is a red pen, a blue cup and a green book on the table. The cup is" -> " blue".
The behaviour is that of the Reasoning about Colored Objects task (BIG-bench, arXiv 2206.04615).
"""

from operator import attrgetter

from gatelens.tasks._words import words
from gatelens.tasks.base import CircuitTask, circuit_task
from gatelens.tasks.draw import distinct, generator
from gatelens.tasks.tokens import Pair, Tokenizer, preferably_single, single_tokens

# All words follow "a", so none begins with a vowel.
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
    """Colored objects. Metric: logit of the thing's color minus the largest logit of the other two colors.

    The corrupt prompt asks about another of the three things.
    """
    random = generator("colored-objects", seed)
    colors = single_tokens(tokenizer, COLORS, "colors", least=3)
    things = single_tokens(tokenizer, THINGS, "things", least=3)
    surfaces = preferably_single(tokenizer, SURFACES)

    def draw() -> Pair:
        three, its_color = random.sample(things, 3), random.sample(colors, 3)
        described = [f"{color} {thing}" for color, thing in zip(its_color, three, strict=True)]
        template, surface = random.choice(TEMPLATES), random.choice(surfaces)
        asked, instead = random.sample(range(3), 2)
        clean, corrupt = (
            template.format(*described, surface=surface, thing=three[which]) for which in (asked, instead)
        )
        wrong = tuple(f" {color}" for color in its_color if color != its_color[asked])
        return Pair(clean, corrupt, (f" {its_color[asked]}",), wrong)

    return circuit_task(tokenizer, "colored-objects", seed, distinct(n, draw, key=attrgetter("clean")))
