"""The versions of the software that a result was made with. Every run records them."""

from __future__ import annotations

import platform
from importlib.metadata import version

from gatelens.version import __version__


def versions() -> dict[str, str]:
    """The versions of gatelens, of the packages that decide its numbers, and of Python, by name."""
    packages = {name: version(name) for name in ("torch", "transformers")}
    return {"gatelens": __version__, **packages, "python": platform.python_version()}
