"""Open a model: `load`, the formats that it reads, the checks that it makes, and the built-in models."""

from gatelens.loading.builtin import BUILT_IN, made_from
from gatelens.loading.loader import load

__all__ = ["BUILT_IN", "load", "made_from"]
