"""Syntax: an instruction, one worked example and a query; the response is the query's right form.

Five kinds: past tense, plural, subject-verb agreement, question formation and negation. Read from a file or the hub
instead (`source`), the set is BLiMP (Warstadt et al., arXiv 1912.00582): see `readers`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import cycle
from operator import itemgetter
from random import Random

from gatelens.tasks._forms import NOUNS, VERBS, past, third_person
from gatelens.tasks._readers import blimp, from_source
from gatelens.tasks.base import ResponseTask, response_task
from gatelens.tasks.draw import choose, distinct, generator
from gatelens.tasks.tokens import Tokenizer

# Subjects that take the verb with -s, and those that take it without.
SINGULAR = ("the boy", "the girl", "the teacher", "the old man", "my sister", "our neighbor", "the doctor", "she", "he")
PLURAL = ("the boys", "the girls", "the teachers", "the old men", "my sisters", "our neighbors", "they", "we", "you")
# A verb and what follows it: any subject can do it.
PHRASES = tuple(
    phrase.split(" ", 1)
    for phrase in (
        "open the door",
        "drink cold water",
        "play the piano",
        "walk to school",
        "eat an apple",
        "write a story",
        "visit the museum",
        "clean the kitchen",
        "sing a song",
        "drive a car",
        "build a house",
        "watch the birds",
        "carry the bag",
        "study the map",
        "help a friend",
        "catch the train",
        "buy fresh bread",
        "feed the horses",
        "climb the hill",
    )
)
AUXILIARIES = {"can": "cannot", "will": "will not", "should": "should not", "must": "must not"}


@dataclass(frozen=True)
class Kind:
    """One kind of question: its instruction, the names of query and response, and how to draw the two."""

    instruction: str
    asked: str
    given: str
    draw: Callable[[Random], tuple[str, str]]


def build(
    tokenizer: Tokenizer, n: int, seed: int, *, kind: str | None = None, source: str | None = None
) -> ResponseTask:
    """Syntax, all kinds in turn or one `kind` (past, plural, agreement, question, negation); or BLiMP from `source`."""
    random = generator("syntax", seed)
    if source is not None:
        return response_task(tokenizer, "syntax", seed, from_source(random, source, blimp, n), source=source)
    if kind is not None:
        choose("kind", kind, tuple(KINDS))
    kinds = cycle(KINDS.values() if kind is None else [KINDS[kind]])
    items = distinct(n, lambda: _ask(random, next(kinds)), key=itemgetter(0))
    return response_task(tokenizer, "syntax", seed, items, kind=kind)


def _ask(random: Random, kind: Kind) -> tuple[str, str]:
    """Prompt and response; the worked example is never the query itself."""
    query, response = kind.draw(random)
    example, worked = kind.draw(random)
    while example == query:
        example, worked = kind.draw(random)
    lines = [kind.instruction, f"{kind.asked}: {example}", f"{kind.given}: {worked}", f"{kind.asked}: {query}"]
    return "\n".join([*lines, f"{kind.given}:"]), f" {response}"


def _subject(random: Random) -> tuple[str, bool]:
    """A subject, and whether it is singular."""
    singular = random.random() < 0.5
    return random.choice(SINGULAR if singular else PLURAL), singular


def _agreement(random: Random) -> tuple[str, str]:
    (subject, singular), (verb, rest) = _subject(random), random.choice(PHRASES)
    return f"{subject} (to {verb} {rest})", f"{subject} {third_person(verb) if singular else verb} {rest}"


def _sentence(random: Random) -> tuple[str, str, str]:
    """A sentence as statement, question and negation: with an auxiliary, in the present or in the past tense."""
    (subject, singular), (verb, rest) = _subject(random), random.choice(PHRASES)
    form = random.choice((*AUXILIARIES, "present", "past"))
    if form in AUXILIARIES:
        said, helper, negated = f"{form} {verb}", form, AUXILIARIES[form]
    elif form == "past":
        said, helper, negated = past(verb), "did", "did not"
    else:
        said, helper = (third_person(verb), "does") if singular else (verb, "do")
        negated = f"{helper} not"
    statement = f"{subject} {said} {rest}."
    question = f"{helper} {subject} {verb} {rest}?"
    negation = f"{subject} {negated} {verb} {rest}."
    return _capital(statement), _capital(question), _capital(negation)


def _capital(sentence: str) -> str:
    return sentence[0].upper() + sentence[1:]


def _question(random: Random) -> tuple[str, str]:
    statement, question, _ = _sentence(random)
    return statement, question


def _negation(random: Random) -> tuple[str, str]:
    statement, _, negation = _sentence(random)
    return statement, negation


KINDS = {
    "past": Kind("Give the past tense of the verb.", "Verb", "Past tense", lambda r: r.choice(list(VERBS.items()))),
    "plural": Kind("Give the plural of the noun.", "Noun", "Plural", lambda r: r.choice(list(NOUNS.items()))),
    "agreement": Kind("Make the verb agree with its subject.", "Words", "Sentence", _agreement),
    "question": Kind("Turn the statement into a question.", "Statement", "Question", _question),
    "negation": Kind("Make the statement negative.", "Statement", "Negative", _negation),
}
