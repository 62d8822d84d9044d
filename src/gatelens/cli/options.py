"""What subcommands have in common: how to name a model and a task, and how to load a model."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from pydantic import Field

from gatelens.jobs.load_settings import GatedLoadSettings, LoadSettings
from gatelens.runtime.settings import key_values

if TYPE_CHECKING:
    from gatelens.model import Model

ModelName = Annotated[str, typer.Argument(help="a built-in name, a folder, a .gguf file or a hub id", metavar="MODEL")]
TaskName = Annotated[str, typer.Argument(help="a task (`gatelens tasks` lists them) or a .jsonl file", metavar="TASK")]
TaskOption = Annotated[
    list[str] | None, typer.Option("--option", help="an option of the task, as KEY=VALUE; repeatable")
]
SkipBad = Annotated[bool, typer.Option("--skip-bad", help="skip bad lines of a .jsonl file instead of stopping")]


_ALLOW_PICKLE: Any = Field(False, description="also read pickled weights, which can run code of their author")


class Loader(GatedLoadSettings):
    """How to load a model. Its fields are options of every subcommand that takes a model."""

    allow_pickle: bool = _ALLOW_PICKLE

    def __call__(self, source: str) -> Model:
        """Load a model."""
        return self.open(source, allow_pickle=self.allow_pickle, bias=self.bias)


class DenseLoader(LoadSettings):
    """How to load a dense model: the same options without the bias."""

    allow_pickle: bool = _ALLOW_PICKLE

    def __call__(self, source: str) -> Model:
        """Load a model."""
        return self.open(source, allow_pickle=self.allow_pickle)


def default_folder(*names: str) -> Path:
    """The run folder if the user does not give one."""
    return Path("runs") / "-".join(names).replace("/", "-")


def task_options(pairs: list[str] | None, skip_bad: bool) -> dict[str, Any]:
    """The options of a task from KEY=VALUE pairs. Values that are JSON (numbers, true, lists) are read as JSON."""
    return {**({"skip_bad": True} if skip_bad else {}), **key_values(pairs or [], "a task option")}
