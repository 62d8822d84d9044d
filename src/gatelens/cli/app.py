"""How the command line works: subcommands are registered here, and their settings become options."""

from __future__ import annotations

import inspect
import sys
import warnings
from collections.abc import Callable
from importlib import import_module
from typing import Annotated, Any, get_args, get_origin

import typer

from gatelens.errors import GatelensError, GatelensWarning
from gatelens.jobs.load_settings import LoadSettings
from gatelens.runtime.interrupts import Interrupted, interrupt_on_sigterm
from gatelens.runtime.rank import is_main
from gatelens.runtime.settings import REQUIRED, Settings, requirement, setting_fields
from gatelens.version import __version__

COMMANDS: dict[str, tuple[Callable[..., None], str | None]] = {}
"""The function of each subcommand, and its settings class as ``module:Class``."""
# typer does not export the base class of its errors about words, which belongs to click or to its own copy of click.
_USAGE_ERROR: Any = typer.BadParameter.__base__
_QUICK = "quick"  # the preset that has an option of its own


def command(name: str, settings: str | None = None) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Register a subcommand.

    Arguments:
        settings: a class, as ``module:Class``, whose fields become options. The function gets an instance of it.
    """

    def register(function: Callable[..., None]) -> Callable[..., None]:
        COMMANDS[name] = function, settings
        return function

    return register


def make_app(asked: str | None = None) -> typer.Typer:
    """The command line.

    Arguments:
        asked: the subcommand that is called, if it is known. Only this one gets the options of its settings: importing
            the settings of a job takes seconds, and the other subcommands do not need them.
    """
    app = typer.Typer(
        help="Find the few heads and edges of a language model that do a task, and prove it.",
        add_completion=False,
        pretty_exceptions_enable=False,
    )
    app.callback()(_options)
    for name, (function, settings) in COMMANDS.items():
        app.command(name)(_expand(function, settings if asked in (None, name) else None))
    return app


def _print_version(asked: bool) -> None:
    if asked:
        print(f"gatelens {__version__}")
        raise typer.Exit


def _options(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and exit.", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    """The options of the command line as a whole."""


def main() -> None:
    """Run the command line. A warning is one sentence.

    Exit codes: 2 after a mistake of the user, 130 after Ctrl-C or SIGTERM, each with one sentence; 1 if some cells of a
    study failed.
    """
    show_warning = warnings.showwarning

    def show(message: Any, category: type[Warning], *args: Any, **kwargs: Any) -> None:
        if issubclass(category, GatelensWarning):
            if is_main():  # with several processes, all of them have the same warnings
                print(f"gatelens: warning: {message}", file=sys.stderr)
        else:
            show_warning(message, category, *args, **kwargs)

    warnings.showwarning = show
    interrupt_on_sigterm()
    try:
        app = make_app(next((word for word in sys.argv[1:] if not word.startswith("-")), ""))
        code = app(sys.argv[1:] or ["--help"], prog_name="gatelens", standalone_mode=False) or 0
    except GatelensError as error:
        print(f"gatelens: {error}", file=sys.stderr)
        code = 2
    except _USAGE_ERROR as error:
        print(f"gatelens: {_usage_sentence(error)}", file=sys.stderr)
        code = 2
    except KeyboardInterrupt as stop:  # while a settings class is imported
        code = _stopped(stop)
    sys.exit(code)


def _stopped(stop: KeyboardInterrupt) -> int:
    """Say where the work stopped, and return the exit code."""
    print(f"gatelens: {stop if isinstance(stop, Interrupted) else Interrupted(resumes=False)}", file=sys.stderr)
    return 130


def _usage_sentence(error: Any) -> str:
    """What typer says about words that it cannot read, in one line, and where to look."""
    message = " ".join(error.format_message().split()).rstrip(".")
    name, pydantic_says, rule = message.partition(": Input should be ")
    if pydantic_says:
        message = f"{name}: {requirement(rule)}"
    command = error.ctx.command_path if error.ctx is not None else "gatelens"
    end = " See" if message.endswith("?") else ": see"
    return f"{message[0].lower()}{message[1:]}{end} `{command} --help`."


def _expand(function: Callable[..., None], settings: str | None) -> Callable[..., None]:
    """The function with an option for each field of its settings and of its loader."""
    own = inspect.signature(function, eval_str=True).parameters.values()
    classes: dict[str, type[Settings]] = {p.name: p.annotation for p in own if p.name == "load"}
    if settings is not None:
        module, name = settings.split(":")
        classes["settings"] = getattr(import_module(module), name)

    def run(called: typer.Context, **values: Any) -> None:
        # A command without settings may have an option --quick of its own, which it gets as it is.
        preset = _chosen_preset(values) if any(cls.presets for cls in classes.values()) else None
        for name, cls in classes.items():
            own = {field.name: values.pop(field.name) for field in setting_fields(cls)}
            if preset is not None and cls.presets:
                values[name] = cls.preset(preset, **{key: own[key] for key in own if _is_given(called, key)})
            else:
                values[name] = cls(**own)
        try:
            function(**values)
        except KeyboardInterrupt as stop:  # typer would end without a word
            raise typer.Exit(_stopped(stop)) from None

    parameters = [inspect.Parameter("called", inspect.Parameter.POSITIONAL_OR_KEYWORD, annotation=typer.Context)]
    parameters += [p.replace(kind=p.KEYWORD_ONLY) for p in own if p.name not in ("load", "settings")]
    for cls in reversed(classes.values()):
        parameters += [*_preset_parameters(cls), *_parameters(cls)]
    run.__name__, run.__doc__ = function.__name__, function.__doc__
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {p.name: p.annotation for p in parameters}
    return run


def _preset_parameters(cls: type[Settings]) -> list[inspect.Parameter]:
    """The options ``--preset NAME`` and ``--quick``, if the settings have presets."""
    values = {
        name: ", ".join(f"{key} {value}" for key, value in fields.items()) for name, fields in cls.presets.items()
    }
    presets = "; ".join(f"{name} ({values[name]})" for name in values)
    names = f"settings under one name: {presets}. Options that are given with it take precedence"
    options: dict[str, Any] = {}
    if cls.presets:
        options["preset"] = None, Annotated[str | None, typer.Option(help=names)]
    if _QUICK in cls.presets:
        options[_QUICK] = False, Annotated[bool, typer.Option(f"--{_QUICK}", help=f"the same as --preset {_QUICK}")]
    return [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)
        for name, (default, annotation) in options.items()
    ]


def _chosen_preset(values: dict[str, Any]) -> str | None:
    """Take the options of `_preset_parameters` out of the values of a command, and return the name of the preset."""
    preset: str | None = values.pop("preset", None)
    is_quick = values.pop(_QUICK, False)
    if is_quick and preset not in (None, _QUICK):
        raise GatelensError(f"--{_QUICK} and --preset {preset} ask for different settings: give one of them.")
    return _QUICK if is_quick else preset


def _is_given(called: typer.Context, option: str) -> bool:
    """Whether the user gave this option of a command."""
    source = called.get_parameter_source(option)
    return source is not None and source.name != "DEFAULT"


def _parameters(cls: type[Settings]) -> list[inspect.Parameter]:
    """One keyword parameter for each field of a settings class."""
    return [
        inspect.Parameter(
            field.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=inspect.Parameter.empty if field.default is REQUIRED else field.default,
            annotation=Annotated[
                _option_type(field.annotation), typer.Option(help=field.help, rich_help_panel=_panel(cls, field.name))
            ],
        )
        for field in setting_fields(cls)
    ]


def _panel(cls: type[Settings], field: str) -> str | None:
    """The part of the help in which a field is listed. Options that most users need come first."""
    if issubclass(cls, LoadSettings):
        return "Loading the model"
    return None if cls.common is None or field in cls.common else "Advanced options"


def _option_type(hint: Any) -> Any:
    """The type of an option. A tuple of any length becomes an option that can be repeated."""
    return list[get_args(hint)[0]] if get_origin(hint) is tuple and Ellipsis in get_args(hint) else hint  # type: ignore[misc]
