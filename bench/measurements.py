"""What a benchmark prints: measurements, each beside its floor and the limit that it should stay below."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass

QUICK, AS_JSON = "--quick", "--json"


@dataclass(frozen=True)
class Measurement:
    """One line of the table of benchmarks."""

    job: str
    measured: float
    unit: str  # what ``measured`` is a multiple of
    floor: float | None = None  # the work that has to be done in any case
    most: float | None = None  # the limit; a measurement above it is marked in the table


def quick() -> bool:
    """Whether ``--quick`` was given: small sizes, which show that a benchmark works but not what a job costs."""
    return QUICK in sys.argv


def arguments() -> list[str]:
    """The command-line arguments without options."""
    return [argument for argument in sys.argv[1:] if argument not in (QUICK, AS_JSON)]


def show(measurement: Measurement) -> None:
    """Print a measurement: as JSON for ``python -m bench``, otherwise as text."""
    if AS_JSON in sys.argv:
        print(json.dumps(asdict(measurement)), flush=True)
        return
    limits = [f"floor {measurement.floor:g}"] if measurement.floor is not None else []
    limits += [f"at most {measurement.most:g}"] if measurement.most is not None else []
    note = f"   ({', '.join(limits)})" if limits else ""
    print(f"  {measurement.job:64} {measurement.measured:6.3g} {measurement.unit}{note}", flush=True)


def read_output(lines: Iterator[str]) -> Iterator[Measurement | str]:
    """The measurements in the output of a benchmark; all other lines as text."""
    for line in lines:
        try:
            yield Measurement(**json.loads(line))
        except (ValueError, TypeError):
            yield line.rstrip()
