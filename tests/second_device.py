"""A second device, as a GPU is one, on a machine without a GPU: its tensors do not mix with those of the CPU.

Tensors of the device hold their numbers in the memory of the CPU, and every operation runs there, so results are those
of the CPU. What differs is what a CUDA device would refuse: an operation on tensors of both devices, and random numbers
for one device from a generator of the other. As on CUDA, a CPU tensor without axes mixes with everything, indices may
come from the CPU, and `copy_` goes between devices.
"""

from __future__ import annotations

import copy
from dataclasses import replace
from functools import cache
from typing import Any

import torch
from families import wrap
from torch import Tensor
from torch.utils import backend_registration
from torch.utils._pytree import tree_leaves, tree_map

from gatelens.model import Model

NAME = "second"
_aten = torch.ops.aten
_library = torch.library.Library("aten", "IMPL")  # what it registers lasts as long as it does
_BETWEEN_DEVICES = {_aten._to_copy.default, _aten.copy_.default}
_INDEXED = {  # the argument that may be on the CPU although the other ones are not: the indices
    _aten.index.Tensor,
    _aten.index_put.default,
    _aten.index_put_.default,
    _aten._index_put_impl_.default,
    _aten._unsafe_index.Tensor,
    _aten._unsafe_index_put.default,
}


class SecondTensor(Tensor):
    """A tensor of the second device; ``held`` has its numbers."""

    held: Tensor

    @staticmethod
    def __new__(cls, held: Tensor) -> SecondTensor:
        made: SecondTensor = Tensor._make_wrapper_subclass(
            cls,
            held.size(),
            strides=held.stride(),
            storage_offset=held.storage_offset(),
            dtype=held.dtype,
            device=torch.device(NAME, 0),
        )
        made.held = held
        return made

    def tolist(self) -> Any:
        return self.held.tolist()

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(func, args, kwargs or {})


class _Module(backend_registration._DummyBackendModule):  # type: ignore[misc]
    """What torch asks of every device: the state of its random numbers, and the dtypes of autocast."""

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16]

    def get_rng_state(self, device: Any = None) -> Tensor:
        return torch.get_rng_state()

    def set_rng_state(self, state: Tensor, device: Any = None) -> None:
        torch.set_rng_state(state)


@cache
def second_device() -> torch.device:
    """The device, which exists in this process from the first call on: call it before the first backward pass."""
    backend_registration._setup_privateuseone_for_python_backend(NAME, _Module())
    _library.impl("empty.memory_format", _empty, "PrivateUse1")
    _library.impl("empty_strided", _empty_strided, "PrivateUse1")
    _library.impl("_copy_from", _copy_from, "PrivateUse1")
    return torch.device(NAME, 0)


def on_second(model: Model) -> Model:
    """A copy of a model on the second device."""
    hf = copy.deepcopy(model.hf).to(second_device())
    hf.tie_weights()
    return replace(wrap(hf, model.name), tokenizer=model.tokenizer)


# What torch calls below `__torch_dispatch__`, or without a tensor of the device: all factories, and lists as indices.


def _empty(size: Any, *, dtype: Any = None, memory_format: Any = None, **_: Any) -> Tensor:
    return SecondTensor(torch.empty(size, dtype=dtype, memory_format=memory_format))


def _empty_strided(size: Any, stride: Any, *, dtype: Any = None, **_: Any) -> Tensor:
    return SecondTensor(torch.empty_strided(size, stride, dtype=dtype))


def _copy_from(source: Tensor, to: Tensor, non_blocking: bool = False) -> Tensor:
    _unwrap(to).copy_(_unwrap(source))
    return to


def _on_second(device: Any) -> bool:
    return device is not None and torch.device(device).type == NAME


def _run(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Check an operation, run it on the CPU, and put its results on the device that they belong to."""
    given = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
    if func not in _BETWEEN_DEVICES:
        _refuse_mixtures(func, args, kwargs)
    if (asked := kwargs.get("device")) is not None:
        second = _on_second(asked)
    elif func is _aten.copy_.default:
        second = isinstance(args[0], SecondTensor)
    else:
        second = any(isinstance(x, SecondTensor) for x in given)
    generator = kwargs.get("generator")
    if second and generator is not None and generator.device.type != NAME:
        raise RuntimeError(f"{func}: the generator is on {generator.device.type}, the numbers are for {NAME}")
    wrappers = {id(x.held): x for x in given if isinstance(x, SecondTensor)}
    plain = {**kwargs, "device": torch.device("cpu")} if asked is not None else kwargs
    results = func(*tree_map(_unwrap, args), **tree_map(_unwrap, plain))
    if not second:
        return results

    def wrap(x: Any) -> Any:
        if not isinstance(x, Tensor):
            return x
        return wrappers[id(x)] if id(x) in wrappers else SecondTensor(x)  # what was changed in place is still itself

    return tree_map(wrap, results)


def _refuse_mixtures(func: Any, args: Any, kwargs: dict[str, Any]) -> None:
    checked = (args[:1], args[2:], kwargs) if func in _INDEXED else (args, kwargs)
    with_axes = [x for x in tree_leaves(checked) if isinstance(x, Tensor) and x.ndim]
    on_second = [isinstance(x, SecondTensor) for x in with_axes]
    if func in _INDEXED and not isinstance(args[0], SecondTensor):  # a CPU tensor has no indices elsewhere
        on_second += [isinstance(x, SecondTensor) for x in tree_leaves(args[1])]
    if any(on_second) and not all(on_second):
        shapes = [f"{tuple(x.shape)} on {x.device.type}" for x in with_axes]
        raise RuntimeError(f"{func}: tensors are on two devices: {', '.join(shapes)}")


def _unwrap(x: Any) -> Any:
    return x.held if isinstance(x, SecondTensor) else x
