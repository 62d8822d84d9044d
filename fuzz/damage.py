"""Ways of damaging a valid input: odd values in JSON, and changed bytes."""

from __future__ import annotations

import copy
import json
import string
import struct
from collections.abc import Iterator, Mapping
from typing import Any

from hypothesis import strategies as st
from hypothesis.strategies import DrawFn, SearchStrategy

Files = Mapping[str, bytes]
"""The files of an input: path in the folder of the input -> contents. A path that ends in ``@`` is a link."""

_DEEP = 100_000
# JSON that `json.dumps` cannot write: it is put in the place of these strings afterwards.
_RAW = {
    "@deep list@": "[" * _DEEP + "]" * _DEEP,
    "@deep object@": '{"a":' * _DEEP + "1" + "}" * _DEEP,
    "@1e400@": "1e400",
    "@5000 digits@": "7" * 5000,
}
ODD_TEXTS = (
    "",
    " ",
    "\0",
    "a\0b",
    "\ud800",
    "x\udfff y",
    "\u202e\u0000\uffff",
    "=1+1",
    "-",
    "../..",
    "/",
    "~",
    "~nobody",
    "/dev/null",
    "/proc/self/mem",
    "a/" * 3000,
    "n" * 300,
    "t3",
    "t3 t4",
    "t3 t\ud800 t5",
    " t\udc80",
    "</script>",
    "[/red]",
    "{}",
    "nan",
)
ODD_NUMBERS = (
    0,
    -1,
    1,
    2,
    7,
    2**31,
    2**53,
    2**63,
    -(2**63) - 1,
    10**20,
    10**400,
    0.5,
    -0.0,
    1e-300,
    1e300,
    float("nan"),
    float("inf"),
    float("-inf"),
)


def odd_values() -> SearchStrategy[Any]:
    """A value that a user does not mean to write, as Python has it."""
    leaves = st.one_of(
        st.sampled_from(ODD_NUMBERS),
        st.sampled_from(ODD_TEXTS),
        st.sampled_from(tuple(_RAW)),
        st.sampled_from([None, True, False]),
        st.integers(-10, 10),
        st.text(string.printable, max_size=6),
    )
    return st.one_of(
        leaves,
        st.lists(leaves, max_size=3),
        st.dictionaries(st.sampled_from(("a", "", "n", "\ud800")), leaves, max_size=2),
        st.just([[], {}]),
    )


def as_json(document: Any) -> bytes:
    """A document as JSON, with what Python does not write itself."""
    text = json.dumps(document)
    for name, raw in _RAW.items():
        text = text.replace(f'"{name}"', raw)
    return text.encode()


@st.composite
def damaged_document(draw: DrawFn, document: Any, most: int = 3) -> Any:
    """The document with some values replaced, removed or added."""
    changed = copy.deepcopy(document)
    for _ in range(draw(st.integers(1, most))):
        places = list(_places(changed))
        if not places:
            return changed
        container, key = draw(st.sampled_from(places))
        how = draw(st.sampled_from(("replace", "replace", "replace", "remove", "swap", "add")))
        if how == "remove":
            del container[key]
        elif how == "swap":
            other, other_key = draw(st.sampled_from(places))
            container[key] = copy.deepcopy(other[other_key])
        elif how == "add" and isinstance(container, dict):
            container[draw(st.sampled_from(ODD_TEXTS))] = draw(odd_values())
        else:
            container[key] = draw(odd_values())
    return changed


def _places(document: Any, depth: int = 0) -> Iterator[tuple[Any, Any]]:
    """Every container in a document with each of its keys."""
    keys = list(document) if isinstance(document, dict) else range(len(document)) if isinstance(document, list) else []
    for key in keys:
        yield document, key
        if depth < 6:
            yield from _places(document[key], depth + 1)


@st.composite
def damaged_json(draw: DrawFn, document: Any) -> bytes:
    """The document as JSON, with odd values and sometimes with changed bytes."""
    data = as_json(draw(damaged_document(document)))
    return draw(damaged_bytes(data)) if draw(st.integers(0, 5)) == 0 else data


@st.composite
def damaged_bytes(draw: DrawFn, data: bytes, within: int | None = None) -> bytes:
    """The data, truncated, or with some bytes or numbers of four or eight bytes replaced.

    Arguments:
        within: change only this many bytes at the beginning.
    """
    for _ in range(draw(st.integers(1, 3))):
        end = min(len(data), within or len(data))
        place = draw(st.integers(0, max(0, end - 1)))
        how = draw(st.sampled_from(("cut", "byte", "int32", "int64", "insert", "remove")))
        number = draw(st.sampled_from((0, 1, -1, 2, 255, 2**31 - 1, -(2**31), 65536)))
        if how == "cut":
            data = data[:place]
        elif how == "byte":
            data = data[:place] + bytes([draw(st.integers(0, 255))]) + data[place + 1 :]
        elif how == "int32":
            data = data[:place] + struct.pack("<i", number) + data[place + 4 :]
        elif how == "int64":
            large = draw(st.sampled_from((number, 2**62, -(2**63), 10**12)))
            data = data[:place] + struct.pack("<q", large) + data[place + 8 :]
        elif how == "insert":
            data = data[:place] + draw(st.binary(max_size=5)) + data[place:]
        else:
            data = data[:place] + data[place + draw(st.integers(1, 8)) :]
    return data


@st.composite
def damaged_file(draw: DrawFn, files: Files, **headers: int) -> Files:
    """A folder in which one file is damaged, missing, empty, a folder or a dangling link.

    Arguments:
        headers: how many bytes at the beginning of the files with this suffix are damaged.
    """
    name = draw(st.sampled_from(sorted(files)))
    rest = {other: data for other, data in files.items() if other != name}
    how = draw(st.sampled_from(("contents",) * 12 + ("missing", "link", "folder")))
    if how == "missing":
        return rest
    if how == "link":
        return {**rest, f"{name}@": draw(st.sampled_from((b"/nowhere/at/all", b".", name.encode())))}
    if how == "folder":
        return {**rest, f"{name}/file": b""}
    suffix = name.rpartition(".")[2]
    if suffix == "json":
        return {**rest, name: draw(damaged_json(json.loads(files[name])))}
    return {**rest, name: draw(damaged_bytes(files[name], headers.get(suffix)))}
