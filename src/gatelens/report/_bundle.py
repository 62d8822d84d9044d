"""How the page gets its style, scripts, data and images: from files next to it, or from inside a single file.

Both kinds of page allow no script but their own: a page in a folder by ``'self'``, a single file by the SHA-256 of each
script. The policy of a folder allows ``file:`` besides ``'self'``, because for Firefox a page on disk and the files
next to it have different origins.
"""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

_REST = "base-uri 'none'; form-action 'none'"
_TYPES = {".png": "image/png", ".svg": "image/svg+xml", ".pdf": "application/pdf", ".csv": "text/csv"}


@dataclass(frozen=True)
class FolderBundle:
    """A page that names the files next to it."""

    style: str
    scripts: Sequence[str]

    @property
    def policy(self) -> str:
        return (
            "default-src 'none'; script-src 'self' file:; style-src 'self' file: 'unsafe-inline'; "
            f"img-src 'self' file: data:; {_REST}"
        )

    @property
    def head(self) -> str:
        scripts = "\n".join(f'<script src="{name}" defer></script>' for name in self.scripts)
        return f'<link rel="stylesheet" href="{self.style}">\n{scripts}'

    foot = ""

    def url(self, file: str) -> str:
        return file


@dataclass(frozen=True)
class SingleFileBundle:
    """A page that contains everything: the files of a folder, by their paths in it, and the licences of the scripts."""

    folder: Path
    style: str
    scripts: Sequence[str]
    licences: Sequence[str]

    @property
    def policy(self) -> str:
        hashes = " ".join(f"'sha256-{_sha256(text)}'" for text in self._scripts())
        return f"default-src 'none'; script-src {hashes}; style-src 'unsafe-inline'; img-src data:; {_REST}"

    @property
    def head(self) -> str:
        return f"<style>\n{self._text(self.style)}</style>"

    @property
    def foot(self) -> str:
        licences = "\n".join(f"{name}\n\n{self._text(name)}" for name in self.licences)
        return "\n".join([f"<!--\n{licences}-->", *(f"<script>{text}</script>" for text in self._scripts())])

    def url(self, file: str) -> str:
        data = base64.b64encode((self.folder / file).read_bytes()).decode()
        return f"data:{_TYPES[Path(file).suffix]};base64,{data}"

    def _scripts(self) -> list[str]:
        """The scripts, in which nothing ends the element that contains them.

        The replaced sequences can only stand in strings, regular expressions and comments, where the backslash changes
        nothing: outside them, ``<!--`` is a comment in JavaScript too.
        """
        return [re.sub(r"<(?=/script|script|!--)", r"\\x3c", self._text(name), flags=re.I) for name in self.scripts]

    def _text(self, name: str) -> str:
        return (self.folder / name).read_text(encoding="utf-8")


def _sha256(text: str) -> str:
    return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
