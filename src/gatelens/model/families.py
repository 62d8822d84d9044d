"""Where the heads, MLPs and norms of each Hugging Face model family are.

A family is described by data: the attribute paths of the modules that gates act on. gatelens neither copies nor
rewrites the model's own code; it registers hooks on the modules that are named here.

To add a family, add an entry to `FAMILIES`. `gatelens.load` then checks on a few short forward passes that the entry
is right (`gatelens.loading._checks`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from gatelens.errors import GatelensError


@dataclass(frozen=True)
class NormKind:
    """How the norms of a family compute ``weight * (x - mean) / scale + bias``.

    Arguments:
        centred: True if the norm subtracts the mean (LayerNorm), False if it does not (RMSNorm).
        weight_offset: what is added to the stored weight before it is used. Gemma stores its weights minus 1.
    """

    centred: bool = False
    weight_offset: float = 0.0


@dataclass(frozen=True)
class Family:
    """The modules of one family, as attribute paths. The defaults are those of Llama.

    Arguments:
        layers: the list of layers, from the root of the model.
        attention: the attention module, from a layer.
        qkv: the query, key and value projections, from the attention module: three names, or one if they are fused.
        fused: how a fused projection orders its output. ``"blocks"``: all queries, then all keys, then all values;
            ``"per head"``: query, key and value of the first head, then of the second, and so on; None: not fused.
        out: the output projection, from the attention module.
        mlp: the MLP, from a layer.
        activation: the activation function, from the MLP.
        product: the projection, from the MLP, whose input is a product of the activation with another projection; None
            if the MLP has no such product.
        before_attention, before_mlp: the norm between the residual stream and the component, from a layer; None if
            there is none.
        after_attention, after_mlp: the norm between the component and the residual stream, from a layer; None if there
            is none.
        final_norm: the norm before the logits, from the root of the model.
        norm: what kind of norm the family uses.
        parallel: the config field that says whether attention and MLP of a layer read the same stream; None if they
            never do.
    """

    layers: str = "model.layers"
    attention: str = "self_attn"
    qkv: tuple[str, ...] = ("q_proj", "k_proj", "v_proj")
    fused: Literal["blocks", "per head"] | None = None
    out: str = "o_proj"
    mlp: str = "mlp"
    activation: str = "act_fn"
    product: str | None = "down_proj"
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
        activation="act",
        product=None,
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
        activation="act",
        product=None,
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
    "phi3": Family(qkv=("qkv_proj",), fused="blocks", activation="activation_fn"),
}
"""The known families, by the ``model_type`` of their Hugging Face config."""


def family_of(config: Any) -> Family:
    """Look up the family that a Hugging Face config belongs to.

    Arguments:
        config: the config of a model (``hf.config``).

    Returns:
        The entry of `FAMILIES`. An unknown ``model_type`` raises a `GatelensError` that says what to add.
    """
    if config.model_type not in FAMILIES:
        raise GatelensError(
            f"the model family '{config.model_type}' is not known: known families are {', '.join(sorted(FAMILIES))}. "
            "To add it, describe where its heads, MLPs and norms are in FAMILIES of gatelens/model/families.py."
        )
    return FAMILIES[config.model_type]
