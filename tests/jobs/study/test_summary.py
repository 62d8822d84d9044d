"""The summary of a study and the page of its report state the same multipliers."""

from __future__ import annotations

import csv
import json
import re
from pathlib import Path

import pytest
from studies import write_study

import gatelens.jobs.study.jobs as study_jobs
from gatelens.jobs.study.file import read_study
from gatelens.jobs.study.run import run_study
from gatelens.jobs.study.summary import SummaryRecord
from gatelens.measures.circuit_result import load_circuit
from gatelens.report import page
from gatelens.report._reading import read_runs
from gatelens.report._summary import summarise
from gatelens.runtime.records import read_record

pytestmark = pytest.mark.filterwarnings("ignore::gatelens.errors.GatelensWarning")
LEVELS = 'level = ["heads", "edges"]'
ROOT = Path(__file__).parents[3]


@pytest.fixture(autouse=True)
def no_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drawing takes a second for each figure."""
    monkeypatch.setattr(page, "draw_pictures", lambda *args: ([], []))


def run(file: Path, out: Path) -> tuple[list[str], list[str]]:
    """Run a study. Returns the multipliers of summary.csv and of the page, each as sorted "level model multiplier"."""
    summary = run_study(read_study(file), out, write_report=page.write_report)
    assert summary.failed == 0
    assert not summary.problems
    with (out / "summary.csv").open() as opened:
        lines = [line for line in csv.DictReader(opened) if line["multiplier"]]
    in_csv = [f"{line['level']} {line['model']} {rounded(float(line['multiplier']))}" for line in lines]
    return sorted(in_csv), sorted(on_page(summary.report))


def rounded(ratio: float) -> str:
    """A multiplier with three digits, as tables print it."""
    return f"{ratio:.2f}x" if ratio < 10 else f"{ratio:.1f}x"


def on_page(path: Path | None) -> list[str]:
    """The multipliers in the table of the page."""
    assert path is not None
    multipliers: list[str] = []
    for line in re.findall(r"<tr>(.*?)</tr>", path.read_text(), re.DOTALL):
        cells = dict(re.findall(r'data-label="([^"]+)"[^>]*>([^<]*)', line))
        if "Multiplier" in cells:
            level, model, multiplier = (cells[name] for name in ("Gates on", "Model", "Multiplier"))
            if multiplier != "-":
                ratio, _, interval = multiplier.partition(" (")
                assert re.fullmatch(r".*( to .*| or more); 4 (held-out )?prompts\)(, no difference shown)?", interval)
                multipliers.append(f"{level.split(',')[0]} {model.split()[0]} {ratio}")
    return multipliers


def expected(out: Path, dense: str) -> list[str]:
    """The multipliers of the sparse model against this dense one, from the saved counts."""
    multipliers = []
    for level in ("heads", "edges"):
        counts = [load_circuit(out / "cells" / f"{level}-induction-{name}").count.value for name in (dense, "sparse")]
        assert counts[0]
        assert counts[1]
        multipliers.append(f"{level} sparse {rounded(counts[0] / counts[1])}")
    return sorted(multipliers)


def test_the_only_dense_model_of_the_same_shape(place: Path) -> None:
    in_csv, shown = run(write_study(place, circuit=LEVELS), place / "out")
    assert in_csv == shown == expected(place / "out", "dense")


def test_every_point_of_a_grid_is_compared_with_the_same_point(place: Path) -> None:
    in_csv, shown = run(write_study(place, circuit="seed = [0, 3]\nthreshold = [0.9, 0.5]"), place / "out")
    assert in_csv == shown
    assert len(in_csv) == 4


def test_the_dense_model_that_the_study_names(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is saved in the run. If the file names it later, nothing is run again, and both tables change."""
    file = write_study(place, circuit=LEVELS, models='twin = { load = "dense", bias = 0.5 }\nthird = "dense"')
    text = file.read_text()
    assert run(file, place / "out") == ([], [])  # two dense models, and neither name is in the name of the sparse one
    monkeypatch.setattr(study_jobs, "find_circuit", None)  # running a circuit would fail
    for dense in ("third", "twin"):
        file.write_text(text.replace('"sparse"', f'{{ load = "sparse", dense = "{dense}" }}', 1))
        in_csv, shown = run(file, place / "out")
        assert in_csv == shown == expected(place / "out", dense)
        result = json.loads((place / "out" / "cells" / "heads-induction-sparse" / "result.json").read_text())
        assert result["dense"] == dense


def test_a_cell_saves_its_dense_model(place: Path) -> None:
    file = write_study(place)
    file.write_text(file.read_text().replace('"sparse"', '{ load = "sparse", dense = "dense" }', 1))
    in_csv, shown = run(file, place / "out")
    assert in_csv == shown
    assert load_circuit(place / "out" / "cells" / "heads-induction-sparse").dense == "dense"
    assert load_circuit(place / "out" / "cells" / "heads-induction-dense").dense is None


def test_of_several_sparse_models_only_the_named_one_is_compared(place: Path) -> None:
    # The study names the dense model of "student"; for the other gated models, no rule decides.
    student = 'student = { load = "sparse", dense = "teacher" }'
    models = f'teacher = "dense"\n{student}\nother = {{ load = "dense", bias = 0.3 }}'
    file = write_study(place, circuit=f'{LEVELS}\nranking = ["absolute", "signed"]', models=models)
    for name in ("teacher", "dense"):  # a study may name another model later
        file.write_text(file.read_text().replace(student, student.replace("teacher", name)))
        summary = run_study(read_study(file), place / "out")
        with (place / "out" / "summary.csv").open(newline="") as table:
            stated = {line["cell"]: line["multiplier"] for line in csv.DictReader(table) if line["multiplier"]}
        groups = summarise(read_runs([place / "out" / "cells"]).circuits)
        entries = [entry for group in groups for entry in group.entries]
        shown = {entry.run.folder.name: f"{entry.multiplier.ratio:.6g}" for entry in entries if entry.multiplier}
        assert stated == shown
        assert len(stated) == 4  # two levels and two rankings
        with (place / "out" / "thresholds.csv").open() as opened:
            lines = [line for line in csv.DictReader(opened) if line["threshold"] == "0.9"]
        assert sorted(line["multiplier"] for line in lines) == sorted(stated.values())
        assert {comparison.dense for comparison in summary.multipliers} == {name}


@pytest.mark.parametrize("name", ["head-ablation-smollm2"])
def test_summaries_of_version_0_1_can_be_read(name: str) -> None:
    record = read_record(ROOT / "results" / name / "summary.json", SummaryRecord)
    assert record.schema_version == 1
    assert record.done == len(record.cells) > 0
    with (ROOT / "results" / name / "summary.csv").open() as opened:
        assert [line["cell"] for line in csv.DictReader(opened)] == [cell.cell for cell in record.cells]


class TestMethods:
    """A study with several methods ends in a comparison of them."""

    def test_every_count_is_in_the_table(self, place: Path) -> None:
        file = write_study(place, circuit='method = ["eap", "patching"]')
        summary = run_study(read_study(file), place / "out")
        with (place / "out" / "methods.csv").open() as opened:
            lines = list(csv.DictReader(opened))
        assert {(line["method"], line["model"]) for line in lines} == {
            (method, model) for method in ("eap", "patching") for model in ("dense", "sparse")
        }
        by_cell = {(cell.method, cell.model): cell for cell in summary.cells()}
        for line in lines:
            cell = by_cell[line["method"], line["model"]]
            assert line["count"] == ("" if cell.count is None else str(cell.count))
            assert int(line["prompts"]) == 4
            assert float(line["cpr"]) == pytest.approx(cell.cpr, rel=1e-5)
        table = summary.methods_table()
        assert table is not None
        assert table.row_count == 2

    def test_one_method_has_no_table(self, place: Path) -> None:
        summary = run_study(read_study(write_study(place)), place / "out")
        assert summary.methods_table() is None
        assert not (place / "out" / "methods.csv").exists()

    def test_the_example_compares_with_patching_everywhere(self) -> None:
        study = read_study(ROOT / "examples" / "methods-smollm2.toml")
        compared = {(cell.task, cell.model.label) for cell in study.cells}
        exact = {(cell.task, cell.model.label) for cell in study.cells if cell.settings.chosen_method.exact}
        assert exact == compared
        assert len(exact) == 8
        assert len({cell.settings.method for cell in study.cells}) >= 10
