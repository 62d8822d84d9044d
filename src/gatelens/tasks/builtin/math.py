"""Math: word problems; the response is a worked solution that ends with the answer.

A built-in story has random numbers and steps that compute the answer from them. Where the solution names a step, the
step is written out ("12 + 5 = 17"), so that the arithmetic is right by construction. With `source`, the problems are
those of GSM8K (Cobbe et al., arXiv 2110.14168), SVAMP (Patel et al., arXiv 2103.07191) or OpenMathInstruct-2 (Toshniwal
et al., arXiv 2410.01560), read from files or from the hub.
"""

from dataclasses import dataclass
from operator import add, floordiv, itemgetter, mul, sub
from random import Random
from typing import Any

from gatelens.errors import GatelensError
from gatelens.tasks import Entry
from gatelens.tasks._prompts import Item, check_shots, prompt
from gatelens.tasks._readers import from_source, math_problem, word_problem
from gatelens.tasks._words import MEN, WOMEN
from gatelens.tasks.base import ResponseTask
from gatelens.tasks.build import response_task
from gatelens.tasks.draw import distinct, generator
from gatelens.tasks.tokens import Tokenizer

OPERATIONS = {"+": add, "-": sub, "*": mul, "/": floordiv}


@dataclass(frozen=True)
class Story:
    """A problem and its solution: {name}, {she} and {her} are a person, {a} to {d} numbers, {x} to {z} steps."""

    problem: str
    solution: str
    ranges: dict[str, tuple[int, int]]  # smallest and largest value of each drawn number
    steps: tuple[str, ...]  # such as "x = a + b"; the value of the last step is the answer


STORIES = (
    Story(
        "{name} has {a} apples and picks {b} more. How many apples does {she} have now?",
        "{name} has {x} apples.",
        {"a": (5, 60), "b": (3, 40)},
        ("x = a + b",),
    ),
    Story(
        "{name} had {a} stickers and gave {b} of them to a friend. How many stickers are left?",
        "There are {x} stickers left.",
        {"a": (20, 90), "b": (3, 19)},
        ("x = a - b",),
    ),
    Story(
        "A shelf holds {a} books. How many books do {b} such shelves hold?",
        "The shelves hold {x} books.",
        {"a": (6, 30), "b": (3, 9)},
        ("x = a * b",),
    ),
    Story(
        "{name} shares {a} candies equally among {b} children. How many candies does each child get?",
        "Each child gets {x} candies.",
        {"a": (12, 96), "b": (2, 9)},
        ("x = a / b",),
    ),
    Story(
        "{name} buys {a} pens for {b} dollars each and a notebook for {c} dollars. How much does {she} pay?",
        "The pens cost {x} dollars. With the notebook {she} pays {y} dollars.",
        {"a": (2, 9), "b": (2, 6), "c": (3, 12)},
        ("x = a * b", "y = x + c"),
    ),
    Story(
        "There are {a} children on a bus. At the first stop {b} get off and {c} get on. "
        "How many children are on the bus now?",
        "After {b} get off there are {x} children. After {c} get on there are {y} children.",
        {"a": (15, 40), "b": (2, 14), "c": (2, 15)},
        ("x = a - b", "y = x + c"),
    ),
    Story(
        "{name} reads {a} pages a day for {b} days. The book has {c} pages. How many pages are left?",
        "{name} reads {x} pages. That leaves {y} pages.",
        {"a": (8, 25), "b": (3, 9), "c": (90, 250)},
        ("x = a * b", "y = c - x"),
    ),
    Story(
        "A farmer has {a} hens, and each lays {b} eggs a week. The eggs are packed in boxes of {c}. "
        "How many boxes are filled in a week?",
        "The hens lay {x} eggs. That makes {y} boxes.",
        {"a": (6, 30), "b": (3, 6), "c": (6, 12)},
        ("x = a * b", "y = x / c"),
    ),
    Story(
        "{name} saves {a} dollars a week for {b} weeks and then spends {c} dollars. How much money is left?",
        "{name} saves {x} dollars. After spending {c} dollars there are {y} dollars left.",
        {"a": (5, 25), "b": (3, 10), "c": (8, 40)},
        ("x = a * b", "y = x - c"),
    ),
    Story(
        "A class has {a} girls and {b} boys. They form teams of {c}. How many teams are there?",
        "The class has {x} children. They form {y} teams.",
        {"a": (8, 20), "b": (8, 20), "c": (3, 6)},
        ("x = a + b", "y = x / c"),
    ),
    Story(
        "{name} walks {a} kilometers on Monday and {b} kilometers more on Tuesday than on Monday. "
        "How many kilometers does {she} walk in the two days?",
        "On Tuesday {she} walks {x} kilometers. In the two days {she} walks {y} kilometers.",
        {"a": (3, 15), "b": (2, 9)},
        ("x = a + b", "y = a + x"),
    ),
    Story(
        "A box of {a} cookies is shared by {b} friends, and {name} eats {c} of {her} share at once. "
        "How many cookies does {she} keep?",
        "Each friend gets {x} cookies. {name} keeps {y} cookies.",
        {"a": (24, 96), "b": (2, 6), "c": (1, 5)},
        ("x = a / b", "y = x - c"),
    ),
    Story(
        "A ticket for an adult costs {a} dollars and a ticket for a child {b} dollars. "
        "How much do {c} adults and {d} children pay?",
        "The adults pay {x} dollars and the children pay {y} dollars. Together they pay {z} dollars.",
        {"a": (9, 20), "b": (3, 8), "c": (2, 5), "d": (2, 9)},
        ("x = c * a", "y = d * b", "z = x + y"),
    ),
    Story(
        "{name} bakes {a} trays of {b} rolls each, sells {c} rolls and packs the rest in bags of {d}. "
        "How many bags does {she} need?",
        "{name} bakes {x} rolls. After the sale there are {y} rolls. That makes {z} bags.",
        {"a": (3, 9), "b": (8, 16), "c": (10, 40), "d": (3, 6)},
        ("x = a * b", "y = x - c", "z = y / d"),
    ),
    Story(
        "A tank holds {a} liters of water. Every day {b} liters are used and {c} liters are added. "
        "How many liters are in the tank after {d} days?",
        "Each day the tank loses {x} liters. In {d} days that is {y} liters. The tank then holds {z} liters.",
        {"a": (150, 400), "b": (20, 40), "c": (5, 18), "d": (3, 7)},
        ("x = b - c", "y = x * d", "z = a - y"),
    ),
    Story(
        "{name} is {a} years old. {her_capital} father is {b} times as old. How old will {her} father be in {c} years?",
        "The father is {x} years old. In {c} years he will be {y} years old.",
        {"a": (6, 14), "b": (3, 5), "c": (2, 9)},
        ("x = a * b", "y = x + c"),
    ),
)


def build(
    tokenizer: Tokenizer,
    n: int,
    seed: int,
    *,
    shots: int = 0,
    source: str | None = None,
    shortest: int | None = None,
) -> ResponseTask:
    """Word problems with worked solutions.

    Arguments:
        shots: worked examples before the query.
        source: a file, folder or hub id of GSM8K, SVAMP or OpenMathInstruct-2. The default is the built-in stories.
        shortest: draw only from this many of the shortest items of the source.
    """
    check_shots(shots)
    random = generator("math", seed)
    options: dict[str, Any] = {"shots": shots} if shots else {}
    if source is None:
        if shortest is not None:
            raise GatelensError("shortest is for a source: the built-in stories have no order.")

        def draw() -> tuple[str, str]:
            query, *worked = (draw_problem(random) for _ in range(1 + shots))
            return prompt(query, worked)

        return response_task(tokenizer, "math", seed, distinct(n, draw, key=itemgetter(0)), **options)
    options |= {"shortest": shortest} if shortest is not None else {}
    items = from_source(random, source, math_problem, n, shots=shots, shortest=shortest)
    return response_task(tokenizer, "math", seed, items, source=source, **options)


def draw_problem(random: Random) -> Item:
    """A random story as an item, with numbers that make every step a whole number above zero."""
    story = random.choice(STORIES)
    person = _person(random)
    while True:
        numbers = {name: random.randint(*bounds) for name, bounds in story.ranges.items()}
        worked = _work(story.steps, numbers)
        if worked is not None:
            texts, answer = worked
            problem = story.problem.format(**person, **numbers)
            solution = story.solution.format(**person, **{**numbers, **texts})
            return word_problem(problem, solution, answer)


def _work(steps: tuple[str, ...], numbers: dict[str, int]) -> tuple[dict[str, str], int] | None:
    """Each step written out, and the value of the last step; None if a step is not a whole number above zero."""
    values, texts = dict(numbers), {}
    for step in steps:
        name, _, left, sign, right = step.split()
        a, b = values[left], values[right]
        values[name] = OPERATIONS[sign](a, b)
        if values[name] < 1 or (sign == "/" and a % b):
            return None
        texts[name] = f"{a} {sign} {b} = {values[name]}"
    return texts, values[name]


def _person(random: Random) -> dict[str, str]:
    if random.random() < 0.5:
        return {"name": random.choice(WOMEN), "she": "she", "her": "her", "her_capital": "Her"}
    return {"name": random.choice(MEN), "she": "he", "her": "his", "her_capital": "His"}


TASK = Entry(
    build,
    "response",
    "Word problems: write a worked solution. Built-in stories, GSM8K, SVAMP or OpenMathInstruct-2.",
    (
        "Question: A shelf holds 12 books. How many books do 3 such shelves hold?\nAnswer:",
        " The shelves hold 12 * 3 = 36 books. The answer is 36.",
    ),
)
