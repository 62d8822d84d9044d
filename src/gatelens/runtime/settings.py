"""The base class of everything that a user sets: settings of jobs and methods, study files, saved results.

pydantic checks the types and ranges, and reads and writes JSON. It is used instead of msgspec because it reports every
wrong value with the path to its key, and because its field descriptions are the help text of the command line and of
the reference pages.
"""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar, Self, get_args, get_origin

from pydantic import BaseModel, ConfigDict, ValidationError, model_validator
from pydantic.fields import FieldInfo

from gatelens.errors import GatelensError, shortened, shown
from gatelens.runtime.inputs import parse_json

EXECUTION: dict[str, Any] = {"execution": True}
"""Mark a field that changes how a job runs but not its numbers: ``Field(default=4.0, json_schema_extra=EXECUTION)``."""

ADDED: dict[str, Any] = {"added": True}
"""Mark a field that earlier versions did not have. With its default it is not part of a request, so that runs and
studies of earlier versions can be resumed: ``Field(default=None, json_schema_extra=ADDED)``."""

_TOO_LARGE = 2**63


class Settings(BaseModel):
    """Settings that are checked when they are made and never change.

    Example:
        class MySettings(Settings):
            steps: int = Field(default=5, ge=1, description="points of the path")

        MySettings(steps=0)  # GatelensError: steps is 0: it must be at least 1.
    """

    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=True, allow_inf_nan=False, protected_namespaces=(), validate_default=False
    )
    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {}
    """Values of several fields under one name, such as the sizes that a paper uses. `preset` makes settings of them."""
    common: ClassVar[tuple[str, ...] | None] = None
    """The fields that most users set. Help lists all others separately; None: all fields are common."""

    def __init__(self, **values: Any) -> None:
        try:
            super().__init__(**values)
        except ValidationError as error:
            raise GatelensError(explain(error, type(self))) from None

    # Tells pydantic not to call this __init__ for nested settings, so that their errors keep the path to the key.
    __init__.__pydantic_base_init__ = True  # type: ignore[attr-defined]

    @model_validator(mode="before")
    @classmethod
    def _plain_values(cls, values: Any) -> Any:
        """Accept a list where a field is a tuple, because JSON and TOML have lists only, and refuse huge integers."""
        if not isinstance(values, Mapping):
            return values
        for key, value in values.items():
            if isinstance(value, int) and abs(value) >= _TOO_LARGE:  # torch and numpy cannot hold it
                raise GatelensError(f"{key} is {shown(value)}: it must be below 2^63.")
        tuples = {name for name, field in cls.model_fields.items() if get_origin(field.annotation) is tuple}
        return {
            key: tuple(value) if key in tuples and isinstance(value, list) else value for key, value in values.items()
        }

    @classmethod
    def preset(cls, name: str, **changes: Any) -> Self:
        """Settings with the values of a preset. All other fields have their defaults.

        Example:
            settings = HeadGatingSettings.preset("published", seeds=5)

        Arguments:
            name: the name of the preset.
            changes: fields that have other values than in the preset.
        """
        return cls(**{**cls.preset_values(name), **changes})

    @classmethod
    def preset_values(cls, name: str) -> Mapping[str, Any]:
        """The fields that a preset sets, with their values."""
        if name not in cls.presets:
            raise GatelensError(unknown_name("preset", name, cls.presets))
        return cls.presets[name]

    def replace(self, **changes: Any) -> Self:
        """The same settings with some of them changed. The result is checked again."""
        # Not dict(self): a field called `keys` would make it a mapping.
        return type(self)(**{**vars(self), **changes})

    def identity(self) -> dict[str, Any]:
        """What decides the numbers, as plain JSON.

        These are all fields except those marked with `EXECUTION`, and those with their default marked with `ADDED`.
        """
        fields = type(self).model_fields
        left_out = {name for name, field in fields.items() if _is_marked(field, EXECUTION)}
        left_out |= {
            name for name, field in fields.items() if _is_marked(field, ADDED) and getattr(self, name) == field.default
        }
        return self.model_dump(mode="json", exclude=left_out)


@dataclasses.dataclass(frozen=True)
class SettingField:
    """One field of a settings class, as the command line and the reference pages show it."""

    name: str
    annotation: Any
    default: Any  # REQUIRED if the field has none
    help: str | None


REQUIRED: Any = ...
"""The default of a field that has none."""


def setting_fields(cls: type[BaseModel]) -> list[SettingField]:
    """The fields of a settings class, in order."""
    return [
        SettingField(
            name,
            field.annotation,
            REQUIRED if field.is_required() else field.get_default(call_default_factory=True),
            field.description,
        )
        for name, field in cls.model_fields.items()
    ]


def explain(error: ValidationError, cls: type[BaseModel], where: str = "") -> str:
    """The first problem that pydantic found, in one sentence.

    Arguments:
        error: what pydantic raised.
        cls: the class whose fields were checked.
        where: text before the key, for example the path of a file and a section.
    """
    detail = error.errors(include_url=False)[0]
    path = [str(part) for part in detail["loc"]]
    key = ".".join(path)
    name = f"{where}{key}" if key else where.rstrip(".: ") or cls.__name__
    before = f"{name}: " if where or len(path) > 1 else ""
    if detail["type"] == "extra_forbidden":
        return unknown_name("setting", path[-1], _owner(cls, path).model_fields, before)
    if detail["type"] == "missing":
        return f"{name} is missing: give it a value."
    if detail["type"] == "literal_error":
        field = _owner(cls, path).model_fields.get(path[-1])
        return unknown_name(path[-1], detail["input"], literal_choices(field) if field is not None else [], before)
    return f"{shortened(name)} is {shown(detail['input'])}: {requirement(detail['msg'])}."


def _owner(cls: type[BaseModel], path: Sequence[str]) -> type[BaseModel]:
    """The class, nested in another one, that has the last key of a path."""
    annotation: Any = cls
    for key in path[:-1]:
        owner = _model_in(annotation)
        if owner is not None and key in owner.model_fields:
            annotation = owner.model_fields[key].annotation  # otherwise it is the key of a mapping or a list
    return _model_in(annotation) or cls


def _model_in(annotation: Any) -> type[BaseModel] | None:
    """The first class of settings that a type contains, such as B in dict[str, B] or B | None."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next((model for part in get_args(annotation) if (model := _model_in(part)) is not None), None)


def unknown_name(kind: str, name: object, known: Iterable[str], where: str = "") -> str:
    """An error message about a name that does not exist: it gives the nearest name and all names.

    Arguments:
        kind: what the name should be, such as "level".
        name: the name that was asked for.
        known: the names that exist.
        where: text before the message, for example the path of a file.
    """
    names = list(known)
    name = shortened(str(name))
    close = difflib.get_close_matches(name, names, 1, cutoff=0.5)
    hint = f"did you mean '{close[0]}'? " if close else ""
    return f"{where}no {kind} '{name}': {hint}There are {', '.join(names) or 'none'}."


def key_values(pairs: Iterable[str], kind: str) -> dict[str, Any]:
    """Options from KEY=VALUE pairs. Values that are JSON (numbers, true, lists) are read as JSON, others as text.

    Arguments:
        kind: what a pair is, with its article, for the error message.
    """
    options: dict[str, Any] = {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not equals or not key:
            raise GatelensError(f"'{pair}' is not {kind}: write it as KEY=VALUE, for example length=8.")
        try:
            options[key] = parse_json(value)
        except ValueError:
            options[key] = value
    return options


def literal_choices(field: FieldInfo) -> Sequence[str]:
    """The values that a field of a Literal type accepts."""
    annotation = field.annotation
    nested = [part for part in get_args(annotation) if get_args(part)] if get_origin(annotation) else []
    return [str(choice) for part in (nested or [annotation]) for choice in get_args(part)]


def requirement(message: str) -> str:
    """pydantic's message as the second half of a sentence: "it must be ..." or, for a list, "it must have ..."."""
    _, has_length, length = message.partition(" should have ")
    if has_length:
        return f"it must have {length.partition(' after validation')[0]}"
    message = message.partition(", unable to parse")[0]
    for start in ("Input should be ", "Value error, ", "Assertion failed, "):
        message = message.removeprefix(start)
    for phrase, plain in _PLAIN.items():
        message = message.replace(phrase, plain)
    return f"it must be {message[0].lower()}{message[1:]}"


_PLAIN = {
    "greater than or equal to": "at least",
    "greater than": "above",
    "less than or equal to": "at most",
    "less than": "below",
    "a valid integer": "a whole number",
    "a valid number": "a number",
    "a valid string": "a string",
    "a valid boolean": "true or false",
    "a valid dictionary": "a table",
    "a valid list": "a list",
}


def _is_marked(field: FieldInfo, mark: Mapping[str, Any]) -> bool:
    extra = field.json_schema_extra
    return isinstance(extra, dict) and all(extra.get(key) == value for key, value in mark.items())
