"""Let plain transformers open a sparse model once gatelens is imported, without importing transformers for it.

Importing transformers' model code takes seconds, so ``import gatelens`` does not do it; instead gated attention is
registered the moment somebody else does.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

_WHERE = "transformers.modeling_utils"


def register_with_transformers() -> None:
    """Register gated attention now if transformers' model code is loaded, else when it is."""
    if _WHERE in sys.modules:
        importlib.import_module("gatelens.sparse.in_model")
    elif not any(isinstance(finder, _Waiting) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Waiting())


class _Waiting(MetaPathFinder):
    """Finds nothing itself; adds one step to the loading of the module it waits for."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != _WHERE:
            return None
        # Looking for a module is not yet loading it, so this goes on waiting.
        sys.meta_path.remove(self)
        try:
            spec = importlib.util.find_spec(fullname)
        finally:
            sys.meta_path.insert(0, self)
        if spec is not None and spec.loader is not None:
            load = spec.loader.exec_module

            def load_and_register(module: ModuleType) -> None:
                load(module)
                importlib.import_module("gatelens.sparse.in_model")

            spec.loader.exec_module = load_and_register  # type: ignore[method-assign]
        return spec
