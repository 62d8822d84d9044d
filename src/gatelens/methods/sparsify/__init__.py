"""Sparse post-training of a model's attention: see `run`."""

from gatelens.methods.sparsify.judge import Judgement, evaluate
from gatelens.methods.sparsify.run import sparsify
from gatelens.methods.sparsify.settings import SparsifySettings

__all__ = ["Judgement", "SparsifySettings", "evaluate", "sparsify"]
