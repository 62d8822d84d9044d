"""Find the few heads and edges of a language model that do a job, and prove it.

Names are imported when they are first used, so that ``import gatelens`` and ``gatelens --help`` take no time.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gatelens.anatomy import Head as Head
    from gatelens.errors import GatelensError as GatelensError
    from gatelens.loading import load as load
    from gatelens.model import Model as Model

__version__ = "0.1.0"

_WHERE = {
    "GatelensError": "gatelens.errors",
    "Head": "gatelens.anatomy",
    "Model": "gatelens.model",
    "load": "gatelens.loading",
}
__all__ = sorted(_WHERE)


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module 'gatelens' has no attribute {name!r}: it has {', '.join(__all__)}")
    return getattr(import_module(_WHERE[name]), name)


def __dir__() -> list[str]:
    return __all__
