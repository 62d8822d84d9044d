"""Log-probabilities of responses: without padding, with several right answers, and what the model knows."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from copying import copying_model
from families import VOCAB, tiny
from response_examples import any_task, plain_log_prob
from torch import Tensor

from gatelens import GatelensError, HeadGatingSettings, Model, fit_head_gates
from gatelens.errors import GatelensWarning
from gatelens.gates import responses
from gatelens.gates.fit_plan import draw_batch, uniform_start
from gatelens.gates.response_checks import share_known, warn_if_unknown
from gatelens.gates.responses import response_log_probs, token_counts
from gatelens.gates.runs import rows_that_fit
from gatelens.methods.head_gating import nll_objective
from gatelens.runtime.context import Context
from gatelens.tasks.base import Example, ResponseTask


@pytest.mark.parametrize("side", ["left", "right"])
def test_log_probs_do_not_depend_on_padding(family: Model, side: str) -> None:
    task = any_task(5)
    gates = torch.rand(2, family.n_layers, family.n_heads, generator=torch.Generator().manual_seed(1))
    for batch in task.batches(5, side=side):  # type: ignore[arg-type]
        log_probs = response_log_probs(family, batch, gates)
        wanted = [[plain_log_prob(family, task.examples[i], row).sum() for i in batch.which.tolist()] for row in gates]
        torch.testing.assert_close(log_probs, torch.tensor(wanted), atol=2e-5, rtol=2e-5)


def test_gradients_of_gates_are_those_of_plain_forwards(family: Model) -> None:
    task = any_task(4)
    batch = task.batch(range(4))
    gates = torch.rand(2, family.n_layers, family.n_heads, generator=torch.Generator().manual_seed(1)).requires_grad_()
    weights = torch.tensor([[1.0, 2, 3, 4], [5, 6, 7, 8]])
    (gradient,) = torch.autograd.grad((weights * response_log_probs(family, batch, gates)).sum(), gates)
    wanted = [plain_log_prob(family, example, row).sum() for row in gates for example in task.examples]
    (plain,) = torch.autograd.grad((weights.flatten() * torch.stack(wanted)).sum(), gates)
    torch.testing.assert_close(gradient, plain, atol=2e-3, rtol=1e-3)


def test_the_last_layer_runs_only_where_responses_are_predicted() -> None:
    model, batch = tiny("llama"), any_task(4).batch(range(4))
    n_tokens: list[int] = []
    for block in model.anatomy.blocks:
        block.mlp.down_proj.register_forward_pre_hook(lambda _, args: n_tokens.append(args[0].shape[:-1].numel()))
    response_log_probs(model, batch, torch.rand(2, model.n_layers, model.n_heads))
    n_responses = int(token_counts(batch).sum())
    assert n_responses < batch.tokens.numel()
    assert n_tokens == [2 * batch.tokens.numel()] * (model.n_layers - 1) + [2 * n_responses]
    plain = model.hf(batch.tokens, use_cache=False)  # the model is as before
    assert plain.logits.shape[:2] == batch.tokens.shape
    assert n_tokens[-1] == batch.tokens.numel()


def test_the_model_is_asked_for_any_of_several_right_answers() -> None:
    model = tiny("gpt2")
    examples = [Example("one", "a", (1, 2, 3), (4,)), Example("any", "a", (5, 6), (7,), also=(8, 9))]
    batch = ResponseTask("any", 0, examples).batch([0, 1])
    log_probs = response_log_probs(model, batch, torch.ones(1, model.n_layers, model.n_heads))[0]
    single = model.hf(torch.tensor([[1, 2, 3]])).logits[0, -1].softmax(-1)[4]
    several = model.hf(torch.tensor([[5, 6]])).logits[0, -1].softmax(-1)[[7, 8, 9]].sum()
    torch.testing.assert_close(log_probs, torch.stack([single, several]).log(), atol=1e-5, rtol=0)


def test_several_answers_of_a_circuit_task_all_count(trained: Model) -> None:
    from gatelens import task
    from gatelens.tasks.batches import as_responses

    circuit = task("induction", trained, n=2)
    answers = [int(answer) for answer in circuit.answer_ids[:, 0]]  # type: ignore[union-attr]
    ids = torch.tensor(
        [[answers[0], 5, answers[0], 6, 5], [answers[1], -1, -1, -1, -1]]
    )  # an answer that is given twice counts once
    first, second = as_responses(replace(circuit, answer_ids=ids)).examples  # type: ignore[type-var, arg-type]
    assert (first.response_ids, first.also) == ((int(ids[0, 0]),), (5, 6))
    assert (second.response_ids, second.also) == ((int(ids[1, 0]),), ())


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
    settings = HeadGatingSettings(batch=10)
    objective = nll_objective(model, task, settings, [0, 0], torch.zeros(2), Context())
    work = objective.work(0, 0, 2)
    losses = torch.stack([loss(gates) for loss in work.losses]).sum(0)
    handle.remove()
    size = {1: 1, 30: 3}.get(tokens, 10)
    parts = [lengths[start : start + size] for start in range(0, 10, size)]
    assert shapes == [(len(part), part[-1]) for part in parts]  # rows are copied by the layers
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
    logits, expected = (uniform_start(model, [0]).requires_grad_() for _ in range(2))
    responses.nll(model, batch, logits.sigmoid()).mean(1).sum().backward()
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


def test_the_share_known_is_that_of_plain_first_choices(trained: Model) -> None:
    from gatelens import task

    syntax = task("syntax", trained, n=12)
    assert isinstance(syntax, ResponseTask)
    hits = []
    for example in syntax.examples:
        first = trained.hf(torch.tensor([example.prompt_ids + example.response_ids])).logits[0].argmax(-1)
        hits += (first[len(example.prompt_ids) - 1 : -1] == torch.tensor(example.response_ids)).tolist()
    assert share_known(trained, syntax) == pytest.approx(sum(hits) / len(hits))


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
    warn_if_unknown(model, task, n_examples=4)
    assert sum(seen) == 4


@pytest.mark.parametrize("rows", [1, 2, 5])
@pytest.mark.parametrize("memory_gb", [1e-4, 4e-4, 2e-3, 1.0])
def test_parts_fit_into_memory(rows: int, memory_gb: float) -> None:
    """All rows of a part, with the tokens of each of them, are no more than what fits; no example is lost."""
    model, batch, context = tiny("llama"), any_task(24).batch(range(24)), Context(memory_gb)
    longest, logits = batch.tokens.shape[1], int(token_counts(batch).max())
    fit = rows_that_fit(model, batch.tokens[:1], 2 * logits, grad=False, context=context)
    at_once, parts = responses.cut(model, batch, rows, grad=False, context=context)
    assert at_once == min(rows, fit)
    assert all(at_once * part.tokens.numel() <= max(fit, 1) * longest for part in parts)
    assert sorted(i for part in parts for i in part.which.tolist()) == list(range(24))
