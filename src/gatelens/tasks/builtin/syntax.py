"""Syntax: an instruction, one worked example and a query; the response is the right form of the query.

There are five kinds: past tense, plural, subject-verb agreement, question and negation. With `source`, the sentences
are those of BLiMP (Warstadt et al., arXiv 1912.00582), read from a file or from the hub.
"""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import cycle
from operator import itemgetter
from random import Random

from gatelens.tasks import Entry
from gatelens.tasks._readers import blimp, from_source
from gatelens.tasks._words import NOUNS, VERBS, past, third_person
from gatelens.tasks.base import ResponseTask, response_task
from gatelens.tasks.draw import distinct, generator
from gatelens.tasks.tokens import Tokenizer

# Subjects that take a verb with -s, and subjects that take a verb without it.
SINGULAR = ("the boy", "the girl", "the teacher", "the old man", "my sister", "our neighbor", "the doctor", "she", "he")
PLURAL = ("the boys", "the girls", "the teachers", "the old men", "my sisters", "our neighbors", "they", "we", "you")
# A verb and the rest of the sentence, which fit every subject.
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
    """One kind of query: its instruction, the labels of query and response, and a function that draws both."""

    instruction: str
    query_label: str
    response_label: str
    draw: Callable[[Random], tuple[str, str]]  # -> query, response


def build(
    tokenizer: Tokenizer, n: int, seed: int, *, kind: str | None = None, source: str | None = None
) -> ResponseTask:
    """The right form of a word or sentence.

    Arguments:
        kind: "past", "plural", "agreement", "question" or "negation". The default is all kinds in turn.
        source: a file or hub id of BLiMP. The default is the built-in sentences.
    """
    random = generator("syntax", seed)
    if source is not None:
        return response_task(tokenizer, "syntax", seed, from_source(random, source, blimp, n), source=source)
    kinds = cycle(KINDS.values() if kind is None else [KINDS[kind]])
    items = distinct(n, lambda: _ask(random, next(kinds)), key=itemgetter(0))
    return response_task(tokenizer, "syntax", seed, items, kind=kind)


def _ask(random: Random, kind: Kind) -> tuple[str, str]:
    """The prompt and the response. The worked example is never the query itself."""
    query, response = kind.draw(random)
    example, worked = kind.draw(random)
    while example == query:
        example, worked = kind.draw(random)
    lines = (
        kind.instruction,
        f"{kind.query_label}: {example}",
        f"{kind.response_label}: {worked}",
        f"{kind.query_label}: {query}",
        f"{kind.response_label}:",
    )
    return "\n".join(lines), f" {response}"


def _subject(random: Random) -> tuple[str, bool]:
    """A subject, and whether it is singular."""
    singular = random.random() < 0.5
    return random.choice(SINGULAR if singular else PLURAL), singular


def _agreement(random: Random) -> tuple[str, str]:
    """A subject with an infinitive, and the sentence in which they agree."""
    (subject, singular), (verb, rest) = _subject(random), random.choice(PHRASES)
    return f"{subject} (to {verb} {rest})", f"{subject} {third_person(verb) if singular else verb} {rest}"


def _sentence(random: Random) -> tuple[str, str, str]:
    """A sentence as a statement, a question and a negation: with an auxiliary, in the present or in the past tense."""
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


TASK = Entry(
    build,
    "response",
    "Past tense, plural, agreement, question or negation, after an instruction and one example. Built-in or BLiMP.",
    ("Give the past tense of the verb.\nVerb: sing\nPast tense: sang\nVerb: go\nPast tense:", " went"),
    choices={"kind": tuple(KINDS)},
)
