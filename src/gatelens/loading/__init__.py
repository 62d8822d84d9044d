"""Open a model: `load()`, the formats it reads, the checks it makes, and the built-in models."""

from gatelens.loading.builtin import BUILT_IN, made_from
from gatelens.loading.loader import load

__all__ = ["BUILT_IN", "load", "made_from"]
