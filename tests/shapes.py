"""Checks the tensor shapes in annotations: `--jaxtyping-packages` in pyproject.toml lists the packages."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from beartype import BeartypeConf, beartype

_Function = TypeVar("_Function", bound=Callable[..., object])
_check = beartype(conf=BeartypeConf(is_pep484_tower=True))  # an int may stand where a float is expected


def check(function: _Function) -> _Function:
    """Check the arguments and the result of a function that names a shape, such as `Float[Tensor, "head dim"]`.

    Other functions stay as they are: many tests give them wrong arguments on purpose, to see the error.
    """
    annotations = getattr(function, "__annotations__", {}).values()
    return _check(function) if any("[Tensor" in str(annotation) for annotation in annotations) else function
