"""What the anatomy says about each family's parts, against the model's own modules and autograd."""

from __future__ import annotations

import copy
from types import SimpleNamespace

import pytest
import torch
from families import CONFIGS, LENGTH, VOCAB, prompts, tiny, wrap
from torch import Tensor

from gatelens import GatelensError, Head, Model
from gatelens.gates.runs import capture
from gatelens.model._norm import Norm
from gatelens.model.anatomy import describe
from gatelens.model.families import FAMILIES, family_of


def norms(model: Model) -> list[Norm]:
    in_blocks = [
        norm
        for block in model.anatomy.blocks
        for norm in (block.before_attention, block.after_attention, block.before_mlp, block.after_mlp)
    ]
    return [*in_blocks, model.anatomy.final_norm]


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def test_every_known_family_has_a_tiny_model() -> None:
    assert {tiny(name).anatomy.model_type for name in CONFIGS} == set(FAMILIES)


def test_sizes(family: Model) -> None:
    config = family.hf.config
    assert (family.n_layers, family.n_heads, family.hf.config.vocab_size) == (3, 4, VOCAB)
    shared = family.anatomy.model_type not in ("gpt2", "gpt_neox")
    assert family.n_kv_heads == (2 if shared else 4)
    assert family.anatomy.width == config.hidden_size
    assert family.anatomy.out_weight(family.anatomy.blocks[0]).shape == (4, family.anatomy.head_dim, config.hidden_size)
    assert family.context == 64
    assert family.n_parameters == sum(p.numel() for p in family.hf.parameters())


def test_only_gpt_neox_is_parallel_and_only_if_its_config_says_so() -> None:
    assert [name for name in CONFIGS if tiny(name).anatomy.parallel] == ["gpt_neox"]


@torch.no_grad()
def test_components_add_up_to_the_final_stream(family: Model) -> None:
    """Embedding, head contributions, biases and MLP outputs, read off by plain hooks."""
    anatomy = family.anatomy
    outputs: list[Tensor] = []
    finals: list[Tensor] = []
    handles = [
        block.mlp_end.register_forward_hook(lambda _, args, out: outputs.append(out)) for block in anatomy.blocks
    ]
    handles.append(anatomy.final_norm.part.register_forward_pre_hook(lambda _, args: finals.append(args[0])))
    run = capture(family, prompts())
    for handle in handles:
        handle.remove()
    total = run.streams[0]
    for block, z, mlp in zip(anatomy.blocks, run.heads, outputs, strict=True):
        shares = anatomy.contributions(block, z)
        assert shares.shape == (4, 3, LENGTH, anatomy.width)
        received = block.after_attention(block.out(z.flatten(-2)))
        bias = getattr(block.out, "bias", None)  # no family has both a bias here and a norm after it
        heads = shares.sum(0) if bias is None else shares.sum(0) + bias
        torch.testing.assert_close(heads, received, rtol=1e-4, atol=1e-4)
        total = total + heads + mlp
    torch.testing.assert_close(total, finals[0], rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_a_contribution_is_the_heads_own_product_times_the_scale_of_the_norm_after_it(family: Model) -> None:
    anatomy = family.anatomy
    block, z = anatomy.blocks[1], capture(family, prompts()).heads[1]
    received = block.out(z.flatten(-2))
    scale = block.after_attention(received) / received
    nothing = block.out(torch.zeros_like(z.flatten(-2)))
    for head, contribution in enumerate(anatomy.contributions(block, z)):
        alone = torch.zeros_like(z)
        alone[:, :, head] = z[:, :, head]
        expected = (block.out(alone.flatten(-2)) - nothing) * scale
        torch.testing.assert_close(contribution, expected, rtol=1e-3, atol=1e-4)


@torch.no_grad()
def test_contributions_with_a_bias_before_the_norm() -> None:
    model = tiny("gemma2", attention_bias=True)
    block, z = model.anatomy.blocks[1], capture(model, prompts()).heads[1]
    received = block.out(z.flatten(-2))
    bias = block.out.bias * block.after_attention(received) / received
    total = model.anatomy.contributions(block, z).sum(0) + bias
    torch.testing.assert_close(total, block.after_attention(received), rtol=1e-3, atol=1e-4)


@torch.no_grad()
def test_contributions_in_half_precision_are_those_of_the_same_numbers_in_float32(family: Model) -> None:
    half = wrap(copy.deepcopy(family.hf).bfloat16())
    block, z = half.anatomy.blocks[1], capture(half, prompts()).heads[1]
    contributions = half.anatomy.contributions(block, z)
    wide = wrap(copy.deepcopy(half.hf).float()).anatomy  # the same weights, rounded to bfloat16
    expected = wide.contributions(wide.blocks[1], z.float())
    assert contributions.dtype == torch.bfloat16
    torch.testing.assert_close(contributions.float(), expected, rtol=2e-2, atol=2e-2 * float(expected.abs().max()))


def test_pull_back_is_autograds(family: Model) -> None:
    x = (2 * randn(2, 5, family.anatomy.width) + 0.5).requires_grad_()
    grads = randn(3, 2, 5, family.anatomy.width, seed=1)
    for norm in norms(family):
        y = norm(x)
        expected = torch.stack([torch.autograd.grad(y, x, u, retain_graph=True)[0] for u in grads])
        torch.testing.assert_close(norm.pull_back(grads.clone(), x.detach()), expected, rtol=1e-4, atol=1e-5)


@torch.no_grad()
def test_scale_is_what_the_centred_input_is_multiplied_by(family: Model) -> None:
    x = 2 * randn(2, 5, family.anatomy.width) + 0.5
    for norm in norms(family):
        centred = x - x.mean(-1, keepdim=True) if norm.kind.centred and norm.module is not None else x
        bias = getattr(norm.module, "bias", None)
        output = norm.scale(x) * centred + (0 if bias is None else bias)
        torch.testing.assert_close(output, norm(x), rtol=1e-4, atol=1e-5)


@torch.no_grad()
def test_projections_are_the_modules_cut_into_heads(family: Model) -> None:
    anatomy = family.anatomy
    x = randn(2, 5, anatomy.width)
    for block in anatomy.blocks:
        parts = []
        for projection, heads in zip(
            anatomy.projections(block), (4, family.n_kv_heads, family.n_kv_heads), strict=True
        ):
            assert projection.weight.shape == (heads, anatomy.head_dim, anatomy.width)
            part = torch.einsum("btw,hdw->bthd", x, projection.weight)
            parts.append(part if projection.bias is None else part + projection.bias)
        for output, module in zip(anatomy.fuse(*parts), block.qkv, strict=True):
            torch.testing.assert_close(output, module(x), rtol=1e-4, atol=1e-4)


def test_unfuse_undoes_fuse(family: Model) -> None:
    dim = family.anatomy.head_dim
    parts = [randn(2, 5, heads, dim, seed=heads) for heads in (4, family.n_kv_heads, family.n_kv_heads)]
    for part, expected in zip(family.anatomy.unfuse(family.anatomy.fuse(*parts)), parts, strict=True):
        assert torch.equal(part, expected)


@torch.no_grad()
def test_values_are_values(family: Model) -> None:
    """The first position attends to itself only: its head outputs are its values, each shared by a group of heads."""
    block, anatomy = family.anatomy.blocks[0], family.anatomy
    run = capture(family, prompts())
    values = anatomy.unfuse([module(block.before_attention(run.streams[0])) for module in block.qkv])[2]
    clip = getattr(family.hf.config, "clip_qkv", None)
    values = values if clip is None else values.clamp(-clip, clip)
    expected = values.repeat_interleave(4 // family.n_kv_heads, dim=2)
    torch.testing.assert_close(run.heads[0][:, 0], expected[:, 0], rtol=1e-4, atol=1e-5)


def test_an_unknown_family_is_named_with_the_known_ones_and_what_to_add() -> None:
    with pytest.raises(GatelensError) as caught:
        family_of(SimpleNamespace(model_type="bloom"))
    message = str(caught.value)
    assert "'bloom'" in message
    assert all(name in message for name in FAMILIES)
    assert "FAMILIES of gatelens/model/families.py" in message


def test_a_part_that_has_moved_is_named() -> None:
    hf = tiny("llama").hf
    del hf.model.layers[0].self_attn.o_proj
    with pytest.raises(GatelensError, match=r"LlamaAttention has no part 'o_proj'.*FAMILIES"):
        describe(hf)


@pytest.mark.parametrize("head", [Head(3, 0), Head(0, 4), Head(-1, 0), Head(0, -1)])
def test_a_head_that_is_not_there_is_refused(head: Head) -> None:
    with pytest.raises(GatelensError, match=f"no head {head} in tiny-llama: layers run 0-2, heads 0-3"):
        tiny("llama").check_head(head)


def test_a_head_that_is_there_is_returned() -> None:
    assert tiny("llama").check_head(Head(2, 3)) == Head(2, 3)


class TestFingerprint:
    def test_is_the_weights_not_the_name(self) -> None:
        assert tiny("llama").fingerprint == wrap(tiny("llama").hf, "another name").fingerprint

    def test_differs_between_models(self) -> None:
        models = [tiny(name) for name in CONFIGS] + [tiny("llama", seed=1), tiny("llama", rms_norm_eps=1e-3)]
        assert len({model.fingerprint for model in models}) == len(models)

    def test_differs_after_a_change_of_any_one_weight(self) -> None:
        fingerprints = {tiny("llama").fingerprint}
        names = [name for name, _ in tiny("llama").hf.named_parameters()]
        for name in names:
            model = tiny("llama")
            model.hf.get_parameter(name).mul_(1.01)
            fingerprints.add(model.fingerprint)
        assert len(fingerprints) == 1 + len(names)
