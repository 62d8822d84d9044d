"""Run the command line inside a test."""

from __future__ import annotations

import sys

import pytest

from gatelens import cli


def run(monkeypatch: pytest.MonkeyPatch, *words: str) -> int:
    """The exit code of ``gatelens`` with these words."""
    monkeypatch.setattr(sys, "argv", ["gatelens", *words])
    with pytest.raises(SystemExit) as end:
        cli.main()
    return int(end.value.code or 0)
