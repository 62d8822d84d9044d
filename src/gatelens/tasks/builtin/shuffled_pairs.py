"""Word pairs in context as a circuit task: which heads carry the relation that the examples show?

The corrupt prompt has the same words, but the answers of its examples are shuffled, so that they show no relation. Such
pairs of prompts are those of function vectors (Todd et al., arXiv 2310.15213), which Nam et al., arXiv 2505.13737,
compare head gating with. `word-pairs` has the same relations as a response task.
"""

from operator import attrgetter
from random import Random

from gatelens.errors import GatelensError
from gatelens.tasks import Entry
from gatelens.tasks.base import CircuitTask
from gatelens.tasks.build import circuit_task
from gatelens.tasks.builtin.word_pairs import RELATIONS
from gatelens.tasks.draw import distinct, generator
from gatelens.tasks.token_roles import mark
from gatelens.tasks.tokens import Pair, Tokenizer, marked_pair, single_tokens

SHOTS = 10


def build(tokenizer: Tokenizer, n: int, seed: int, *, relation: str = "antonym", shots: int = SHOTS) -> CircuitTask:
    """The word that stands in the relation of the examples to the last word.

    Metric: the logit of the answer minus the largest logit of the answers of the examples. Only pairs whose answer is
    one token are used.

    Arguments:
        relation: a name of `RELATIONS`.
        shots: examples before the query, at least 2.
    """
    if not isinstance(shots, int) or shots < 2:
        raise GatelensError(f"shots is {shots}: it must be a whole number of at least 2, because answers are shuffled.")
    random = generator(f"shuffled-pairs {relation}", seed)
    answers = RELATIONS[relation]
    single = {*single_tokens(tokenizer, [*answers.values()], "answers", least=shots + 1)}
    # Each answer once: two words may have the same one.
    words = list({answer: word for word, answer in answers.items() if answer in single}.values())
    if len(words) <= shots:
        raise GatelensError(f"{relation} has {len(words)} pairs for {shots} examples and a query: ask for fewer shots.")

    def draw() -> Pair:
        *shown, asked = random.sample(words, shots + 1)
        right = [answers[word] for word in shown]
        clean, corrupt = (_prompt(shown, said, asked) for said in (right, _shuffled(random, right)))
        return marked_pair(clean, corrupt, (f" {answers[asked]}",), tuple(f" {answer}" for answer in right))

    pairs = distinct(n, draw, key=attrgetter("clean"))
    return circuit_task(tokenizer, "shuffled-pairs", seed, pairs, relation=relation, shots=shots)


def _shuffled(random: Random, answers: list[str]) -> list[str]:
    """The answers in another order, in which none is at its place."""
    order = random.sample(range(len(answers)), len(answers))
    # In a random cycle of places, each place gets the answer of the next one.
    moved = dict(zip(order, [*order[1:], order[0]], strict=True))
    return [answers[moved[place]] for place in range(len(answers))]


def _prompt(words: list[str], answers: list[str], asked: str) -> str:
    lines = [f"{mark(word, 'word')} ->{mark(f' {said}', 'answer')}" for word, said in zip(words, answers, strict=True)]
    return "\n".join([*lines, f"{mark(asked, 'asked word')} ->"])


TASK = Entry(
    build,
    "circuit",
    "Ten word pairs show a relation: give the word for an eleventh. The corrupt prompt has the answers shuffled.",
    ("big -> small\nfast -> slow\nold -> young\nhot ->", " cold"),
    choices={"relation": tuple(RELATIONS)},
)
