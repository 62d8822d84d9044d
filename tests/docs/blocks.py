"""The code blocks of a page, and what hidden comments say about them.

A page that a person reads shows sensible models and sizes; a test has seconds. So HTML comments may say

    <!-- test: stand-in -->                 here and below, stories260k stands in for smollm2
    <!-- test: replace "n=64" by "n=4" -->  here and below
    <!-- test: run -->                      the next shell block is run, not only parsed
    <!-- test: save study.toml -->          the next block is the content of this file
    <!-- test: skip: needs a GPU -->        the next block is compiled or parsed only
    <!-- test-setup
    Python that is run at this place
    -->
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = sorted(path for path in (*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")) if path.name != "CHANGELOG.md")

_PARTS = re.compile(
    r"<!-- test-setup\n(?P<setup>.*?)-->|<!-- test: (?P<test>.*?) -->|^```(?P<language>\w*)\n(?P<code>.*?)^```$",
    re.MULTILINE | re.DOTALL,
)
_REPLACE = re.compile(r'replace "(.*)" by "(.*)"')


@dataclass(frozen=True)
class Block:
    """One fenced block as it is to be tested, or a hidden set-up (which is Python that always runs)."""

    language: str
    code: str
    line: int  # of its first line of code in the page, from 1
    run: bool
    save: str | None = None  # the file that it is the content of


def blocks(page: Path) -> list[Block]:
    """The blocks of a page in order, with its replacements made."""
    text = page.read_text(encoding="utf-8")
    found: list[Block] = []
    replacements: list[tuple[str, str]] = []
    run = skip = False
    save: str | None = None
    for part in _PARTS.finditer(text):
        if part["setup"] is not None:
            found.append(Block("python", part["setup"], _line(text, part.start("setup")), run=True))
        elif part["test"] is not None:
            said = part["test"]
            if said == "stand-in":
                replacements.append((r"(?<![\w/-])(sparse-)?smollm2(?![\w-])", r"\1stories260k"))
            elif change := _REPLACE.fullmatch(said):
                replacements.append((re.escape(change[1]), change[2]))
            elif said == "run":
                run = True
            elif said.startswith("skip: "):
                skip = True
            elif said.startswith("save "):
                save = said.removeprefix("save ")
            else:
                raise ValueError(f"{page.name}, line {_line(text, part.start())}: no such instruction: {said}")
        else:
            code = part["code"]
            for old, new in replacements:
                code = re.sub(old, new, code)
            executed = (part["language"] == "python" or run) and not skip
            found.append(Block(part["language"], code, _line(text, part.start("code")), executed, save))
            run, skip, save = False, False, None
    return found


def commands(block: Block) -> list[str]:
    """The commands of a shell block, one string each, without comments at the end of lines."""
    joined = block.code.replace("\\\n", " ")
    lines = (re.sub(r"\s+#.*$|^#.*$", "", line).strip() for line in joined.splitlines())
    return [line for line in lines if line]


def _line(text: str, place: int) -> int:
    return text.count("\n", 0, place) + 1
