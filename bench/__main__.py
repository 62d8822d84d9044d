"""Run all benchmarks, or those that are named, and print one table: ``python -m bench [--quick] [NAME ...]``.

Almost every number is a ratio of two things that are measured in one run, so that it can be compared between machines.
Nothing is asserted. Each benchmark runs in a process of its own, because peak memory is that of a process.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from rich.console import Console
from rich.table import Table

from bench.measurements import AS_JSON, QUICK, Measurement, arguments, quick, read_output

_HELPERS = ("large_models", "measurements", "memory_watch", "sparsify_memory", "tables", "timing")
_MODULES = sorted(path.stem for path in Path(__file__).parent.glob("*.py"))
NAMES = [name for name in _MODULES if name not in _HELPERS and not name.startswith("__")]
ONLY_BY_NAME = ("large",)  # it writes 40 GB of weights


def main() -> int:
    console = Console()
    unknown = [name for name in arguments() if name not in NAMES]
    if unknown:
        print(f"no benchmark '{unknown[0]}': there are {', '.join(NAMES)}.", file=sys.stderr)
        return 2
    table = Table("benchmark", "job", "measured", "in units of", "floor", "at most", "", title="costs, as ratios")
    failed = False
    for name in arguments() or [name for name in NAMES if name not in ONLY_BY_NAME]:
        console.print(f"== {name}", highlight=False)
        failed |= run(name, table, console)
        table.add_section()
    console.print(table)
    return int(failed)


def run(name: str, table: Table, console: Console) -> bool:
    """Run a benchmark, print its output as it comes, and add its measurements to the table.

    Returns:
        Whether the benchmark failed.
    """
    command = [sys.executable, "-m", f"bench.{name}", AS_JSON, *([QUICK] if quick() else [])]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in read_output(process.stdout):
            if isinstance(line, Measurement):
                table.add_row(name, *cells(line))
                console.print(f"  {line.job}: {line.measured:.3g} {line.unit}", highlight=False, markup=False)
            else:
                console.print(line, highlight=False, markup=False)
    if process.returncode:
        table.add_row(name, f"failed with exit code {process.returncode}")
    return process.returncode != 0


def cells(measurement: Measurement) -> list[str]:
    """The cells of a measurement in the table; the last one marks it if it is above its limit."""
    above = measurement.most is not None and measurement.measured > measurement.most
    limits = ["" if limit is None else f"{limit:g}" for limit in (measurement.floor, measurement.most)]
    return [measurement.job, f"{measurement.measured:.3g}", measurement.unit, *limits, "above" if above else ""]


if __name__ == "__main__":
    sys.exit(main())
