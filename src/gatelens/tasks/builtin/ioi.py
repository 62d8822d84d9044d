"""Indirect object identification (IOI): two people are named, one of them acts again; the answer is the other one.

"After Mary and John arrived at the park, John handed a coin to" -> " Mary".
The behaviour is that of Wang et al., arXiv 2211.00593. IO is the indirect object (Mary) and S the subject (John), whose
two places are the token roles S1 and S2. Every name is a single token and follows a space, so that a name can be
replaced by any other name.
"""

from collections.abc import Callable, Sequence
from operator import attrgetter
from random import Random

from gatelens.tasks import Entry
from gatelens.tasks._words import NAMES
from gatelens.tasks.base import CircuitTask
from gatelens.tasks.build import circuit_task
from gatelens.tasks.draw import distinct, generator, others
from gatelens.tasks.token_roles import mark
from gatelens.tasks.tokens import Pair, Tokenizer, marked_pair, preferably_single, single_tokens

PLACES = ("library", "market", "museum", "park", "beach", "theater", "farm", "kitchen")
OBJECTS = ("book", "letter", "ticket", "camera", "coin", "sandwich", "map", "flower")

# {A} and {B} are the two people in either order (IO first: ABBA, S first: BABA); {S} is the subject again.
TEMPLATES = (
    "Soon after {A} and {B} arrived at the {place}, {S} handed a {object} to",
    "While {A} and {B} were waiting at the {place}, {S} offered a {object} to",
    "Last night {A} and {B} met at the {place}, where {S} gave a {object} to",
    "Since {A} and {B} were both at the {place}, {S} gave a {object} to",
    "As soon as {A} and {B} reached the {place}, {S} passed a {object} to",
    "On Monday {A} and {B} walked to the {place}. Later {S} gave a {object} to",
    "Today {A} and {B} spent hours at the {place}, and {S} lent a {object} to",
    "Because {A} and {B} loved the {place} so much, {S} bought a {object} for",
    "Shortly before {A} and {B} left the {place}, {S} proudly showed a {object} to",
    "Later, when {A} and {B} came to the {place}, {S} gave a {object} to",
    "This week {A} and {B} ate near the {place}, and {S} handed a {object} to",
    "One morning {A} and {B} drove to the {place}, and {S} sold a {object} to",
    "When {A} and {B} got bored at the {place}, {S} finally threw a {object} to",
    "The friends {A} and {B} found the {place} closed, so {S} returned a {object} to",
    "Although {A} and {B} argued at the {place}, {S} still gave a {object} to",
    "Once {A} and {B} were inside the {place}, {S} quietly passed a {object} to",
    "At noon {A} and {B} met at the {place}, and {S} promised a {object} to",
    "Long after {A} and {B} had left the {place}, {S} sent a {object} to",
)

# The names (IO, S, S again) of the corrupt prompt, given the names of the clean prompt.
CORRUPTIONS: dict[str, Callable[[Random, Sequence[str], str, str], Sequence[str]]] = {
    "names": lambda random, names, io, s: others(random, names, 3, exclude=(io, s)),
    "subject": lambda random, names, io, s: (io, s, others(random, names, 1, exclude=(io, s))[0]),
    "exchange": lambda random, names, io, s: (s, io, io),
}
NAMES_NEEDED = {"names": 5, "subject": 3, "exchange": 2}


def build(tokenizer: Tokenizer, n: int, seed: int, *, corruption: str = "names") -> CircuitTask:
    """IOI in single sentences. Metric: logit(IO) - logit(S).

    Arguments:
        corruption: what the corrupt prompt changes. "names" puts three new names in place of IO, S and the second S;
            "subject" puts a random name in place of the second S; "exchange" exchanges IO and S everywhere.
    """
    return ioi_task("ioi", tokenizer, n, seed, corruption, lambda random: random.choice(TEMPLATES))


def ioi_task(
    name: str, tokenizer: Tokenizer, n: int, seed: int, corruption: str, template: Callable[[Random], str]
) -> CircuitTask:
    """IOI with templates that `template` draws. A template contains {A}, {B}, {S}, {place} and {object}."""
    random = generator(name, seed)
    names = single_tokens(tokenizer, NAMES, "names", least=NAMES_NEEDED[corruption])
    places, objects = (preferably_single(tokenizer, words) for words in (PLACES, OBJECTS))

    def draw() -> Pair:
        io, s = random.sample(names, 2)
        corrupt_names = CORRUPTIONS[corruption](random, names, io, s)
        text = template(random)
        io_first = random.random() < 0.5
        place, object_ = mark(random.choice(places), "place"), mark(random.choice(objects), "object")

        def write(indirect_object: str, subject: str, again: str) -> str:
            people = mark(indirect_object, "IO"), mark(subject, "S1", following="S1+1")
            a, b = people if io_first else people[::-1]
            return text.format(A=a, B=b, S=mark(again, "S2"), place=place, object=object_)

        first_sentence = text.partition(".")[0]
        return marked_pair(write(io, s, s), write(*corrupt_names), (f" {io}",), (f" {s}",), first_sentence)

    return circuit_task(tokenizer, name, seed, distinct(n, draw, key=attrgetter("clean")), corruption=corruption)


TASK = Entry(
    build,
    "circuit",
    "Indirect object identification: two people are named and one acts again; name the other one.",
    ("Soon after Mary and John arrived at the park, John handed a coin to", " Mary"),
    choices={"corruption": tuple(CORRUPTIONS)},
)
