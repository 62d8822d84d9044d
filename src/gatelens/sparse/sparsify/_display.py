"""What a run shows while it trains: one live line in a terminal, one printed line for each step elsewhere."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from gatelens.sparse.sparsify._log import Record


class Display:
    """Shows losses, open keys per query and head, idle heads, multiplier, tokens per second and time left."""

    def __init__(self, done: int, steps: int, progress: Progress | None, console: Console | None) -> None:
        self.done, self.steps, self.console, self.progress = done, steps, console, progress
        self.started, self.first = time.perf_counter(), done
        self.task = None if progress is None else progress.add_task("sparsify", total=steps, completed=done, numbers="")

    def step(self, record: Record) -> None:
        """Show the numbers of a step that was just made."""
        self.done += 1
        numbers = (
            f"cross-entropy {record['cross_entropy']:.3f} ({record['above_dense']:+.3f})  KL {record['kl']:.4f}  "
            f"keys per query {record['keys_per_query']:.2f}  idle heads {100 * record['idle_heads']:.0f}%  "
            f"multiplier {record['multiplier']:.3g}  {record['tokens_per_second']:.0f} tokens/s"
        )
        if self.progress is not None and self.task is not None:
            self.progress.update(self.task, completed=self.done, numbers=numbers)
        elif self.console is not None:
            spent = time.perf_counter() - self.started
            left = timedelta(seconds=round(spent / (self.done - self.first) * (self.steps - self.done)))
            self.say(f"step {self.done}/{self.steps}  {numbers}  {left} left")

    def say(self, line: str) -> None:
        """Print a line, if anything is shown."""
        if self.console is not None:
            self.console.print(line, highlight=False, soft_wrap=True)


@contextmanager
def displayed(show: bool, done: int, steps: int) -> Iterator[Display]:
    """A display for the steps from `done` to `steps`; without `show` it shows nothing."""
    console = Console() if show else None
    if console is None or not console.is_terminal:
        yield Display(done, steps, None, console)
        return
    numbers = TextColumn("{task.fields[numbers]}")
    columns = (MofNCompleteColumn(), BarColumn(bar_width=20), numbers, TimeRemainingColumn())
    with Progress(*columns, console=console) as progress:
        yield Display(done, steps, progress, console)
