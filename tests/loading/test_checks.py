"""The check at load passes for every family, and the error says which fact is false."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
from families import tiny, wrap
from torch import Tensor

from gatelens import GatelensError, Model
from gatelens.gates import head_runs
from gatelens.loading._checks import check_model
from gatelens.model.families import FAMILIES, NormKind
from gatelens.sparse.in_model import make_sparse

ADD_UP = "the outputs of its components do not add up to the residual stream"
MLPS = "its MLPs do not read the residual stream as described"
CUT = "its query, key and value projections are not split into heads as described"
NORM = "its norm is not of the kind described"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_every_family_passes(family: Model, dtype: torch.dtype) -> None:
    check_model(wrap(copy.deepcopy(family.hf).to(dtype)))


def test_float64_passes() -> None:
    check_model(wrap(tiny("llama").hf.double()))


@pytest.mark.parametrize(
    ("family", "entry", "message"),
    [
        ("llama", {"norm": NormKind(centred=True)}, NORM),
        ("gpt2", {"norm": NormKind(centred=False)}, NORM),
        ("olmo", {"norm": NormKind(centred=False)}, NORM),
        ("qwen3", {"norm": NormKind(weight_offset=1.0)}, NORM),
        ("gemma2", {"norm": NormKind(weight_offset=0.0)}, ADD_UP),  # it scales the heads' contributions too
        ("gpt_neox", {"fused": "blocks"}, CUT),
        ("gpt2", {"fused": "per head"}, CUT),
        ("llama", {"before_attention": "post_attention_layernorm"}, CUT),
        ("olmo2", {"before_attention": "post_attention_layernorm"}, CUT),
        ("llama", {"out": "q_proj"}, ADD_UP),
        ("llama", {"mlp": "post_attention_layernorm"}, ADD_UP),
        ("olmo2", {"after_attention": None}, ADD_UP),
        ("gemma3_text", {"after_mlp": None}, ADD_UP),
        ("phi3", {"before_mlp": "input_layernorm"}, MLPS),
        ("gemma2", {"before_mlp": None}, MLPS),
        ("gpt_neox", {"parallel": None}, MLPS),
        ("gpt_neox_sequential", {"parallel": "attention_bias"}, MLPS),
    ],
)
def test_a_wrong_entry_is_detected(
    monkeypatch: pytest.MonkeyPatch, family: str, entry: dict[str, Any], message: str
) -> None:
    hf = tiny(family).hf
    name = hf.config.model_type
    monkeypatch.setitem(FAMILIES, name, replace(FAMILIES[name], **entry))
    with pytest.raises(GatelensError) as caught:
        check_model(wrap(hf, "mine"))
    assert str(caught.value).startswith(f"mine ({name}) fails the check at load: {message}")
    assert "check=False (--no-check)" in str(caught.value)


def test_a_gate_that_scales_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(head_runs, "_mix", lambda gates, source: lambda z: z * (1 + 1e-6))
    with pytest.raises(
        GatelensError, match="with all head gates at 1 its logits differ from those of plain Hugging Face by up"
    ):
        check_model(tiny("llama"))


def test_weights_that_are_nan_are_detected() -> None:
    model = tiny("llama")
    model.hf.model.layers[1].mlp.up_proj.weight[0, 0] = torch.nan
    with pytest.raises(GatelensError, match="fails the check at load"):
        check_model(model)


def from_the_left(x: Tensor) -> Tensor:
    return torch.arange(x.shape[1])


def from_the_right(x: Tensor) -> Tensor:
    return torch.arange(x.shape[1]).flip(0)


@pytest.mark.parametrize(("side", "distance"), [("left", from_the_left), ("right", from_the_right)])
def test_padding_that_matters_is_detected(side: str, distance: Any) -> None:
    """A model that counts its positions from one end, padding or not."""
    model = tiny("llama")
    embeddings = model.hf.get_input_embeddings()
    embeddings.register_forward_hook(lambda _, args, out: out + 0.1 * distance(out)[:, None])
    with pytest.raises(GatelensError, match=f"padding on the {side} changes its numbers"):
        check_model(model)


def test_a_sparse_model_passes_with_most_edges_closed() -> None:
    model = tiny("llama")
    make_sparse(model.hf, bias=-0.5)
    check_model(model)
