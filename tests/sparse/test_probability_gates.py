"""Probability gates inside tiny random models of every family, against attention that is computed plainly."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from decoding import decode_in_steps
from families import LENGTH, prompts, tiny
from plain_attention import plain_attention
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface, AutoModelForCausalLM, StaticCache
from transformers.masking_utils import sdpa_mask

from gatelens.errors import GatelensError
from gatelens.model import Model
from gatelens.sparse._head_gates import _as_columns, _from_columns
from gatelens.sparse.attention_interface import edge_gates
from gatelens.sparse.in_model import (
    GateValues,
    dense_attention,
    gate_values,
    is_sparse,
    make_dense,
    make_sparse,
    save_sparse,
)
from gatelens.sparse.recording import attention_modules, record_open, straight_through

CLOSE = {"rtol": 1e-5, "atol": 5e-5}
BIAS = 2.0  # about half of the gates are open


def random_gates(hf: Any, learned: bool = False, seed: int = 0) -> GateValues:
    """Make a model sparse with offsets and rest values that matter."""
    generator = torch.Generator().manual_seed(seed)
    make_sparse(hf, gate="probability")
    shapes = {name: getattr(gate_values(hf), name).shape for name in ("bias", "query", "key", "rest")}
    made = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    for name in ("query", "key"):
        made[name] *= 0.3
    values = GateValues("probability", **{**made, "bias": made["bias"] + BIAS})
    make_sparse(hf, learned=learned, **vars(values))
    return values


@pytest.fixture
def hf(family: Model) -> Any:
    return copy.deepcopy(family.hf)


@pytest.fixture
def llama() -> Any:
    return tiny("llama").hf


@torch.no_grad()
def logits(hf: Any, **inputs: Any) -> Tensor:
    return hf(**inputs).logits


def padded(tokens: Tensor, extra: int = 3) -> dict[str, Tensor]:
    """All but the first sequence are padded on the left; the first one is real throughout."""
    ids = torch.cat([torch.full((len(tokens), extra), 7), tokens], 1)
    mask = torch.ones_like(ids)
    mask[1:, :extra] = 0
    return {"input_ids": ids, "attention_mask": mask, "position_ids": (mask.cumsum(1) - 1).clamp(min=0)}


def whole_mask(**arguments: Any) -> Tensor:
    """True for a visible pair; never left out."""
    return sdpa_mask(**{**arguments, "allow_is_causal_skip": False})


@contextmanager
def plainly(hf: Any, values: GateValues) -> Iterator[dict[int, Tensor]]:
    """Inside, the model computes its attention by `plain_attention`, from inputs that are caught here."""
    inputs: dict[int, Tensor] = {}
    opened: dict[int, Tensor] = {}

    def catch(module: Any, args: Any, kwargs: Any) -> None:
        inputs[module.layer_idx] = args[0] if args else kwargs["hidden_states"]

    def attend(module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scaling: float | None = None, **kw: Any):
        layer = module.layer_idx
        b, u, w, r = (getattr(values, name)[layer].double() for name in ("bias", "query", "key", "rest"))
        x = inputs[layer].double()
        plain = plain_attention(
            q.double(),
            k.double(),
            v.double(),
            b,
            mask.expand(-1, q.shape[1], -1, -1),
            gate="probability",
            query_offset=(x @ u.T).mT,
            key_offset=(x @ w.T).mT,
            rest=r,
            scale=scaling,
            softcap=kw.get("softcap"),
        )
        opened[layer] = plain.open
        return plain.z.to(q).transpose(1, 2), None

    AttentionInterface.register("plainly", attend)
    AttentionMaskInterface.register("plainly", whole_mask)
    hooks = [module.register_forward_pre_hook(catch, with_kwargs=True) for module in attention_modules(hf)]
    hf.set_attn_implementation("plainly")
    try:
        yield opened
    finally:
        hf.set_attn_implementation("gatelens")
        for hook in hooks:
            hook.remove()


def test_equals_the_plain_version(hf: Any) -> None:
    values = random_gates(hf)
    inputs = {"input_ids": prompts()}
    with plainly(hf, values) as opened:
        right = logits(hf, **inputs)
    with record_open(hf, edges=True) as record:
        actual = logits(hf, **inputs)
    torch.testing.assert_close(actual, right, **CLOSE)
    edges = torch.stack([opened[layer] for layer in sorted(opened)])
    assert torch.equal(record.edges, edges)
    assert torch.equal(record.open_keys, edges.sum(-1))
    assert 0.1 < record.open_share.mean() < 0.9


def test_open_gates_are_the_dense_model(hf: Any) -> None:
    dense = logits(hf, **padded(prompts()))
    values = random_gates(hf)
    make_sparse(hf, 1e4, gate="probability", rest=values.rest)
    sparse = logits(hf, **padded(prompts()))
    torch.testing.assert_close(sparse[0], dense[0], **CLOSE)
    torch.testing.assert_close(sparse[:, 3:], dense[:, 3:], **CLOSE)
    with dense_attention(hf):
        torch.testing.assert_close(logits(hf, **padded(prompts()))[:, 3:], dense[:, 3:], **CLOSE)


def test_numbers_do_not_depend_on_padding(hf: Any) -> None:
    random_gates(hf)
    with record_open(hf) as alone:
        right = logits(hf, input_ids=prompts())
    with record_open(hf) as beside:
        actual = logits(hf, **padded(prompts()))
    torch.testing.assert_close(actual[1:, 3:], right[1:], **CLOSE)
    assert torch.equal(beside.open_keys[:, 1:, :, 3:], alone.open_keys[:, 1:])
    assert not beside.visible_keys[:, 1:, :, :3].any()
    assert not beside.open_keys[:, 1:, :, :3].any()


def test_cached_decoding_is_the_full_forward(hf: Any) -> None:
    random_gates(hf)
    inputs = padded(prompts())
    full = logits(hf, **inputs)
    together = decode_in_steps(hf, inputs)
    torch.testing.assert_close(together[0], full[0], **CLOSE)
    torch.testing.assert_close(together[:, 3:], full[:, 3:], **CLOSE)


def test_static_cache(hf: Any) -> None:
    random_gates(hf)
    tokens = prompts()
    full = logits(hf, input_ids=tokens)
    cache = StaticCache(config=hf.config, max_cache_len=32)
    first = logits(hf, input_ids=tokens[:, :6], past_key_values=cache)
    rest = [logits(hf, input_ids=tokens[:, at : at + 1], past_key_values=cache) for at in range(6, LENGTH)]
    torch.testing.assert_close(torch.cat([first, *rest], 1), full, **CLOSE)


@pytest.mark.parametrize("options", [{}, {"num_beams": 3}, {"cache_implementation": "static"}])
def test_generate(options: dict[str, Any]) -> None:
    """Beams are reordered and sequences padded on the left; without a cache every step is a full forward."""
    hf = tiny("llama").hf
    random_gates(hf)
    inputs = padded(prompts())
    del inputs["position_ids"]
    shared = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0, "eos_token_id": None, **inputs}
    right = hf.generate(**shared, use_cache=False, num_beams=options.get("num_beams", 1))
    assert torch.equal(hf.generate(**shared, **options), right)


@pytest.mark.parametrize(("dtype", "precision"), [(torch.float32, 0.0), (torch.bfloat16, 1e-6), (torch.float16, 1e-6)])
def test_a_cache_keeps_offsets_in_full_precision(dtype: torch.dtype, precision: float) -> None:
    offsets = 5 * torch.randn(2, 6, 7, generator=torch.Generator().manual_seed(0))
    columns = _as_columns(offsets, 3, dtype)
    assert columns.dtype == dtype
    assert columns.shape[:3] == (2, 3, 7)
    torch.testing.assert_close(_from_columns(columns, 2), offsets, rtol=precision, atol=precision)


def test_every_part_of_the_gates_learns(llama: Any) -> None:
    random_gates(llama, learned=True)
    llama.train()

    def gradients() -> dict[str, Tensor]:
        llama.zero_grad()
        torch.manual_seed(0)
        with record_open(llama) as record:
            loss = llama(input_ids=prompts(), labels=prompts(), use_cache=False).loss
            (loss + record.expected.log().mean()).backward()
        return {name: p.grad for name, p in llama.named_parameters() if p.requires_grad}

    first = gradients()
    assert len(first) == 3 * 4
    assert all(gradient.ne(0).any() for gradient in first.values())
    llama.gradient_checkpointing_enable()
    for name, gradient in gradients().items():
        torch.testing.assert_close(gradient, first[name])


def test_straight_through(llama: Any) -> None:
    """In evaluation mode gates have no gradient unless asked for."""
    random_gates(llama, learned=True)

    def offset_gradient() -> Tensor | None:
        llama.zero_grad()
        llama(input_ids=prompts(), labels=prompts(), use_cache=False).loss.backward()
        return llama.model.layers[1].self_attn.gate_query.weight.grad

    plain = offset_gradient()
    assert plain is None or not plain.any()
    with straight_through(llama):
        through = offset_gradient()
    assert through is not None
    assert through.ne(0).any()


def test_a_saved_model_opens_in_plain_transformers(hf: Any, tmp_path: Path) -> None:
    values = random_gates(hf, learned=True)
    right = logits(hf, input_ids=prompts())
    save_sparse(hf, tmp_path / "first")
    again, report = AutoModelForCausalLM.from_pretrained(tmp_path / "first", output_loading_info=True)
    assert is_sparse(again)
    assert not report["unexpected_keys"]
    assert not report["missing_keys"]
    assert torch.equal(logits(again, input_ids=prompts()), right)
    again.save_pretrained(tmp_path / "second")  # nothing else is needed: all of the gates are weights
    third = AutoModelForCausalLM.from_pretrained(tmp_path / "second")
    make_sparse(third, learned=True)  # to train on
    assert torch.equal(logits(third, input_ids=prompts()), right)
    for name, right_values in vars(values).items():
        actual = getattr(gate_values(third), name)
        assert torch.equal(actual, right_values) if isinstance(right_values, Tensor) else actual == right_values
    dense = AutoModelForCausalLM.from_pretrained(tmp_path / "first", attn_implementation="eager")
    make_dense(third)
    assert not any("gate_" in name for name in third.state_dict() if "gate_proj" not in name and "gate_up" not in name)
    torch.testing.assert_close(logits(third, input_ids=prompts()), logits(dense, input_ids=prompts()), **CLOSE)


def test_gates_change_kind(llama: Any) -> None:
    make_sparse(llama, 0.7)
    random_gates(llama)
    make_sparse(llama, 0.3, gate="score")
    assert gate_values(llama).gate == "score"
    assert gate_values(llama).query is None
    assert not any("gate_query" in name for name in llama.state_dict())
    make_sparse(llama, gate="probability")
    assert gate_values(llama).bias.eq(6.0).all()
    with pytest.raises(GatelensError, match="have no rest"):
        make_sparse(llama, gate="score", rest=torch.zeros(3, 4, 12))


def test_gates_for_other_attention(hf: Any) -> None:
    """What `edge_gates` says about each layer is what the operator does."""
    random_gates(hf)
    with record_open(hf, edges=True) as record:
        right = logits(hf, input_ids=prompts())
    edges: list[Tensor] = []

    def attend(module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scaling: float | None = None, **kw: Any):
        group = q.shape[1] // k.shape[1]
        k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
        scores = q @ k.mT * (q.shape[-1] ** -0.5 if scaling is None else scaling)
        if kw.get("softcap") is not None:
            scores = kw["softcap"] * torch.tanh(scores / kw["softcap"])
        gates = edge_gates(module, scores, mask)
        edges.append(gates.edges)
        p = scores.masked_fill(~mask, -torch.inf).softmax(-1) * gates.edges
        assert gates.rest is not None
        z = gates.rest[:, None] + p @ (v - gates.rest[:, None])
        return z.transpose(1, 2), None

    AttentionInterface.register("gatelens-test", attend)
    AttentionMaskInterface.register("gatelens-test", whole_mask)
    hf.set_attn_implementation("gatelens-test")
    torch.testing.assert_close(logits(hf, input_ids=prompts()), right, **CLOSE)
    assert torch.equal(torch.stack(edges), record.edges)
