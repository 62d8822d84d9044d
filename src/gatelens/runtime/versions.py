"""The versions of the software that a result was made with. Every run records them."""

from __future__ import annotations

import platform
from importlib.metadata import version


def versions() -> dict[str, str]:
    """The versions of gatelens, of the packages that decide its numbers, and of Python, by name."""
    packages = {name: version(name) for name in ("gatelens", "torch", "transformers")}
    return {**packages, "python": platform.python_version()}
