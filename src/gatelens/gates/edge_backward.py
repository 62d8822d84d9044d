"""Runs with gates on edges in which gates, or the constants that closed edges read, get gradients.

A run keeps the differences of all sources from the reference and the inputs of all destinations. The backward pass goes
through the components from the logits down to the first layer. It runs each component again, alone and with gradients,
and puts the gradient at its inputs in the place of the inputs. Then

    d loss / d difference of s  =  sum over d of gate(s, d) * d loss / d input of d
    d loss / d gate(s, d)       =  difference of s . d loss / d input of d
    d loss / d constant of s    =  sum over d, prompts and positions of (1 - gate(s, d)) * d loss / d input of d

So memory is that of all sources and destinations and of one component's activations, however deep the model is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from jaxtyping import Float, Int, Shaped
from torch import Tensor

from gatelens.gates.alone import head_outputs, logits_of, mlp_output
from gatelens.gates.component_runs import Components, with_sources
from gatelens.gates.edge_runs import EdgeRun, edge_numbers, join_projections, project_inputs
from gatelens.model import Model
from gatelens.model.graph import Graph
from gatelens.runtime.context import Context

_LAYERS_AT_ONCE = 6  # gate gradients of many destinations at once read the differences less often


def run_learned_edges(
    model: Model,
    tokens: Int[Tensor, "prompt position"],
    gates: Shaped[Tensor, "row source destination"],
    reference: Components,
    *,
    context: Context | None = None,
) -> Float[Tensor, "row prompt vocab"]:
    """`run_edges` with gradients with respect to the gates.

    Returns:
        The logits. Cost for each row: 1.5 to 2 forwards, and 3 to 4 for the backward pass.
    """
    at_once = (context or Context()).fits(len(tokens) * learned_edge_numbers(model, tokens.shape[1]))
    parts: list[Tensor] = [
        _EdgeRunFunction.apply(part, None, model, tokens, reference)  # type: ignore[no-untyped-call]
        for part in gates.split(at_once)
    ]
    return torch.cat(parts)


def run_learned_constants(
    model: Model,
    tokens: Int[Tensor, "prompt position"],
    gates: Shaped[Tensor, "row source destination"],
    constants: Float[Tensor, "source width"],
    run: Components,
) -> Float[Tensor, "row prompt vocab"]:
    """`run_edges` in which closed edges read a constant of their source, with gradients with respect to the constants.

    Arguments:
        constants: what every closed edge that leaves a source reads, at all positions of all prompts.
        run: a captured run of prompts of the same shape. Only the biases in its streams are used.

    Returns:
        The logits. Cost for each row: 1.5 to 2 forwards, and about 3 for the backward pass.
    """
    logits: Tensor = _EdgeRunFunction.apply(gates, constants, model, tokens, run)  # type: ignore[no-untyped-call]
    return logits


def learned_edge_numbers(model: Model, length: int) -> int:
    """How many numbers a run holds for one row and one prompt, until its backward pass is done."""
    n_destinations = Graph.of(model.anatomy).n_destinations
    return edge_numbers(model, length) + length * model.anatomy.width * n_destinations


class _EdgeRunFunction(torch.autograd.Function):
    """Logits of rows of gates, and the gradients with respect to the gates and to the constants that they read."""

    @staticmethod
    def forward(
        ctx: Any, gates: Tensor, constants: Tensor | None, model: Model, tokens: Tensor, reference: Components
    ) -> Tensor:
        graph = Graph.of(model.anatomy)
        if constants is not None:
            reference = with_sources(model, reference, constants.to(reference.sources)[:, None, None])
        ctx.run = EdgeRun(model, graph, gates.detach(), reference, None, keep_inputs=True)
        ctx.tokens, ctx.inputs = tokens, (gates, constants)
        return ctx.run.logits(tokens)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_logits: Tensor) -> tuple[Tensor | None, ...]:
        backward = _Backward(ctx.run, ctx.tokens)
        backward.run_down(grad_logits)
        gates, constants = ctx.inputs
        at_gates = backward.gate_gradients().to(gates) if ctx.needs_input_grad[0] else None
        at_constants = backward.constant_gradients().to(constants) if ctx.needs_input_grad[1] else None
        del ctx.run  # the gradients took the place of its inputs
        return at_gates, at_constants, None, None, None


class _Backward:
    """The backward pass of one run, component by component."""

    def __init__(self, run: EdgeRun, tokens: Tensor) -> None:
        self.run, self.tokens, self.model, self.graph = run, tokens, run.model, run.graph
        self.gates = run.gates * run.graph.edges.to(run.gates)  # 0 where there is no edge
        self.at_inputs = run.inputs  # (row, destination, prompt, position, width): inputs, later their gradients

    def run_down(self, grad_logits: Tensor) -> None:
        """Replace the inputs of all destinations by the gradients at them, from the logits to the first layer."""
        graph = self.graph
        last = slice(graph.logits, graph.logits + 1)
        self._through(last, lambda inputs: self._logits(inputs), grad_logits.flatten(0, 1))
        for layer in reversed(range(graph.n_layers)):
            heads, mlp = graph.heads(layer), graph.mlp_input(layer)
            above = slice(mlp + 1, graph.n_destinations)
            at_sources = self._from(slice(heads.start, heads.stop + 1), above)  # the heads, then the MLP
            self._through(slice(mlp, mlp + 1), partial(self._mlp, layer), at_sources[:, -1].flatten(0, 1))
            at_heads = at_sources[:, :-1] + self._from(heads, slice(mlp, mlp + 1))
            self._through(
                graph.attention_inputs(layer), partial(self._heads, layer), at_heads.transpose(0, 1).flatten(1, 2)
            )

    def constant_gradients(self) -> Float[Tensor, "source width"]:
        """The gradient of the constant of each source, after `run_down`."""
        closed = self.graph.edges.to(self.gates) - self.gates
        return (closed @ self.at_inputs.sum((2, 3))).sum(0)

    def _logits(self, inputs: Sequence[Tensor]) -> Tensor:
        return logits_of(self.model, self.tokens, _one_input(inputs), self.run.rows)

    def _mlp(self, layer: int, inputs: Sequence[Tensor]) -> Tensor:
        return mlp_output(self.model, layer, _one_input(inputs))

    def _heads(self, layer: int, inputs: Sequence[Tensor]) -> Tensor:
        """What the heads of a layer add to the stream: (head, row * prompt, position, width)."""
        block = self.model.anatomy.blocks[layer]
        projected = join_projections(self.model, [project_inputs(self.model, block, row) for row in inputs])
        z = head_outputs(self.model, self.tokens, layer, projected, self.run.rows)
        return self.model.anatomy.contributions(block, z)

    def _from(self, sources: slice, destinations: slice) -> Float[Tensor, "row source prompt position width"]:
        """The gradient at the differences of some sources, from the inputs of some destinations."""
        gates, at_inputs = self.gates[:, sources, destinations], self.at_inputs[:, destinations]
        return (gates @ at_inputs.flatten(2)).unflatten(2, at_inputs.shape[2:])

    def _through(self, destinations: slice, compute: Callable[[Sequence[Tensor]], Tensor], grad_output: Tensor) -> None:
        """Replace the inputs of one component by the gradients at them.

        Arguments:
            destinations: the component's inputs.
            compute: the component's output, from the inputs (input, prompt, position, width) of each row.
            grad_output: the gradient at this output.
        """
        with torch.enable_grad():
            inputs = [row.to(self.model.dtype).requires_grad_() for row in self.at_inputs[:, destinations].clone()]
            output = compute(inputs)
            gradients = torch.autograd.grad(output, inputs, grad_output.to(output))
        for at_inputs, gradient in zip(self.at_inputs, gradients, strict=True):
            at_inputs[destinations] = gradient.to(at_inputs)

    def gate_gradients(self) -> Float[Tensor, "row source destination"]:
        """The gradient of each gate, after `run_down`; 0 where there is no edge."""
        products = torch.zeros_like(self.gates)
        own, at_inputs = self.run.own.flatten(2), self.at_inputs.flatten(2)
        for layer in range(0, self.graph.n_layers, _LAYERS_AT_ONCE):
            first = self.graph.attention_inputs(layer).start
            stop = min(self.graph.n_destinations, first + _LAYERS_AT_ONCE * (self.graph.mlp_input(0) + 1))
            n = int(self.graph.reads[first:stop].max())
            products[:, :n, first:stop] = own[:, :n] @ at_inputs[:, first:stop].mT
        last = self.graph.logits
        products[:, :, last] = (own @ at_inputs[:, last, :, None])[..., 0]
        return products * self.graph.edges.to(products)


def _one_input(inputs: Sequence[Tensor]) -> Tensor:
    """The input of a component that has only one: (row * prompt, position, width)."""
    return torch.cat([row[0] for row in inputs])
