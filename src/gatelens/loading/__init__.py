"""Open a model: `load()`, the formats it reads, the checks it makes, and the built-in models."""

from gatelens.loading.loader import BUILT_IN, load

__all__ = ["BUILT_IN", "load"]
