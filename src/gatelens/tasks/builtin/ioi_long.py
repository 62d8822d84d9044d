"""Indirect object identification over a longer context: the names are far from the question.

A story names the two people, goes on for one or two sentences that name nobody, and ends with the question. It has 35
to 60 tokens. Names, metric and corruptions are those of the task `ioi`.
"""

from random import Random

from gatelens.tasks import Entry
from gatelens.tasks.base import CircuitTask
from gatelens.tasks.builtin.ioi import CORRUPTIONS, ioi_task
from gatelens.tasks.tokens import Tokenizer

# All openings have the same number of tokens with most tokenizers, and so have all distractors and all questions. The
# stories then have few different lengths, and fall into few buckets.
OPENINGS = (
    "Early on Saturday {A} and {B} met in front of the {place} to make plans.",
    "At the start of summer {A} and {B} spent a week close to the {place}.",
    "Right after breakfast {A} and {B} took the first bus to the {place} and waited.",
    "Some years ago {A} and {B} were close neighbors and often went to the {place}.",
    "Late in the afternoon {A} and {B} found a very quiet seat near the {place}.",
    "For their first trip {A} and {B} chose a small town with a famous {place}.",
    "After a long drive {A} and {B} finally reached the {place} just outside the city.",
    "On a bright spring day {A} and {B} went out to see the new {place}.",
)

DISTRACTORS = (
    "The weather had been cold all week, but it was dry.",
    "A street band was playing an old song, and people listened.",
    "Nobody seemed to be in a hurry, and it was quiet.",
    "There was a long line at the door that moved very slowly.",
    "The food was cheap and fresh, and everything was very good.",
    "Some children were playing with a ball, and a dog watched.",
    "The wind was getting stronger, and the sky had turned dark.",
    "The old clock on the wall had stopped exactly one hour ago.",
    "It was louder than usual because of a rather large school visit.",
    "A few other visitors were taking pictures of the tall trees nearby.",
)

QUESTIONS = (
    "Before going home again, {S} gave a {object} to",
    "At the very end, {S} handed a {object} to",
    "Not very much later, {S} offered a {object} to",
    "Then, without thinking, {S} passed a {object} to",
    "As a nice surprise, {S} bought a {object} for",
    "When everyone was tired, {S} gave a {object} to",
    "To say thank you, {S} gave a {object} to",
    "Later on that evening, {S} showed a {object} to",
)


def build(tokenizer: Tokenizer, n: int, seed: int, *, corruption: str = "names") -> CircuitTask:
    """IOI in stories of three or four sentences. Metric: logit(IO) - logit(S). `corruption`: see `ioi.build`."""
    return ioi_task("ioi-long", tokenizer, n, seed, corruption, story)


def story(random: Random) -> str:
    """Draw a template: an opening, one or two distractors, and a question."""
    between = random.sample(DISTRACTORS, random.choice((1, 2)))
    return " ".join([random.choice(OPENINGS), *between, random.choice(QUESTIONS)])


TASK = Entry(
    build,
    "circuit",
    "The task ioi over 35 to 60 tokens, with sentences in between that name nobody.",
    ("Some years ago Mary and John were close neighbors ... To say thank you, John gave a map to", " Mary"),
    choices={"corruption": tuple(CORRUPTIONS)},
)
