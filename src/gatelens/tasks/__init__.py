"""Tasks: the behaviours to explain, for any tokenizer.

`task` builds a task from its name or from a JSON-lines file. A circuit task has aligned clean and corrupt prompts and a
metric. A response task has prompts with target responses.

`TASKS` holds the built-in tasks. To add one, write a module in `builtin/` that defines `TASK`, and add its name to
`TASKS`. The module of a task is imported when the task is first used, so that importing this package does not import
torch.
"""

import difflib
import inspect
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

from gatelens.errors import GatelensError, shortened, shown
from gatelens.runtime.inputs import usable_path

if TYPE_CHECKING:
    from gatelens.tasks.base import CircuitTask, ResponseTask

__all__ = ["TASKS", "Entry", "HasTokenizer", "contrast", "from_spec", "task"]

DEFAULT_N = 64
MOST_PROMPTS = 1_000_000  # more would fill the memory before anything runs


class HasTokenizer(Protocol):
    """Anything that has a Hugging Face tokenizer, such as a `gatelens.Model`."""

    @property
    def tokenizer(self) -> Any: ...


@dataclass(frozen=True)
class Entry:
    """A task that can be asked for by name: how to build it, and how to describe it to a user.

    Arguments:
        build: a function `(tokenizer, n, seed, *, options) -> task`. Its keyword-only arguments are the task's options.
        kind: the kind of task that `build` returns.
        description: one line that says what the model has to do.
        example: a prompt and its answer.
        choices: the values of each option that takes one of a few values.
    """

    build: "Callable[..., CircuitTask | ResponseTask]"
    kind: Literal["circuit", "response"]
    description: str
    example: tuple[str, str]
    choices: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    def options(self) -> tuple[str, ...]:
        """The names of the task's options."""
        return tuple(self._defaults())

    def check(self, name: str, options: Mapping[str, Any]) -> None:
        """Raise an error if the task, which is called `name`, has no such option or no such value of an option."""
        defaults = self._defaults()
        _check_names(name, options, tuple(defaults))
        for option, value in options.items():
            choices = self.choices.get(option)
            if choices is not None and value not in choices and value != defaults[option]:
                raise GatelensError(
                    f"the task {name} has no {option} {value!r}: {option} is one of {', '.join(choices)}."
                )

    def _defaults(self) -> dict[str, Any]:
        """Option name -> default value: the keyword-only arguments of `build`."""
        parameters = inspect.signature(self.build).parameters
        return {name: option.default for name, option in parameters.items() if option.kind is option.KEYWORD_ONLY}


class Registry(MutableMapping[str, Entry]):
    """Task name -> entry. The entry of the built-in task `a-b` is `TASK` in the module `builtin/a_b.py`."""

    def __init__(self, *names: str) -> None:
        self._entries: dict[str, Entry | None] = dict.fromkeys(names)

    def __getitem__(self, name: str) -> Entry:
        entry = self._entries[name]
        if entry is None:
            entry = import_module(f"gatelens.tasks.builtin.{name.replace('-', '_')}").TASK
            self._entries[name] = entry
        return entry

    def __contains__(self, name: object) -> bool:
        return name in self._entries  # does not import the task's module

    def __setitem__(self, name: str, entry: Entry) -> None:
        self._entries[name] = entry

    def __delitem__(self, name: str) -> None:
        del self._entries[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)


# In the order in which `gatelens tasks` lists them: circuit tasks, then response tasks.
TASKS = Registry(
    "ioi",
    "ioi-long",
    "greater-than",
    "docstring",
    "gender-pronoun",
    "subject-verb",
    "induction",
    "colored-objects",
    "addition",
    "pattern-swap",
    "shuffled-pairs",
    "syntax",
    "common-sense",
    "math",
    "aba-abb",
    "word-pairs",
)


def task(
    name: str | Path, model: HasTokenizer, n: int | None = None, seed: int = 0, **options: Any
) -> "CircuitTask | ResponseTask":
    """Build a task for the model's tokenizer.

    Arguments:
        name: the name of a built-in task (`gatelens tasks` lists them), or the path of a JSON-lines file.
        model: the model whose tokenizer is used; nothing is run.
        n: the number of prompts. The default is 64 for a built-in task and all lines for a file.
        seed: the same seed gives the same prompts on every machine.
        options: the task's own options, which docs/tasks.md describes.

    Returns:
        The task. Its prompts are tokenised, and checked to fit the tokenizer.

    Example:
        task = gatelens.task("ioi", model, n=64, seed=0)
        swapped = gatelens.task("ioi", model, n=64, seed=0, corruption="subject")
    """
    check_task(name, n, options)
    if not -(2**63) <= seed < 2**63:
        raise GatelensError(f"seed is {shown(seed)}: it must be below 2^63.")
    return _fitted(_build(name, model, n, seed, options), model)


def _build(
    name: str | Path, model: HasTokenizer, n: int | None, seed: int, options: Mapping[str, Any]
) -> "CircuitTask | ResponseTask":
    if str(name) in TASKS:
        return _built_in(str(name), model, DEFAULT_N if n is None else n, seed, options)
    from gatelens.tasks._own_file import read

    return read(model.tokenizer, str(name), n, seed, context=getattr(model, "context", None), **options)


def check_task(name: str | Path, n: int | None = None, options: Mapping[str, Any] | None = None) -> None:
    """Raise an error if there is no such task, or if it cannot have this size or these options. Needs no model.

    Arguments:
        name, n, options: as for `task`.
    """
    if n is not None and not 1 <= n <= MOST_PROMPTS:
        raise GatelensError(f"n is {shown(n)}: a task has 1 to {MOST_PROMPTS:,} prompts.")
    if str(name) in TASKS:
        TASKS[str(name)].check(str(name), options or {})
        return
    path = usable_path(name)
    if path.is_file():
        _check_names(str(name), options or {}, ("skip_bad",))
        return
    if path.suffix == ".jsonl":
        raise GatelensError(
            f"{name} cannot be read: there is no such file. Give the path of a .jsonl file, or the name of a task."
        )
    close = difflib.get_close_matches(str(name), TASKS, 1)
    hint = f"Did you mean '{close[0]}'? " if close else ""
    raise GatelensError(
        f"no task '{shortened(str(name))}': tasks are {', '.join(sorted(TASKS))}, or the path of a .jsonl file. "
        f"{hint}`gatelens tasks` describes them."
    )


def _fitted(made: "CircuitTask | ResponseTask", model: HasTokenizer) -> "CircuitTask | ResponseTask":
    """The task, if the model knows all of its tokens: some tokenizers have tokens that their model does not have."""
    from dataclasses import replace

    from gatelens.tasks.base import ResponseTask

    hf = getattr(model, "hf", None)
    if hf is None:
        return made
    known = hf.get_input_embeddings().num_embeddings
    for number, ids in enumerate(made.token_ids()):
        if (largest := max(ids)) >= known:
            raise GatelensError(
                f"prompt {number} of the task {made.name} has the token {model.tokenizer.decode([largest])!r} "
                f"({largest}), and the model knows {known} tokens: use the tokenizer that belongs to the model, or "
                "other prompts."
            )
    if isinstance(made, ResponseTask) and made.pad_id >= known:
        return replace(made, pad_id=0)  # padding is masked: any token that the model has will do
    return made


def from_spec(spec: Mapping[str, Any], model: HasTokenizer) -> "CircuitTask | ResponseTask":
    """Build the task that `task.spec()` describes."""
    return task(spec["name"], model, n=spec["n"], seed=spec["seed"], **spec["options"])


def contrast(
    model: HasTokenizer,
    n: int = DEFAULT_N,
    seed: int = 0,
    relation: str = "antonym",
    source: str | None = None,
    instruction: str | None = None,
) -> "tuple[ResponseTask, ResponseTask]":
    """Build two tasks for contrastive gating: the same word pairs, asked for by an instruction and by examples.

    Arguments:
        model, n, seed: as for `task`.
        relation, source, instruction: the options of the task `word-pairs`.

    Returns:
        The task that asks by an instruction and the task that asks by examples. Prompt i of both has the same query and
        the same response.

    Example:
        instructions, examples = gatelens.tasks.contrast(model, n=16, relation="antonym")
    """
    from gatelens.tasks.builtin import word_pairs

    word_pairs.TASK.check("word-pairs", {"relation": relation})
    by_instruction, by_examples = (
        word_pairs.build(model.tokenizer, n, seed, relation=relation, ask=ask, source=source, instruction=instruction)
        for ask in ("instruction", "examples")
    )
    return by_instruction, by_examples


def _built_in(
    name: str, model: HasTokenizer, n: int, seed: int, options: Mapping[str, Any]
) -> "CircuitTask | ResponseTask":
    entry = TASKS[name]
    entry.check(name, options)
    try:
        return entry.build(model.tokenizer, n, seed, **options)
    except (TypeError, ValueError, OverflowError) as error:
        if not options:
            raise
        given = ", ".join(f"{key}={value!r}" for key, value in options.items())
        raise GatelensError(f"the task {name} cannot be built with {given}: {error}. See docs/tasks.md.") from error


def _check_names(name: str, options: Mapping[str, Any], known: tuple[str, ...]) -> None:
    for option in options:
        if option not in known:
            has = f"its options are {', '.join(known)}" if known else "it has no options"
            raise GatelensError(f"the task {name} has no option '{option}': {has}.")
