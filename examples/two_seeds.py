"""Do two runs with other prompts agree? Counts of each task seed, for every circuit of a study that has several.

    python examples/two_seeds.py results/heads-kept-smollm2

A task seed has its own prompts to rank gates on and its own held-out prompts to count them on, so seeds are separate
runs. The last column says whether the 95 % intervals of all seeds have a number in common. Nothing is run.
"""

from __future__ import annotations

import sys
from pathlib import Path

import gatelens
from gatelens.measures.counts import Interval

THRESHOLD = 0.9


def main(study: Path) -> None:
    for folder in sorted((study / "cells").iterdir()):
        curve = gatelens.load_circuit(folder).curve
        n_seeds = len(curve.none)
        if n_seeds > 1:
            counts = [curve.of_seed(seed).counted(THRESHOLD) for seed in range(n_seeds)]
            agree = "overlap" if overlap([count.interval for count in counts]) else "do not overlap"
            print(f"{folder.name}: {', '.join(map(str, counts))}: the intervals {agree}")


def overlap(intervals: list[Interval]) -> bool:
    """Whether some number lies in all intervals. An open end has no limit."""
    lows = [low for low, _ in intervals if low is not None]
    highs = [high for _, high in intervals if high is not None]
    return not lows or not highs or max(lows) <= min(highs)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
