"""Where heads, MLPs and norms live in each Hugging Face family.

A family is described by data: the attribute paths of the parts that gates act on. The model's own code is
never copied or rewritten; it runs as it is, and gates hook into the modules named here. To add a family, add
a row to ``FAMILIES``; ``gatelens.loading.checks`` tells at load whether the row is right.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any, Literal

import torch
from torch import Tensor, nn

from gatelens.errors import GatelensError


def widen(x: Tensor) -> Tensor:
    """At least float32: sums over prompts, positions and sources are never kept in half precision."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


@dataclass(frozen=True, order=True)
class Head:
    """One attention head, written ``L3H7``: layer 3, head 7, both counted from 0."""

    layer: int
    index: int

    def __str__(self) -> str:
        return f"L{self.layer}H{self.index}"


@dataclass(frozen=True)
class NormKind:
    """How a family's norm computes ``weight * (x - mean) / scale + bias``."""

    centred: bool = False  # LayerNorm subtracts the mean, RMSNorm does not
    weight_offset: float = 0.0  # Gemma stores its weights less 1


@dataclass(frozen=True)
class Family:
    """The parts of one family as attribute paths; the defaults are Llama's.

    ``before_*`` norms stand between the residual stream and a component, ``after_*`` norms between a
    component and the stream. ``parallel`` names the config field that makes attention and MLP read the
    same stream. ``fused`` says how one module holds q, k and v: as three blocks, or head by head.
    """

    layers: str = "model.layers"
    attention: str = "self_attn"
    qkv: tuple[str, ...] = ("q_proj", "k_proj", "v_proj")
    fused: Literal["blocks", "per head"] | None = None
    out: str = "o_proj"
    mlp: str = "mlp"
    before_attention: str | None = "input_layernorm"
    after_attention: str | None = None
    before_mlp: str | None = "post_attention_layernorm"
    after_mlp: str | None = None
    final_norm: str = "model.norm"
    norm: NormKind = NormKind()
    parallel: str | None = None


_GEMMA = Family(
    after_attention="post_attention_layernorm",
    before_mlp="pre_feedforward_layernorm",
    after_mlp="post_feedforward_layernorm",
    norm=NormKind(weight_offset=1.0),
)

FAMILIES: dict[str, Family] = {
    "gpt2": Family(
        layers="transformer.h",
        attention="attn",
        qkv=("c_attn",),
        fused="blocks",
        out="c_proj",
        before_attention="ln_1",
        before_mlp="ln_2",
        final_norm="transformer.ln_f",
        norm=NormKind(centred=True),
    ),
    "gpt_neox": Family(
        layers="gpt_neox.layers",
        attention="attention",
        qkv=("query_key_value",),
        fused="per head",
        out="dense",
        final_norm="gpt_neox.final_layer_norm",
        norm=NormKind(centred=True),
        parallel="use_parallel_residual",
    ),
    "llama": Family(),
    "mistral": Family(),
    "qwen2": Family(),
    "qwen3": Family(),
    "olmo": Family(norm=NormKind(centred=True)),
    "olmo2": Family(
        before_attention=None,
        after_attention="post_attention_layernorm",
        before_mlp=None,
        after_mlp="post_feedforward_layernorm",
    ),
    "gemma2": _GEMMA,
    "gemma3_text": _GEMMA,
    "phi3": Family(qkv=("qkv_proj",), fused="blocks"),
}


@dataclass(frozen=True, eq=False)
class Projection:
    """One of a layer's q, k or v projections, cut into heads: ``x -> x @ weight + bias`` for each head."""

    weight: Tensor  # (head, dim, width), a view of the model's own weight
    bias: Tensor | None  # (head, dim)


@dataclass(frozen=True, eq=False)
class Norm:
    """A norm module together with the closed form of its backward pass. Without a module it is the identity."""

    module: nn.Module | None
    kind: NormKind

    @property
    def part(self) -> nn.Module:
        """The module, where there must be one."""
        assert self.module is not None
        return self.module

    def __call__(self, x: Tensor) -> Tensor:
        return x if self.module is None else self.module(x)

    def scale(self, x: Tensor) -> Tensor:
        """What the centred input is multiplied by, weights included: (..., width). One if there is no norm."""
        if self.module is None:
            return torch.ones_like(x)
        weight = getattr(self.module, "weight", None)
        inverse = self._inverse(widen(x))
        return inverse.expand_as(x) if weight is None else inverse * (widen(weight) + self.kind.weight_offset)

    def pull_back(self, grads: Tensor, x: Tensor) -> Tensor:
        """Gradients at the norm's output, turned in place into gradients at its input ``x``.

        grads: (any, ..., width), several for each x; x: (..., width). With y = w (x - mean) / s the pull-back
        of u is ``(v - mean(v) - x' mean(v x')) / s`` with v = w u and x' the normed input; RMSNorm has no means.
        """
        if self.module is None:
            return grads
        weight = getattr(self.module, "weight", None)
        if weight is not None:
            grads *= widen(weight).to(grads.device) + self.kind.weight_offset
        x = widen(x)
        inverse = self._inverse(x)
        if self.kind.centred:
            x = x - x.mean(-1, keepdim=True)
            grads -= grads.mean(-1, keepdim=True)
        normed = x * inverse
        along = torch.einsum("k...d,...d->k...", grads, normed) / x.shape[-1]
        grads.addcmul_(along.unsqueeze(-1), normed, value=-1)
        grads *= inverse
        return grads

    def _inverse(self, x: Tensor) -> Tensor:
        eps = getattr(self.module, "eps", getattr(self.module, "variance_epsilon", 1e-5))
        if self.kind.centred:
            x = x - x.mean(-1, keepdim=True)
        return torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)


@dataclass(frozen=True, eq=False)
class Block:
    """The parts of one layer."""

    layer: nn.Module
    attention: nn.Module
    qkv: tuple[nn.Module, ...]
    out: nn.Module  # its input holds the head outputs z
    mlp: nn.Module
    before_attention: Norm
    after_attention: Norm
    before_mlp: Norm
    after_mlp: Norm

    @property
    def mlp_start(self) -> nn.Module:
        """The module whose input is the stream that the MLP reads."""
        return self.mlp if self.before_mlp.module is None else self.before_mlp.module

    @property
    def mlp_end(self) -> nn.Module:
        """The module whose output the MLP adds to the stream."""
        return self.mlp if self.after_mlp.module is None else self.after_mlp.module

    @property
    def device(self) -> torch.device:
        return next(self.out.parameters()).device


@dataclass(frozen=True, eq=False)
class Anatomy:
    """The parts of one model, found through its family's description."""

    model_type: str
    family: Family
    blocks: Sequence[Block]
    final_norm: Norm
    unembed: nn.Module
    n_heads: int
    n_kv_heads: int
    head_dim: int
    width: int
    parallel: bool

    @property
    def n_layers(self) -> int:
        return len(self.blocks)

    def projections(self, block: Block) -> tuple[Projection, Projection, Projection]:
        """The q, k and v projections of a layer, cut into heads (KV heads for k and v)."""
        if self.family.fused is None:
            parts = [_linear(module) for module in block.qkv]
        else:
            weight, bias = _linear(block.qkv[0])
            if self.family.fused == "per head":
                weights = weight.unflatten(0, (self.n_heads, 3, self.head_dim)).unbind(1)
                biases = _none3(bias, lambda b: b.unflatten(0, (self.n_heads, 3, self.head_dim)).unbind(1))
                return tuple(map(Projection, weights, biases))  # type: ignore[return-value]
            sizes = [n * self.head_dim for n in (self.n_heads, self.n_kv_heads, self.n_kv_heads)]
            parts = list(zip(weight.split(sizes), _none3(bias, lambda b: b.split(sizes)), strict=True))
        cut = (-1, self.head_dim)
        return tuple(  # type: ignore[return-value]
            Projection(weight.unflatten(0, cut), None if bias is None else bias.unflatten(0, cut))
            for weight, bias in parts
        )

    def fuse(self, q: Tensor, k: Tensor, v: Tensor) -> list[Tensor]:
        """Per-head q, k and v (..., head, dim) as the outputs of the modules in ``block.qkv``."""
        if self.family.fused == "per head":
            return [torch.stack([q, k, v], dim=-2).flatten(-3)]
        parts = [part.flatten(-2) for part in (q, k, v)]
        return [torch.cat(parts, dim=-1)] if self.family.fused else parts

    def unfuse(self, outputs: Sequence[Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """The inverse of :meth:`fuse`: outputs of ``block.qkv`` as per-head q, k and v (..., head, dim)."""
        if self.family.fused == "per head":
            q, k, v = outputs[0].unflatten(-1, (self.n_heads, 3, self.head_dim)).unbind(-2)
            return q, k, v
        if self.family.fused:
            outputs = outputs[0].split(
                [n * self.head_dim for n in (self.n_heads, self.n_kv_heads, self.n_kv_heads)], -1
            )
        q, k, v = (part.unflatten(-1, (-1, self.head_dim)) for part in outputs)
        return q, k, v

    def out_weight(self, block: Block) -> Tensor:
        """The output projection cut into heads: (head, dim, width)."""
        return _linear(block.out)[0].T.unflatten(0, (self.n_heads, self.head_dim))

    def contributions(self, block: Block, z: Tensor) -> Tensor:
        """What each head adds to the residual stream: z (..., head, dim) -> (head, ..., width).

        Where a norm follows the output projection (OLMo 2, Gemma 2 and 3), each head's share is taken with the
        norm's scale of the run that z belongs to, so that the shares and the projection's bias still add up to
        what the stream received. One product per head: no head's copy of the stream is broadcast.
        """
        shape = z.shape[:-2]
        by_head = z.reshape(-1, self.n_heads, self.head_dim).transpose(0, 1)
        shares = torch.bmm(by_head, self.out_weight(block)).unflatten(1, shape)
        if block.after_attention.module is not None:
            bias = _linear(block.out)[1]
            total = shares.sum(0) if bias is None else shares.sum(0) + bias
            shares *= block.after_attention.scale(total).to(shares.dtype)
        return shares


def describe(hf: nn.Module) -> Anatomy:
    """The anatomy of a Hugging Face causal LM. An unknown family is an error that says what to add."""
    config: Any = hf.config
    family = family_of(config)
    layers = _part(hf, family.layers)
    if not list(layers.children()):
        raise GatelensError("this model has no layers: its config.json says num_hidden_layers 0.")
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


def family_of(config: Any) -> Family:
    """The description of the family that a Hugging Face config belongs to."""
    if config.model_type not in FAMILIES:
        raise GatelensError(
            f"the model family '{config.model_type}' is not known: known are {', '.join(sorted(FAMILIES))}. "
            "To add it, describe where its heads, MLPs and norms live in FAMILIES of gatelens/anatomy.py."
        )
    return FAMILIES[config.model_type]


def _block(layer: nn.Module, family: Family) -> Block:
    attention = _part(layer, family.attention)

    def norm(path: str | None) -> Norm:
        return Norm(None if path is None else _part(layer, path), family.norm)

    return Block(
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
            f"{type(root).__name__} has no part '{path}', where the anatomy of its family expects one: "
            "this transformers version has moved it; mend its row in FAMILIES of gatelens/anatomy.py."
        ) from error


def _linear(module: nn.Module) -> tuple[Tensor, Tensor | None]:
    """Weight (out, in) and bias of a linear module. GPT-2's Conv1D stores its weight the other way round."""
    weight: Tensor = module.weight  # type: ignore[assignment]
    bias: Tensor | None = module.bias  # type: ignore[assignment]
    return (weight.T if type(module).__name__ == "Conv1D" else weight), bias


def _none3(bias: Tensor | None, cut: Any) -> Sequence[Tensor | None]:
    return (None, None, None) if bias is None else cut(bias)
