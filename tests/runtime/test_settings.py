"""Settings: checked when they are made, with one sentence for a wrong value."""

from __future__ import annotations

from typing import Literal

import pytest
from pydantic import Field

from gatelens.errors import GatelensError
from gatelens.runtime.settings import ADDED, EXECUTION, REQUIRED, SettingField, Settings, setting_fields


class Example(Settings):
    steps: int = Field(default=5, ge=1)
    rate: tuple[float, float] = Field(default=(0.1, 0.01))
    level: Literal["heads", "edges"] = "heads"
    memory_gb: float = Field(default=4.0, gt=0, json_schema_extra=EXECUTION)


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        ({"steps": 0}, "steps is 0: it must be at least 1."),
        ({"steps": 2.5}, "steps is 2.5: it must be a whole number."),
        ({"steps": "3"}, "steps is '3': it must be a whole number."),
        ({"steps": True}, "steps is True: it must be a whole number."),
        ({"memory_gb": float("nan")}, "memory_gb is nan: it must be a finite number."),
        ({"stpes": 3}, "no setting 'stpes': did you mean 'steps'? There are steps, rate, level, memory_gb."),
        ({"level": "head"}, "no level 'head': did you mean 'heads'? There are heads, edges."),
    ],
)
def test_a_wrong_value_is_one_sentence(values: dict[str, object], sentence: str) -> None:
    with pytest.raises(GatelensError) as raised:
        Example(**values)
    assert str(raised.value) == sentence


def test_lists_and_whole_numbers_are_accepted_as_json_and_toml_have_them() -> None:
    settings = Example(rate=[1, 2], memory_gb=3)  # type: ignore[arg-type]
    assert settings.rate == (1.0, 2.0)
    assert settings.memory_gb == 3.0


def test_replace_checks_again() -> None:
    assert Example().replace(steps=7) == Example(steps=7)
    with pytest.raises(GatelensError, match="steps is -1"):
        Example().replace(steps=-1)


def test_identity_leaves_out_the_default_of_a_field_that_was_added_later() -> None:
    class Later(Example):
        clip: float | None = Field(None, json_schema_extra=ADDED)

    assert Later().identity() == Example().identity()
    assert Later(clip=1.0).identity() == {**Example().identity(), "clip": 1.0}


def test_identity_leaves_out_what_changes_no_number() -> None:
    assert Example(memory_gb=1).identity() == Example(memory_gb=2).identity()
    assert Example(steps=1).identity() != Example(steps=2).identity()
    assert Example().identity() == {"steps": 5, "rate": [0.1, 0.01], "level": "heads"}


def test_fields_are_listed_with_their_defaults_and_help() -> None:
    class Checked(Settings):
        name: str = Field(description="its name")
        rate: tuple[float, ...] = Field((0.1,), description="learning rates")

    assert setting_fields(Checked) == [
        SettingField("name", str, REQUIRED, "its name"),
        SettingField("rate", tuple[float, ...], (0.1,), "learning rates"),
    ]


def test_nested_settings_name_the_path_and_the_nearest_name() -> None:
    class Outer(Settings):
        parts: dict[str, Example] = Field(default={})
        first: Example | None = None

    for values, sentence in (
        ({"parts": {"a": {"steps": 0}}}, "parts.a.steps is 0: it must be at least 1."),
        ({"parts": {"a": {"level": "head"}}}, "parts.a.level: no level 'head': did you mean 'heads'? There are heads,"),
        ({"first": {"stpes": 1}}, "first.stpes: no setting 'stpes': did you mean 'steps'? There are steps, rate,"),
    ):
        with pytest.raises(GatelensError) as raised:
            Outer(**values)  # type: ignore[arg-type]
        assert str(raised.value).startswith(sentence)
