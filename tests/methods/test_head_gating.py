"""Causal head gating: against a plain implementation, on a model whose roles are known, and when it is stopped."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from copying import COPIES, DIM, SPOILS, copying_model, copying_task, trained_model
from families import VOCAB, tiny
from torch import Tensor

from gatelens import GatelensError, HeadGatingSettings, Model, fit_head_gates
from gatelens.errors import GatelensWarning
from gatelens.gates import fitting, responses
from gatelens.gates.fitting import draw_batch
from gatelens.gates.responses import response_log_probs, share_known, token_counts
from gatelens.gates.roles import KINDS, HeadRoles
from gatelens.runtime import precision
from gatelens.runtime.context import Context
from gatelens.runtime.journal import Journal
from gatelens.tasks.base import Example, ResponseBatch, ResponseTask

pytestmark = pytest.mark.filterwarnings("ignore::gatelens.errors.GatelensWarning")


def any_task(n: int = 10, seed: int = 0) -> ResponseTask:
    """Random prompts and responses of different lengths."""
    draw = random.Random(seed)

    def some(least: int, most: int) -> tuple[int, ...]:
        return tuple(draw.randrange(VOCAB) for _ in range(draw.randint(least, most)))

    return ResponseTask("any", seed, [Example(f"prompt {i}", "response", some(3, 8), some(1, 4)) for i in range(n)])


def plain_log_prob(model: Model, example: Example, gates: Tensor) -> Tensor:
    """Log-probabilities of the response's tokens: one example, no padding, all logits, hooks set by hand."""
    handles = [
        block.out.register_forward_pre_hook(
            lambda _, args, row=gates[layer]: ((args[0].unflatten(-1, (len(row), -1)) * row[:, None]).flatten(-2),)
        )
        for layer, block in enumerate(model.anatomy.blocks)
    ]
    try:
        log_probs = model.hf(torch.tensor([example.prompt_ids + example.response_ids])).logits[0].log_softmax(-1)
    finally:
        for handle in handles:
            handle.remove()
    before = len(example.prompt_ids) - 1
    return torch.stack([log_probs[before + i, token] for i, token in enumerate(example.response_ids)])


@pytest.mark.parametrize("side", ["left", "right"])
def test_log_probs_do_not_depend_on_padding(family: Model, side: str) -> None:
    task = any_task(5)
    gates = torch.rand(2, family.n_layers, family.n_heads, generator=torch.Generator().manual_seed(1))
    for batch in task.batches(5, side=side):  # type: ignore[arg-type]
        log_probs = response_log_probs(family, batch, gates)
        wanted = [[plain_log_prob(family, task.examples[i], row).sum() for i in batch.which.tolist()] for row in gates]
        torch.testing.assert_close(log_probs, torch.tensor(wanted), atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("name", ["gpt2", "llama", "gemma2"])
def test_gates_equal_those_of_a_plain_implementation(name: str) -> None:
    model, task = tiny(name), any_task()
    if name != "gemma2":  # its softmax is float32 in any case
        model.hf.double()  # Adam turns the rounding error of a gradient near 0 into a step
    settings = HeadGatingSettings(seeds=2, updates=20, batch=4)
    roles = fit_head_gates(model, task, settings)

    def loss(gates: Tensor, batch: ResponseBatch) -> Tensor:
        losses = [-plain_log_prob(model, task.examples[i], gates).mean() for i in batch.which.tolist()]
        return torch.stack(losses).mean()

    def fit(start: Tensor, penalty: float, first: float, last: float) -> Tensor:
        logits = start.clone().requires_grad_()
        adam = torch.optim.Adam([logits])
        for update in range(20):
            adam.param_groups[0]["lr"] = first + (last - first) * update / 19
            adam.zero_grad()
            batch = draw_batch(task, 4, update, 0)
            (loss(logits.sigmoid(), batch) - penalty * logits.clamp(-4, 4).mean()).backward()
            adam.step()
        return logits.detach()

    for seed in range(2):
        uniform = torch.rand(model.n_layers, model.n_heads, generator=torch.Generator().manual_seed(seed))
        plain = fit(uniform.logit(), 0.0, 0.1, 0.01)
        torch.testing.assert_close(roles.gates[seed], plain.sigmoid(), atol=1e-5, rtol=0)
        torch.testing.assert_close(roles.plus[seed], fit(plain, 0.1, 0.5, 0.1).sigmoid(), atol=1e-5, rtol=0)
        torch.testing.assert_close(roles.minus[seed], fit(plain, -0.1, 0.5, 0.1).sigmoid(), atol=1e-5, rtol=0)


@pytest.fixture(scope="module", params=[copying_model, trained_model], ids=["by hand", "trained"])
def known_roles(request: pytest.FixtureRequest) -> HeadRoles:
    return fit_head_gates(request.param(), copying_task(), HeadGatingSettings(seeds=4, updates=100, batch=12))


def test_training_gave_the_heads_their_roles() -> None:
    model = trained_model()
    out = model.hf.transformer.h[0].attn.c_proj.weight
    learned = out.clone()

    def right(*heads: int) -> list[float]:
        """Shares of first and of second words that are predicted with only the outputs of these heads."""
        out.copy_(torch.zeros_like(learned))
        for head in heads:
            out[head * DIM : (head + 1) * DIM] = learned[head * DIM : (head + 1) * DIM]
        tokens = torch.tensor([[*example.prompt_ids, *example.response_ids] for example in copying_task().examples])
        first = model.hf(tokens).logits[:, 2:4].argmax(-1)
        return (first == tokens[:, 3:]).float().mean(0).tolist()

    assert right(0, 1) == [1.0, 1.0]
    assert right(0)[0] == right(1)[1] == 1.0
    assert max(right(0)[1], right(1)[0], right(0, 1, 2)[0]) < 0.3
    assert right(0, 1, 3) == [1.0, 1.0]


def test_known_roles_come_out_in_every_seed(known_roles: HeadRoles) -> None:
    for layer in range(2):
        for index in range(4):
            head = (layer, index)
            copies = head in {(h.layer, h.index) for h in COPIES}
            kind = (
                "facilitation" if copies else "interference" if head == (SPOILS.layer, SPOILS.index) else "irrelevance"
            )
            for name in KINDS:
                scores = known_roles.kind(name)[:, layer, index]
                assert bool((scores >= 0.8).all() if name == kind else (scores < 0.3).all()), (head, name, scores)


def test_the_summary_counts_heads(known_roles: HeadRoles) -> None:
    shares = {name: share["all seeds"] for name, share in known_roles.summary().items()}
    assert shares == {"facilitation": 2 / 8, "irrelevance": 5 / 8, "interference": 1 / 8}
    plus = torch.ones(2, 1, 4)
    plus[0, 0, 0], plus[:, 0, 1] = 0.5, 0.1
    roles = HeadRoles(plus, plus, torch.zeros_like(plus), torch.zeros(3, 1, 2))
    assert roles.summary()["interference"] == {"all seeds": 1 / 4, "any seed": 2 / 4}


def test_losses_fall_and_have_their_shape(known_roles: HeadRoles) -> None:
    assert known_roles.losses.shape == (3, 100, 4)
    assert (known_roles.losses[0, -5:].mean(0) < known_roles.losses[0, :5].mean(0)).all()


def test_accumulated_batches_equal_one_large_batch() -> None:
    model, task = tiny("llama"), any_task(10)  # different lengths, and not a multiple of the batch size
    large = fit_head_gates(model, task, HeadGatingSettings(seeds=1, updates=4, batch=8))
    accumulated = fit_head_gates(model, task, HeadGatingSettings(seeds=1, updates=4, batch=4, accumulate=2))
    torch.testing.assert_close(large.minus, accumulated.minus, atol=1e-5, rtol=0)


def test_rows_that_do_not_fit_into_memory_are_run_one_by_one_with_the_same_numbers() -> None:
    model, task, settings = tiny("llama"), any_task(6), HeadGatingSettings(seeds=3, updates=3, batch=2)
    together = fit_head_gates(model, task, settings)
    batch_sizes: list[int] = []
    embedding = model.hf.get_input_embeddings()
    handle = embedding.register_forward_pre_hook(lambda _, args: batch_sizes.append(len(args[0])))
    alone = fit_head_gates(model, task, settings, context=Context(memory_gb=1e-9))
    handle.remove()
    assert max(batch_sizes[-18:]) == 2  # the last updates: one row of gates, two examples
    for name in ("gates", "plus", "minus", "losses"):
        torch.testing.assert_close(getattr(alone, name), getattr(together, name), atol=1e-5, rtol=0)


def test_batches_are_as_large_as_asked_mixed_anew_and_fair() -> None:
    task = any_task(10)
    drawn = [draw_batch(task, 4, number, seed=0).which.tolist() for number in range(10)]
    assert all(len(batch) == 4 for batch in drawn)
    seen = [i for batch in drawn for i in batch]
    epochs = [seen[start : start + 10] for start in range(0, 40, 10)]
    assert all(sorted(epoch) == list(range(10)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 4
    assert sorted(draw_batch(task, 99, 3, seed=0).which.tolist()) == list(range(10))


class Stop(Exception):
    pass


def stop_at(folder: Path, update: int) -> Context:
    """A context that ends the fit of G+ and G- after an update."""

    def stop(title: str, done: int, total: int) -> None:
        if "G+" in title and done == update:
            raise Stop

    return Context.in_folder(folder, progress=stop)


def same(roles: HeadRoles, expected: HeadRoles) -> None:
    for name in ("gates", "plus", "minus", "losses"):
        assert torch.equal(getattr(roles, name), getattr(expected, name)), name


@pytest.mark.parametrize(("updates", "seconds", "resumed_at"), [(25, 1e9, 25), (1000, 0.0, 37)])
def test_a_fit_that_was_stopped_continues_with_the_same_numbers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, updates: int, seconds: float, resumed_at: int
) -> None:
    model, task = copying_model(), copying_task(8)
    settings = HeadGatingSettings(seeds=2, updates=60, batch=4)
    whole = fit_head_gates(model, task, settings)
    monkeypatch.setattr(fitting, "_UPDATES", updates)
    monkeypatch.setattr(fitting, "_SECONDS", seconds)
    with pytest.raises(Stop):
        fit_head_gates(model, task, settings, context=stop_at(tmp_path, 37))
    reported: list[int] = []
    context = Context.in_folder(
        tmp_path, progress=lambda title, done, total: reported.append(done) if "G+" in title else None
    )
    same(fit_head_gates(model, task, settings, context=context), whole)
    assert reported == [0, *range(resumed_at, 61)]  # every update is reported


def test_fits_that_are_behind_catch_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, task, settings = tiny("llama"), any_task(), HeadGatingSettings(seeds=2, updates=8, batch=4)
    model.hf.double()
    whole = fit_head_gates(model, task, settings)
    monkeypatch.setattr(fitting, "_UPDATES", 1)
    with pytest.raises(Stop):
        fit_head_gates(model, task, settings, context=stop_at(tmp_path, 3))
    [early] = Journal(tmp_path).kept("G+")
    with pytest.raises(Stop):
        fit_head_gates(model, task, settings, context=stop_at(tmp_path, 6))
    [late] = Journal(tmp_path).kept("G+")
    packed = {
        "plus-0": late["plus-0"],
        "plus-1": early["plus-1"],
        "minus-1": torch.zeros(5),
    }  # no minus-0; minus-1 has a wrong size
    Journal(tmp_path).keep("G+-and-G-.0-of-1", packed)
    again = fit_head_gates(model, task, settings, context=Context.in_folder(tmp_path))
    for name in ("gates", "plus", "minus", "losses"):
        torch.testing.assert_close(getattr(again, name), getattr(whole, name), atol=1e-6, rtol=0)


def test_the_model_stays_untouched() -> None:
    model = tiny("llama")
    model.hf.requires_grad_()
    next(model.hf.parameters()).requires_grad_(False)
    asked = [weight.requires_grad for weight in model.hf.parameters()]
    weights = [weight.clone() for weight in model.hf.parameters()]
    fit_head_gates(model, any_task(4), HeadGatingSettings(seeds=1, updates=2))
    assert all(weight.grad is None for weight in model.hf.parameters())
    assert [weight.requires_grad for weight in model.hf.parameters()] == asked
    assert all(map(torch.equal, weights, model.hf.parameters()))


def test_the_model_is_asked_for_any_of_several_right_answers() -> None:
    model = tiny("gpt2")
    examples = [Example("one", "a", (1, 2, 3), (4,)), Example("any", "a", (5, 6), (7,), also=(8, 9))]
    batch = ResponseTask("any", 0, examples).batch([0, 1])
    log_probs = response_log_probs(model, batch, torch.ones(1, model.n_layers, model.n_heads))[0]
    single = model.hf(torch.tensor([[1, 2, 3]])).logits[0, -1].softmax(-1)[4]
    several = model.hf(torch.tensor([[5, 6]])).logits[0, -1].softmax(-1)[[7, 8, 9]].sum()
    torch.testing.assert_close(log_probs, torch.stack([single, several]).log(), atol=1e-5, rtol=0)


def test_several_answers_of_a_circuit_task_all_count(stories: Model) -> None:
    from gatelens import task
    from gatelens.tasks.batches import as_responses

    circuit = task("induction", stories, n=2)
    answers = [int(answer) for answer in circuit.answer_ids[:, 0]]  # type: ignore[union-attr]
    ids = torch.tensor(
        [[answers[0], 5, answers[0], 6, 5], [answers[1], -1, -1, -1, -1]]
    )  # an answer that is given twice counts once
    first, second = as_responses(replace(circuit, answer_ids=ids)).examples  # type: ignore[type-var, arg-type]
    assert (first.response_ids, first.also) == ((int(ids[0, 0]),), (5, 6))
    assert (second.response_ids, second.also) == ((int(ids[1, 0]),), ())


def test_a_circuit_task_is_fitted_on_its_answers(stories: Model) -> None:
    from gatelens import task

    roles = fit_head_gates(stories, task("induction", stories, n=4), HeadGatingSettings(seeds=1, updates=2))
    assert roles.facilitation.shape == (1, stories.n_layers, stories.n_heads)


def test_a_half_precision_model_is_fitted_in_float32() -> None:
    model = tiny("llama")
    model.hf.bfloat16()
    roles = fit_head_gates(model, any_task(4), HeadGatingSettings(seeds=1, updates=3))
    assert roles.minus.dtype == torch.float32
    assert roles.minus.isfinite().all()


def test_a_float64_model_has_the_gates_of_a_float32_one() -> None:
    # Mistral's mask hides all positions of padding; its float64 minimum would be infinite in float32.
    narrow, wide, settings = tiny("mistral"), tiny("mistral"), HeadGatingSettings(seeds=1, updates=3, batch=8)
    wide.hf.double()
    torch.testing.assert_close(
        fit_head_gates(wide, any_task(), settings).minus,
        fit_head_gates(narrow, any_task(), settings).minus,
        atol=1e-4,
        rtol=0,
    )


def test_a_loss_that_is_not_finite_ends_the_fit() -> None:
    model = tiny("gpt2")
    with torch.no_grad():
        model.anatomy.blocks[0].out.weight[0, 0] = float("nan")
    with pytest.raises(GatelensError, match="the loss of update 0 is not a finite number"):
        fit_head_gates(model, any_task(), HeadGatingSettings(seeds=1, updates=1))


def test_autocast_rounds_products_and_changes_little(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        precision, "_cpu_has_bfloat16", lambda: True
    )  # emulated if the processor has none: slow but correct
    model, task = tiny("llama"), any_task()
    exact, mixed = (
        fit_head_gates(model, task, HeadGatingSettings(seeds=2, updates=5, batch=4, autocast=autocast))
        for autocast in (False, True)
    )
    assert mixed.losses.dtype == torch.float32
    assert not torch.equal(mixed.losses[0, 0], exact.losses[0, 0])  # autocast was active
    # The first fit moves so slowly that rounding errors stay small.
    torch.testing.assert_close(mixed.losses[0], exact.losses[0], rtol=0.02, atol=0.0)


@pytest.mark.filterwarnings("default::gatelens.errors.GatelensWarning")
def test_a_processor_without_bfloat16_runs_in_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(precision, "_cpu_has_bfloat16", lambda: False)
    model, task, settings = tiny("llama"), any_task(), HeadGatingSettings(seeds=1, updates=1)
    with pytest.warns(GatelensWarning, match="no bfloat16 instructions: matrix products run in float32"):
        asked = fit_head_gates(model, task, settings.replace(autocast=True))
    same(asked, fit_head_gates(model, task, settings))


@pytest.mark.parametrize("tokens", [1, 3 * 10, 1 << 20])
def test_a_batch_in_parts_has_the_loss_of_the_whole(monkeypatch: pytest.MonkeyPatch, tokens: int) -> None:
    model, task = tiny("llama"), any_task()
    lengths = sorted(len(example) for example in task.examples)
    assert lengths[-1] == 10
    monkeypatch.setattr(responses, "_STREAM", tokens * 2 * model.anatomy.width)  # this many tokens for each of two rows
    gates = torch.rand(2, model.n_layers, model.n_heads, generator=torch.Generator().manual_seed(1))
    shapes: list[tuple[int, ...]] = []
    embedding = model.hf.get_input_embeddings()
    handle = embedding.register_forward_pre_hook(lambda _, args: shapes.append(tuple(args[0].shape)))
    losses = responses.mean_nll(model, draw_batch(task, 10, 0, 0), gates)
    handle.remove()
    size = {1: 1, 30: 3}.get(tokens, 10)
    parts = [lengths[start : start + size] for start in range(0, 10, size)]
    assert shapes == [(2 * len(part), part[-1]) for part in parts]
    wanted = [[plain_log_prob(model, example, row).mean() for example in task.examples] for row in gates]
    torch.testing.assert_close(losses, -torch.tensor(wanted).mean(1), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("longest", [0, 256])
def test_short_sequences_go_through_plain_attention_with_the_same_gradient(
    monkeypatch: pytest.MonkeyPatch, longest: int
) -> None:
    monkeypatch.setattr(responses, "_SHORT", longest)
    model, batch = tiny("llama"), draw_batch(any_task(), 4, 0, 0)
    model.hf.set_attn_implementation("sdpa")
    used = []
    for block in model.hf.model.layers:
        block.register_forward_pre_hook(lambda *_: used.append(model.hf.config._attn_implementation))
    logits, expected = (fitting.uniform_start(model, [0]).requires_grad_() for _ in range(2))
    responses.mean_nll(model, batch, logits.sigmoid()).sum().backward()
    assert set(used) == {"eager" if longest else "sdpa"}
    assert model.hf.config._attn_implementation == "sdpa"
    (-(response_log_probs(model, batch, expected.sigmoid()) / token_counts(batch)).mean(1)).sum().backward()
    torch.testing.assert_close(logits.grad, expected.grad, atol=1e-6, rtol=1e-4)


def test_an_example_longer_than_the_context_is_named() -> None:
    model = copying_model()
    task = ResponseTask(
        "long", 0, [Example("0 1 |", " 0", (0, 1, 11), (0,)), Example("too long", " 1", (1,) * 8, (1,))]
    )
    with pytest.raises(
        GatelensError, match=r"example 1 of long \('too long'\.\.\.\) has 9 tokens.*the context of .* has 8"
    ):
        fit_head_gates(model, task)


@pytest.mark.parametrize(
    ("example", "problem"),
    [
        (Example("p", "", (1, 2), ()), "an empty response"),
        (Example("p", " x", (), (1,)), "an empty prompt"),
        (Example("p", " x", (1, VOCAB), (1,)), "tokens that tiny-gpt2 does not have"),
        (Example("p", " x", (1,), (1, 2), also=(3,)), "several right responses"),
    ],
)
def test_an_example_that_cannot_be_read_is_named(example: Example, problem: str) -> None:
    task = ResponseTask("own", 0, [*any_task(2).examples, example])
    with pytest.raises(GatelensError, match=rf"example 2 of own \('p'\.\.\.\) has {problem}"):
        fit_head_gates(tiny("gpt2"), task)


def test_a_task_without_examples_is_refused() -> None:
    with pytest.raises(GatelensError, match="has no examples"):
        fit_head_gates(tiny("gpt2"), ResponseTask("none", 0, []))


def test_the_share_known_is_that_of_plain_first_choices(stories: Model) -> None:
    from gatelens import task

    syntax = task("syntax", stories, n=12)
    assert isinstance(syntax, ResponseTask)
    hits = []
    for example in syntax.examples:
        first = stories.hf(torch.tensor([example.prompt_ids + example.response_ids])).logits[0].argmax(-1)
        hits += (first[len(example.prompt_ids) - 1 : -1] == torch.tensor(example.response_ids)).tolist()
    assert share_known(stories, syntax) == pytest.approx(sum(hits) / len(hits))


@pytest.mark.filterwarnings("default::gatelens.errors.GatelensWarning")
def test_a_model_at_chance_is_warned_about() -> None:
    with pytest.warns(
        GatelensWarning,
        match="predicts 0%.*hardly has the behaviour.*it does not know is 'response' after 'prompt 0'",
    ):
        fit_head_gates(tiny("gpt2"), any_task(4), HeadGatingSettings(seeds=1, updates=1))


def test_the_warning_looks_at_the_first_examples_only(monkeypatch: pytest.MonkeyPatch) -> None:
    model, task, seen = tiny("gpt2"), any_task(10), []
    run = responses.run_heads

    def counted(model: Model, tokens: Tensor, *rest: object, **more: object) -> Tensor:
        seen.append(len(tokens))
        return run(model, tokens, *rest, **more)  # type: ignore[arg-type]

    monkeypatch.setattr(responses, "run_heads", counted)
    responses.warn_if_unknown(model, task, n_examples=4)
    assert sum(seen) == 4


@pytest.mark.parametrize(
    "bad",
    [
        {"seeds": 0},
        {"updates": 0},
        {"penalty": -1.0},
        {"penalty": float("nan")},
        {"memory_gb": 4.0},  # the budget belongs to the context
        {"first_rate": (-1.0, 0.1)},
        {"seed": -1},
        {"seed": 10**20},
    ],
)
def test_bad_settings_are_refused(bad: dict[str, float]) -> None:
    with pytest.raises(GatelensError):
        HeadGatingSettings(**bad)  # type: ignore[arg-type]
