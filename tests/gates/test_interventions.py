"""Plain calls and generation under gates, against gated runs of the whole text."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from families import CONFIGS, LENGTH, prompts, sparse_model, tiny, wrap
from test_hooks import traces
from torch import Tensor
from toys import random_task

from gatelens import GatelensError, Head, Model
from gatelens.gates import EDGES, HEADS
from gatelens.gates.interventions import gate_mask
from gatelens.model.graph import Graph
from gatelens.runtime.context import Context

CLOSE = {"rtol": 1e-4, "atol": 1e-4}
TEXT, OTHER = prompts(rows=1), prompts(seed=1, rows=1, length=LENGTH + 4)
TASK = random_task(n=2)
HEADS_OFF = ["L0H1", (1, 3), Head(2, 0)]
EDGES_OFF = ["M0", "L1H2", "embed -> L2H3.q", "L0H0 -> logits"]


def close(model: Model, parts: Any, source: str, *, keep: bool = False) -> Any:
    """The intervention with one of the sources: zero, the mean over a task, or another run ("patch": by `patch`)."""
    if source == "patch":
        return model.patch(parts, model.capture(OTHER))
    way = model.keep if keep else model.ablate
    if source == "mean":
        return way(parts, "mean", on=TASK)
    return way(parts, "zero" if source == "zero" else model.capture(OTHER))


def whole_text(model: Model, tokens: Tensor, parts: Any, source: str, *, keep: bool = False) -> Tensor:
    """Logits at the last position from one gated run of the whole text: (prompt, vocab)."""
    is_edges, mask = gate_mask(model, parts)
    level: Any = EDGES if is_edges else HEADS
    gates = (mask if keep else ~mask).float()
    kind = "corrupt" if source in ("run", "patch") else source
    corrupt = OTHER[:, : tokens.shape[1]].expand(len(tokens), -1)
    closed = level.closed(model, corrupt, kind, lambda: level.mean(model, [b.corrupt for b in TASK.buckets]))
    return level.run(model, tokens, gates[None], closed, context=Context())[0]


def in_full(model: Model, next_logits: Callable[[Tensor], Tensor], n: int = 3) -> list[int]:
    """Greedy decoding without a cache: each token from one run of the whole text."""
    tokens = TEXT
    for _ in range(n):
        tokens = torch.cat([tokens, next_logits(tokens).argmax(-1, keepdim=True)], 1)
    return tokens[0].tolist()


@torch.no_grad()
def check(model: Model, parts: Any, source: str, *, keep: bool = False) -> None:
    before = traces(model.hf)
    right = in_full(model, lambda tokens: whole_text(model, tokens, parts, source, keep=keep))
    with close(model, parts, source, keep=keep):
        logits = model.hf(TEXT).logits[:, -1]
        generated = model.hf.generate(TEXT, max_new_tokens=3, do_sample=False, pad_token_id=0, eos_token_id=None)
    torch.testing.assert_close(logits, whole_text(model, TEXT, parts, source, keep=keep), **CLOSE)
    assert generated[0].tolist() == right
    assert traces(model.hf) == before


@pytest.mark.parametrize("source", ["zero", "mean", "run", "patch"])
@pytest.mark.parametrize("parts", [HEADS_OFF, EDGES_OFF], ids=["heads", "edges"])
def test_generation_with_a_cache_equals_runs_of_the_whole_text(family: Model, parts: Any, source: str) -> None:
    check(family, parts, source)


@pytest.mark.parametrize("parts", [HEADS_OFF, EDGES_OFF], ids=["heads", "edges"])
@pytest.mark.parametrize("name", CONFIGS)
def test_sparse_models(name: str, parts: Any) -> None:
    model, _ = sparse_model(name)
    check(model, parts, "patch")
    check(model, parts, "mean", keep=True)


@pytest.mark.parametrize("parts", [HEADS_OFF, EDGES_OFF], ids=["heads", "edges"])
def test_keep_closes_everything_else(family: Model, parts: Any) -> None:
    check(family, parts, "mean", keep=True)


def test_zero_is_a_head_without_output_weights() -> None:
    """The plainest oracle: a model whose output projection was changed by hand."""
    model = tiny("llama")
    without = wrap(copy.deepcopy(model.hf))
    dim = model.anatomy.head_dim
    for layer, head in ((0, 1), (2, 3)):
        without.hf.model.layers[layer].self_attn.o_proj.weight[:, head * dim : (head + 1) * dim] = 0
    with torch.no_grad(), model.ablate(["L0H1", "L2H3"]):
        torch.testing.assert_close(model.hf(TEXT).logits, without.hf(TEXT).logits, **CLOSE)


@pytest.mark.parametrize("parts", [HEADS_OFF, EDGES_OFF], ids=["heads", "edges"])
@torch.no_grad()
def test_padding_on_the_left_and_beams(parts: Any) -> None:
    """A run is read by the position among real tokens; beams are reordered with their cache."""
    model = tiny("gpt2")
    short = TEXT[:, 3:]
    both = torch.cat([TEXT, torch.cat([torch.zeros(1, 3, dtype=torch.int64), short], 1)])
    mask = torch.ones_like(both)
    mask[1, :3] = 0
    options = {"max_new_tokens": 3, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    with model.ablate(parts, model.capture(OTHER)):
        together = model.hf.generate(both, attention_mask=mask, **options)
        alone = [model.hf.generate(tokens, **options) for tokens in (TEXT, short)]
        beams = model.hf.generate(TEXT, num_beams=3, **options)
        plain_beams = model.hf.generate(TEXT, num_beams=3, use_cache=False, **options)
    assert together[0].tolist() == alone[0][0].tolist()
    assert together[1, 3:].tolist() == alone[1][0].tolist()
    assert torch.equal(beams, plain_beams)


@pytest.mark.parametrize("part", ["L1H2", "M1"])
@torch.no_grad()
def test_patch_changes_only_the_asked_positions(part: str) -> None:
    """Layers are causal: logits before the first patched position stay, and positions beyond the run are untouched."""
    model = tiny("llama")
    plain = model.hf(TEXT).logits
    with model.patch(part, model.capture(OTHER), positions=[4]):
        one = model.hf(TEXT).logits
    assert torch.equal(one[:, :4], plain[:, :4])
    assert not torch.allclose(one[:, 4:], plain[:, 4:], **CLOSE)
    with model.patch(part, model.capture(TEXT)):  # the same run: nothing changes
        torch.testing.assert_close(model.hf(TEXT).logits, plain, **CLOSE)
    with model.patch(part, model.capture(OTHER[:, :3])):
        start = model.hf(TEXT).logits
    with model.patch(part, model.capture(OTHER), positions=range(3)):
        torch.testing.assert_close(model.hf(TEXT).logits, start, **CLOSE)


@torch.no_grad()
def chain(model: Model, layer: int) -> Tensor:
    """Logits if only the embedding reaches one MLP, and only this MLP the logits: from the model's own modules."""
    anatomy, caught = model.anatomy, []
    handle = anatomy.blocks[0].layer.register_forward_pre_hook(lambda _, args: caught.append(args[0]))
    model.hf(TEXT)
    handle.remove()
    biases = [anatomy.out_bias(block) for block in anatomy.blocks]
    zeros = [torch.zeros(anatomy.width) if bias is None else bias for bias in biases]  # biases belong to no edge
    block = anatomy.blocks[layer]
    read = caught[0] + sum(zeros[: layer if anatomy.parallel else layer + 1])
    written = block.after_mlp(block.mlp(block.before_mlp(read)))
    logits = anatomy.unembed(anatomy.final_norm(written + sum(zeros)))
    cap = getattr(model.hf.config, "final_logit_softcapping", None)
    return logits if cap is None else cap * torch.tanh(logits / cap)


@torch.no_grad()
def check_chain(model: Model, layer: int) -> None:
    parts, right = [f"embed -> M{layer}", f"M{layer} -> logits"], chain(model, layer)
    with model.keep(parts):
        torch.testing.assert_close(model.hf(TEXT).logits, right, **CLOSE)
    torch.testing.assert_close(whole_text(model, TEXT, parts, "zero", keep=True), right[:, -1], **CLOSE)


@pytest.mark.parametrize("name", CONFIGS)
def test_a_few_edges_are_exact_beside_a_large_stream(name: str) -> None:
    """The stream of a few edges is small. Rounding errors of the whole stream, which the norms enlarge, stay out."""
    model = tiny(name)
    for parameter in model.anatomy.blocks[0].mlp_end.parameters():
        parameter.mul_(1e4)
    check_chain(model, layer=2)


def test_a_few_edges_of_smollm2(smollm2: Model) -> None:
    check_chain(smollm2, layer=29)
    with torch.no_grad(), smollm2.keep("embed -> L3H2.q"):  # no edge reaches the logits
        assert not smollm2.hf(TEXT).logits.any()


def test_everything_open_is_plain_to_the_last_bit(family: Model) -> None:
    with torch.no_grad():
        plain = family.hf(TEXT).logits
        with family.keep([(layer, head) for layer in range(3) for head in range(4)]), family.ablate([]):
            assert torch.equal(family.hf(TEXT).logits, plain)


def test_hooks_are_gone_after_an_exception() -> None:
    model = tiny("olmo2")
    before = traces(model.hf)
    for parts in (HEADS_OFF, EDGES_OFF):
        with pytest.raises(ZeroDivisionError), model.ablate(parts):
            raise ZeroDivisionError
        assert traces(model.hf) == before


def test_heads_can_be_ablated_inside_another_block() -> None:
    model = tiny("gpt2")
    with torch.no_grad():
        with model.ablate("L0H1"), model.ablate("L2H3"):
            nested = model.hf(TEXT).logits
        with model.ablate(["L0H1", "L2H3"]):
            torch.testing.assert_close(nested, model.hf(TEXT).logits)


def test_generate_text() -> None:
    model = tiny("llama")
    added = model.generate("t5 t6 t7", max_new_tokens=4, eos_token_id=None)
    tokens = torch.tensor([[5, 6, 7]])
    whole = model.hf.generate(tokens, max_new_tokens=4, do_sample=False, pad_token_id=0, eos_token_id=None)
    assert added == model.tokenizer.decode(whole[0, 3:], skip_special_tokens=True)
    assert model.generate(["t5 t6 t7"], max_new_tokens=4, eos_token_id=None) == [added]


@pytest.mark.parametrize(
    ("use", "message"),
    [
        (lambda model: model.ablate("L9H0"), "no head L9H0 in tiny-llama: layers run 0-2, heads 0-3"),
        (lambda model: model.ablate("M7"), "no part 'M7' in tiny-llama: write a head as L3H7"),
        (lambda model: model.ablate("L1H1 -> L0H1.q"), "no edge 'L1H1 -> L0H1.q'"),
        (lambda model: model.ablate([3.5]), "3.5 is not a part of a model"),
        (lambda model: model.ablate("L0H0", "median"), "no source 'median': closed gates read 'zero', 'mean' or a run"),
        (lambda model: model.ablate("L0H0", "mean"), "needs what the mean is taken over: give on="),
        (lambda model: model.ablate("L0H0", "mean", on=[]), "no text to take the mean over"),
        (lambda model: model.patch("L0H0", "t5"), "'t5' is not a run: capture one with model.capture"),
    ],
)
def test_bad_input(use: Callable[[Model], Any], message: str) -> None:
    with pytest.raises(GatelensError, match=message), use(tiny("llama")):
        pass


def test_bad_text() -> None:
    model = tiny("llama")
    with pytest.raises(GatelensError, match="the text is empty"):
        model.generate("")
    with pytest.raises(GatelensError, match="3 is not a text"):
        model.capture(3)  # type: ignore[arg-type]
    with pytest.raises(GatelensError, match=r"the shape \(prompt, position\), and not \(4,\)"):
        model.capture(torch.arange(4))


def test_two_interventions_on_edges_are_refused() -> None:
    model = tiny("llama")
    with (
        model.ablate("embed -> L1H1.q"),
        pytest.raises(GatelensError, match="gates on edges already act on this model"),
        model.ablate("embed -> L1H2.q"),
    ):
        pass


def test_a_run_of_other_prompts_is_refused() -> None:
    model = tiny("llama")
    with (
        model.ablate("L0H0", model.capture(prompts(rows=2))),
        pytest.raises(GatelensError, match="has 2 prompts, and this pass has 3"),
    ):
        model.hf(prompts(rows=3))


def test_a_component_is_all_edges_that_leave_it() -> None:
    model = tiny("llama")
    graph = Graph.of(model.anatomy)
    is_edges, mask = gate_mask(model, ["M0", "L1H2"])
    names = {graph.source_names[source] for source in mask.any(1).nonzero()[:, 0].tolist()}
    assert is_edges
    assert names == {"M0", "L1H2"}
    assert mask.sum() == graph.edges[[graph.source_names.index(name) for name in names]].sum()
