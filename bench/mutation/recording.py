"""Records what each test costs and which functions of the library it calls, on the correct code."""

from __future__ import annotations

import hashlib
import inspect
import json
import signal
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, TypedDict

import pytest
from _pytest.runner import runtestprotocol

from bench.mutation.sample import ROOT


class TestRecord(TypedDict):
    """A test on the correct code: its CPU time, and the functions that it calls, as `file:name`."""

    test: str
    seconds: float
    passed: bool
    calls: list[str]


def read_lines(file: Path) -> list[Any]:
    """The records of a file with one JSON object per line; none if there is no file."""
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


class Recorder:
    """Runs tests on the correct code; keeps the CPU time of each and the functions of the library that it calls."""

    def __init__(self, packages: list[str], slow: float) -> None:
        self.folders = tuple(str(ROOT / package) for package in packages)
        self.slow = slow
        self.seen: dict[int, CodeType] = {}
        self.by_fixture: dict[str, set[str]] = defaultdict(set)

    def _trace(self, frame: FrameType, event: str, argument: object) -> None:
        if frame.f_code.co_filename.startswith(self.folders):
            self.seen[id(frame.f_code)] = frame.f_code

    def _take(self) -> set[str]:
        """The functions that were called since the last time."""
        codes, self.seen = self.seen.values(), {}
        return {f"{Path(c.co_filename).relative_to(ROOT)}:{c.co_qualname.split('.<locals>')[0]}" for c in codes}

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(self, fixturedef: pytest.FixtureDef[object]) -> Iterator[object]:
        """What a shared fixture calls counts for every test that uses it, not only for the first one."""
        outer, self.seen = self.seen, {}
        try:
            return (yield)
        finally:
            self.by_fixture[fixturedef.argname] |= self._take()
            self.seen = outer

    def run(self, items: list[pytest.Item], file: Path) -> None:
        def stop(number: int, frame: object) -> None:
            raise _TooSlowError

        signal.signal(signal.SIGPROF, stop)
        signal.signal(signal.SIGALRM, stop)  # for tests that wait for other processes
        with file.open("a") as lines:
            for item, following in zip(items, [*items[1:], None], strict=True):
                began = time.process_time()
                signal.setitimer(signal.ITIMER_PROF, self.slow)
                signal.setitimer(signal.ITIMER_REAL, 8 * self.slow)
                sys.settrace(self._trace)
                passed = passes(item, following)
                sys.settrace(None)
                signal.setitimer(signal.ITIMER_PROF, 0)
                signal.setitimer(signal.ITIMER_REAL, 0)
                called = self._take().union(*(self.by_fixture[name] for name in getattr(item, "fixturenames", ())))
                seconds = time.process_time() - began
                record = TestRecord(test=test_name(item), seconds=seconds, passed=passed, calls=sorted(called))
                print(json.dumps(record), file=lines, flush=True)


class _TooSlowError(BaseException):
    """A test takes more than the limit; nothing in the library catches this."""


def passes(item: pytest.Item, following: pytest.Item | None) -> bool:
    return not any(report.failed for report in runtestprotocol(item, log=False, nextitem=following))


@cache  # the text as it was collected
def test_name(item: pytest.Item) -> str:
    """The test and a hash of its text, so that a changed test is recorded again."""
    text = inspect.getsource(inspect.unwrap(getattr(item, "function", passes)))
    return f"{item.nodeid} {hashlib.sha256(text.encode()).hexdigest()[:8]}"
