"""The code blocks of a page, with the changes that its hidden comments ask for.

A page shows readers sensible models and sizes, but a test has to run in seconds. HTML comments change the code:

    <!-- test: stand-in -->                 from here on, use the model of the tests instead of smollm2
    <!-- test: no stand-in -->              from here on, use smollm2 again
    <!-- test: replace "n=64" by "n=4" -->  from here on
    <!-- test: run -->                      run the next shell block instead of only parsing it
    <!-- test: save study.toml -->          save the next block as this file instead of running it
    <!-- test: skip: needs a GPU -->        only compile or parse the next block
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
_STAND_IN = (r"(?<![\w/-])(sparse-)?smollm2(?![\w-])", r"\1trained-model")


@dataclass(frozen=True)
class Block:
    """One fenced block as it is tested, or a hidden set-up, which is Python that always runs."""

    language: str
    code: str
    line: int  # the number of its first line of code in the page, from 1
    run: bool
    save: str | None = None  # the name of the file to save it as


def blocks(page: Path) -> list[Block]:
    """The blocks of a page in order, after all replacements."""
    text = page.read_text(encoding="utf-8")
    page_blocks: list[Block] = []
    replacements: list[tuple[str, str]] = []
    run = skip = False
    save: str | None = None
    for part in _PARTS.finditer(text):
        if part["setup"] is not None:
            page_blocks.append(Block("python", part["setup"], _line(text, part.start("setup")), run=True))
        elif part["test"] is not None:
            instruction = part["test"]
            if instruction == "stand-in":
                replacements.append(_STAND_IN)
            elif instruction == "no stand-in":
                replacements.remove(_STAND_IN)
            elif change := _REPLACE.fullmatch(instruction):
                replacements.append((re.escape(change[1]), change[2]))
            elif instruction == "run":
                run = True
            elif instruction.startswith("skip: "):
                skip = True
            elif instruction.startswith("save "):
                save = instruction.removeprefix("save ")
            else:
                raise ValueError(
                    f"{page.name}, line {_line(text, part.start())}: there is no instruction '{instruction}'"
                )
        else:
            code = part["code"]
            for old, new in replacements:
                code = re.sub(old, new, code)
            executed = (part["language"] == "python" or run) and not skip and save is None
            page_blocks.append(Block(part["language"], code, _line(text, part.start("code")), executed, save))
            run, skip, save = False, False, None
    return page_blocks


def commands(block: Block) -> list[str]:
    """The commands of a shell block, one string each, without comments."""
    joined = block.code.replace("\\\n", " ")
    lines = (re.sub(r"\s+#.*$|^#.*$", "", line).strip() for line in joined.splitlines())
    return [line for line in lines if line]


def _line(text: str, place: int) -> int:
    return text.count("\n", 0, place) + 1
