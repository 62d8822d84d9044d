"""The version of gatelens. This is the only place that has it: the package's metadata is read from here."""

from __future__ import annotations

__version__ = "0.2.0"
