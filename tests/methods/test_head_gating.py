"""Causal head gating: against a plain implementation, on a model whose roles are known, and when it is stopped."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from copying import COPIES, DIM, SPOILS, copying_model, copying_task, trained_model
from families import tiny
from response_examples import any_task, plain_log_prob
from torch import Tensor

from gatelens import GatelensError, HeadGatingSettings, Model, fit_head_gates
from gatelens.errors import GatelensWarning
from gatelens.gates import fitting
from gatelens.gates.fit_plan import Schedule, draw_batch
from gatelens.gates.roles import KINDS, HeadRoles
from gatelens.measures.roles_result import RolesSettings
from gatelens.runtime import precision
from gatelens.runtime.context import Context
from gatelens.runtime.journal import Journal, StateSaver
from gatelens.tasks.base import ResponseBatch

pytestmark = pytest.mark.filterwarnings("ignore::gatelens.errors.GatelensWarning")


@pytest.mark.parametrize(
    ("name", "preset", "clip"),
    [
        ("gpt2", "standard", None),
        ("llama", "published", None),
        ("llama", "published", 0.1),
        ("gemma2", "quick", 0.1),
    ],
)
def test_gates_equal_those_of_a_plain_implementation(name: str, preset: str, clip: float | None) -> None:
    model, task = tiny(name), any_task()
    if name != "gemma2":  # its softmax is float32 in any case
        model.hf.double()  # Adam turns the rounding error of a gradient near 0 into a step
    settings = HeadGatingSettings.preset(preset, seeds=2, updates=20, clip=clip)
    settings = settings.replace(batch=min(settings.batch, 4))
    roles = fit_head_gates(model, task, settings)
    norms: list[float] = []

    def loss(gates: Tensor, batch: ResponseBatch) -> Tensor:
        losses = [-plain_log_prob(model, task.examples[i], gates).mean() for i in batch.which.tolist()]
        return torch.stack(losses).mean()

    def fit(start: Tensor, penalty: float, first: float, last: float, order: int) -> Tensor:
        logits = start.clone().requires_grad_()
        adam = torch.optim.Adam([logits])
        for update in range(20):
            adam.param_groups[0]["lr"] = first + (last - first) * update / 19
            adam.zero_grad()
            batch = draw_batch(task, 4, update, order)
            (loss(logits.sigmoid(), batch) - penalty * logits.clamp(-4, 4).mean()).backward()
            if clip is not None:
                norms.append(float(torch.nn.utils.clip_grad_norm_([logits], clip)))
            adam.step()
        return logits.detach()

    for seed in range(2):
        order = seed if preset == "published" else 0  # the paper's seeds do not share their batches
        uniform = torch.rand(model.n_layers, model.n_heads, generator=torch.Generator().manual_seed(seed))
        plain = fit(uniform.logit(), 0.0, 0.1, 0.01, order)
        torch.testing.assert_close(roles.gates[seed], plain.sigmoid(), atol=1e-5, rtol=0)
        torch.testing.assert_close(roles.plus[seed], fit(plain, 0.1, 0.5, 0.1, order).sigmoid(), atol=1e-5, rtol=0)
        torch.testing.assert_close(roles.minus[seed], fit(plain, -0.1, 0.5, 0.1, order).sigmoid(), atol=1e-5, rtol=0)
    if clip is not None:
        assert min(norms) < clip < max(norms)  # some gradients were clipped, and others were not


def test_presets_have_the_published_sizes_and_can_be_changed() -> None:
    published = HeadGatingSettings.preset("published")
    assert (published.seeds, published.updates, published.batch, published.paired) == (10, 500, 64, False)
    assert (published.first_rate, published.second_rate) == ((0.1, 0.01), (0.5, 0.1))
    assert (published.penalty, published.clamp, published.clip) == (0.1, 4.0, None)
    assert HeadGatingSettings.preset("published", seeds=3) == published.replace(seeds=3)
    assert HeadGatingSettings.preset("standard") == HeadGatingSettings()  # the defaults have a name
    assert RolesSettings.preset("standard") == RolesSettings()
    assert RolesSettings.preset("published").batch == 64
    with pytest.raises(GatelensError, match="no preset 'publish': did you mean 'published'"):
        HeadGatingSettings.preset("publish")


def test_a_fit_whose_gates_stand_still_ends_and_says_so(tmp_path: Path) -> None:
    model, task = copying_model(), copying_task(8)
    settings = HeadGatingSettings(seeds=2, updates=100, batch=8, patience=4)
    patient = fit_head_gates(model, task, settings.replace(patience=0))
    assert patient.updates.tolist() == [[100, 100]] * 3
    early = fit_head_gates(model, task, settings)
    assert int(early.updates.min()) < 100
    assert len({*early.updates.flatten().tolist()}) > 1  # each fit ends when its own gates are still
    # Up to where a fit of G ends, its losses are those of the fit that goes on, and its gates were still.
    for seed, made in enumerate(early.updates[0].tolist()):
        torch.testing.assert_close(early.losses[0, :made, seed], patient.losses[0, :made, seed])
        assert early.losses[0, made:, seed].isnan().all()
    # Stopped in the middle and resumed, it ends after the same updates with the same gates.
    with pytest.raises(Stop):
        fit_head_gates(model, task, settings, context=stop_at(tmp_path, 12))
    again = fit_head_gates(model, task, settings, context=Context.in_folder(tmp_path))
    assert torch.equal(again.updates, early.updates)
    torch.testing.assert_close(again.minus, early.minus, atol=1e-6, rtol=0)


def test_gates_are_still_while_all_of_them_stay_within_a_hundredth() -> None:
    start = torch.tensor([0.5, 0.5, 0.5]).logit().view(3, 1, 1)
    fits = fitting._Fits(start, Schedule(10, (0.1, 0.1), patience=3))
    moves = torch.tensor([[0.5, 0.52, 0.5], [0.505, 0.5, 0.509], [0.5, 0.52, 0.518], [0.5, 0.5, 0.527]])
    for (
        gates
    ) in moves:  # the first stays, the second jumps back and forth, the third drifts by less than 0.01 at a time
        rows = fits.unfinished
        fits.advance(rows, gates.logit()[rows].view(-1, 1, 1, 1).expand(-1, 3, 1, 1), torch.zeros(len(rows)))
    assert fits.done == [3, 4, 4]
    assert fits.unfinished == [1, 2]


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
    assert max(batch_sizes[-36:]) == 1  # the last updates: one row of gates, one example
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
    monkeypatch.setattr(StateSaver, "STEPS", updates)
    monkeypatch.setattr(StateSaver, "SECONDS", seconds)
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
    monkeypatch.setattr(StateSaver, "STEPS", 1)
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


def test_a_circuit_task_is_fitted_on_its_answers(trained: Model) -> None:
    from gatelens import task

    roles = fit_head_gates(trained, task("induction", trained, n=4), HeadGatingSettings(seeds=1, updates=2))
    assert roles.facilitation.shape == (1, trained.n_layers, trained.n_heads)


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
