"""What subcommands have in common: how to name a model and a task, and how to load a model."""

from __future__ import annotations

import dataclasses
import json
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gatelens.errors import GatelensError

if TYPE_CHECKING:
    from gatelens.model import Model

ModelName = Annotated[str, typer.Argument(help="a built-in name, a folder, a .gguf file or a hub id", metavar="MODEL")]
TaskName = Annotated[str, typer.Argument(help="a task (`gatelens tasks` lists them) or a .jsonl file", metavar="TASK")]
TaskOption = Annotated[
    list[str] | None, typer.Option("--option", help="an option of the task, as KEY=VALUE; repeatable")
]
SkipBad = Annotated[bool, typer.Option("--skip-bad", help="leave out bad lines of a .jsonl file instead of stopping")]


def _field(default: Any, help_: str) -> Any:
    return dataclasses.field(default=default, metadata={"help": help_})


@dataclasses.dataclass(frozen=True)
class Loader:
    """How to load a model. Its fields are options of every subcommand that takes one."""

    device: str | None = _field(None, "cpu, cuda, mps; default: cuda where there is one")
    dtype: str = _field("float32", "float32, bfloat16 or float16")
    device_map: str | None = _field(None, "spread a large model over devices: auto (needs accelerate)")
    check: bool = _field(True, "compare gated runs with plain ones when loading")
    allow_pickle: bool = _field(False, "also read pickled weights, which can run their author's code")

    def __call__(self, name: str) -> Model:
        import torch

        from gatelens.loading import load

        dtypes = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
        if self.dtype not in dtypes:
            raise GatelensError(f"no dtype '{self.dtype}': dtypes are {', '.join(dtypes)}.")
        if self.device is not None:
            try:
                torch.empty(0, device=self.device)
            except (RuntimeError, AssertionError) as error:  # torch asserts that it was built for the device
                raise GatelensError(
                    f"no device '{self.device}' here: give cpu, or cuda or mps where there is one."
                ) from error
        return load(
            name,
            device=self.device,
            dtype=dtypes[self.dtype],
            device_map=self.device_map,
            check=self.check,
            allow_pickle=self.allow_pickle,
        )


def task_options(given: list[str] | None, skip_bad: bool) -> dict[str, Any]:
    """KEY=VALUE pairs; values that read as JSON (numbers, true, lists) are taken so."""
    options: dict[str, Any] = {"skip_bad": True} if skip_bad else {}
    for pair in given or []:
        key, equals, value = pair.partition("=")
        if not equals or not key:
            raise GatelensError(f"'{pair}' is no task option: write it as KEY=VALUE, e.g. corruption=exchange.")
        try:
            options[key] = json.loads(value)
        except ValueError:
            options[key] = value
    return options
