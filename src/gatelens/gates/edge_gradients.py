"""Attribution of all edges between components at once (EAP, Syed et al., arXiv 2310.10348).

The product of an edge is (clean - corrupt output of the source) . d metric / d input of the destination. The products
of all sources with all destinations are matrix products over positions and width, one for each prompt.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
from jaxtyping import Float, Shaped
from torch import Tensor

from gatelens.gates.attribution import Attribution, SoftmaxProducts
from gatelens.gates.component_runs import hook_sources, new_sources
from gatelens.gates.gradients import InputGradients, Metric, Pass, SourceGroup, differentiate, sum_rows
from gatelens.gates.hooks import Hooks
from gatelens.gates.query_key import QueryKeyEdges
from gatelens.gates.runs import forward
from gatelens.model import Model
from gatelens.model.graph import Graph
from gatelens.sparse.attention_interface import offset_modules
from gatelens.tasks.base import Bucket

_DESTINATIONS_AT_ONCE = 96


class EdgeAttribution(Attribution):
    """The products of the differences of all sources with the gradient of each destination."""

    def __init__(self, model: Model, batch: Bucket, metric: Metric) -> None:
        super().__init__(model, batch, metric)
        self.graph = Graph.of(model.anatomy)
        # The outputs of the corrupt run, from which the clean run makes differences: clean - corrupt.
        self.differences = new_sources(model, batch.clean)  # (source, prompt, position, width)
        self.has_differences = False
        with torch.no_grad(), Hooks() as hooks:
            hook_sources(model, hooks, self._keep)
            forward(model, batch.corrupt, None, hooks, "last")
        # The products read all differences once for each group of layers, so a group has many destinations. All groups
        # use the same memory for the gradients at their inputs.
        self.per_layer = self.graph.mlp_input(0) + 1
        self.layers_at_once = max(1, _DESTINATIONS_AT_ONCE // self.per_layer)
        self.inputs = self.differences.new_empty(self.layers_at_once * self.per_layer, *self.differences.shape[1:])

    def products(self, step: Pass) -> Shaped[Tensor, "... source destination"]:
        """The products of all edges; 0 where there is no edge."""
        gradients = self._gradients(step)
        sums = self._new_sums()
        sources = self._sources(step.only)
        for first in range(step.start, self.graph.n_layers, self.layers_at_once):
            layers = range(first, min(first + self.layers_at_once, self.graph.n_layers))
            self._add_layers(layers, gradients, step, sources, sums)
        # The metric reads the last position only, so the gradient of the logits is zero at all others.
        final = gradients.final[0][None, :, -1:].to(self.inputs, copy=True)
        stream = gradients.finals[0][:, -1:].to(final.device)
        self.model.anatomy.final_norm.pull_back(final, stream, hold=step.hold_norms)
        last = sum_rows(final[0, :, 0], step.rows)  # (prompt, width)
        sums[..., sources, self.graph.logits] += torch.einsum("spw,pw->ps", self.differences[sources, :, -1], last)
        return sums.mul_(self.graph.edges.to(sums.device))

    def _new_sums(self) -> Tensor:
        return self.differences.new_zeros(len(self.batch), self.graph.n_sources, self.graph.n_destinations)

    def groups(self) -> list[SourceGroup]:
        layers = range(self.graph.n_layers)
        both = [group for layer in layers for group in (SourceGroup("heads", layer), SourceGroup("mlp", layer))]
        return [SourceGroup("embedding"), *both]

    def softmax_products(
        self, z_gradients: Sequence[Mapping[int, Float[Tensor, "prompt position _"]]]
    ) -> Iterator[SoftmaxProducts]:
        self._need_differences()
        return QueryKeyEdges(self.model, self.batch.clean, self.differences).products(z_gradients)

    def _sources(self, group: SourceGroup | None) -> slice:
        """The numbers of the sources of a group; of all sources without one."""
        if group is None:
            return slice(0, self.graph.n_sources)
        if group.kind == "heads":
            return self.graph.heads(group.layer)
        at = self.graph.mlp(group.layer) if group.kind == "mlp" else 0
        return slice(at, at + 1)

    def _keep(self, start: int, outputs: Tensor) -> None:
        self.differences[start : start + len(outputs)].copy_(outputs)

    def _subtract_from(self, start: int, outputs: Tensor) -> None:
        corrupt = self.differences[start : start + len(outputs)]
        torch.sub(outputs.to(corrupt), corrupt, out=corrupt)

    def _gradients(self, step: Pass) -> InputGradients:
        """Run a pass. If it runs all of the clean prompt, it also gives the differences, which are needed once."""
        gradients = InputGradients()
        shares_forward = not self.has_differences and step.stream is None

        def watch(hooks: Hooks) -> None:
            if shares_forward:
                hook_sources(self.model, hooks, self._subtract_from)
            gradients.watch(self.model, hooks)

        if not shares_forward:
            self._need_differences()
        differentiate(self.model, self.batch.clean, self.metric, watch, step)
        self.has_differences = True
        return gradients

    def _need_differences(self) -> None:
        """Run the clean prompts, unless a pass has done so."""
        if not self.has_differences:
            with torch.no_grad(), Hooks() as hooks:
                hook_sources(self.model, hooks, self._subtract_from)
                forward(self.model, self.batch.clean, None, hooks, "last")
            self.has_differences = True

    def _add_layers(self, layers: range, gradients: InputGradients, step: Pass, sources: slice, sums: Tensor) -> None:
        """Products of some sources with the inputs of some layers."""
        start = self.graph.attention_inputs(layers[0]).start
        destinations = slice(start, self.graph.mlp_input(layers[-1]) + 1)
        for layer in layers:
            offset = self.graph.attention_inputs(layer).start - start
            self._pull_back(layer, gradients, step, self.inputs[offset : offset + self.per_layer])
        # The layers of a group do not all read the same sources; products that are not edges are removed at the end.
        sources = slice(sources.start, min(sources.stop, int(self.graph.reads[destinations].max())))
        inputs = self.inputs[: destinations.stop - destinations.start]
        sums[..., sources, destinations] += self._multiply(self.differences[sources], inputs)

    def _multiply(
        self,
        differences: Float[Tensor, "source prompt position width"],
        gradients: Float[Tensor, "destination prompt position width"],
    ) -> Float[Tensor, "prompt source destination"]:
        """The products of all sources with all destinations, for each prompt."""
        by_prompt, gradients_by_prompt = (x.transpose(0, 1).flatten(2) for x in (differences, gradients))
        return by_prompt @ gradients_by_prompt.mT

    def _pull_back(self, layer: int, gradients: InputGradients, step: Pass, into: Tensor) -> None:
        """Gradients at a layer's q, k, v and MLP inputs, before the norms: (destination, prompt, position, width)."""
        block = self.model.anatomy.blocks[layer]
        by_row = into if step.rows == 1 else into.new_empty(len(into), step.rows * into.shape[1], *into.shape[2:])
        self._pull_back_projections(layer, gradients, by_row[:-1])
        self._add_offsets(layer, gradients, by_row[:-1])
        if layer in gradients.mlp:
            by_row[-1] = gradients.mlp[layer].to(into)
        else:
            by_row[-1].zero_()
        stream, mlp_stream = (x[layer].to(into.device) for x in (gradients.streams, gradients.mlp_streams))
        block.before_attention.pull_back(by_row[:-1], stream, hold=step.hold_norms)
        block.before_mlp.pull_back(by_row[-1:], mlp_stream, hold=step.hold_norms)
        if step.rows > 1:
            torch.sum(by_row.unflatten(1, (step.rows, -1)), 1, out=into)

    def _pull_back_projections(self, layer: int, gradients: InputGradients, into: Tensor) -> None:
        """Gradients at a layer's q, k and v inputs, after the norm; 0 where the pass has none."""
        projections = self.model.anatomy.projections(self.model.anatomy.blocks[layer])
        start = 0
        for projection, gradient in zip(projections, self._projected(layer, gradients), strict=True):
            part = into[start : start + len(projection.weight)].flatten(1, 2)
            start += len(projection.weight)
            if gradient is None:
                part.zero_()
            else:
                by_head = gradient.flatten(0, 1).transpose(0, 1).to(into)
                torch.bmm(by_head, projection.weight.to(into), out=part)

    def _projected(self, layer: int, gradients: InputGradients) -> Sequence[Tensor | None]:
        """Gradients at a layer's q, k and v, each (row * prompt, position, head, dim); None where the pass has none."""
        anatomy, stored = self.model.anatomy, gradients.qkv[layer]
        if len(anatomy.blocks[layer].qkv) == 1:
            return anatomy.unfuse([stored[0]]) if stored else (None, None, None)
        return [stored[i].unflatten(-1, (-1, anatomy.head_dim)) if i in stored else None for i in range(3)]

    def _add_offsets(self, layer: int, gradients: InputGradients, into: Tensor) -> None:
        """Add what the q and k inputs receive through the offsets of a sparse model's gates, if they have any."""
        anatomy, block = self.model.anatomy, self.model.anatomy.blocks[layer]
        modules = offset_modules(block.attention) or ()
        start = 0
        for i, (module, n) in enumerate(zip(modules, (anatomy.n_heads, anatomy.n_kv_heads), strict=False)):
            if i in gradients.offsets[layer]:
                weight = module.weight.to(into).unflatten(0, (n, -1))  # (input, head, width)
                gradient = (
                    gradients.offsets[layer][i].to(into).unflatten(-1, (n, -1))
                )  # (prompt, position, input, head)
                into[start : start + n] += torch.einsum("psng,ngw->npsw", gradient, weight)
            start += n
