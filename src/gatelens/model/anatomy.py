"""The parts of one model: its blocks, projections and norms, found through the description of its family."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any

import torch
from torch import Tensor, nn

from gatelens.errors import GatelensError
from gatelens.model._norm import Norm
from gatelens.model.families import Family, family_of


@dataclass(frozen=True, eq=False)
class Projection:
    """A query, key or value projection of one layer, split into heads: ``x -> x @ weight.T + bias`` for each head.

    Arguments:
        weight: (head, dim, width), a view of the model's own weight.
        bias: (head, dim), or None.
    """

    weight: Tensor
    bias: Tensor | None


@dataclass(frozen=True, eq=False)
class TransformerBlock:
    """The modules of one layer.

    Arguments:
        layer: the whole layer.
        attention: the attention module.
        qkv: the query, key and value projections, or one fused projection.
        out: the output projection. Its input holds the head outputs z.
        mlp: the MLP.
        before_attention, before_mlp: the norms between the residual stream and the component.
        after_attention, after_mlp: the norms between the component and the residual stream.
    """

    layer: nn.Module
    attention: nn.Module
    qkv: tuple[nn.Module, ...]
    out: nn.Module
    mlp: nn.Module
    before_attention: Norm
    after_attention: Norm
    before_mlp: Norm
    after_mlp: Norm

    @property
    def mlp_start(self) -> nn.Module:
        """The module whose input is the residual stream that the MLP reads."""
        return self.mlp if self.before_mlp.module is None else self.before_mlp.module

    @property
    def mlp_end(self) -> nn.Module:
        """The module whose output the MLP adds to the residual stream."""
        return self.mlp if self.after_mlp.module is None else self.after_mlp.module

    @property
    def norms(self) -> list[Norm]:
        """The norms of the block that exist in its family."""
        norms = (self.before_attention, self.after_attention, self.before_mlp, self.after_mlp)
        return [norm for norm in norms if norm.module is not None]

    @property
    def device(self) -> torch.device:
        """The device that the block's weights are on."""
        return next(self.out.parameters()).device


@dataclass(frozen=True, eq=False)
class Anatomy:
    """The parts and sizes of one model.

    Arguments:
        model_type: the family's name in the Hugging Face config.
        family: the description of the family.
        blocks: the layers, first to last.
        final_norm: the norm before the logits.
        unembed: the module that maps the residual stream to logits.
        n_heads: query heads in each layer.
        n_kv_heads: key-value heads in each layer; fewer than `n_heads` with grouped-query attention.
        head_dim: the size of one head's output.
        width: the size of the residual stream.
        parallel: True if attention and MLP of a layer read the same stream.
    """

    model_type: str
    family: Family
    blocks: Sequence[TransformerBlock]
    final_norm: Norm
    unembed: nn.Module
    n_heads: int
    n_kv_heads: int
    head_dim: int
    width: int
    parallel: bool

    @property
    def n_layers(self) -> int:
        """Number of layers."""
        return len(self.blocks)

    @property
    def norms(self) -> list[Norm]:
        """All norms of the residual stream."""
        return [*(norm for block in self.blocks for norm in block.norms), self.final_norm]

    def activation(self, block: TransformerBlock) -> nn.Module:
        """The activation function of a layer's MLP."""
        return _part(block.mlp, self.family.activation)

    def product(self, block: TransformerBlock) -> nn.Module | None:
        """The projection of a layer's MLP whose input is a product of two projections; None if there is none."""
        return None if self.family.product is None else _part(block.mlp, self.family.product)

    def projections(self, block: TransformerBlock) -> tuple[Projection, Projection, Projection]:
        """The query, key and value projections of a layer, split into heads (key-value heads for k and v)."""
        if self.family.fused is None:
            parts = [_linear(module) for module in block.qkv]
        else:
            weight, bias = _linear(block.qkv[0])
            if self.family.fused == "per head":
                weights = weight.unflatten(0, (self.n_heads, 3, self.head_dim)).unbind(1)
                biases = _split_bias(bias, lambda b: b.unflatten(0, (self.n_heads, 3, self.head_dim)).unbind(1))
                return tuple(map(Projection, weights, biases))  # type: ignore[return-value]
            parts = list(zip(weight.split(self._sizes), _split_bias(bias, lambda b: b.split(self._sizes)), strict=True))
        by_head = (-1, self.head_dim)
        return tuple(  # type: ignore[return-value]
            Projection(weight.unflatten(0, by_head), None if bias is None else bias.unflatten(0, by_head))
            for weight, bias in parts
        )

    def fuse(self, q: Tensor, k: Tensor, v: Tensor) -> list[Tensor]:
        """Join per-head q, k and v, each (..., head, dim), into the outputs of the modules in ``block.qkv``."""
        if self.family.fused == "per head":
            return [torch.stack([q, k, v], dim=-2).flatten(-3)]
        parts = [part.flatten(-2) for part in (q, k, v)]
        return [torch.cat(parts, dim=-1)] if self.family.fused else parts

    def unfuse(self, outputs: Sequence[Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """Split the outputs of the modules in ``block.qkv`` into per-head q, k and v, each (..., head, dim).

        This is the inverse of `fuse`.
        """
        if self.family.fused == "per head":
            q, k, v = outputs[0].unflatten(-1, (self.n_heads, 3, self.head_dim)).unbind(-2)
            return q, k, v
        if self.family.fused:
            outputs = outputs[0].split(self._sizes, -1)
        q, k, v = (part.unflatten(-1, (-1, self.head_dim)) for part in outputs)
        return q, k, v

    @property
    def _sizes(self) -> list[int]:
        """Output sizes of the query, key and value parts of a projection that is fused in blocks."""
        return [heads * self.head_dim for heads in (self.n_heads, self.n_kv_heads, self.n_kv_heads)]

    def out_weight(self, block: TransformerBlock) -> Tensor:
        """The weight of the output projection, split into heads: (head, dim, width)."""
        return _linear(block.out)[0].T.unflatten(0, (self.n_heads, self.head_dim))

    def out_bias(self, block: TransformerBlock) -> Tensor | None:
        """The bias of the output projection (width), or None. It belongs to no head."""
        return _linear(block.out)[1]

    def contributions(self, block: TransformerBlock, z: Tensor) -> Tensor:
        """What each head adds to the residual stream.

        Where a norm follows the output projection (OLMo 2, Gemma 2 and 3), each head's contribution is multiplied by
        the scale that the norm has in the run that z comes from. The contributions and the projection's bias then
        still add up to what the residual stream receives.

        Arguments:
            block: the layer.
            z: (..., head, dim), the head outputs.

        Returns:
            (head, ..., width). Cost: one matrix product for each head.
        """
        shape = z.shape[:-2]
        by_head = z.reshape(-1, self.n_heads, self.head_dim).transpose(0, 1)
        shares = _products(by_head, self.out_weight(block)).unflatten(1, shape)
        if block.after_attention.module is not None:
            bias = self.out_bias(block)
            total = shares.sum(0) if bias is None else shares.sum(0) + bias
            shares *= block.after_attention.scale(total).to(shares.dtype)
        return shares


def describe(hf: nn.Module) -> Anatomy:
    """Find the parts of a Hugging Face causal LM.

    Arguments:
        hf: the model.

    Returns:
        Its anatomy. A model of an unknown family raises a `GatelensError` that says what to add.
    """
    config: Any = hf.config
    family = family_of(config)
    layers = _part(hf, family.layers)
    if not list(layers.children()):
        raise GatelensError(
            "this model has no layers (num_hidden_layers is 0 in its config.json): give a model with layers."
        )
    n_heads = config.num_attention_heads
    width = config.hidden_size
    return Anatomy(
        model_type=config.model_type,
        family=family,
        blocks=[_block(layer, family) for layer in layers.children()],
        final_norm=Norm(_part(hf, family.final_norm), family.norm),
        unembed=hf.get_output_embeddings(),  # type: ignore[operator]
        n_heads=n_heads,
        n_kv_heads=getattr(config, "num_key_value_heads", None) or n_heads,
        head_dim=getattr(config, "head_dim", None) or width // n_heads,
        width=width,
        parallel=family.parallel is not None and bool(getattr(config, family.parallel)),
    )


def _block(layer: nn.Module, family: Family) -> TransformerBlock:
    attention = _part(layer, family.attention)

    def norm(path: str | None) -> Norm:
        return Norm(None if path is None else _part(layer, path), family.norm)

    return TransformerBlock(
        layer=layer,
        attention=attention,
        qkv=tuple(_part(attention, name) for name in family.qkv),
        out=_part(attention, family.out),
        mlp=_part(layer, family.mlp),
        before_attention=norm(family.before_attention),
        after_attention=norm(family.after_attention),
        before_mlp=norm(family.before_mlp),
        after_mlp=norm(family.after_mlp),
    )


def _part(root: nn.Module, path: str) -> nn.Module:
    try:
        return reduce(getattr, path.split("."), root)
    except AttributeError as error:
        raise GatelensError(
            f"{type(root).__name__} has no part '{path}', which the description of its family names: the installed "
            "version of transformers lays out this model differently. Correct the entry in FAMILIES of "
            "gatelens/model/families.py."
        ) from error


def _products(heads: Tensor, weights: Tensor) -> Tensor:
    """``torch.bmm`` of (head, position, dim) with weights (head, dim, width) that are views of a linear module.

    On a CPU in half precision, ``bmm`` does not use the fast product for such views: one product for each head is 13
    times faster in bfloat16.
    """
    if heads.device.type != "cpu" or heads.dtype.itemsize != 2:
        return torch.bmm(heads, weights)
    return torch.stack([nn.functional.linear(x, weight.T) for x, weight in zip(heads, weights, strict=True)])


def _linear(module: nn.Module) -> tuple[Tensor, Tensor | None]:
    """Weight (out, in) and bias of a linear module. GPT-2's Conv1D stores the transposed weight."""
    weight: Tensor = module.weight  # type: ignore[assignment]
    bias: Tensor | None = module.bias  # type: ignore[assignment]
    return (weight.T if type(module).__name__ == "Conv1D" else weight), bias


def _split_bias(bias: Tensor | None, split: Callable[[Tensor], Sequence[Tensor]]) -> Sequence[Tensor | None]:
    return (None, None, None) if bias is None else split(bias)
