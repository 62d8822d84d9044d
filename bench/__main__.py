"""All benches, one after another, and one table of what they measured: ``python -m bench [--quick] [NAME ...]``.

Every number is a ratio of two things measured in one run, so that it means the same on every machine; nothing is
asserted. Each bench has a process of its own: peaks of memory are those of a process.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from rich.console import Console
from rich.table import Table

from bench.rows import AS_ROWS, QUICK, Row, heard, quick, words

NAMES = sorted(path.stem for path in Path(__file__).parent.glob("*.py") if path.stem not in ("rows", "timing"))
NAMES = [name for name in NAMES if not name.startswith("__")]


def main() -> int:
    console = Console()
    unknown = [name for name in words() if name not in NAMES]
    if unknown:
        print(f"no bench '{unknown[0]}': benches are {', '.join(NAMES)}.", file=sys.stderr)
        return 2
    table = Table("bench", "job", "measured", "in units of", "floor", "at most", "", title="costs, as ratios")
    failed = False
    for name in words() or NAMES:
        console.print(f"== {name}", highlight=False)
        failed |= run(name, table, console)
        table.add_section()
    console.print(table)
    return int(failed)


def run(name: str, table: Table, console: Console) -> bool:
    """Add a bench's rows to the table; print at once what it says besides. True if it failed."""
    command = [sys.executable, "-m", f"bench.{name}", AS_ROWS, *([QUICK] if quick() else [])]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for said in heard(process.stdout):
            if isinstance(said, Row):
                table.add_row(name, *cells(said))
                console.print(f"  {said.job}: {said.measured:.3g} {said.unit}", highlight=False, markup=False)
            else:
                console.print(said, highlight=False, markup=False)
    if process.returncode:
        table.add_row(name, f"failed with exit code {process.returncode}")
    return process.returncode != 0


def cells(row: Row) -> list[str]:
    above = row.most is not None and row.measured > row.most
    limits = ["" if limit is None else f"{limit:g}" for limit in (row.floor, row.most)]
    return [row.job, f"{row.measured:.3g}", row.unit, *limits, "above" if above else ""]


if __name__ == "__main__":
    sys.exit(main())
