"""Gates on heads, against models whose weights or hooks were changed by hand."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import accelerate
import pytest
import torch
from families import CONFIGS, LENGTH, prompts, tiny, wrap
from torch import Tensor

from gatelens import GatelensError, Model
from gatelens.gates.head_runs import mean_heads, run_heads
from gatelens.gates.runs import capture
from gatelens.runtime.context import Context

CLOSE = {"rtol": 1e-4, "atol": 1e-5}


def ones(model: Model, rows: int = 1) -> Tensor:
    return torch.ones(rows, model.n_layers, model.n_heads)


def random_gates(model: Model, rows: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(rows, model.n_layers, model.n_heads, generator=generator)


@torch.no_grad()
def plain(model: Model, tokens: Tensor) -> Tensor:
    return model.hf(input_ids=tokens, use_cache=False).logits


def plain_heads(model: Model, tokens: Tensor) -> list[Tensor]:
    """The head outputs, as plain hooks see them: (prompt, position, head * dim) for each layer."""
    seen: list[Tensor] = []
    handles = [
        block.out.register_forward_pre_hook(lambda _, args: seen.append(args[0])) for block in model.anatomy.blocks
    ]
    plain(model, tokens)
    for handle in handles:
        handle.remove()
    return seen


@contextmanager
def edited_heads(model: Model, edit: Callable[[int, Tensor], Tensor]) -> Iterator[None]:
    """Plain hooks that pass each layer's head outputs (prompt, position, head, dim) through ``edit``."""

    def hook(layer: int) -> Callable[..., tuple[Tensor]]:
        return lambda _, args: (edit(layer, args[0].unflatten(-1, (model.n_heads, -1))).flatten(-2),)

    handles = [block.out.register_forward_pre_hook(hook(layer)) for layer, block in enumerate(model.anatomy.blocks)]
    yield
    for handle in handles:
        handle.remove()


@contextmanager
def embedded_as(model: Model, tokens: Tensor) -> Iterator[None]:
    """Whatever tokens go in, the model sees the embedding of these."""
    embeddings = model.hf.get_input_embeddings()
    wanted = embeddings(tokens)
    handle = embeddings.register_forward_hook(lambda *_: wanted)
    yield
    handle.remove()


@contextmanager
def counted_rows(model: Model) -> Iterator[list[int]]:
    """How many prompts each layer's MLP ran on inside the block, over all rows."""
    ran = [0] * model.n_layers

    def count(layer: int) -> Callable[..., None]:
        def hook(_: object, args: tuple[Tensor, ...]) -> None:
            ran[layer] += len(args[0])

        return hook

    handles = [block.mlp.register_forward_pre_hook(count(layer)) for layer, block in enumerate(model.anatomy.blocks)]
    yield ran
    for handle in handles:
        handle.remove()


class TestGatesAtOne:
    """All gates at 1 give plain Hugging Face's logits, to the last bit."""

    def check(self, model: Model, tokens: Tensor) -> None:
        wanted = plain(model, tokens)
        corrupt = capture(model, tokens.flip(0))
        for source in (None, corrupt.heads, mean_heads(corrupt)):
            # Gates that require gradients are applied, also while they are 1.
            found = run_heads(model, tokens, ones(model).requires_grad_(), source, logits_at="all")[0]
            assert torch.equal(found.detach(), wanted)

    def test_families(self, family: Model) -> None:
        self.check(family, prompts())

    def test_trained(self, trained: Model) -> None:
        self.check(trained, prompts())

    def test_smollm2(self, smollm2: Model) -> None:
        self.check(smollm2, 400 * prompts(rows=2, length=5))


class TestSources:
    def test_zero_equals_zeroed_rows_of_the_output_projection(self, family: Model) -> None:
        tokens = prompts()
        for layer, head in ((0, 1), (2, 3)):
            changed = wrap(copy.deepcopy(family.hf))
            out = changed.anatomy.blocks[layer].out
            weight = out.weight if type(out).__name__ == "Conv1D" else out.weight.T  # (in, out)
            dim = weight.shape[0] // family.n_heads
            weight[head * dim : (head + 1) * dim] = 0
            gates = ones(family)
            gates[0, layer, head] = 0
            found = run_heads(family, tokens, gates, logits_at="all")[0]
            torch.testing.assert_close(found, plain(changed, tokens), **CLOSE)

    def test_mean_equals_a_hook_that_puts_the_mean_there(self, family: Model) -> None:
        tokens, others = prompts(), prompts(seed=1, rows=5, length=6)
        means = [z.unflatten(-1, (family.n_heads, -1)).mean((0, 1)) for z in plain_heads(family, others)]
        gates = (random_gates(family, 1) > 0.5).float()

        def replace(layer: int, z: Tensor) -> Tensor:
            return torch.where(gates[0, layer, :, None] == 0, means[layer].expand_as(z), z)

        with edited_heads(family, replace):
            wanted = plain(family, tokens)
        found = run_heads(family, tokens, gates, mean_heads(capture(family, others)), logits_at="all")[0]
        torch.testing.assert_close(found, wanted, **CLOSE)

    def test_all_corrupt_heads_and_a_corrupt_embedding_are_the_corrupt_run(self, family: Model) -> None:
        tokens, corrupt_tokens = prompts(), prompts(seed=1)
        corrupt = capture(family, corrupt_tokens)
        closed = 0 * ones(family)
        wanted = plain(family, corrupt_tokens)
        with embedded_as(family, corrupt_tokens):
            found = run_heads(family, tokens, closed, corrupt.heads, logits_at="all")[0]
        torch.testing.assert_close(found, wanted, **CLOSE)
        found = run_heads(family, tokens, closed, corrupt.heads, start=corrupt, logits_at="all")[0]
        torch.testing.assert_close(found, wanted, **CLOSE)

    def test_all_corrupt_heads_and_a_clean_embedding(self, family: Model) -> None:
        tokens, corrupt_tokens = prompts(), prompts(seed=1)
        theirs = plain_heads(family, corrupt_tokens)
        with edited_heads(family, lambda layer, z: theirs[layer].view_as(z)):
            wanted = plain(family, tokens)
        found = run_heads(family, tokens, 0 * ones(family), capture(family, corrupt_tokens).heads, logits_at="all")[0]
        torch.testing.assert_close(found, wanted, **CLOSE)

    def test_fractional_gates_mix(self, family: Model) -> None:
        tokens, corrupt_tokens = prompts(), prompts(seed=1)
        theirs = plain_heads(family, corrupt_tokens)
        gates = random_gates(family, 1)

        def mix(layer: int, z: Tensor) -> Tensor:
            gate = gates[0, layer, :, None]
            return gate * z + (1 - gate) * theirs[layer].view_as(z)

        with edited_heads(family, mix):
            wanted = plain(family, tokens)
        found = run_heads(family, tokens, gates, capture(family, corrupt_tokens).heads, logits_at="all")[0]
        torch.testing.assert_close(found, wanted, **CLOSE)


def test_a_half_precision_model_is_mixed_in_float32() -> None:
    """In bfloat16 a gate of 0.9971 would be 0.9961."""
    model, tokens = wrap(tiny("llama").hf.to(torch.bfloat16)), prompts()
    with edited_heads(model, lambda layer, z: (0.9971 * z.float()).to(z.dtype)):
        wanted = plain(model, tokens)
    found = run_heads(model, tokens, 0.9971 * ones(model), logits_at="all")[0]
    assert torch.equal(found, wanted)
    assert not torch.equal(found, plain(model, tokens))


class TestGradients:
    def test_against_finite_differences(self, family: Model) -> None:
        """Fourth order differences, because Hugging Face's norms round to float32 even in a float64 model."""
        model = wrap(copy.deepcopy(family.hf).double())
        model.hf.config.clip_qkv = None  # OLMo's clipping has kinks, where differences are off
        tokens = prompts(rows=2)
        source = capture(model, prompts(seed=1, rows=2)).heads
        gates = (0.2 + 0.6 * random_gates(model, 1)).double().requires_grad_()
        direction = torch.randn(2, model.hf.config.vocab_size, generator=torch.Generator().manual_seed(2)).double()
        logits = run_heads(model, tokens, gates, source)
        (found,) = torch.autograd.grad((logits * direction).sum(), gates)

        each = torch.eye(gates.numel(), dtype=torch.float64).view(-1, *gates.shape[1:])
        step = 0.005
        at = [gates.detach() + offset * step * each for offset in (-2, -1, 1, 2)]
        values = (run_heads(model, tokens, torch.cat(at), source) * direction).sum((1, 2)).view(4, -1)
        wanted = (torch.tensor([1.0, -8, 8, -1]).double() @ values / (12 * step)).view_as(gates)
        assert wanted.abs().min() > 1e-3  # every head matters
        torch.testing.assert_close(found, wanted, rtol=1e-3, atol=2e-3)

    def test_rows_do_not_share_gradients_and_chunks_keep_them(self) -> None:
        model, tokens = tiny("llama"), prompts()
        gates = random_gates(model, 3)

        def gradient(part: Tensor, memory_gb: float = 2.0) -> Tensor:
            part = part.clone().requires_grad_()
            logits = run_heads(model, tokens, part, context=Context(memory_gb))
            return torch.autograd.grad(logits.square().sum(), part)[0]

        wanted = torch.cat([gradient(row) for row in gates.split(1)])
        torch.testing.assert_close(gradient(gates), wanted, **CLOSE)
        torch.testing.assert_close(gradient(gates, 1e-9), wanted, **CLOSE)

    def test_half_precision_gates_keep_float32_gradients(self) -> None:
        model = wrap(tiny("llama").hf.to(torch.bfloat16))
        gates = ones(model).requires_grad_()
        run_heads(model, prompts(), gates).float().square().sum().backward()
        assert gates.grad is not None
        assert gates.grad.dtype == torch.float32
        assert (gates.grad != 0).all()

    def test_without_gradients_nothing_is_recorded(self) -> None:
        model = tiny("llama")
        assert not run_heads(model, prompts(), random_gates(model, 2)).requires_grad
        with torch.no_grad():
            assert not run_heads(model, prompts(), random_gates(model, 2).requires_grad_()).requires_grad


class TestRows:
    def test_each_row_equals_that_row_alone(self, family: Model) -> None:
        tokens, source = prompts(), capture(family, prompts(seed=1)).heads
        gates = random_gates(family, 4)
        found = run_heads(family, tokens, gates, source, logits_at="all")
        assert found.shape == (4, 3, LENGTH, family.hf.config.vocab_size)
        for row in range(4):
            wanted = run_heads(family, tokens, gates[row : row + 1], source, logits_at="all")[0]
            torch.testing.assert_close(found[row], wanted, **CLOSE)

    def test_a_small_memory_budget_splits_the_rows_and_changes_nothing(self) -> None:
        model, tokens = tiny("llama"), prompts()
        source, gates = capture(model, prompts(seed=1)).heads, random_gates(model, 5)
        wanted = run_heads(model, tokens, gates, source)
        sizes: list[int] = []
        handle = model.hf.get_input_embeddings().register_forward_hook(lambda _, args, out: sizes.append(len(out)))
        found = run_heads(model, tokens, gates, source, context=Context(1e-9))
        handle.remove()
        assert sizes == [3] * 5
        torch.testing.assert_close(found, wanted, **CLOSE)

    @pytest.mark.parametrize("shape", [(3, 4), (1, 4, 3), (0, 3, 4), (1, 3, 4, 1)])
    def test_gates_of_another_shape_are_refused(self, shape: tuple[int, ...]) -> None:
        with pytest.raises(GatelensError, match=r"shape \(row, 3, 4\), that is \(row, layer, head\)"):
            run_heads(tiny("llama"), prompts(), torch.ones(shape))

    def test_a_prompt_that_is_too_long_is_refused(self) -> None:
        with pytest.raises(GatelensError, match="65 tokens does not fit into tiny-llama, which reads 64"):
            capture(tiny("llama"), prompts(length=65))


class TestSharedLayers:
    """Rows share the layers below the first gate in which they differ."""

    def gates(self, model: Model) -> Tensor:
        """Rows 0 and 3 are equal; row 1 differs from them at layer 2, row 2 at layer 1, and row 4 at layer 0."""
        gates = random_gates(model, 1).repeat(5, 1, 1)
        for row, layer in ((1, 2), (2, 1), (4, 0)):
            gates[row, layer, 3] = 0
        return gates

    @pytest.mark.parametrize("padded", [False, True])
    def test_each_row_equals_that_row_alone(self, family: Model, padded: bool) -> None:
        tokens, gates, mask = prompts(), self.gates(family), None
        if padded:
            mask = torch.ones(3, LENGTH, dtype=torch.bool)
            mask[1, -3:] = False
        source = capture(family, prompts(seed=1)).heads
        for found, row in zip(run_heads(family, tokens, gates, source, mask=mask), gates, strict=True):
            [wanted] = run_heads(family, tokens, row[None], source, mask=mask)
            torch.testing.assert_close(found, wanted, **CLOSE)

    def test_a_layer_runs_once_for_all_rows_that_are_equal_so_far(self) -> None:
        model, tokens = tiny("llama"), prompts()
        with counted_rows(model) as ran:
            run_heads(model, tokens, self.gates(model))
        assert [n // len(tokens) for n in ran] == [2, 3, 4]


class TestPrefixReuse:
    """``start`` leaves out what the gates do not change."""

    def gates(self, model: Model) -> Tensor:
        """Rows that first close a gate at layer 2, nowhere, 0, 1 and 2: in no order."""
        gates = ones(model, 5)
        gates[0, 2, 1] = 0
        gates[2] = random_gates(model, 1)[0]
        gates[3, 1:, 2] = 0.3
        gates[4, 2] = 0
        return gates

    @pytest.mark.parametrize("memory_gb", [2.0, 1e-9])
    def test_same_numbers(self, family: Model, memory_gb: float) -> None:
        tokens, gates = prompts(), self.gates(family)
        source = capture(family, prompts(seed=1)).heads
        wanted = run_heads(family, tokens, gates, source, logits_at="all")
        clean = capture(family, tokens)
        found = run_heads(family, tokens, gates, source, start=clean, logits_at="all", context=Context(memory_gb))
        torch.testing.assert_close(found, wanted, **CLOSE)

    def test_same_numbers_and_gradients_for_gates_that_are_learned(self) -> None:
        model, tokens = tiny("gemma2"), prompts()
        clean = capture(model, tokens)
        found, wanted = (self.gates(model).requires_grad_() for _ in range(2))
        run_heads(model, tokens, found, start=clean).square().sum().backward()
        run_heads(model, tokens, wanted).square().sum().backward()
        torch.testing.assert_close(found.grad, wanted.grad, **CLOSE)

    def test_layers_below_the_first_closed_gate_are_not_run(self) -> None:
        model, tokens = tiny("llama"), prompts()
        clean = capture(model, tokens)
        with counted_rows(model) as ran:
            run_heads(model, tokens, self.gates(model), start=clean)
        assert [n // len(tokens) for n in ran] == [1, 2, 5]  # of the five rows

    def test_with_padding(self) -> None:
        model = tiny("mistral")
        tokens, mask = prompts(), torch.ones(3, LENGTH, dtype=torch.bool)
        mask[1, :3] = False
        clean = capture(model, tokens, mask)
        found = run_heads(model, tokens, self.gates(model), mask=mask, start=clean)
        torch.testing.assert_close(found, run_heads(model, tokens, self.gates(model), mask=mask), **CLOSE)


class TestLogitsAt:
    def test_last_all_and_a_mask(self, family: Model) -> None:
        tokens, gates = prompts(), random_gates(family, 2)
        everywhere = run_heads(family, tokens, gates, logits_at="all")
        last = run_heads(family, tokens, gates)
        assert last.shape == (2, 3, family.hf.config.vocab_size)
        torch.testing.assert_close(last, everywhere[:, :, -1], **CLOSE)
        wanted = torch.rand(3, LENGTH, generator=torch.Generator().manual_seed(0)) > 0.7
        picked = run_heads(family, tokens, gates, logits_at=wanted)
        torch.testing.assert_close(picked, everywhere[:, wanted], **CLOSE)

    def test_only_the_logits_asked_for_are_computed(self) -> None:
        model, tokens = tiny("llama"), prompts()
        seen: list[int] = []
        handle = model.anatomy.unembed.register_forward_hook(lambda _, args, out: seen.append(out[..., 0].numel()))
        run_heads(model, tokens, random_gates(model, 2))
        handle.remove()
        assert seen == [2 * 3]


class TestPadding:
    @pytest.mark.parametrize("side", ["left", "right"])
    def test_gated_logits_equal_the_unpadded_ones(self, family: Model, side: str) -> None:
        lengths = (LENGTH, 5, 7)
        clean, corrupt = prompts(), prompts(seed=1)
        gates = random_gates(family, 2)
        mask = torch.stack([torch.arange(LENGTH) < n for n in lengths])
        mask = mask.flip(1) if side == "left" else mask

        def padded(tokens: Tensor) -> Tensor:
            out = torch.zeros_like(tokens)
            for row, n in enumerate(lengths):
                out[row, mask[row]] = tokens[row, :n]
            return out

        source = capture(family, padded(corrupt), mask).heads
        last = run_heads(family, padded(clean), gates, source, mask=mask)
        everywhere = run_heads(family, padded(clean), gates, source, mask=mask, logits_at="all")
        for row, n in enumerate(lengths):
            alone = capture(family, corrupt[row : row + 1, :n]).heads
            wanted = run_heads(family, clean[row : row + 1, :n], gates, alone, logits_at="all")[:, 0]
            torch.testing.assert_close(everywhere[:, row, mask[row]], wanted, **CLOSE)
            torch.testing.assert_close(last[:, row], wanted[:, -1], **CLOSE)

    def test_the_mean_is_over_real_tokens(self, family: Model) -> None:
        tokens = prompts(rows=2)
        mask = torch.ones(2, LENGTH, dtype=torch.bool)
        mask[0, :4] = False
        parts = [capture(family, tokens[:1, 4:]).heads, capture(family, tokens[1:]).heads]
        for found, short, long in zip(mean_heads(capture(family, tokens, mask)), *parts, strict=True):
            torch.testing.assert_close(found, torch.cat([short[0], long[0]]).mean(0), **CLOSE)


class TestCapture:
    def test_heads_are_what_a_plain_hook_sees(self, family: Model) -> None:
        run = capture(family, prompts())
        for found, wanted in zip(run.heads, plain_heads(family, prompts()), strict=True):
            assert found.shape == (3, LENGTH, family.n_heads, family.anatomy.head_dim)
            assert torch.equal(found.flatten(-2), wanted)

    def test_streams_are_the_hidden_states(self, family: Model) -> None:
        run = capture(family, prompts(), logits_at="all")
        with torch.no_grad():
            # A copy: transformers leaves hooks in a model that has returned its hidden states.
            output = copy.deepcopy(family.hf)(prompts(), output_hidden_states=True, use_cache=False)
        for found, wanted in zip(run.streams, output.hidden_states[:-1], strict=True):
            assert torch.equal(found, wanted)
        assert torch.equal(run.logits, output.logits)

    def test_streams_are_kept_only_if_asked(self) -> None:
        assert capture(tiny("llama"), prompts(), streams=False).streams == []


@pytest.mark.parametrize("name", CONFIGS)
def test_a_model_spread_by_accelerate_works_the_same(name: str) -> None:
    """Accelerate puts its own forward on every module, which gates must keep."""
    model, tokens = tiny(name), prompts()
    gates = TestPrefixReuse().gates(model)
    clean = capture(model, tokens)
    wanted = run_heads(model, tokens, gates, clean.heads[::-1], logits_at="all")
    spread = wrap(copy.deepcopy(model.hf))
    parts = {part: "cpu" for part, module in spread.hf.named_modules() if not list(module.children())}
    accelerate.dispatch_model(spread.hf, parts, main_device="cpu", force_hooks=True)
    for block in spread.anatomy.blocks:
        accelerate.hooks.add_hook_to_module(block.layer, accelerate.hooks.AlignDevicesHook("cpu"))
    forwards = [block.layer.forward for block in spread.anatomy.blocks]
    found = run_heads(spread, tokens, gates, clean.heads[::-1], start=capture(spread, tokens), logits_at="all")
    torch.testing.assert_close(found, wanted, **CLOSE)
    assert [block.layer.forward for block in spread.anatomy.blocks] == forwards
