"""Time as ratios: the cost of a job in units of another job, measured side by side."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping


def ratios(
    floor: Callable[[], object], jobs: Mapping[str, Callable[[], object]], *, repeats: int = 7, warm: bool = True
) -> dict[str, float]:
    """The time of each job divided by that of the floor: the median over repeats in which all of them run in turn.

    Processor time is measured, so that other work on the machine has little influence. Use one thread.

    Arguments:
        warm: run everything once before, untimed, because first runs allocate memory and choose kernels.
    """
    for job in (floor, *jobs.values()) if warm else ():
        job()
    times: dict[str, list[float]] = {name: [] for name in jobs}
    for _ in range(repeats):
        unit = _seconds(floor)
        for name, job in jobs.items():
            times[name].append(_seconds(job) / unit)
    return {name: statistics.median(job_times) for name, job_times in times.items()}


def _seconds(job: Callable[[], object]) -> float:
    start = time.process_time()
    job()
    return time.process_time() - start
