"""Stop a job on Ctrl-C (SIGINT) or SIGTERM so that it can be resumed, and say where it stopped.

A signal raises `KeyboardInterrupt`, and the run folder turns it into `Interrupted`, which says where the work stopped.
Work that proceeds step by step finishes its step first and saves its state: it runs inside `finishing_steps`.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Interrupted(KeyboardInterrupt):
    """The work was stopped by a signal. Its message is one sentence for the user.

    Arguments:
        where: the piece of work at which it stopped, such as "step 12"; empty if that is not known.
        resumes: whether the same command continues from there; otherwise it starts again.
    """

    def __init__(self, where: str = "", *, resumes: bool = True) -> None:
        self.where, self.resumes = where, resumes
        at, next_run = f" at {where}" * bool(where), "continues" if resumes else "starts again"
        super().__init__(f"stopped{at}; the same command {next_run}.")


class StopRequest:
    """Whether a signal has asked the work to stop. The first one waits for the step to end, the second one does not."""

    def __init__(self) -> None:
        self.received = False

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if self.received:
            raise KeyboardInterrupt
        self.received = True


@contextmanager
def finishing_steps() -> Iterator[StopRequest]:
    """Let the block finish its current step when a signal arrives. It must look at `received` after every step.

    Signals can be handled in the main thread only; in any other thread the request is never received.

    Example:
        with finishing_steps() as stop:
            for step in range(steps):
                train(step)
                if stop.received:
                    save(step)
                    raise Interrupted(f"step {step + 1}")
    """
    stop = StopRequest()
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return
    # A signal that is ignored stays so, as for a job that was started by nohup. A handler that was not set in Python
    # (None) could not be set again.
    handlers = {number: signal.getsignal(number) for number in SIGNALS}
    handlers = {number: handler for number, handler in handlers.items() if handler not in (None, signal.SIG_IGN)}
    for number in handlers:
        signal.signal(number, stop)
    try:
        yield stop
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


def interrupt_on_sigterm() -> None:
    """Treat SIGTERM, which batch systems and containers send, as Ctrl-C. It holds until the process ends."""
    if signal.getsignal(signal.SIGTERM) is not signal.SIG_IGN:
        signal.signal(signal.SIGTERM, signal.default_int_handler)
