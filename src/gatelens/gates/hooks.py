"""Hooks that are removed when their ``with`` block ends, also after an exception."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

Edit = Callable[[Tensor], Tensor | None]
"""Maps a tensor to its replacement; None leaves it unchanged."""


class Hooks(ExitStack):
    """Hooks on the modules of a model, which are removed at the end of the block.

    Example:
        with Hooks() as hooks:
            hooks.before(module, edit)
            model.hf(tokens)
    """

    def before(self, module: nn.Module, edit: Edit, others: Callable[[Tensor], Tensor] | None = None) -> None:
        """Pass the module's input (its first argument, or ``hidden_states``) through ``edit``.

        Arguments:
            others: what all other arguments that are tensors, or hold tensors, are passed through.
        """

        def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            edited = edit(args[0] if args else kwargs["hidden_states"])
            if edited is None:
                return None
            if others is not None:
                args, kwargs = tree_map_only(Tensor, others, (args, kwargs))
            return ((edited, *args[1:]), kwargs) if args else (args, {**kwargs, "hidden_states": edited})

        self.callback(module.register_forward_pre_hook(hook, with_kwargs=True).remove)

    def after(self, module: nn.Module, edit: Edit) -> None:
        """Pass the module's output (the first of several) through ``edit``."""

        def hook(_: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
            if not isinstance(output, tuple):
                return edit(output)
            edited = edit(output[0])
            return None if edited is None else (edited, *output[1:])

        self.callback(module.register_forward_hook(hook).remove)

    def instead(self, module: nn.Module, forward: Callable[..., Any]) -> None:
        """Run ``forward`` instead of the module's own forward."""
        own = module.__dict__.get("forward")  # accelerate sets a forward on the instance

        def restore() -> None:
            if own is None:
                del module.forward
            else:
                module.forward = own

        module.forward = forward
        self.callback(restore)
