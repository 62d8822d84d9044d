"""Syntax: an instruction, one worked example and a query; the response is the right form of the query.

The kinds are those of three tasks of BIG-Bench (Srivastava et al., arXiv 2206.04615): its linguistic mappings (past
tense, plural, pronoun replacement, question formation, negation), tense, and subject-verb agreement. With `source`, the
sentences are those of BIG-Bench or of BLiMP (Warstadt et al., arXiv 1912.00582), read from a file or from the hub.
"""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import cycle
from operator import itemgetter
from random import Random

from gatelens.tasks import Entry
from gatelens.tasks._prompts import Item, check_shots, prompt
from gatelens.tasks._readers import from_source, sentences
from gatelens.tasks._words import NOUNS, VERBS, past, third_person
from gatelens.tasks.base import ResponseTask
from gatelens.tasks.build import response_task
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
PRONOUNS = {
    "the boy": "he",
    "the old man": "he",
    "my brother": "he",
    "the girl": "she",
    "the queen": "she",
    "my sister": "she",
    "the boys": "they",
    "the girls": "they",
    "the teachers": "they",
    "our neighbors": "they",
}
AUXILIARIES = {"can": "cannot", "will": "will not", "should": "should not", "must": "must not"}


@dataclass(frozen=True)
class Kind:
    """One kind of query: its instruction, the labels of query and response, and a function that draws both."""

    instruction: str
    query_label: str
    response_label: str
    draw: Callable[[Random], tuple[str, str]]  # -> query, response


def build(
    tokenizer: Tokenizer, n: int, seed: int, *, kind: str | None = None, shots: int = 1, source: str | None = None
) -> ResponseTask:
    """The right form of a word or sentence.

    Arguments:
        kind: a name of `KINDS`. The default is all kinds in turn.
        shots: worked examples before the query; sentences of BLiMP have none.
        source: a file or hub id of BIG-Bench or BLiMP. The default is the built-in sentences.
    """
    check_shots(shots)
    random = generator("syntax", seed)
    options = {"shots": shots} if shots != 1 else {}
    if source is not None:
        prompts = from_source(random, source, sentences, n, shots=shots)
        return response_task(tokenizer, "syntax", seed, prompts, source=source, **options)
    kinds = cycle(KINDS.values() if kind is None else [KINDS[kind]])
    prompts = distinct(n, lambda: prompt(*_ask(random, next(kinds), shots)), key=itemgetter(0))
    return response_task(tokenizer, "syntax", seed, prompts, kind=kind, **options)


def _ask(random: Random, kind: Kind, shots: int) -> tuple[Item, list[Item]]:
    """A query and worked examples of a kind, all of them different."""
    drawn: dict[str, Item] = {}
    while len(drawn) <= shots:
        query, response = kind.draw(random)
        lines = f"{kind.query_label}: {query}\n{kind.response_label}:"
        drawn.setdefault(lines, Item(lines, f" {response}", kind.instruction))
    asked, *worked = drawn.values()
    return asked, worked


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


def _pronoun(random: Random) -> tuple[str, str]:
    """A sentence that names its subject twice, and the sentence with a pronoun in the second place."""
    subject, pronoun = random.choice(list(PRONOUNS.items()))
    (first, rest), (second, end) = random.sample(PHRASES, 2)
    if pronoun != "they":
        first, second = third_person(first), third_person(second)
    sentence = _capital(f"{subject} {first} {rest}, and then {{}} {second} {end}.")
    return sentence.format(subject), sentence.format(pronoun)


def _tense(random: Random) -> tuple[str, str]:
    """A sentence in one tense with the name of another tense, and the sentence in this tense."""
    (subject, singular), (verb, rest) = _subject(random), random.choice(PHRASES)
    forms = {
        "present": third_person(verb) if singular else verb,
        "past": past(verb),
        "future": f"will {verb}",
    }
    given, asked = random.sample(list(forms), 2)
    said, wanted = (_capital(f"{subject} {forms[tense]} {rest}.") for tense in (given, asked))
    return f"{said} ({asked})", wanted


KINDS = {
    "past": Kind("Give the past tense of the verb.", "Verb", "Past tense", lambda r: r.choice(list(VERBS.items()))),
    "plural": Kind("Give the plural of the noun.", "Noun", "Plural", lambda r: r.choice(list(NOUNS.items()))),
    "agreement": Kind("Make the verb agree with its subject.", "Words", "Sentence", _agreement),
    "question": Kind("Turn the statement into a question.", "Statement", "Question", _question),
    "negation": Kind("Make the statement negative.", "Statement", "Negative", _negation),
    "pronoun": Kind("Replace the repeated subject by a pronoun.", "Sentence", "With a pronoun", _pronoun),
    "tense": Kind("Write the sentence in the given tense.", "Sentence", "Changed", _tense),
}


TASK = Entry(
    build,
    "response",
    "Past tense, plural, agreement and so on, after an instruction and one example. Built-in, BIG-Bench or BLiMP.",
    ("Give the past tense of the verb.\nVerb: sing\nPast tense: sang\nVerb: go\nPast tense:", " went"),
    choices={"kind": tuple(KINDS)},
)
