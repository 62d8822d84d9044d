"""The reference describes every parameter of every function, and every field of every class."""

from __future__ import annotations

import dataclasses
import inspect
from typing import Any

import pytest
from blocks import ROOT
from test_reference_examples import ENTRIES, entry_named

griffe = pytest.importorskip("griffe", reason="the extra `docs` is not installed")
SECTIONS = ("parameters", "attributes")


@pytest.fixture(scope="module")
def package() -> Any:
    """The package as the site sees it."""
    extensions = griffe.load_extensions(str(ROOT / "docs" / "docstrings.py"), "dataclasses")
    return griffe.load("gatelens", search_paths=[ROOT / "src"], extensions=extensions)


def names_of(entry: Any) -> list[str]:
    """The parameters of a function, or the fields of a class that has fields."""
    if dataclasses.is_dataclass(entry):
        return [field.name for field in dataclasses.fields(entry) if not field.name.startswith("_")]
    if inspect.isclass(entry):
        return list(getattr(entry, "_fields", ()))
    return list(inspect.signature(entry).parameters)


@pytest.mark.parametrize("name", ENTRIES)
def test_every_parameter_has_a_line_with_its_type(name: str, package: Any) -> None:
    docstring = package[name.removeprefix("gatelens.")].docstring
    sections = docstring.parse("google", warnings=False)
    lines = {line.name: line for section in sections if section.kind.value in SECTIONS for line in section.value}
    wanted = names_of(entry_named(name))
    assert [each for each in lines if each in wanted] == wanted
    for each in wanted:
        assert lines[each].description.strip()
        assert lines[each].annotation is not None
