"""The README, the changelog, the citation and the public names agree with the code."""

from __future__ import annotations

import ast
import re
import tomllib
from typing import Any

import pytest
from blocks import ROOT

import gatelens
from gatelens.gates import LEVELS
from gatelens.methods.registry import Method, methods

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


@pytest.fixture(scope="module")
def citation() -> Any:
    yaml = pytest.importorskip("yaml")
    return yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))


def test_one_version(citation: Any) -> None:
    changes = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    first = re.search(r"^## \[(\S+)\]", changes, re.MULTILINE)
    assert first is not None
    assert {first[1], citation["version"]} == {gatelens.__version__}
    assert "version" in PROJECT["dynamic"]  # read from gatelens/version.py


def test_the_citation_has_what_the_format_asks_for(citation: Any) -> None:
    """CFF 1.2.0: these keys are needed, and every reference has a type, authors and a title."""
    assert citation["cff-version"] == "1.2.0"
    assert {"message", "title", "authors"} <= citation.keys()
    assert citation["license"] == PROJECT["license"]
    assert [reference["title"] for reference in citation["references"]]
    for reference in citation["references"]:
        assert {"type", "authors", "title"} <= reference.keys()
        assert all({"family-names", "given-names"} <= author.keys() for author in reference["authors"])


def test_both_papers_are_cited_with_their_numbers(citation: Any) -> None:
    numbers = {i["value"] for reference in citation["references"] for i in reference["identifiers"]}
    assert numbers == {"arXiv:2512.05865", "arXiv:2505.13737"}


def test_the_hosted_tests_run_the_commands_of_the_repository() -> None:
    yaml = pytest.importorskip("yaml")
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "test.yml").read_text(encoding="utf-8"))
    steps = [step["run"] for job in workflow["jobs"].values() for step in job["steps"] if "run" in step]
    assert steps == ["bash .ci/run", "make test-wheel", "make test-versions"]
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    own = (ROOT / ".ci" / "run").read_text(encoding="utf-8").splitlines()
    asked = {line.removeprefix("make ") for line in (*steps, *own) if line.startswith("make ")}
    assert asked == {"test", "test-slow", "test-wheel", "test-versions"}
    assert asked <= targets
    pythons = {line.rpartition(" ")[2] for line in PROJECT["classifiers"] if re.search(r":: 3\.\d+$", line)}
    assert set(workflow["jobs"]["test"]["strategy"]["matrix"]["python"]) == pythons


def test_the_readme_is_short_and_its_tree_is_the_real_one() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 130
    tree = re.search(r"^```\n(src/gatelens/\n.*?)^```$", text, re.MULTILINE | re.DOTALL)
    assert tree is not None
    for line in tree[1].splitlines():
        folder = ROOT / "src" / "gatelens" if line.startswith(" ") else ROOT
        for name in re.findall(r"^[^\s,]+(?:, [^\s,]+)*", line.strip())[0].split(", "):
            assert (folder / name).exists(), f"the tree in the README has {name}, which does not exist"


def test_the_readme_lists_the_registered_methods() -> None:
    """Names, costs for one prompt at every level, and papers are those of the registry."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    header = f"| method | {' | '.join(LEVELS)} | paper |\n|{'---|' * (len(LEVELS) + 2)}\n"
    lines = [
        f"| `{name}` | {' | '.join(_cost(method, level) for level in LEVELS)} | {method.paper} |\n"
        for name, method in methods().items()
    ]
    assert header + "".join(lines) + "\n" in text


def _cost(method: Method, level: str) -> str:
    """What a method costs at a level with its default settings."""
    return str(method.price(LEVELS[level], method.settings())) if method.works_on(level) else ""


def test_type_checkers_see_the_public_names() -> None:
    """The imports for type checkers and the table of lazy imports name the same modules."""
    tree = ast.parse((ROOT / "src" / "gatelens" / "__init__.py").read_text(encoding="utf-8"))
    imports = {
        name.name: node.module
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom)
        and str(node.module).startswith("gatelens.")
        and node.module != "gatelens.version"
        for name in node.names
    }
    assert imports == gatelens._MODULE_OF
    for name in gatelens.__all__:
        assert getattr(gatelens, name).__name__ == name
