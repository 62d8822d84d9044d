"""Sparse post-training of a model's attention: see `run`."""

from gatelens.sparse.sparsify.judge import Judgement, evaluate
from gatelens.sparse.sparsify.run import sparsify
from gatelens.sparse.sparsify.settings import SparsifySettings

__all__ = ["Judgement", "SparsifySettings", "evaluate", "sparsify"]
