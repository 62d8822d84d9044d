"""Load what cannot be loaded."""

from __future__ import annotations

from typing import Any

import pytest

import gatelens
from gatelens import GatelensError


def refusal(source: object, **options: Any) -> str:
    """The error that loading raises. It must be one line, name the source, and contain no traceback."""
    with pytest.raises(GatelensError) as caught:
        gatelens.load(source, **options)  # type: ignore[arg-type]
    message = str(caught.value)
    assert "\n" not in message
    assert "Traceback" not in message
    assert str(source) in message
    return message
