"""A planted circuit: a model, a task, and the edges that do the task."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from toys import make_task

from gatelens.model import Model
from gatelens.model.graph import Graph
from gatelens.tasks.base import CircuitTask


@dataclass(frozen=True, eq=False)
class Planted:
    """A model with a known circuit.

    Arguments:
        edges: the names of the edges of the circuit: those that carry what differs between clean and corrupt prompts
            from the embedding to the logits. An edge that carries the same in both, such as the position that a head
            looks up, is not one of them.
        obeys: the share of random interchanges after which the model answers as the circuit does; None: not measured,
            because the weights were set by hand.
    """

    model: Model
    task: CircuitTask
    edges: Sequence[str]
    obeys: float | None = None

    def truth(self, level: Literal["edges", "heads"]) -> Tensor:
        """Which gates are in the circuit: bool (source, destination), or (layer, head) for heads on these edges."""
        graph = Graph.of(self.model.anatomy)
        mask = torch.zeros_like(graph.edges)
        for name in self.edges:
            mask[graph.edge(name)] = True
        if level == "edges":
            return mask
        return torch.stack([mask.any(1)[graph.heads(layer)] for layer in range(graph.n_layers)])


@dataclass(frozen=True)
class Case:
    """A planted circuit by name.

    Arguments:
        kind: how it came into the model; hard ones are set by hand, too, so that they mislead some methods.
        plant: makes the model. Every call makes the same one.
        says: what the model does, in a few words.
    """

    name: str
    kind: Literal["by hand", "trained", "hard"]
    plant: Callable[[], Planted]
    says: str


def from_pairs(clean: Tensor, corrupt: Tensor, answers: Tensor, wrong: Tensor) -> CircuitTask:
    """The task of these prompts (prompt, position) with the answers to the clean and to the corrupt ones (prompt,)."""
    return make_task(list(zip(clean.tolist(), corrupt.tolist(), answers.tolist(), wrong.tolist(), strict=True)))
