'''Docstring: a Python method documents its arguments in order; the answer is the next argument to document.

    def connect(self, port, host, name, size, mode, user):
        """open remote record

        :param port: old value
        :param host: main part
        :param name: next line
        :param

-> " size". The behaviour is that of Heimersheim and Janiak (2023), "A circuit for Python docstrings in a 4-layer
attention-only transformer". A method has six arguments besides `self`, of which three are documented. Arguments and
all other words are single tokens after a space.
'''

from dataclasses import replace
from operator import attrgetter
from random import Random
from typing import Any

from gatelens.tasks import Entry
from gatelens.tasks._words import words
from gatelens.tasks.base import CircuitTask
from gatelens.tasks.build import circuit_task
from gatelens.tasks.draw import distinct, generator, others
from gatelens.tasks.token_roles import mark
from gatelens.tasks.tokens import Pair, Tokenizer, marked_pair, single_tokens

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
    {tag}'''
# What stands before an argument in the docstring; the first one is used unless the option `templates` is "several".
TAGS = (":param", "@param", ":arg", "-")
CORRUPTIONS = ("both", "definition", "docstring", "answer")
# The token roles of the arguments, in order: in the definition, and in the docstring. The answer follows, in the
# definition, the argument that the docstring documents last.
DEFINED_ROLES = ("def earlier", "def earlier", "def before answer", "def answer", "def later", "def later")
DOCUMENTED_ROLES = ("doc earlier", "doc earlier", "doc last")


def build(
    tokenizer: Tokenizer, n: int, seed: int, *, corruption: str = "both", templates: str = "one", target: str = "metric"
) -> CircuitTask:
    """The argument to document next.

    Metric: the logit of the right argument minus the largest logit of the other five arguments.

    Arguments:
        corruption: where the corrupt prompt has other, random argument names: in the definition and, independently, in
            the docstring ("both"), in the definition only ("definition"), in the docstring only ("docstring"), or only
            in place of the answer in the definition ("answer").
        templates: "one" writes `:param` before every argument; "several" draws one of four ways for each prompt.
        target: what methods that use gradients differentiate: the metric, or the logit of the right argument minus the
            "mean" logit of the others. The effect of circuits is measured by the metric in both cases.
    """
    random = generator("docstring", seed)
    names = single_tokens(tokenizer, ARGUMENTS, "argument names", least=20)
    plain_words = single_tokens(tokenizer, WORDS, "words", least=10)

    def draw() -> Pair:
        arguments = random.sample(names, 6)
        method, summary = random.choice(METHODS), random.sample(plain_words, 3)
        notes = [random.sample(plain_words, 2) for _ in range(DOCUMENTED)]
        defined, documented = _corrupt(random, names, arguments, corruption)
        tag = random.choice(TAGS) if templates == "several" else TAGS[0]
        clean, corrupt = (
            _write(tag, method, in_definition, summary, in_docstring, notes)
            for in_definition, in_docstring in ((arguments, arguments[:DOCUMENTED]), (defined, documented))
        )
        answer = arguments[DOCUMENTED]
        wrong = tuple(f" {name}" for name in arguments if name != answer)
        return marked_pair(clean, corrupt, (f" {answer}",), wrong, tag)

    added = {"templates": (templates, "one"), "target": (target, "metric")}
    options: dict[str, Any] = {"corruption": corruption}
    options |= {name: value for name, (value, default) in added.items() if value != default}
    task = circuit_task(tokenizer, "docstring", seed, distinct(n, draw, key=attrgetter("clean")), **options)
    return replace(task, target=target)  # type: ignore[arg-type]


def _corrupt(random: Random, names: list[str], arguments: list[str], corruption: str) -> tuple[list[str], list[str]]:
    """The argument names of the corrupt prompt: in the definition, and in the docstring."""
    fresh = others(random, names, len(arguments) + DOCUMENTED, exclude=arguments)
    defined, documented = list(arguments), arguments[:DOCUMENTED]
    if corruption in ("both", "definition"):
        defined = fresh[: len(arguments)]
    if corruption in ("both", "docstring"):
        documented = fresh[len(arguments) :]
    if corruption == "answer":
        defined[DOCUMENTED] = fresh[0]
    return defined, documented


def _write(
    tag: str, method: str, defined: list[str], summary: list[str], documented: list[str], notes: list[list[str]]
) -> str:
    """The prompt: the definition, the summary, the documented arguments with their notes, and an open `:param`."""
    in_definition, in_docstring = (
        [mark(name, role) for name, role in zip(names, roles, strict=True)]
        for names, roles in ((defined, DEFINED_ROLES), (documented, DOCUMENTED_ROLES))
    )
    lines = [f"    {tag} {name}: {' '.join(words)}" for name, words in zip(in_docstring, notes, strict=True)]
    return TEMPLATE.format(
        method=method,
        arguments=", ".join(in_definition),
        summary=" ".join(summary),
        documented="\n".join(lines),
        tag=tag,
    )


TASK = Entry(
    build,
    "circuit",
    "A Python docstring documents the arguments in order: give the next argument.",
    ('def load(self, port, host, name, size, mode, user): """... :param name: old value :param', " size"),
    choices={"corruption": CORRUPTIONS, "templates": ("one", "several"), "target": ("metric", "mean")},
)
