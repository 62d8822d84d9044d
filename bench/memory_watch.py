"""The memory that a piece of work takes: anonymous pages of the process, sampled while the work runs.

Files that are mapped into memory, such as weights, are not anonymous, so they do not count. Linux only.
"""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

INTERVAL = 0.01  # seconds between samples; the large tensors of a large model live longer than that


@dataclass
class Used:
    """What some work took.

    Arguments:
        peak_gb: the largest amount of memory above that at its start.
        seconds: processor time.
        elapsed: time on the clock, which includes waiting for other work on the machine and for the disk.
    """

    peak_gb: float = 0.0
    seconds: float = 0.0
    elapsed: float = 0.0


@contextmanager
def watched() -> Iterator[Used]:
    """Measure what the block takes. The fields of the result are complete after the block."""
    gc.collect()
    used, done = Used(), threading.Event()
    before = anonymous_gb()

    def sample() -> None:
        while not done.wait(INTERVAL):
            used.peak_gb = max(used.peak_gb, anonymous_gb() - before)

    thread = threading.Thread(target=sample, daemon=True)
    thread.start()
    start, processor_start = time.perf_counter(), time.process_time()
    try:
        yield used
    finally:
        used.seconds, used.elapsed = time.process_time() - processor_start, time.perf_counter() - start
        used.peak_gb = max(used.peak_gb, anonymous_gb() - before)
        done.set()
        thread.join()


def anonymous_gb() -> float:
    """The memory of this process that no file holds, in GB."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("RssAnon")) * 1024 / 1e9
