"""Jobs that get a signal at a known piece of work, for tests to start as a process of its own.

python interrupted.py < JOBS: one line of JSON for each job, {"words": [...], "signal": "SIGINT", "phase": "fit G",
"at": 3}. The job is the command line with these words. It gets the signal when it reports piece or step number `at` of
the phase for the first time; without a phase, when sparsify begins step number `at`. With {"call": "module:function"}
instead of both, it gets the signal when it calls this function. The process prints a line of JSON for each job: its
exit code and what it wrote to stderr. SIGKILL ends the process.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import signal
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import gatelens.jobs.demo
from gatelens import cli
from gatelens.runtime.journal import Journal
from gatelens.sparse.sparsify._training import Training


def main() -> None:
    for line in sys.stdin:
        job = json.loads(line)
        if "demo" in job:
            gatelens.jobs.demo.STUDY = Path(job["demo"])
        said = io.StringIO()
        sys.argv = ["gatelens", *job["words"]]
        number = signal.Signals[job["signal"]]
        call, phase = job.get("call"), job.get("phase")
        stopping = interrupting(phase, job["at"], number) if call is None else interrupting_call(call, number)
        with stopping, contextlib.redirect_stderr(said):
            try:
                cli.main()
            except SystemExit as end:
                print(json.dumps({"code": end.code or 0, "stderr": said.getvalue()}), file=sys.__stdout__, flush=True)


@contextlib.contextmanager
def interrupting(phase: str | None, at: int, number: signal.Signals) -> Any:
    """Send this process a signal when a phase of the work reaches this number."""
    reach, step, sent = Journal.reach, Training.step, []

    def send() -> None:
        if not sent:
            sent.append(number)
            os.kill(os.getpid(), number)

    def reach_and_send(self: Journal, done: int) -> None:
        reach(self, done)
        if self.title == phase and done == at:
            send()

    def send_and_step(self: Training, number: int) -> Any:
        if phase is None and number + 1 == at:
            send()
        return step(self, number)

    Journal.reach, Training.step = reach_and_send, send_and_step  # type: ignore[method-assign]
    try:
        yield
    finally:
        Journal.reach, Training.step = reach, step  # type: ignore[method-assign]


@contextlib.contextmanager
def interrupting_call(place: str, number: int) -> Any:
    """Send this process a signal when it calls a function, given as ``module:function``."""
    module, _, name = place.partition(":")
    home = import_module(module)
    function = getattr(home, name)

    def send_and_call(*args: Any, **kwargs: Any) -> Any:
        os.kill(os.getpid(), number)
        return function(*args, **kwargs)

    setattr(home, name, send_and_call)
    try:
        yield
    finally:
        setattr(home, name, function)


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored where the tests run in the background
    main()
