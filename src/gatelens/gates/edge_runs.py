"""Run a model with gates on the edges between its components.

A destination's input is the residual stream before the norm. With gates g it is

    reference stream + sum over sources of g * (source's output in this run - its output in the reference run)

where the reference is the corrupt run (or zero, or a mean). The norm is computed again on the mixed input, and the q, k
and v inputs of each head are mixed separately. If all gates of a layer's inputs are 1, the model's own stream is used,
so that a fully open graph reproduces the plain Hugging Face model to the last bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from weakref import WeakSet

import torch
from jaxtyping import Float, Int, Shaped
from torch import Tensor, nn

from gatelens.errors import GatelensError
from gatelens.gates.component_runs import Components, hook_sources
from gatelens.gates.hooks import Hooks
from gatelens.gates.runs import forward, only_last_position, skip_to
from gatelens.model import Model
from gatelens.model.anatomy import TransformerBlock
from gatelens.model.graph import Graph
from gatelens.runtime.context import Context
from gatelens.runtime.precision import widen
from gatelens.sparse.attention_interface import offset_modules

_gated: WeakSet[nn.Module] = WeakSet()  # the models whose edges have gates now


@torch.no_grad()
def run_edges(
    model: Model,
    tokens: Int[Tensor, "prompt position"],
    gates: Shaped[Tensor, "row ..."],
    reference: Components,
    *,
    start: Components | None = None,
    context: Context | None = None,
) -> Float[Tensor, "row prompt vocab"]:
    """Logits at the last position under each row of gates.

    Arguments:
        gates: (row, source, destination). With 1 the destination reads the source's output in this run, with 0 that in
            the reference. Gates where the graph has no edge are ignored.
        reference: what closed edges read.
        start: the captured run of the same tokens; layers below the first closed edge are then not run again.
        context: its memory budget decides how many rows run together.

    Returns:
        The logits. Cost for each row: 1.5 to 2 forwards if the circuit is spread over the model, less with ``start``.
    """
    graph = Graph.of(model.anatomy)
    if gates.ndim != 3 or tuple(gates.shape[1:]) != (graph.n_sources, graph.n_destinations) or len(gates) == 0:
        raise GatelensError(
            f"edge gates of {model.name} must have the shape (row, {graph.n_sources}, {graph.n_destinations}), that is "
            f"(row, source, destination), and not {tuple(gates.shape)}."
        )
    at_once = (context or Context()).fits(len(tokens) * edge_numbers(model, tokens.shape[1]))
    parts = [EdgeRun(model, graph, part, reference, start).logits(tokens) for part in gates.split(at_once)]
    return torch.cat(parts)


def edge_numbers(model: Model, length: int) -> int:
    """How many numbers a run holds for one row and one prompt: the differences of all sources, and a layer's inputs."""
    graph = Graph.of(model.anatomy)
    copies = graph.n_sources + 4 * graph.attention_inputs(0).stop + 16
    return length * model.anatomy.width * copies + 2 * int(model.hf.config.vocab_size)


class EdgeRun:
    """A batch of rows of gates that runs through the model together.

    Arguments:
        keep_inputs: mix the inputs of all destinations, also where all gates are open, and keep them.

    Attributes:
        reference: what closed edges read, for the prompts and positions of the forward pass.
        known: bool (prompt, position), where the reference has a value; elsewhere all edges are open. None: everywhere.
    """

    known: Tensor | None = None

    def __init__(
        self,
        model: Model,
        graph: Graph,
        gates: Tensor,
        reference: Components,
        start: Components | None,
        *,
        keep_inputs: bool = False,
    ) -> None:
        self.model, self.graph, self.reference, self.start = model, graph, reference, start
        self.gates = gates.to(reference.sources)
        self.rows = len(gates)
        self.keep_inputs = keep_inputs
        closed = ((self.gates != 1) & graph.edges.to(self.gates.device)).flatten(0, -2).any(0) | keep_inputs
        self.closed_attention = [bool(closed[graph.attention_inputs(n)].any()) for n in range(graph.n_layers)]
        self.closed_mlp = [bool(closed[graph.mlp_input(n)]) for n in range(graph.n_layers)]
        self.closed_logits = bool(closed[graph.logits])
        self.any_closed = bool(closed.any())
        touched = [a or m for a, m in zip(self.closed_attention, self.closed_mlp, strict=True)] + [True]
        # Below the first touched layer all rows equal the plain run, so they share their differences.
        self.first = min(touched.index(True), graph.n_layers - 1) if start is not None else 0
        self.n_shared = graph.heads(self.first).start if start is not None else 0
        # Above the last touched layer nothing reads the differences.
        self.last = (
            graph.n_layers if self.closed_logits else max((n for n, t in enumerate(touched[:-1]) if t), default=0)
        )

    def logits(self, tokens: Tensor) -> Tensor:
        """Run the rows: (row, prompt, vocab) at the last position."""
        self.begin(*tokens.shape)
        with Hooks() as hooks:
            if self.start is not None:
                of_start, of_reference = (run.sources[: self.n_shared] for run in (self.start, self.reference))
                self._subtract(of_start, of_reference, self.shared)
                stream = self.start.attention_inputs[self.first].to(self.model.dtype)
                skip_to(self.model, self.first, stream, hooks, self.rows)
            self.hook(hooks)
            if self.any_closed and not self.keep_inputs:
                only_last_position(self.model, hooks)
            return forward(self.model, tokens, None, hooks, "last", self.rows).unflatten(0, (self.rows, -1))

    def begin(self, n_prompts: int, n_positions: int) -> None:
        """Make room for the outputs of the sources in a forward pass on this many prompts and positions."""
        shape = (n_prompts, n_positions, self.model.anatomy.width)
        new = self.reference.sources.new_empty
        # The difference of each source from the reference: (source, ...) if all rows share it, else (row, source, ...).
        self.shared = new(self.n_shared, *shape)
        self.own = new(self.rows, self.graph.n_sources - self.n_shared, *shape)
        # One row's inputs of a layer or, if they are kept, of all layers: (row, destination, ...).
        n_inputs = (self.rows, self.graph.n_destinations) if self.keep_inputs else (1, self.graph.mlp_input(0))
        self.inputs = new(*n_inputs, *shape)

    def hook(self, hooks: Hooks) -> None:
        """Register the hooks that collect what sources write and replace what destinations read."""
        if self.model.hf in _gated:
            raise GatelensError(
                "gates on edges already act on this model: leave the `with` block of the first intervention before "
                "the next one."
            )
        _gated.add(self.model.hf)
        hooks.callback(_gated.discard, self.model.hf)
        blocks, graph = self.model.anatomy.blocks, self.graph
        hook_sources(self.model, hooks, self._write, range(self.first, min(self.last + 1, graph.n_layers)))
        for layer in range(self.first, graph.n_layers):
            self._hook_inputs(layer, blocks[layer], hooks)
        if self.closed_logits:
            hooks.before(
                self.model.anatomy.final_norm.part,
                lambda stream: self._input_of(graph.logits, self.reference.final, stream),
            )

    def _write(self, start: int, outputs: Tensor) -> None:
        if start < self.n_shared:  # the embedding, which all rows share
            return
        reference = self.reference.sources[start : start + len(outputs)]
        by_row = outputs.to(reference.device).unflatten(1, (self.rows, -1)).transpose(0, 1)
        at = start - self.n_shared
        self._subtract(by_row, reference, self.own[:, at : at + len(outputs)])

    def _subtract(self, outputs: Tensor, reference: Tensor, into: Tensor) -> None:
        """Store the difference of outputs from the reference, both (..., prompt, position, width)."""
        torch.sub(outputs, reference, out=into)

    def _hook_inputs(self, layer: int, block: TransformerBlock, hooks: Hooks) -> None:
        if self.closed_attention[layer]:
            projected: list[Tensor] = []
            hooks.before(block.layer, lambda stream: self._project(layer, block, stream, projected))
            for module in (*(offset_modules(block.attention) or ()), *block.qkv):  # in the order of their calls
                hooks.instead(module, lambda *_: projected.pop(0))
        if self.closed_mlp[layer]:
            at = self.graph.mlp_input(layer)
            hooks.before(block.mlp_start, lambda stream: self._input_of(at, self.reference.mlp_inputs[layer], stream))

    def _mix(self, row: int, destinations: slice, stream: Tensor) -> Tensor:
        """One row's inputs of destinations that read the same sources: (destination, prompt, position, width).

        Rows are mixed one at a time, in the same memory unless inputs are kept: all rows at once would not fit into the
        processor's cache.
        """
        n = int(self.graph.reads[destinations.start])
        n_mixed = destinations.stop - destinations.start
        mixed = self.inputs[row, destinations] if self.keep_inputs else self.inputs[0, :n_mixed]
        self._add_sources(row, self.gates[row, :n, destinations], stream.reshape(1, -1), mixed.flatten(1))
        return mixed

    def _add_sources(self, row: int, gates: Tensor, stream: Tensor, into: Tensor, columns: slice = slice(None)) -> None:
        """Add the differences of sources to a stream, times their gates.

        Arguments:
            gates: (source, destination).
            stream: (1, column), where the columns are the numbers of all positions of all prompts.
            into: (destination, column), where the sum is written.
            columns: only these columns.
        """
        own = self.own[row, : len(gates) - self.n_shared].flatten(1)[:, columns]
        torch.addmm(stream[:, columns], gates[self.n_shared :].T, own, out=into[:, columns])
        if self.n_shared:
            into[:, columns].addmm_(gates[: self.n_shared].T, self.shared.flatten(1)[:, columns])

    def _input_of(self, destination: int, reference: Tensor, stream: Tensor) -> Tensor:
        """The input of one destination, instead of the model's own stream: (row * prompt, position, width)."""
        place = slice(destination, destination + 1)
        mixed = torch.cat([self._mix(row, place, reference)[0].clone() for row in range(self.rows)]).to(stream)
        return self._where_known(mixed, stream)

    def _where_known(self, mixed: Tensor, stream: Tensor) -> Tensor:
        """The mixed input where the reference has a value, and the model's own stream elsewhere."""
        return mixed if self.known is None else torch.where(self.known.to(stream.device)[..., None], mixed, stream)

    def _project(self, layer: int, block: TransformerBlock, stream: Tensor, projected: list[Tensor]) -> None:
        """Replace ``projected`` by the query, key and value projections of the mixed inputs of every head.

        The gates of a sparse model may have offsets: those of queries are computed from the heads' q inputs, and those
        of keys from the k inputs.
        """
        place, reference = self.graph.attention_inputs(layer), self.reference.attention_inputs[layer]
        rows: list[list[Tensor]] = []
        for row in range(self.rows):
            mixed = self._mix(row, place, reference).to(stream.device, stream.dtype)
            rows.append(project_inputs(self.model, block, self._where_known(mixed, stream)))
        projected[:] = join_projections(self.model, rows)


def project_inputs(
    model: Model, block: TransformerBlock, inputs: Float[Tensor, "_input prompt position width"]
) -> list[Tensor]:
    """What the heads of a layer compute from inputs of their own, before the norm.

    Arguments:
        inputs: the q inputs of all heads, then the k inputs of all key-value heads, then their v inputs.

    Returns:
        The offsets of queries and of keys (prompt, position, head) if the model is sparse and its gates have them; then
        q, k and v (prompt, position, head, dim).
    """
    projections = model.anatomy.projections(block)
    parts = block.before_attention(inputs).split([len(projection.weight) for projection in projections])
    outputs: list[Tensor] = []
    for module, x in zip(offset_modules(block.attention) or (), parts[:2], strict=False):
        weight = widen(module.weight).unflatten(0, (len(x), -1))  # (input, head that reads it, width)
        outputs.append(torch.einsum("npsw,ngw->psng", x.to(weight), weight).flatten(-2))
    for projection, x in zip(projections, parts, strict=True):
        output = torch.bmm(x.flatten(1, 2), projection.weight.transpose(1, 2))
        if projection.bias is not None:
            output += projection.bias[:, None]
        outputs.append(output.transpose(0, 1).unflatten(0, x.shape[1:3]))
    return outputs


def join_projections(model: Model, rows: Sequence[Sequence[Tensor]]) -> list[Tensor]:
    """Join what `project_inputs` returned for each row into the outputs of the layer's modules, in call order."""
    *offsets, q, k, v = (torch.cat(parts) for parts in zip(*rows, strict=True))
    return [*offsets, *model.anatomy.fuse(q, k, v)]
