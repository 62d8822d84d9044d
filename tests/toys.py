"""Tasks for tiny models, models whose answers are known, and a plain transformer as an oracle for edge gates."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from families import VOCAB, tiny, wrap
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel

from gatelens.model import Model
from gatelens.sparse.in_model import GateValues
from gatelens.tasks.base import CircuitTask
from gatelens.tasks.build import from_tokens
from gatelens.tasks.tokens import Pair, PairTokens

# Tasks


def make_task(prompts: list[tuple[list[int], list[int], int, int]], seed: int = 0) -> CircuitTask:
    """The task of these (clean, corrupt, answer, wrong) tokens."""
    pairs = [Pair(f"clean {i}", f"corrupt {i}", ("right",), ("wrong",)) for i in range(len(prompts))]
    tokens = [
        PairTokens(clean, corrupt, [answer], [wrong], _some_roles(len(clean), i))
        for i, (clean, corrupt, answer, wrong) in enumerate(prompts)
    ]
    return from_tokens("toy", seed, pairs, tokens)


def _some_roles(length: int, number: int) -> list[str]:
    """Two named roles, whose order differs between prompts. Other positions have the roles of their place."""
    roles = ["" for _ in range(length)]
    for place, role in zip((1, 2), ("name", "verb") if number % 2 else ("verb", "name"), strict=True):
        if place < length - 1:
            roles[place] = role
    return roles


def random_task(n: int = 3, lengths: tuple[int, ...] = (9,), seed: int = 0) -> CircuitTask:
    """Random tokens and answers, in prompts of these lengths in turn."""
    generator = torch.Generator().manual_seed(seed)

    def draw(count: int) -> list[int]:
        return torch.randint(3, VOCAB, (count,), generator=generator).tolist()

    sizes = [lengths[i % len(lengths)] for i in range(n)]
    return make_task(
        [(draw(size), draw(size), *(torch.tensor(draw(1)) + torch.tensor([0, 1])).tolist()) for size in sizes]
    )


def off(actual: Tensor, expected: Tensor) -> float:
    """The largest difference, in units of the largest expected number."""
    return float((actual - expected).detach().abs().max() / expected.detach().abs().max())


# A linear model

_LINEAR: dict[str, dict[str, Any]] = {
    "gpt2": {"activation_function": "linear", "layer_norm_epsilon": 1e8},
    "gpt_neox": {"hidden_act": "linear", "layer_norm_eps": 1e8},
    "llama": {"rms_norm_eps": 1e8},
}


@torch.no_grad()
def linear(family: str) -> Model:
    """A model whose logits are linear in its embeddings, up to one part in 10^8.

    Norms divide by the root of a huge epsilon, and their weights compensate for it. Queries and keys are zero, so that
    attention is a plain mean. The MLPs have no nonlinearity; Llama's MLPs, which multiply two projections, are zero.
    """
    model = tiny(family, **_LINEAR[family])
    for block in model.anatomy.blocks:
        for norm in (block.before_attention, block.before_mlp):
            norm.part.weight *= 1e4
        q, k, _ = model.anatomy.projections(block)  # views of the model's own weights
        for projection in (q, k):
            projection.weight.zero_()
            if projection.bias is not None:
                projection.bias.zero_()
        for weight in block.mlp.parameters():  # the stream must be small compared with epsilon
            weight *= 0 if family == "llama" else 0.2
    model.anatomy.final_norm.part.weight *= 1e4
    return model


# A planted circuit

TOKENS = 16  # of the planted model
PREVIOUS, INDUCTION = (0, 2), (1, 1)  # (layer, head)
PLANTED = [
    "embed -> L0H2.v",  # the previous token,
    "L0H2 -> L1H1.k",  # in the key of the token after it,
    "embed -> L1H1.q",  # is matched by the last token;
    "embed -> L1H1.v",  # what stood there is copied
    "L1H1 -> logits",  # to the logits
]


@torch.no_grad()
def planted() -> Model:
    """A GPT-2 whose weights implement induction; other heads and the MLPs do something small at random."""
    hf = hand_set(n_layers=2, n_parts=4)
    token, previous, copied, position = stream_parts(4)
    hf.lm_head.weight.copy_(10 * copied)
    one_later = torch.diag(torch.ones(TOKENS - 1), 1)
    set_head(hf, PREVIOUS, 80.0, query=position.T, key=position.T @ one_later, value=token.T, out=previous)
    set_head(hf, INDUCTION, 40.0, query=token.T, key=previous.T, value=token.T, out=copied)
    return wrap(hf, "planted")


@torch.no_grad()
def hand_set(n_layers: int, n_parts: int) -> Any:
    """A GPT-2 to plant heads in: small random weights, and embeddings that write tokens and positions as unit vectors.

    The stream has parts of 16 numbers, and as many heads: the first part is the token, the last one the position. The
    norms are nearly linear (see `linear`); the mean that they subtract is the same at every position and in every
    prompt.
    """
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=TOKENS, n_positions=TOKENS, n_embd=TOKENS * n_parts, n_head=n_parts, n_layer=n_layers, n_inner=32,
        layer_norm_epsilon=1e8, tie_word_embeddings=False, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    hf = GPT2LMHeadModel(config)
    for name, parameter in hf.named_parameters():
        parameter.copy_(torch.full_like(parameter, 1e4 * name.endswith("weight")) if "ln_" in name else parameter)
    token, *_, position = stream_parts(n_parts)
    hf.transformer.wte.weight.copy_(token)
    hf.transformer.wpe.weight.copy_(position)
    return hf


def stream_parts(n_parts: int) -> list[Tensor]:
    """The parts of the stream of `hand_set`: unit vectors (16, width) for each part."""
    return list(torch.eye(TOKENS * n_parts).split(TOKENS))


def set_head(
    hf: Any, head: tuple[int, int], sharpness: float, *, query: Tensor, key: Tensor, value: Tensor, out: Tensor
) -> None:
    """Set one head: matrices (width, dim), and (dim, width) for ``out``; its scores are 0 or ``sharpness / 4``."""
    layer, index = head
    attention, width, dim = hf.transformer.h[layer].attn, hf.config.n_embd, TOKENS
    for i, matrix in enumerate((sharpness * query, key, value)):
        at = i * width + index * dim
        attention.c_attn.weight[:, at : at + dim] = matrix
    attention.c_proj.weight[index * dim : (index + 1) * dim] = out


def planted_task(n: int = 6, seed: int = 0) -> CircuitTask:
    """``a b c ... a`` is followed by ``b``; the corrupt prompt has the same pattern with other tokens."""
    generator = torch.Generator().manual_seed(seed)
    prompts = []
    for _ in range(n):
        drawn = torch.randperm(TOKENS, generator=generator).tolist()
        clean, corrupt = drawn[:5], drawn[5:10]
        prompts.append(([*clean, clean[1]], [*corrupt, corrupt[3]], clean[2], corrupt[4]))
    return make_task(prompts, seed)


# A plain transformer

Read = Callable[[str, dict[str, Tensor], Tensor], Tensor]
"""Called as read(destination, outputs of the sources by name, sum of the biases so far); the destination's input."""


def read_all(_: str, sources: dict[str, Tensor], biases: Tensor) -> Tensor:
    """What every destination reads in a plain run: the residual stream."""
    return sum(sources.values()) + biases


def plain_run(
    model: Model,
    tokens: Tensor,
    read: Read = read_all,
    embedding: Tensor | None = None,
    gates: GateValues | None = None,
) -> tuple[Any, Tensor]:
    """A decoder that is written out head by head, for GPT-2, GPT-NeoX, Llama and OLMo.

    It uses only the norms, MLPs and weights of the Hugging Face model.

    Arguments:
        read: what each destination reads.
        embedding: used instead of the model's own.
        gates: probability gates of a sparse model; their gradients are straight through.

    Returns:
        The output of every source by name, and the logits at the last position.
    """
    parts = parts_of(model)
    sources = {"embed": parts.embed(tokens) if embedding is None else embedding}
    biases = torch.zeros(model.anatomy.width)
    group = model.n_heads // model.n_kv_heads
    for n in range(model.n_layers):
        layer, before = parts.layers[n], dict(sources)
        for h in range(model.n_heads):
            kv = f"L{n}H{h}" if group == 1 else f"L{n}KV{h // group}"
            inputs = (
                read(f"L{n}H{h}.q", before, biases),
                read(f"{kv}.k", before, biases),
                read(f"{kv}.v", before, biases),
            )
            normed = [parts.norm(layer, x) for x in inputs]
            q, k, v = (
                parts.project(layer, kind, head, x)
                for kind, head, x in zip("qkv", (h, h // group, h // group), normed, strict=True)
            )
            q, k = parts.rotate(q), parts.rotate(k)
            scores = q @ k.transpose(1, 2) / q.shape[-1] ** 0.5
            hidden = torch.ones(scores.shape[1:]).triu(1).bool()
            p, rest = scores.masked_fill(hidden, -torch.inf).softmax(-1), torch.zeros(())
            if gates is not None:
                bias, u, w, rest = (getattr(gates, name)[n, h] for name in ("bias", "query", "key", "rest"))
                offsets = bias + (normed[0] @ u)[:, :, None] + (normed[1] @ w)[:, None]
                soft = torch.sigmoid(p.masked_fill(hidden, 1.0).log() + offsets) * ~hidden
                p = p * ((soft > 0.5).float() + soft - soft.detach())
            z = rest + p @ (v - rest)
            sources[f"L{n}H{h}"] = parts.out(layer, h, z)
        if not model.anatomy.parallel:
            before, biases = dict(sources), biases + parts.out_bias(layer)
        sources[f"M{n}"] = parts.mlp(layer, read(f"M{n}", before, biases))
        if model.anatomy.parallel:
            biases = biases + parts.out_bias(layer)
    return sources, parts.logits(read("logits", sources, biases))[:, -1]


def parts_of(model: Model) -> Any:
    """The embedding, norms, projections and MLPs of a model, head by head."""
    return _PARTS[model.anatomy.model_type](model.hf)


class _Llama:
    """The parts of Llama and of OLMo, which clips its projections and has norms without weights."""

    def __init__(self, hf: Any) -> None:
        self.hf, self.layers = hf, hf.model.layers
        self.dim = hf.config.hidden_size // hf.config.num_attention_heads
        self.rotated = self.dim

    def embed(self, tokens: Tensor) -> Tensor:
        return self.hf.model.embed_tokens(tokens)

    def norm(self, layer: Any, x: Tensor) -> Tensor:
        return layer.input_layernorm(x)

    def project(self, layer: Any, kind: str, head: int, x: Tensor) -> Tensor:
        weight = getattr(layer.self_attn, f"{kind}_proj").weight[head * self.dim : (head + 1) * self.dim]
        clip = getattr(self.hf.config, "clip_qkv", None)
        return x @ weight.T if clip is None else (x @ weight.T).clamp(-clip, clip)

    def rotate(self, x: Tensor) -> Tensor:
        """Rotary positions with base 10,000, on the first ``rotated`` numbers."""
        half = self.rotated // 2
        frequencies = 10_000.0 ** (-torch.arange(half) / half)
        angles = torch.arange(x.shape[1])[:, None] * frequencies
        a, b, rest = x[..., :half], x[..., half : self.rotated], x[..., self.rotated :]
        return torch.cat([a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin(), rest], -1)

    def out(self, layer: Any, head: int, z: Tensor) -> Tensor:
        return z @ layer.self_attn.o_proj.weight[:, head * self.dim : (head + 1) * self.dim].T

    def out_bias(self, layer: Any) -> Any:
        return 0

    def mlp(self, layer: Any, x: Tensor) -> Tensor:
        return layer.mlp(layer.post_attention_layernorm(x))

    def logits(self, x: Tensor) -> Tensor:
        return self.hf.lm_head(self.hf.model.norm(x))


class _GPT2(_Llama):
    def __init__(self, hf: Any) -> None:
        self.hf, self.layers = hf, hf.transformer.h
        self.dim = hf.config.n_embd // hf.config.n_head

    def embed(self, tokens: Tensor) -> Tensor:
        return self.hf.transformer.wte(tokens) + self.hf.transformer.wpe.weight[: tokens.shape[1]]

    def norm(self, layer: Any, x: Tensor) -> Tensor:
        return layer.ln_1(x)

    def project(self, layer: Any, kind: str, head: int, x: Tensor) -> Tensor:
        at = "qkv".index(kind) * self.hf.config.n_embd + head * self.dim
        columns = slice(at, at + self.dim)
        return x @ layer.attn.c_attn.weight[:, columns] + layer.attn.c_attn.bias[columns]

    def rotate(self, x: Tensor) -> Tensor:
        return x

    def out(self, layer: Any, head: int, z: Tensor) -> Tensor:
        return z @ layer.attn.c_proj.weight[head * self.dim : (head + 1) * self.dim]

    def out_bias(self, layer: Any) -> Any:
        return layer.attn.c_proj.bias

    def mlp(self, layer: Any, x: Tensor) -> Tensor:
        return layer.mlp(layer.ln_2(x))

    def logits(self, x: Tensor) -> Tensor:
        return self.hf.lm_head(self.hf.transformer.ln_f(x))


class _NeoX(_Llama):
    def __init__(self, hf: Any) -> None:
        self.hf, self.layers = hf, hf.gpt_neox.layers
        self.dim = hf.config.hidden_size // hf.config.num_attention_heads
        self.rotated = self.dim // 4

    def embed(self, tokens: Tensor) -> Tensor:
        return self.hf.gpt_neox.embed_in(tokens)

    def project(self, layer: Any, kind: str, head: int, x: Tensor) -> Tensor:
        at = (3 * head + "qkv".index(kind)) * self.dim
        outputs, fused = slice(at, at + self.dim), layer.attention.query_key_value
        return x @ fused.weight[outputs].T + fused.bias[outputs]

    def out(self, layer: Any, head: int, z: Tensor) -> Tensor:
        return z @ layer.attention.dense.weight[:, head * self.dim : (head + 1) * self.dim].T

    def out_bias(self, layer: Any) -> Any:
        return layer.attention.dense.bias

    def logits(self, x: Tensor) -> Tensor:
        return self.hf.get_output_embeddings()(self.hf.gpt_neox.final_layer_norm(x))


_PARTS: dict[str, Any] = {"gpt2": _GPT2, "gpt_neox": _NeoX, "llama": _Llama, "olmo": _Llama}
PLAIN = ["gpt2", "gpt_neox", "gpt_neox_sequential", "llama", "olmo"]  # the families that `plain_run` knows
