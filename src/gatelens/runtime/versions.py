"""Which versions a result was made with: every run says so."""

from __future__ import annotations

import platform
from importlib.metadata import version


def versions() -> dict[str, str]:
    """Of this package, of those that its numbers rest on, and of Python."""
    packages = {name: version(name) for name in ("gatelens", "torch", "transformers")}
    return {**packages, "python": platform.python_version()}
