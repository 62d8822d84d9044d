"""Names of rooms above the caller's, which are imported when they are first used.

Imports between the rooms of this package point one way. A few methods are conveniences that lead the other way: a model
switches heads off (`gatelens.gates`), and a result draws itself (`gatelens.report`). They look up what they call here,
by its name. Nothing else does.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any


def late(name: str) -> Any:
    """The object with this name, written ``module:object``.

    Example:
        >>> late("gatelens.gates.interventions:ablate")
    """
    module, _, attribute = name.partition(":")
    return getattr(import_module(module), attribute)
