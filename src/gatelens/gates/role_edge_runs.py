"""Runs and products of edges between components that have a gate for each role of positions.

At a position of role r, a destination's input is mixed by the gates of role r. Positions are put in the order of their
roles, so that those of one role are neighbours: then the inputs of a role are one matrix product, and all roles
together cost as much as edges without roles.
"""

from __future__ import annotations

import torch
from jaxtyping import Float, Int, Shaped
from torch import Tensor

from gatelens.gates.component_runs import Components
from gatelens.gates.edge_gradients import EdgeAttribution
from gatelens.gates.edge_runs import EdgeRun, edge_numbers
from gatelens.gates.gradients import Metric, Pass
from gatelens.model import Model
from gatelens.model.graph import Graph
from gatelens.runtime.context import Context
from gatelens.tasks.base import Bucket


@torch.no_grad()
def run_role_edges(
    model: Model,
    tokens: Int[Tensor, "prompt position"],
    gates: Shaped[Tensor, "row role source destination"],
    roles: Int[Tensor, "prompt position"],
    reference: Components,
    *,
    start: Components | None = None,
    context: Context | None = None,
) -> Float[Tensor, "row prompt vocab"]:
    """Logits at the last position under each row of gates.

    Arguments:
        gates: 1 where a destination at positions of a role reads the source's output in this run, 0 where it reads that
            in the reference.
        roles: the role of every position.
        reference, start, context: as for `gatelens.gates.edge_runs.run_edges`.

    Returns:
        The logits. Cost for each row: that of `run_edges`.
    """
    at_once = (context or Context()).fits(len(tokens) * edge_numbers(model, tokens.shape[1]))
    parts = [_RoleEdgeRun(model, part, roles, reference, start).logits(tokens) for part in gates.split(at_once)]
    return torch.cat(parts)


class _RoleEdgeRun(EdgeRun):
    """Rows of gates with a role axis. Differences from the reference are stored in the order of roles."""

    def __init__(
        self, model: Model, gates: Tensor, roles: Tensor, reference: Components, start: Components | None
    ) -> None:
        graph, gates = Graph.of(model.anatomy), gates.clone()
        gates[:, :-1, :, graph.logits] = 1  # not gates: the logits are read at the last role only
        super().__init__(model, graph, gates, reference, start)
        self.order = roles.flatten().argsort(stable=True).to(reference.final.device)
        self.places = self.order.argsort()  # of the positions in this order
        self.columns = _slices(roles.flatten(), gates.shape[1], model.anatomy.width)

    def _subtract(self, outputs: Tensor, reference: Tensor, into: Tensor) -> None:
        differences = (outputs - reference).flatten(-3, -2)
        into.copy_(differences.index_select(-2, self.order).view(into.shape))

    def _mix(self, row: int, destinations: slice, stream: Tensor) -> Tensor:
        n = int(self.graph.reads[destinations.start])
        mixed = self.inputs[0, : destinations.stop - destinations.start]
        in_order = stream.reshape(-1, stream.shape[-1])[self.order].view(1, -1)
        for role, columns in self.columns:
            self._add_sources(row, self.gates[row, role, :n, destinations], in_order, mixed.flatten(1), columns)
        return mixed.flatten(1, 2)[:, self.places].view(mixed.shape)


class RoleEdgeAttribution(EdgeAttribution):
    """The products of `EdgeAttribution`, summed over the positions of each role.

    Arguments:
        roles: the role of every position of the batch, as numbers below ``n_roles``. The last one is that of the last
            position, which therefore stays at the end when positions are in the order of roles.
    """

    def __init__(
        self, model: Model, batch: Bucket, metric: Metric, roles: Int[Tensor, "prompt position"], n_roles: int
    ) -> None:
        self.n_roles = n_roles
        self.order = roles.argsort(dim=1, stable=True).to(model.device)  # of the positions of each prompt
        self.columns = [_slices(of_prompt, n_roles, model.anatomy.width) for of_prompt in roles]
        super().__init__(model, batch, metric)

    def products(self, step: Pass) -> Shaped[Tensor, "prompt role source destination"]:
        """The products of all edges at all roles; 0 where there is no edge, or no position of a role."""
        products = super().products(step)
        products[:-1, ..., self.graph.logits] = 0  # the logits are read at the last position only
        return products.transpose(0, 1)

    def _new_sums(self) -> Tensor:
        return super()._new_sums().repeat(self.n_roles, 1, 1, 1)

    def _keep(self, start: int, outputs: Tensor) -> None:
        super()._keep(start, self._in_order(outputs))

    def _subtract_from(self, start: int, outputs: Tensor) -> None:
        super()._subtract_from(start, self._in_order(outputs))

    def _in_order(self, values: Float[Tensor, "_n prompt position width"]) -> Float[Tensor, "_n prompt position width"]:
        """Put the positions of each prompt in the order of their roles."""
        order = self.order.to(values.device)
        return values[:, torch.arange(len(order), device=order.device)[:, None], order]

    def _multiply(
        self,
        differences: Float[Tensor, "source prompt position width"],
        gradients: Float[Tensor, "destination prompt position width"],
    ) -> Float[Tensor, "role prompt source destination"]:
        shape = (self.n_roles, len(self.batch), len(differences), len(gradients))
        products = differences.new_zeros(shape)
        gradients = self._in_order(gradients)
        for prompt, columns in enumerate(self.columns):
            ours, theirs = (values[:, prompt].flatten(1) for values in (differences, gradients))
            for role, place in columns:
                torch.mm(ours[:, place], theirs[:, place].T, out=products[role, prompt])
        return products


def _slices(roles: Int[Tensor, " position"], n_roles: int, width: int) -> list[tuple[int, slice]]:
    """Each role that some position has, and the columns of its positions if positions are in the order of roles."""
    stops = roles.bincount(minlength=n_roles).cumsum(0).tolist()
    starts = [0, *stops[:-1]]
    return [(r, slice(a * width, b * width)) for r, (a, b) in enumerate(zip(starts, stops, strict=True)) if a < b]
