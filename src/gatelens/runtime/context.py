"""How a computation may run: its memory budget, where it saves finished pieces, and how it reports progress.

Every function that does long work takes one `Context` and hands it down. Settings say what is computed; the context
does not change any number.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from torch import Tensor

from gatelens.errors import GatelensError
from gatelens.runtime.journal import Journal, Progress
from gatelens.runtime.processes import Processes

MEMORY_GB = 4.0
"""The default memory budget of runs, in GB, besides the model itself."""
LEAST_GB = 0.1
"""The smallest budget for which work that does not fit is refused."""
MEMORY_HELP = "memory budget for runs, in GB, besides the model itself"


@dataclass(frozen=True)
class Context:
    """The execution context of a computation.

    Example:
        scores = gatelens.attribute_edges(model, task, context=Context(memory_gb=1.0))

    Arguments:
        memory_gb: budget for activations and gates, in GB, besides the model itself. Batches are cut so that they fit.
        journal: saves finished pieces of work so that a killed run can resume; by default nothing is saved.
        processes: share the pieces (`accelerate launch`). All of them then call the same functions in the same order.
            By default this process does everything.
    """

    memory_gb: float = MEMORY_GB
    journal: Journal = field(default_factory=Journal)
    processes: Processes | None = None

    def __post_init__(self) -> None:
        if not self.memory_gb > 0:
            raise GatelensError(f"memory_gb is {self.memory_gb}: it must be a number above 0.")

    @classmethod
    def in_folder(cls, folder: Path, memory_gb: float = MEMORY_GB, progress: Progress | None = None) -> Context:
        """A context that saves its finished pieces in a folder and reports progress."""
        return cls(memory_gb, Journal(folder, progress))

    def fits(self, numbers: int) -> int:
        """How many items fit into the memory budget, at least one.

        Arguments:
            numbers: how many float32 numbers one item holds.
        """
        if math.isinf(self.memory_gb):
            return sys.maxsize
        return min(max(1, int(self.memory_gb * 1e9 // (4 * max(1, numbers)))), sys.maxsize)

    def without(self, numbers: int) -> Context:
        """The same context with what is left of the budget beside these float32 numbers; at least a tenth of it."""
        return self.with_memory(max(self.memory_gb - 4e-9 * numbers, self.memory_gb / 10))

    def require(self, numbers: int, what: str, remedy: str = "shorter prompts") -> None:
        """Raise an error if work that cannot be cut any further does not fit into the memory budget.

        Budgets below `LEAST_GB` are not enforced: the process itself takes more.

        Arguments:
            numbers: how many float32 numbers the work holds.
            what: what it is, for the error, such as "one prompt of 4,000 tokens".
            remedy: what would also help, for the error.
        """
        needed = 4e-9 * numbers
        if needed > max(self.memory_gb, LEAST_GB):
            raise GatelensError(
                f"{what} needs about {needed:.1f} GB, and the memory budget is {self.memory_gb:g} GB: give a budget of "
                f"at least {math.ceil(10 * needed) / 10:g} GB (--memory-gb), or {remedy}."
            )

    def with_memory(self, memory_gb: float) -> Context:
        """The same context with another memory budget."""
        return replace(self, memory_gb=memory_gb)

    @property
    def n_processes(self) -> int:
        """How many processes share the pieces."""
        return 1 if self.processes is None else self.processes.count

    def alone(self) -> Context:
        """The same context for work that every process does by itself, such as a part of a piece."""
        return replace(self, processes=None)

    def part(self, name: str) -> Context:
        """A context for one part of the work. The names of its pieces begin with the name of the part."""
        return replace(self, journal=self.journal.part(name))

    def begin(self, title: str, total: int) -> None:
        """Announce the next phase of the work and its number of pieces or steps."""
        self.journal.begin(title, total)

    def piece(self, name: str, compute: Callable[[], Tensor], shape: tuple[int, ...] | None = None) -> Tensor:
        """The piece of work with this name: read from the journal if it is there, otherwise computed and saved.

        Of several processes the main one does it, and all get it: for work that needs the piece before.
        """
        return self.pieces([(name, compute)], shape)[0]

    def pieces(
        self, named: Sequence[tuple[str, Callable[[], Tensor]]], shape: tuple[int, ...] | None = None
    ) -> list[Tensor]:
        """Pieces of work that do not need each other, in order. Each process does its share, and all get all pieces.

        Arguments:
            named: the name of each piece, and how it is computed.
            shape: if given, a saved piece of another shape is computed again.
        """
        return list(self.each_piece(named, shape))

    def each_piece(
        self, named: Sequence[tuple[str, Callable[[], Tensor]]], shape: tuple[int, ...] | None = None
    ) -> Iterator[Tensor]:
        """The same as `pieces`, one after the other: one process holds only one of them. Several processes hold all."""
        if self.processes is None or self.n_processes == 1:
            for name, compute in named:
                yield self.journal.piece(name, compute, shape)
            return
        before, own = self.journal.done, []
        for number in self.processes.share(len(named)):
            own.append(self.journal.piece(*named[number], shape))
            self.journal.reach(before + min(len(own) * self.processes.count, len(named)))  # the others are as far
        gathered = self.processes.gather(own, len(named))
        self.journal.reach(before + len(named))
        yield from gathered


UNLIMITED = Context(memory_gb=math.inf)
"""No memory budget: for work whose caller has already cut it to size."""
