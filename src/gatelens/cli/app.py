"""The machine of the command line: subcommands are registered here, and get their options from their settings."""

from __future__ import annotations

import inspect
import sys
import warnings
from collections.abc import Callable
from importlib import import_module
from typing import Annotated, Any, get_args, get_origin

import typer

from gatelens.cli.options import Loader
from gatelens.errors import GatelensError, GatelensWarning
from gatelens.runtime.settings import REQUIRED, setting_fields

COMMANDS: dict[str, tuple[Callable[..., None], str | None]] = {}


def command(name: str, settings: str | None = None) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Register a subcommand; ``settings`` names a class, ``module:Class``, whose fields become its options."""

    def register(function: Callable[..., None]) -> Callable[..., None]:
        COMMANDS[name] = function, settings
        return function

    return register


def make_app(asked: str | None = None) -> typer.Typer:
    """The command line. With ``asked``, only that subcommand gets the options of its settings.

    Settings live beside their methods, whose imports take seconds; the other subcommands do not wait for them.
    """
    app = typer.Typer(
        help="Find the few heads and edges of a language model that do a task, and prove it.",
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
    )
    for name, (function, settings) in COMMANDS.items():
        app.command(name)(_expand(function, settings if asked in (None, name) else None))
    return app


def main() -> None:
    """Run the command line; a user's mistake ends in one sentence and exit code 2, a warning is one too."""
    plain = warnings.showwarning

    def show(message: Any, category: type[Warning], *where: Any, **more: Any) -> None:
        if issubclass(category, GatelensWarning):
            print(f"gatelens: warning: {message}", file=sys.stderr)
        else:
            plain(message, category, *where, **more)

    warnings.showwarning = show
    try:
        make_app(next((word for word in sys.argv[1:] if not word.startswith("-")), ""))()
    except GatelensError as error:
        print(f"gatelens: {error}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        print("gatelens: stopped; the same command continues where it was.", file=sys.stderr)
        sys.exit(130)


def _expand(function: Callable[..., None], settings: str | None) -> Callable[..., None]:
    """The function with an option for each field of its settings (where they are named) and of its loader."""
    own = inspect.signature(function, eval_str=True).parameters.values()
    made: dict[str, Any] = {p.name: Loader for p in own if p.name == "load"}
    if settings is not None:
        module, name = settings.split(":")
        made["settings"] = getattr(import_module(module), name)

    def run(**given: Any) -> None:
        for name, cls in made.items():
            given[name] = cls(**{field.name: given.pop(field.name) for field in setting_fields(cls)})
        function(**given)

    parameters = [p.replace(kind=p.KEYWORD_ONLY) for p in own if p.name not in ("load", "settings")]
    for cls in reversed(made.values()):
        parameters += _parameters(cls)
    run.__name__, run.__doc__ = function.__name__, function.__doc__
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {p.name: p.annotation for p in parameters}
    return run


def _parameters(cls: Any) -> list[inspect.Parameter]:
    """One keyword parameter for each field of a settings class."""
    return [
        inspect.Parameter(
            field.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=inspect.Parameter.empty if field.default is REQUIRED else field.default,
            annotation=Annotated[_option_type(field.annotation), typer.Option(help=field.help)],
        )
        for field in setting_fields(cls)
    ]


def _option_type(hint: Any) -> Any:
    """A tuple of any length is an option that can be repeated."""
    return list[get_args(hint)[0]] if get_origin(hint) is tuple and Ellipsis in get_args(hint) else hint  # type: ignore[misc]
