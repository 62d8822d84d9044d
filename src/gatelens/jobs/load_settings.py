"""How a job loads its model: the same options on the command line and in the models of a study."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from pydantic import Field

from gatelens.errors import GatelensError
from gatelens.runtime.settings import EXECUTION, Settings

if TYPE_CHECKING:
    from gatelens.model import Model


class LoadSettings(Settings):
    """How to load a model. This module imports torch only when a model is loaded, so that help texts appear at once."""

    device: str | None = Field(
        None, description="cpu, cuda or mps; default: cuda if there is one", json_schema_extra=EXECUTION
    )
    dtype: Literal["float32", "bfloat16", "float16"] = Field("float32", description="dtype of the weights")
    device_map: str | None = Field(
        None,
        description="auto spreads a large model over several devices; needs accelerate",
        json_schema_extra=EXECUTION,
    )
    check: bool = Field(
        True, description="compare runs with gates with plain runs after loading", json_schema_extra=EXECUTION
    )

    def open(self, source: str, *, allow_pickle: bool = False, bias: float | None = None) -> Model:
        """Load a model.

        Arguments:
            source: a built-in name, a folder, a .gguf file or a hub id.
            allow_pickle: also read pickled weights.
            bias: open a model with plain attention as a sparse model with this bias.
        """
        import torch

        from gatelens.loading import load

        if self.device is not None:
            try:
                torch.empty(0, device=self.device)
            except (RuntimeError, AssertionError) as error:  # torch asserts that it was built for the device
                raise GatelensError(
                    f"there is no device '{self.device}' on this machine: give cpu, or cuda or mps if there is one."
                ) from error
        return load(
            source,
            device=self.device,
            dtype=getattr(torch, self.dtype),
            device_map=self.device_map,
            check=self.check,
            allow_pickle=allow_pickle,
            bias=bias,
        )


class GatedLoadSettings(LoadSettings):
    """How to load a model that may become sparse by loading it with a bias."""

    bias: float | None = Field(
        None, description="open a model with plain attention as a sparse model: the bias of all its gates, such as 0"
    )
