'''Docstring: a Python method documents its arguments in order; the answer is the argument to be documented next.

    def connect(self, port, host, name, size, mode, user):
        """open remote record

        :param port: old value
        :param host: main part
        :param name: next line
        :param

-> " size". The behaviour is that of Heimersheim and Janiak (2023), "A circuit for Python docstrings in a 4-layer
attention-only transformer". Arguments (six beside `self`) and all other words are single tokens after a space.
'''

from operator import attrgetter
from random import Random

from gatelens.tasks._words import words
from gatelens.tasks.base import CircuitTask, circuit_task
from gatelens.tasks.draw import choose, distinct, generator, others
from gatelens.tasks.tokens import Pair, Tokenizer, single_tokens

ARGUMENTS = words(
    """
    port host name size mode user path file line key value index count width height color table column row
    start end source target input output label title message status version order group list date time year price
    address country city phone email image page link text token model data node parent child root tree graph edge
    point angle speed weight depth level scale offset length limit rate step score state event action filter query
    result rule test client server session account role option style theme format
    """
)

WORDS = words(
    """
    old new main next last first local global open closed remote simple complex small large fast slow public
    private common special final early late current given single double full empty part piece side field area
    space place group unit set range type kind form case copy note sign block frame store stock record report
    review change check search match run call load save read write send return update create
    """
)

METHODS = words("connect load save update create build process handle render parse merge resolve")

DOCUMENTED = 3
TEMPLATE = '''def {method}(self, {arguments}):
    """{summary}

{documented}
    :param'''
CORRUPTIONS = ("both", "definition", "docstring", "answer")


def build(tokenizer: Tokenizer, n: int, seed: int, *, corruption: str = "both") -> CircuitTask:
    """Docstring. Metric: logit of the right name minus the largest logit of the other names in the prompt.

    `corruption` puts random names in place of the arguments in the definition and, independently, in the docstring
    ("both"), in one of them only ("definition", "docstring"), or in place of the answer in the definition ("answer").
    """
    choose("corruption", corruption, CORRUPTIONS)
    random = generator("docstring", seed)
    names = single_tokens(tokenizer, ARGUMENTS, "argument names", least=20)
    plain = single_tokens(tokenizer, WORDS, "words", least=10)

    def draw() -> Pair:
        arguments = random.sample(names, 6)
        method, summary = random.choice(METHODS), random.sample(plain, 3)
        notes = [random.sample(plain, 2) for _ in range(DOCUMENTED)]
        defined, documented = _corrupt(random, names, arguments, corruption)
        clean, corrupt = (
            _write(method, a, summary, d, notes)
            for a, d in ((arguments, arguments[:DOCUMENTED]), (defined, documented))
        )
        answer = arguments[DOCUMENTED]
        return Pair(clean, corrupt, (f" {answer}",), tuple(f" {name}" for name in arguments if name != answer))

    return circuit_task(tokenizer, "docstring", seed, distinct(n, draw, key=attrgetter("clean")), corruption=corruption)


def _corrupt(random: Random, names: list[str], arguments: list[str], corruption: str) -> tuple[list[str], list[str]]:
    """The names of the corrupt prompt, in the definition and in the docstring."""
    fresh = others(random, names, len(arguments) + DOCUMENTED, but=arguments)
    defined, documented = list(arguments), arguments[:DOCUMENTED]
    if corruption in ("both", "definition"):
        defined = fresh[: len(arguments)]
    if corruption in ("both", "docstring"):
        documented = fresh[len(arguments) :]
    if corruption == "answer":
        defined[DOCUMENTED] = fresh[0]
    return defined, documented


def _write(method: str, defined: list[str], summary: list[str], documented: list[str], notes: list[list[str]]) -> str:
    lines = [f"    :param {name}: {' '.join(words)}" for name, words in zip(documented, notes, strict=True)]
    return TEMPLATE.format(
        method=method, arguments=", ".join(defined), summary=" ".join(summary), documented="\n".join(lines)
    )
