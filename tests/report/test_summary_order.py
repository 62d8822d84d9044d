"""The order of the panels: tasks of the published figures first, others as they occur."""

from types import SimpleNamespace
from typing import Any

import pytest

from gatelens.report import _summary


def test_groups_stand_in_the_order_of_the_published_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = SimpleNamespace(level="heads", method="eap", threshold=0.9)
    names = ("zebra", "ioi-long", "docstring", "addition", "ioi", "greater-than", "zebra")
    runs: list[Any] = [SimpleNamespace(result=SimpleNamespace(settings=settings, task=name)) for name in names]
    monkeypatch.setattr(
        _summary, "_group", lambda level, method, task, threshold, _: _summary.Group(task, level, method, threshold, [])
    )
    tasks = [group.task for group in _summary.summarise(runs)]
    assert tasks == ["greater-than", "ioi", "docstring", "ioi-long", "zebra", "addition"]
