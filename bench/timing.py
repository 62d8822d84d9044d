"""Times as ratios: what a job costs in units of another one, measured side by side."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping


def ratios(
    floor: Callable[[], object], jobs: Mapping[str, Callable[[], object]], *, repeats: int = 7, warm: bool = True
) -> dict[str, float]:
    """Each job's time over the floor's: the median over repeats in which all of them run in turn.

    Processor time is counted, so that other work on the machine matters little: use one thread.
    warm: run everything once before, untimed; first runs allocate memory and choose kernels.
    """
    for job in (floor, *jobs.values()) if warm else ():
        job()
    found: dict[str, list[float]] = {name: [] for name in jobs}
    for _ in range(repeats):
        unit = _seconds(floor)
        for name, job in jobs.items():
            found[name].append(_seconds(job) / unit)
    return {name: statistics.median(times) for name, times in found.items()}


def _seconds(job: Callable[[], object]) -> float:
    start = time.process_time()
    job()
    return time.process_time() - start
