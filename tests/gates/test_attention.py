"""Gates on attention edges, against plain Hugging Face and against attention written out by hand."""

from __future__ import annotations

import copy

import pytest
import torch
from families import CONFIGS, LENGTH, WINDOW, prompts, tiny, wrap
from torch import Tensor
from toys import random_task

import gatelens
from gatelens import GatelensError, Model
from gatelens.gates.attention_runs import capture_attention, run_attention
from gatelens.gates.head_runs import run_heads
from gatelens.gates.runs import capture
from gatelens.methods.attribution import attribute_attention
from gatelens.methods.patching import patch_attention
from gatelens.runtime.context import Context
from gatelens.sparse.in_model import make_sparse
from gatelens.sparse.recording import record_open

CLOSE = {"rtol": 1e-5, "atol": 1e-5}
BOTH = prompts(), prompts(seed=1)  # clean and corrupt


@pytest.fixture(scope="module", params=CONFIGS)
def sparse(request: pytest.FixtureRequest) -> Model:
    """A model of each family in turn, with about a third of its attention edges closed."""
    model = wrap(copy.deepcopy(tiny(request.param).hf), f"sparse-{request.param}")
    make_sparse(model.hf, 0.2)
    return model


@torch.no_grad()
def plain(model: Model, tokens: Tensor) -> Tensor:
    return model.hf(input_ids=tokens, use_cache=False).logits[:, -1]


def full(model: Model, rows: int = 1, length: int = LENGTH) -> Tensor:
    return torch.ones(rows, 1, model.n_layers, model.n_heads, length, length)


class TestEnds:
    def test_all_open_is_plain_hugging_face(self, family: Model) -> None:
        for source in (None, capture_attention(family, BOTH[1])):
            found = run_attention(family, BOTH[0], full(family, 2), source)
            for row in found:
                torch.testing.assert_close(row, plain(family, BOTH[0]), **CLOSE)

    def test_all_open_is_the_sparse_model(self, sparse: Model) -> None:
        found = run_attention(sparse, BOTH[0], full(sparse), capture_attention(sparse, BOTH[1]))[0]
        torch.testing.assert_close(found, plain(sparse, BOTH[0]), **CLOSE)
        dense = tiny(sparse.name.removeprefix("sparse-"))
        assert not torch.allclose(found, plain(dense, BOTH[0]), atol=1e-2)

    def test_all_closed_is_all_heads_patched(self, family: Model) -> None:
        corrupt = capture(family, BOTH[1])
        closed = torch.zeros(1, family.n_layers, family.n_heads)
        for source, heads in ((None, None), (capture_attention(family, BOTH[1]), corrupt.heads)):
            found = run_attention(family, BOTH[0], 0 * full(family), source)[0]
            torch.testing.assert_close(found, run_heads(family, BOTH[0], closed, heads)[0], **CLOSE)

    def test_all_closed_on_the_corrupt_prompt_is_the_corrupt_run(self, family: Model) -> None:
        source = capture_attention(family, BOTH[1])
        found = run_attention(family, BOTH[1], 0 * full(family), source)[0]
        torch.testing.assert_close(found, plain(family, BOTH[1]), **CLOSE)


class TestCapture:
    def test_weights_are_those_of_eager_attention(self, family: Model) -> None:
        run = capture_attention(family, BOTH[0])
        eager = copy.deepcopy(family.hf)
        eager.set_attn_implementation("eager")
        with torch.no_grad():
            wanted = eager(BOTH[0], output_attentions=True, use_cache=False).attentions
        for found, weights in zip(run.weights, wanted, strict=True):
            torch.testing.assert_close(found, weights, **CLOSE)
        torch.testing.assert_close(run.logits, plain(family, BOTH[0]), **CLOSE)

    def test_weights_times_values_are_the_heads(self, family: Model) -> None:
        run, heads = capture_attention(family, BOTH[0]), capture(family, BOTH[0]).heads
        for p, v, z in zip(run.weights, run.values, heads, strict=True):
            torch.testing.assert_close((p @ v).transpose(1, 2), z, **CLOSE)

    def test_edges_are_the_visible_keys(self, family: Model) -> None:
        edges = capture_attention(family, BOTH[0]).edges
        causal = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()
        near = causal & ~causal.tril(-WINDOW)
        layers = getattr(family.hf.config, "layer_types", None) or ["full_attention"] * family.n_layers
        if family.anatomy.model_type == "mistral":
            layers = ["sliding_attention"] * family.n_layers
        for layer, kind in enumerate(layers):
            wanted = near if kind == "sliding_attention" else causal
            assert (edges[:, layer] == wanted).all()

    def test_edges_of_a_sparse_model_are_the_open_ones(self, sparse: Model) -> None:
        edges = capture_attention(sparse, BOTH[0]).edges
        with torch.no_grad(), record_open(sparse.hf, edges=True) as record:
            sparse.hf(BOTH[0], use_cache=False)
        visible = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()
        wanted = record.edges.transpose(0, 1) & visible
        assert torch.equal(edges, wanted)
        assert 0.1 < edges.sum() / visible.expand_as(edges).sum() < 0.95


class TestGates:
    def test_one_edge_by_hand(self, family: Model) -> None:
        """Closing (layer 1, head 2, query 8, key j) takes p v away from z, and nothing else."""
        run, source = capture_attention(family, BOTH[0]), capture_attention(family, BOTH[1])
        key = LENGTH - 2
        for other in (None, source):
            gates = full(family)
            gates[..., 1, 2, -1, key] = 0

            def edit(_: object, args: tuple[Tensor, ...], other: object = other) -> tuple[Tensor]:
                z = args[0].unflatten(-1, (family.n_heads, -1)).clone()
                z[:, -1, 2] -= run.weights[1][:, 2, -1, key, None] * run.values[1][:, 2, key]
                if other is not None:
                    z[:, -1, 2] += source.weights[1][:, 2, -1, key, None] * source.values[1][:, 2, key]
                return (z.flatten(-2),)

            handle = family.anatomy.blocks[1].out.register_forward_pre_hook(edit)
            wanted = plain(family, BOTH[0])
            handle.remove()
            found = run_attention(family, BOTH[0], gates, other)[0]
            assert not torch.allclose(wanted, plain(family, BOTH[0]), atol=1e-4)
            torch.testing.assert_close(found, wanted, **CLOSE)

    def test_a_heads_edges_together_are_the_head(self, family: Model) -> None:
        shape = (4, family.n_layers, family.n_heads)
        heads = torch.rand(shape, generator=torch.Generator().manual_seed(0))
        gates = heads[:, None, :, :, None, None].expand(-1, 1, -1, -1, LENGTH, LENGTH)
        found = run_attention(family, BOTH[0], gates, capture_attention(family, BOTH[1]))
        wanted = run_heads(family, BOTH[0], heads, capture(family, BOTH[1]).heads)
        torch.testing.assert_close(found, wanted, **CLOSE)

    def test_rows_prompts_and_memory(self, family: Model) -> None:
        source = capture_attention(family, BOTH[1])
        shape = (3, 3, *full(family).shape[2:])
        gates = torch.rand(shape, generator=torch.Generator().manual_seed(0))
        wanted = run_attention(family, BOTH[0], gates, source)
        torch.testing.assert_close(
            run_attention(family, BOTH[0], gates, source, context=Context(1e-9)), wanted, **CLOSE
        )
        for prompt in range(3):
            one = slice(prompt, prompt + 1)
            alone = run_attention(family, BOTH[0][one], gates[:, one], capture_attention(family, BOTH[1][one]))
            torch.testing.assert_close(alone[:, 0], wanted[:, prompt], **CLOSE)


class TestSparse:
    """Closed edges are no edges: neither scored nor counted."""

    def test_scores(self, sparse: Model) -> None:
        task = random_task(n=3, lengths=(5, 4))
        attributed, patched = attribute_attention(sparse, task, 2), patch_attention(sparse, task)
        for i, bucket in enumerate(task.buckets):
            either = capture_attention(sparse, bucket.clean).edges | capture_attention(sparse, bucket.corrupt).edges
            for found in (attributed, patched):
                assert torch.equal(found.edges[i], either)
                assert not found.scores[i][~either].any()

    def test_counts(self, sparse: Model) -> None:
        task = random_task(n=3, lengths=(5, 4))
        scores = attribute_attention(sparse, task)
        curve = gatelens.explained_effect(sparse, task, scores)
        sizes = [int(one.sum()) for edges in scores.edges for one in edges]
        assert curve.total == max(sizes)
        assert float(curve.kept[-1]) == pytest.approx(sum(sizes) / len(sizes))
        assert curve.effect[[0, -1]].tolist() == pytest.approx([0, 1], abs=1e-5)
        wanted = torch.cat([task.metric(plain(sparse, b.clean), b) for b in task.buckets])
        order = torch.cat([b.which for b in task.buckets])
        torch.testing.assert_close(curve.everything[0, order], wanted, rtol=1e-4, atol=1e-4)

    def test_a_bfloat16_model_agrees_with_itself(self) -> None:
        """The same edges are open here and in the operator, also where a score rounds to the threshold."""
        model = wrap(copy.deepcopy(tiny("llama").hf).to(torch.bfloat16))
        make_sparse(model.hf, 0.2)
        edges = capture_attention(model, BOTH[0]).edges
        with torch.no_grad(), record_open(model.hf, edges=True) as record:
            model.hf(BOTH[0], use_cache=False)
        first = record.edges[0] & torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()
        assert torch.equal(edges[:, 0], first)  # above, rounding has already made the streams differ a little


@pytest.mark.parametrize("given", [(1, 3, 4, 9, 9), (1, 2, 3, 4, 9, 9), (1, 3, 3, 4, 9, 8), (0, 3, 3, 4, 9, 9)])
def test_gates_of_another_shape(given: tuple[int, ...]) -> None:
    with pytest.raises(GatelensError, match="gates of tiny-llama for 3 prompts of 9 tokens must have the shape"):
        run_attention(tiny("llama"), BOTH[0], torch.ones(given))


def test_nothing_is_left_behind_after_an_error(family: Model) -> None:
    own, wanted = family.hf.config._attn_implementation, plain(family, BOTH[0])
    with pytest.raises(RuntimeError):
        run_attention(family, BOTH[0], 0.5 * full(family), capture_attention(family, BOTH[1][:2]))
    assert family.hf.config._attn_implementation == own
    assert not any(hasattr(block.attention, "edge_gates") for block in family.anatomy.blocks)
    assert torch.equal(plain(family, BOTH[0]), wanted)
