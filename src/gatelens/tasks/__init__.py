"""Tasks: the behaviours to explain, for any tokenizer.

`task` makes one by name, or from a file of one's own. A circuit task has aligned clean and corrupt prompts and a
metric; a response task has prompts with a target response. Builders are imported when they are used.
"""

import difflib
import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

from gatelens.errors import GatelensError

if TYPE_CHECKING:
    from gatelens.tasks.base import CircuitTask, ResponseTask

__all__ = ["TASKS", "Entry", "HasTokenizer", "contrast", "from_spec", "task"]

DEFAULT_N = 64


class HasTokenizer(Protocol):
    """Anything with a Hugging Face tokenizer: a `gatelens.Model`, for one."""

    @property
    def tokenizer(self) -> Any: ...


@dataclass(frozen=True)
class Entry:
    """One built-in task: where its builder is, what kind of task it makes, and how to tell a user what it is."""

    builder: str  # module:function inside gatelens.tasks.builtin
    kind: Literal["circuit", "response"]
    description: str
    example: tuple[str, str]  # a prompt and its answer

    def load(self) -> Any:
        """The builder: (tokenizer, n, seed, *, options) -> task."""
        module, function = self.builder.split(":")
        return getattr(import_module(f"gatelens.tasks.builtin.{module}"), function)

    def options(self) -> tuple[str, ...]:
        parameters = inspect.signature(self.load()).parameters.values()
        return tuple(parameter.name for parameter in parameters if parameter.kind is parameter.KEYWORD_ONLY)


TASKS: dict[str, Entry] = {
    "ioi": Entry(
        "ioi:build",
        "circuit",
        "indirect object identification: two people are named, one acts again, the answer is the other",
        ("Soon after Mary and John arrived at the park, John handed a coin to", " Mary"),
    ),
    "ioi-long": Entry(
        "ioi_long:build",
        "circuit",
        "the same over 35 to 60 tokens, with sentences in between that name nobody",
        ("Some years ago Mary and John were close neighbors ... To say thank you, John gave a map to", " Mary"),
    ),
    "greater-than": Entry(
        "greater_than:build",
        "circuit",
        "an event ends after it has begun: years above the first against the others",
        ("The war lasted from the year 1739 to the year 17", "40 to 99"),
    ),
    "docstring": Entry(
        "docstring:build",
        "circuit",
        "a Python docstring documents the arguments in order: which comes next",
        ('def load(self, port, host, name, size, mode, user): """... :param name: old value :param', " size"),
    ),
    "gender-pronoun": Entry(
        "agreement:gender_pronoun",
        "circuit",
        "a tag question takes the pronoun that fits the name",
        ("Everyone knows that Mary is a good friend, isn't", " she"),
    ),
    "subject-verb": Entry(
        "agreement:subject_verb",
        "circuit",
        "a verb agrees with its subject, not with the nearest noun",
        ("The keys near the door", " are"),
    ),
    "induction": Entry(
        "induction:build",
        "circuit",
        "random tokens are repeated: what came next the first time; works for any model",
        (" lake moon tree salt lake moon tree", " salt"),
    ),
    "colored-objects": Entry(
        "colored_objects:build",
        "circuit",
        "three things of different colors and a question about one of them",
        ("There is a red pen, a blue cup and a green book on the table. The cup is", " blue"),
    ),
    "addition": Entry(
        "addition:build",
        "circuit",
        "two-digit addition, one digit of the sum at a time",
        ("51 + 11 = 62\n37 + 45 = ", "8"),
    ),
    "syntax": Entry(
        "syntax:build",
        "response",
        "past tense, plural, agreement, questions and negation by instruction and example; or BLiMP",
        ("Give the past tense of the verb.\nVerb: sing\nPast tense: sang\nVerb: go\nPast tense:", " went"),
    ),
    "common-sense": Entry(
        "common_sense:build",
        "response",
        "five-way multiple choice, the response is the letter; or CommonsenseQA",
        (
            "Choose the right answer.\nQuestion: What barks?\nA. cow\nB. dog\nC. fish\nD. bird\nE. horse\nAnswer:",
            " B",
        ),
    ),
    "math": Entry(
        "word_problems:build",
        "response",
        "word problems with a worked solution; or GSM8K, SVAMP",
        (
            "Question: A shelf holds 12 books. How many books do 3 such shelves hold?\nAnswer:",
            " The shelves hold 12 * 3 = 36 books. The answer is 36.",
        ),
    ),
    "aba-abb": Entry(
        "patterns:build",
        "response",
        "the pattern A^B^A or A^B^B of random tokens, shown by four examples",
        ("lake^moon^lake\nsalt^door^salt\ncup^road^cup\nhill^bird^hill\ntree^ring^", "tree"),
    ),
    "word-pairs": Entry(
        "word_pairs:build",
        "response",
        "opposites, capitals, past tenses, plurals, asked by instruction or by examples; or function-vector pairs",
        ("Give the opposite of the word.\nhot ->", " cold"),
    ),
}


def task(
    name: str | Path, model: HasTokenizer, n: int | None = None, seed: int = 0, **options: Any
) -> "CircuitTask | ResponseTask":
    """The task of this name, or of one's own .jsonl file, for the model's tokenizer.

    n prompts, 64 unless said (a file: all its lines); the same seed gives the same prompts on every machine. `options`
    are the task's own, see docs/tasks.md.
    """
    if n is not None and n < 1:
        raise GatelensError(f"a task has at least one prompt, so n={n} makes none.")
    if str(name) in TASKS:
        entry = TASKS[str(name)]
        _check_options(str(name), options, entry.options())
        try:
            made: CircuitTask | ResponseTask = entry.load()(
                model.tokenizer, DEFAULT_N if n is None else n, seed, **options
            )
        except (TypeError, ValueError) as error:
            if not options:
                raise
            given = ", ".join(f"{key}={value!r}" for key, value in options.items())
            raise GatelensError(f"the task {name} cannot be made with {given}: {error}. See docs/tasks.md.") from error
        return made
    path = Path(name)
    if path.is_file() or path.suffix == ".jsonl":
        from gatelens.tasks._own import read

        _check_options(str(name), options, ("skip_bad",))
        return read(model.tokenizer, str(name), n, seed, context=getattr(model, "context", None), **options)
    close = difflib.get_close_matches(str(name), TASKS, 1)
    hint = f"Did you mean '{close[0]}'? " if close else ""
    raise GatelensError(
        f"no task '{name}': tasks are {', '.join(sorted(TASKS))}, or a .jsonl file of your own. "
        f"{hint}`gatelens tasks` lists them."
    )


def from_spec(spec: Mapping[str, Any], model: HasTokenizer) -> "CircuitTask | ResponseTask":
    """The task that `task.spec()` describes."""
    return task(spec["name"], model, n=spec["n"], seed=spec["seed"], **spec["options"])


def contrast(
    model: HasTokenizer,
    n: int = DEFAULT_N,
    seed: int = 0,
    relation: str = "antonym",
    source: str | None = None,
    instruction: str | None = None,
) -> "tuple[ResponseTask, ResponseTask]":
    """The same word pairs asked by an instruction and by examples, prompt by prompt: for contrastive gating."""
    from gatelens.tasks.builtin.word_pairs import build

    by_instruction, by_examples = (
        build(model.tokenizer, n, seed, relation=relation, ask=ask, source=source, instruction=instruction)
        for ask in ("instruction", "examples")
    )
    return by_instruction, by_examples


def _check_options(name: str, options: Mapping[str, Any], known: tuple[str, ...]) -> None:
    for option in options:
        if option not in known:
            has = f"its options are {', '.join(known)}" if known else "it has none"
            raise GatelensError(f"task {name} has no option '{option}': {has}.")
