"""Prepares docstrings for the reference.

An ``Example:`` section of lines becomes a fenced block. Every parameter of a function and every field of a class gets
its line in the table, with its type: also one that is described together with others, as in ``q, k, v: ...``, one
whose description is a comment beside the field, and one that means the same everywhere, which docstrings do not repeat.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import griffe

PARAMETERS = {
    "model": "the model, from `gatelens.load`.",
    "task": "the task, from `gatelens.task`.",
    "level": "what gates act on, such as `gatelens.gates.HEADS`.",
    "settings": "the settings; by default all have their default values.",
    "context": "how the computation may run: memory budget, journal, progress. It does not change any number.",
    "roles": "the learned gates, from `gatelens.fit_head_gates`.",
    "scores": "the scores of all gates.",
    "folder": "the folder of the run.",
}
"""Parameters of functions that mean the same everywhere."""

FIELDS = {
    "model": "the name of the model.",
    "task": "the name of the task.",
    "settings": "the settings of the run.",
    "seconds": "how long the run took, including starts that were killed.",
    "graph": "the component graph of the model.",
    "scores": "the score of every gate, mean over prompts.",
    "method": "how gates were scored.",
    "measured": "where a gate was scored; None: all gates were.",
    "magnitudes": "the absolute score of each gate, mean over prompts; None: not known.",
    "errors": "the standard error of each score, over prompts; None: not known.",
    "source": "the number of the source in the graph.",
    "destination": "the number of the destination in the graph.",
}
"""Fields of classes that mean the same everywhere, unless a comment beside the field says more."""

_INDENTED = r"((?:[ ]{4}.*(?:\n|$)|\n(?=[ ]{4}))+)"
_EXAMPLE = re.compile(rf"^Example:\n{_INDENTED}", re.MULTILINE)
_ARGUMENTS = re.compile(rf"^(?:Arguments|Attributes):\n{_INDENTED}", re.MULTILINE)
_ENTRY = re.compile(r"^    (\w+(?:, \w+)*): (.*(?:\n[ ]{8}.*)*)", re.MULTILINE)
_NEXT_SECTION = re.compile(r"^(?:Returns|Example):\n|\Z", re.MULTILINE)
_COMMENT = re.compile(r"  # (?!noqa|type:|fmt:)(.+)$")


class Docstrings(griffe.Extension):
    """Changes the docstrings that the reference shows."""

    def on_object(self, *, obj: griffe.Object, loader: griffe.GriffeLoader, **_: Any) -> None:
        """Called for every object of the package, when all of it is loaded."""
        if obj.docstring is None:
            return
        text, section = obj.docstring.value, "Arguments"
        if obj.is_function and not obj.name.startswith("_"):
            names = [parameter.name for parameter in obj.parameters if parameter.name not in ("self", "cls")]
            text = completed(text, {name: PARAMETERS.get(name, "") for name in names}, section)
        elif obj.is_class and (is_tuple := _is_a(obj, "NamedTuple")) is not None:
            text = completed(text, _fields(obj), "Attributes" if is_tuple else section)
        obj.docstring.value = fenced(text)


def fenced(docstring: str) -> str:
    """A docstring whose examples are fenced blocks of Python."""
    return _EXAMPLE.sub(_fence, docstring)


def completed(docstring: str, known: Mapping[str, str], section: str) -> str:
    """A docstring in which every argument has an entry of its own, in the order of the signature.

    Arguments:
        known: for each argument, what is said about it if the docstring says nothing; empty: nothing.
        section: the name of the section that is added if the docstring has none.
    """
    written = _ARGUMENTS.search(docstring)
    said = {name: text for names, text in _ENTRY.findall(written[1] if written else "") for name in names.split(", ")}
    entries = {name: said.get(name) or text for name, text in known.items()} | {
        name: text for name, text in said.items() if name not in known
    }
    lines = "".join(f"    {name}: {text}\n" for name, text in entries.items() if text)
    if written:
        return docstring[: written.start(1)] + lines + "\n" + docstring[written.end(1) :].lstrip("\n")
    if not lines:
        return docstring
    place = _NEXT_SECTION.search(docstring).start()  # type: ignore[union-attr]  # \Z always matches
    return f"{docstring[:place].rstrip()}\n\n{section}:\n{lines}\n{docstring[place:]}"


def _is_a(cls: griffe.Object, base: str) -> bool | None:
    """Whether a class has this base; None if it has no fields, because it is neither a dataclass nor a tuple."""
    if any(str(each) == base for each in cls.bases):
        return True
    return False if "dataclass" in cls.labels else None


def _fields(cls: griffe.Object) -> dict[str, str]:
    """What is known of each field of a class: the comment beside it, or what the field means everywhere."""
    lines = cls.lines_collection[cls.filepath]
    found = {}
    for name, member in cls.members.items():
        if member.is_attribute and member.annotation is not None and not _is_no_field(name, member):
            comment = _COMMENT.search(lines[member.endlineno - 1])
            found[name] = comment[1] if comment else FIELDS.get(name, "")
    return found


def _is_no_field(name: str, member: griffe.Object) -> bool:
    return name.startswith("_") or "property" in member.labels or "ClassVar" in str(member.annotation)


def _fence(match: re.Match[str]) -> str:
    lines = [line.removeprefix("    ") for line in match[1].rstrip().splitlines()]
    code = "\n".join(lines).strip("`")
    return f"**Example:**\n\n```py\n{code}\n```\n"
