"""What a bench says: rows of a table. Each is a ratio beside the least that it could be and the most that it should."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass

QUICK, AS_ROWS = "--quick", "--rows"


@dataclass(frozen=True)
class Row:
    """One measurement."""

    job: str
    measured: float
    unit: str  # in units of what
    floor: float | None = None  # what it cannot be below by much: the work that has to be done
    most: float | None = None  # what it should not be above


def quick() -> bool:
    """Whether small sizes are asked for: numbers that show that a bench works, and little else."""
    return QUICK in sys.argv


def words() -> list[str]:
    """What else was asked."""
    return [word for word in sys.argv[1:] if word not in (QUICK, AS_ROWS)]


def say(row: Row) -> None:
    """Print a row at once: as JSON for ``python -m bench``, else for people."""
    if AS_ROWS in sys.argv:
        print(json.dumps(asdict(row)), flush=True)
        return
    limits = [f"floor {row.floor:g}"] if row.floor is not None else []
    limits += [f"at most {row.most:g}"] if row.most is not None else []
    said = f"   ({', '.join(limits)})" if limits else ""
    print(f"  {row.job:64} {row.measured:6.3g} {row.unit}{said}", flush=True)


def heard(lines: Iterator[str]) -> Iterator[Row | str]:
    """The rows among a bench's lines; other lines as they are."""
    for line in lines:
        try:
            yield Row(**json.loads(line))
        except (ValueError, TypeError):
            yield line.rstrip()
