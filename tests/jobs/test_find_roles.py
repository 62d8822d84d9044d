"""The gate job: its folder, its figures, results of earlier versions, and resuming after a kill."""

from __future__ import annotations

import csv
import io
import itertools
import json
import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from commands import kill, run
from rich.console import Console
from safetensors.torch import load_file

from gatelens import GatelensError, Model
from gatelens.cli.tables import roles_table
from gatelens.gates.response_checks import share_known
from gatelens.gates.roles import KINDS
from gatelens.jobs.roles import find_roles, roles_forwards
from gatelens.measures.ablation import ablation_order, forced
from gatelens.measures.roles_result import RolesRecord, RolesSettings, load_roles
from gatelens.report.run_figures import draw_run
from gatelens.runtime.files import write_tensors
from gatelens.runtime.records import read_record
from gatelens.tasks import task as make_task
from gatelens.tasks.batches import as_responses, split

pytestmark = pytest.mark.filterwarnings("ignore::gatelens.errors.GatelensWarning")
FIRST_VERSION = Path(__file__).parents[2] / "results" / "head-ablation-smollm2" / "cells"
SMALL = RolesSettings(seeds=2, updates=60, batch=4, n=8, held_out=4, most=6, every=3)


def test_a_folder_holds_the_whole_result(trained: Model, tmp_path: Path) -> None:
    result = find_roles(trained, "induction", SMALL, out=tmp_path / "run")
    again = load_roles(tmp_path / "run")
    assert again.settings == SMALL
    for kind in KINDS:
        assert torch.equal(result.roles.kind(kind), again.roles.kind(kind))
    for a, b in zip(result.curves, again.curves, strict=True):
        assert a.kind == b.kind
        assert torch.equal(a.changes, b.changes)
        assert torch.equal(a.heads, b.heads)
    records = list(csv.DictReader((tmp_path / "run" / "ablation.csv").open()))
    last = [record for record in records if record["kind"] == "facilitation"][-1]
    assert (int(last["ablated"]), float(last["change"])) == (
        6,
        pytest.approx(float(result.curves[0].change[-1]), rel=1e-4),
    )
    assert again.known == result.known
    for before, after in zip(result.curves, again.curves, strict=True):
        assert before.own is not None
        assert after.own is not None
        assert torch.equal(before.own, after.own)
    needed = (result.roles.facilitation >= 0.5).flatten(1).sum(1)
    assert float(last["of kind"]) == pytest.approx(needed.clamp(max=6).float().mean().item())
    assert json.loads((tmp_path / "run" / "asked.json").read_text())["model"]["fingerprint"] == trained.fingerprint
    assert not list((tmp_path / "run").glob("*.png"))  # the command line draws, not the job
    assert sorted(path.name for path in draw_run(tmp_path / "run")) == ["ablation.png", "roles.png"]
    assert all((tmp_path / "run" / f"{name}.png").stat().st_size > 1000 for name in ("roles", "ablation"))


@pytest.mark.parametrize("folder", sorted(FIRST_VERSION.iterdir()), ids=lambda folder: folder.name)
def test_results_of_version_0_1_still_open(folder: Path) -> None:
    saved = json.loads((folder / "result.json").read_text())
    assert "schema_version" not in saved
    result = load_roles(folder)
    assert (result.model, result.task, result.sparse) == (saved["model"], saved["task"], saved["sparse"])
    assert result.settings.identity().items() <= saved["settings"].items()  # later settings have their defaults
    assert result.roles.summary() == saved["summary"]
    assert (result.known, result.seconds) == (saved["known"], saved["seconds"])
    for curve in result.curves:
        assert curve.own is not None
        assert float(curve.change[-1]) == saved["change at the end"][curve.kind]
        assert float(curve.own.mean()) == saved["change of their own heads"][curve.kind]
    record = read_record(folder / "result.json", RolesRecord)
    assert record.heads_of_kind == saved["heads of each kind"]
    assert (record.last_change, record.own_change) == (saved["change at the end"], saved["change of their own heads"])


def test_a_file_of_a_later_version_or_a_damaged_one_is_one_sentence(tmp_path: Path) -> None:
    shutil.copytree(sorted(FIRST_VERSION.iterdir())[0], tmp_path / "run")
    saved = json.loads((tmp_path / "run" / "result.json").read_text())
    for change, sentence in (
        ({"schema_version": 3}, r"newer version of gatelens \(schema 3; this one reads up to 2\)"),
        ({"model": None}, "result.json: model is None: it must be a string"),
        ({"settings": saved["settings"] | {"seeds": 0}}, "settings.seeds is 0: it must be at least 1"),
    ):
        (tmp_path / "run" / "result.json").write_text(json.dumps(saved | change))
        with pytest.raises(GatelensError, match=sentence):
            load_roles(tmp_path / "run")
    (tmp_path / "run" / "result.json").write_text(json.dumps(saved))
    write_tensors(tmp_path / "run" / "roles.safetensors", {"gates": torch.zeros(1, 2, 3)})
    with pytest.raises(GatelensError, match=r"roles.safetensors has no tensor 'plus'"):
        load_roles(tmp_path / "run")


def test_a_task_is_as_good_as_its_name(trained: Model, tmp_path: Path) -> None:
    settings = RolesSettings(seeds=1, updates=2, n=4, held_out=2, most=1)
    by_name = find_roles(trained, "induction", settings, out=tmp_path / "run")
    task = make_task("induction", trained, n=6)
    assert torch.equal(find_roles(trained, task, settings).roles.losses, by_name.roles.losses)
    assert find_roles(trained, task, settings, out=tmp_path / "run").seconds == by_name.seconds  # it was loaded
    with pytest.raises(GatelensError, match="the task induction is already made, so the options source cannot"):
        find_roles(trained, task, settings, options={"source": "other"})


def test_the_table_tells_what_just_the_heads_of_a_kind_do_where_they_run_out(trained: Model) -> None:
    result = find_roles(trained, "induction", RolesSettings(seeds=2, updates=1, n=4, held_out=2, most=6))
    curves = [replace(x, heads=torch.tensor([6, 6]), own=torch.tensor([1.0, 2.0])) for x in result.curves]
    printed = io.StringIO()
    Console(width=80, file=printed).print(roles_table(replace(result, curves=curves)))
    assert "just these" not in printed.getvalue()
    curves[2] = replace(curves[2], heads=torch.tensor([3, 6]))
    Console(width=80, file=printed).print(roles_table(replace(result, curves=curves)))
    assert printed.getvalue().count("+1.50  with just these heads") == 1


def test_what_is_known_is_that_of_the_held_out_examples(trained: Model) -> None:
    result = find_roles(trained, "syntax", RolesSettings(seeds=1, updates=1, n=8, held_out=4, most=1))
    fitted, held_out = (
        share_known(trained, part) for part in split(as_responses(make_task("syntax", trained, n=12)), 8)
    )
    assert result.known == pytest.approx(held_out)
    assert fitted != pytest.approx(held_out)


def test_the_scores_are_saved_not_only_the_gates(trained: Model, tmp_path: Path) -> None:
    result = find_roles(trained, "induction", RolesSettings(seeds=2, updates=2, n=4, held_out=2, most=1), out=tmp_path)
    saved = load_file(tmp_path / "roles.safetensors")
    for kind in KINDS:
        assert torch.equal(saved[kind], result.roles.kind(kind))
    records = list(csv.DictReader((tmp_path / "roles.csv").open()))
    assert len(records) == trained.n_layers * trained.n_heads * len(KINDS)
    (record,) = [record for record in records if (record["head"], record["kind"]) == ("L1H2", "irrelevance")]
    plus, minus = result.roles.plus[:, 1, 2], result.roles.minus[:, 1, 2]
    assert [float(record[f"seed {seed}"]) for seed in range(2)] == pytest.approx(
        (plus * (1 - minus)).tolist(), rel=1e-4
    )
    assert float(record["mean"]) == pytest.approx((plus * (1 - minus)).mean().item(), rel=1e-4)


def test_a_bad_held_out_example_is_found_before_the_fit_and_the_folder_stays_free(
    trained: Model, tmp_path: Path
) -> None:
    own = tmp_path / "own.jsonl"
    lines = ['{"prompt": "Once upon a", "response": " time"}'] * 5
    long = json.dumps({"prompt": "Once upon a time. " * 300, "response": " Tom"})
    own.write_text("\n".join([*lines, long]))
    settings = RolesSettings(seeds=1, updates=1, n=4, held_out=2, most=1)
    with pytest.raises(
        GatelensError, match=r"1 of 6 lines is bad(.|\n)*line 6: it has \d+ tokens, and the model can read 512"
    ):
        find_roles(trained, str(own), settings, out=tmp_path / "run")
    own.write_text("\n".join([*lines, lines[0]]))
    find_roles(trained, str(own), settings, out=tmp_path / "run")


def test_held_out_examples_are_not_fitted_on(trained: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[str, set[tuple[int, ...]]] = {}

    def watch(name: str) -> None:
        import gatelens.jobs.roles

        original = getattr(gatelens.jobs.roles, name)

        def spy(model: Model, task: object, *args: object, **kwargs: object) -> object:
            seen.setdefault(name, set()).update(example.prompt_ids for example in task.examples)  # type: ignore[attr-defined]
            return original(model, task, *args, **kwargs)

        monkeypatch.setattr(gatelens.jobs.roles, name, spy)

    watch("fit_head_gates")
    watch("ablation_curve")
    find_roles(trained, "induction", RolesSettings(seeds=1, updates=1, n=6, held_out=5, most=1))
    assert {name: len(prompts) for name, prompts in seen.items()} == {"fit_head_gates": 6, "ablation_curve": 5}
    assert not seen["fit_head_gates"] & seen["ablation_curve"]


@pytest.mark.slow
def test_a_killed_run_continues_with_the_same_numbers(trained: Model, trained_folder: Path, tmp_path: Path) -> None:
    words = ["gate", str(trained_folder), "induction", "--out", str(tmp_path / "run")]
    words += ["--seeds", "2", "--updates", "60", "--batch", "4", "--n", "8", "--held-out", "4"]
    words += ["--most", "6", "--every", "3"]
    kill(words, "fit G+ and G-", 40)  # updates are saved every 25
    assert list((tmp_path / "run" / "pieces").glob("G+*.safetensors"))
    assert not (tmp_path / "run" / "result.json").exists()
    clock = tmp_path / "run" / "pieces" / "seconds.json"
    assert json.loads(clock.read_text())["seconds"] > 0
    clock.write_text('{"seconds": 1000}')
    resumed = find_roles(trained, "induction", SMALL, out=tmp_path / "run")
    assert resumed.seconds > 1000
    whole = find_roles(trained, "induction", SMALL)
    for kind in KINDS:
        torch.testing.assert_close(resumed.roles.kind(kind), whole.roles.kind(kind), atol=1e-6, rtol=0)


def test_the_cost_is_that_of_the_passes_that_are_made(trained: Model) -> None:
    settings = RolesSettings(seeds=2, updates=3, batch=4, n=8, held_out=4, most=6, every=3)
    passes = {True: 0, False: 0}  # examples, with and without a backward pass

    def count(_: object, args: tuple[torch.Tensor, ...]) -> None:
        passes[torch.is_grad_enabled()] += len(args[0])

    # Rows of gates share the layers below their first difference; the last layer runs for every row.
    handle = trained.hf.get_decoder().layers[-1].self_attn.k_proj.register_forward_pre_hook(count)
    try:
        result = find_roles(trained, "induction", settings)
    finally:
        handle.remove()
    assert passes[True] == 3 * 2 * 3 * 4
    # The heads of a kind are ablated together too, at a point that the estimate counts in the place of no heads. This
    # point saves its two rows of gates if it is one of the others; equal rows run once.
    rows = 0
    for curve, seed in itertools.product(result.curves, range(2)):
        points = {3, 6, min(6, int(curve.heads[seed]))} - {0}
        order = ablation_order(result.roles, curve.kind, seed)
        gates = (forced(result.roles.plus[seed], order[:n], value) for n in points for value in (0.0, 1.0))
        rows += len({tuple(row.flatten().tolist()) for row in gates})
    known = settings.n + settings.held_out  # whether the model knows the responses is not estimated
    assert passes[False] == known + rows * settings.held_out
    most_rows = 4 * 2 * 2 * 3  # orders, seeds, values and points
    assert roles_forwards(settings) == 2 * passes[True] + most_rows * settings.held_out
    assert most_rows - 4 * 2 * 2 <= rows <= most_rows


def test_the_cost_is_printed_before_the_work_and_not_for_a_finished_run(
    trained_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["gate", str(trained_folder), "induction", "--quick", "--updates", "1", "--n", "4", "--held-out", "2"]
    words += ["--out", str(tmp_path / "run"), "--no-check"]
    assert run(monkeypatch, *words) == 0
    printed = capsys.readouterr().out
    assert re.search(r"about 144 forward passes of one example, \d+ s on this machine\n(.|\n)*roles of heads", printed)
    assert run(monkeypatch, *words) == 0
    assert "forward passes" not in capsys.readouterr().out


def test_too_few_examples_are_refused(trained: Model, tmp_path: Path) -> None:
    own = tmp_path / "own.jsonl"
    own.write_text('{"prompt": "Once upon a", "response": " time"}\n' * 3)
    with pytest.raises(GatelensError, match="has 3 examples, fewer than 8 to fit and 4 to hold out"):
        find_roles(trained, str(own), SMALL)


def test_another_request_in_the_same_folder_is_refused(trained: Model, tmp_path: Path) -> None:
    settings = RolesSettings(seeds=1, updates=1, n=4, held_out=2, most=1)
    find_roles(trained, "induction", settings, out=tmp_path / "run")
    with pytest.raises(GatelensError, match="holds a run with updates 1, not 2: "):
        find_roles(
            trained, "induction", RolesSettings(seeds=1, updates=2, n=4, held_out=2, most=1), out=tmp_path / "run"
        )


def test_the_table_says_which_fits_ended_early(trained: Model) -> None:
    settings = RolesSettings(seeds=2, updates=3, n=4, held_out=2, most=1)
    result = find_roles(trained, "induction", settings)
    losses = result.roles.losses.clone()
    losses[1, 1:, 0] = losses[2, 2:, 1] = float("nan")  # as `fit_gates` leaves the updates that it does not make
    early = replace(result, roles=replace(result.roles, losses=losses))
    said = []
    for shown in (result, early):
        printed = io.StringIO()
        Console(width=120, file=printed).print(roles_table(shown))
        said.append("2 of 6 fits ended after 1 to 2 of 3 updates: their gates stood still" in printed.getvalue())
    assert said == [False, True]
