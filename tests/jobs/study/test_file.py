"""Study files: what they mean, and what is said about mistakes in them."""

from __future__ import annotations

from pathlib import Path

import pytest
from commands import run

from gatelens import CircuitSettings, GatelensError
from gatelens.jobs.study._folder import StudyRecord, refuse_changed
from gatelens.jobs.study.file import read_study
from gatelens.measures.roles_result import RolesSettings
from gatelens.runtime.records import read_record

EXAMPLES = Path(__file__).parents[3] / "examples"

WHOLE = """\
title = "Some heads"

[models]
small = "smollm2"
sparse = { load = "sparse-smollm2", dense = "small", dtype = "bfloat16", cpus = 2 }
big = "allenai/OLMo-7B-hf"

[circuit]
tasks = [
    "ioi",
    "docstring",
]
level = ["heads", "edges"]
seed = [0, 1]
n = 32
models = ["small", "sparse"]
[circuit.task.docstring]
n = 16
options = { corruption = "answer" }
[circuit.model.sparse]
memory_gb = 8

[gate]
tasks = "syntax"
models = ["big"]
first_rate = [0.2, 0.02]
"""


def read(tmp_path: Path, text: str) -> list[str]:
    """Names of the cells of this study."""
    (tmp_path / "study.toml").write_text(text)
    return [cell.name for cell in read_study(tmp_path / "study.toml").cells]


class TestMeaning:
    def test_a_grid_in_the_order_of_the_models(self, tmp_path: Path) -> None:
        kinds = [f"{level}-{task}" for task in ("ioi", "docstring") for level in ("heads", "edges")]
        pair = [f"{kind}-{{0}}{seed}" for kind in kinds for seed in ("", "-seed-1")]
        wanted = [name.format(label) for label in ("small", "sparse") for name in pair] + ["roles-syntax-big"]
        assert read(tmp_path, WHOLE) == wanted

    def test_a_preset_gives_way_to_other_settings(self, tmp_path: Path) -> None:
        section = 'preset = "published"\nseeds = [2, 10]\n[gate.task.syntax]\npreset = "quick"\nupdates = 7'
        names = read(tmp_path, WHOLE.replace("first_rate = [0.2, 0.02]", section))
        cells = {cell.name: cell.settings for cell in read_study(tmp_path / "study.toml").cells}
        assert cells[names[-1]] == RolesSettings.preset("quick", updates=7)  # the task's preset replaces the seeds
        with pytest.raises(GatelensError, match=r"gate\.preset: no preset of gate 'fast'"):
            read(tmp_path, WHOLE.replace("first_rate = [0.2, 0.02]", 'preset = "fast"'))

    def test_settings_that_need_each_other(self, tmp_path: Path) -> None:
        """A selection of edges is checked together with the level, which comes after it."""
        edges = 'tasks = "ioi"\nselection = "path"\nlevel = "edges"\n'
        assert read(tmp_path, f'[models]\nm = "gpt2"\n[circuit]\n{edges}') == ["edges-ioi-m"]
        with pytest.raises(GatelensError, match=r"circuit\.selection: the selection 'path' does not select heads"):
            read(tmp_path, '[models]\nm = "gpt2"\n[circuit]\ntasks = "ioi"\nselection = "path"\n')

    def test_settings_of_tasks_and_models(self, tmp_path: Path) -> None:
        read(tmp_path, WHOLE)
        study = read_study(tmp_path / "study.toml")
        cells = {cell.name: cell for cell in study.cells}
        assert cells["heads-ioi-small"].settings == CircuitSettings(n=32, held_out=True)
        cell = cells["edges-docstring-sparse-seed-1"]
        assert cell.settings == CircuitSettings(n=16, level="edges", seed=1, memory_gb=8.0, held_out=True)
        assert cell.options == {"corruption": "answer"}
        assert (cell.model.dtype, cell.model.dense, cell.model.cpus) == ("bfloat16", "small", 2.0)
        assert cells["roles-syntax-big"].settings == RolesSettings(first_rate=(0.2, 0.02))
        assert study.title == "Some heads"

    def test_circuits_of_a_study_are_evaluated_on_held_out_prompts(self, tmp_path: Path) -> None:
        (tmp_path / "a.toml").write_text('models = {a = "smollm2"}\n[circuit]\ntasks = "ioi"\nheld_out = [true, false]')
        cells = read_study(tmp_path / "a.toml").cells
        assert [(cell.name, cell.settings.held_out) for cell in cells] == [
            ("heads-ioi-a", True),
            ("heads-ioi-a-held_out-False", False),
        ]
        (tmp_path / "a.toml").write_text('models = {a = "smollm2"}\n[circuit]\ntasks = "ioi"')
        assert [cell.settings.held_out for cell in read_study(tmp_path / "a.toml").cells] == [True]

    def test_paths_are_relative_to_the_file(self, tmp_path: Path) -> None:
        (tmp_path / "models" / "mine").mkdir(parents=True)
        (tmp_path / "mine.jsonl").write_text("{}")
        text = '[models]\nm = "models/mine"\n[gate]\ntasks = ["mine.jsonl"]\n'
        assert read(tmp_path, text) == ["roles-mine-m"]
        (cell,) = read_study(tmp_path / "study.toml").cells
        assert (cell.model.where, cell.where) == (str(tmp_path / "models" / "mine"), str(tmp_path / "mine.jsonl"))
        assert str(tmp_path) not in str(cell.identity())  # the folder of a study can be moved

    def test_sources_of_tasks_are_relative_to_the_file(self, tmp_path: Path) -> None:
        text = '[models]\nm = "smollm2"\n[gate]\ntasks = "syntax"\n'
        text += '[gate.task.syntax]\noptions = { source = "s.jsonl" }\n'
        seen = set()
        for content in ("{}", "[]"):
            (tmp_path / "s.jsonl").write_text(content)
            read(tmp_path, text)
            (cell,) = read_study(tmp_path / "study.toml").cells
            assert cell.task_options == {"source": str(tmp_path / "s.jsonl")}
            assert cell.identity()["options"] == {"source": "s.jsonl"}
            seen.add(cell.fingerprint())
        assert len(seen) == 2  # a file with other contents is another task

    def test_a_section_can_occur_several_times(self, tmp_path: Path) -> None:
        text = (
            '[models]\nm = "smollm2"\n[[circuit]]\ntasks = "ioi"\n[[circuit]]\ntasks = "ioi"\nlevel = "edges"\nn = 3\n'
        )
        assert read(tmp_path, text) == ["heads-ioi-m", "edges-ioi-m"]

    def test_the_order_of_the_file_decides_the_order_in_names(self, tmp_path: Path) -> None:
        text = '[models]\nm = "smollm2"\n[circuit]\ntasks = "ioi"\n{}\n{}\n'
        lists = ("threshold = [0.9, 1]", "seed = [0, 1]")
        assert read(tmp_path, text.format(*lists))[-1] == "heads-ioi-m-threshold-1.0-seed-1"
        assert read(tmp_path, text.format(*reversed(lists)))[-1] == "heads-ioi-m-seed-1-threshold-1.0"

    def test_names_are_safe_for_folders(self, tmp_path: Path) -> None:
        assert read(tmp_path, '[models]\n"../a b" = "smollm2"\n[circuit]\ntasks = "ioi"\n') == ["heads-ioi-..-a-b"]

    def test_a_grid_of_pairs(self, tmp_path: Path) -> None:
        text = '[models]\nm = "smollm2"\n[gate]\ntasks = "ioi"\nfirst_rate = [[0.1, 0.01], [0.2, 0.1]]\n'
        names = read(tmp_path, text)
        assert names[0] == "roles-ioi-m"
        assert len(names) == 2


class TestMistakes:
    """Each of these changes one line of the file above. The error names the file, the key path and the nearest name."""

    @pytest.mark.parametrize(
        ("old", "new", "message"),
        [
            ('title = "Some heads"', "title = 3", "title is 3: it must be a string."),
            ('title = "Some heads"', "titel = 'x'", "titel: no setting 'titel': did you mean 'title'?"),
            ('small = "smollm2"', 'small = "smolm2"', "models.small: no model 'smolm2': did you mean 'smollm2'?"),
            ('small = "smollm2"', 'small = "../nowhere"', "models.small: there is no folder or file '../nowhere'"),
            ('small = "smollm2"', "small = 3", "models.small is 3: it must be a table"),
            ('small = "smollm2"', "small = { dtype = 'float32' }", "models.small.load is missing"),
            ("dtype =", "dtipe =", "models.sparse.dtipe: no setting 'dtipe': did you mean 'dtype'?"),
            ('"bfloat16"', '"float61"', "models.sparse.dtype: no dtype 'float61': did you mean 'float16'?"),
            ('dense = "small"', 'dense = "smal"', "models.sparse.dense: no other model 'smal': did you mean 'small'?"),
            ('dense = "small"', 'dense = "sparse"', "models.sparse.dense: no other model 'sparse'"),
            ('small = "smollm2"', 'small = "~nobody-here/m"', "models.small: there is no folder or file '~nobody-here"),
            ("cpus = 2", "cpus = 0", "models.sparse.cpus is 0: it must be above 0."),
            ("cpus = 2", "gpus = 1.5", "models.sparse.gpus is 1.5: it must be a whole number if it is above 1."),
            ("cpus = 2", 'cpus = "all"', "models.sparse.cpus is 'all': it must be a number."),
            ("cpus = 2", 'where = "x"', "models.sparse.where: no setting 'where'"),
            ("[circuit]", "[circuits]\n[circuit]", "circuits: no setting 'circuits': did you mean 'circuit'?"),
            ('"docstring",', '"docstrings",', "circuit.tasks.1: no task 'docstrings': did you mean 'docstring'?"),
            ('    "docstring",', '    "ioi",', "circuit.tasks.1: ioi is in the list twice"),
            ('    "docstring",', '    "syntax",', "circuit.tasks.1: the task syntax has target responses"),
            ('    "docstring",', '    "mine.jsonl",', "circuit.tasks.1: there is no file 'mine.jsonl'"),
            ('    "docstring",', "    3,", "circuit.tasks.1 is 3: it must be a string."),
            ('["heads", "edges"]', '["heads", "edge"]', "circuit.level: no level 'edge': did you mean 'edges'?"),
            ("seed = [0, 1]", "seed = []", "circuit.seed: the list is empty"),
            ("seed = [0, 1]", "seed = [0, -1]", "circuit.seed is -1: it must be at least 0."),
            ("seed = [0, 1]", "sead = [0, 1]", "circuit.sead: no setting of circuit 'sead': did you mean 'seed'?"),
            ("seed = [0, 1]", 'method = "eap_ig"', "circuit.method: no method 'eap_ig': did you mean 'eap-ig'?"),
            ("n = 32", "n = 0", "circuit.n is 0: it must be at least 1."),
            ("n = 32", "n = true", "circuit.n is True: it must be a whole number."),
            ("n = 32", "n = 1.5", "circuit.n is 1.5: it must be a whole number."),
            ("n = 32", "threshold = 2", "circuit.threshold is 2: it must be at most 1."),
            ("n = 32", 'ranking = "absolut"', "circuit.ranking: no ranking 'absolut': did you mean 'absolute'?"),
            (
                '["small", "sparse"]',
                '["small", "spares"]',
                "circuit.models.1: no model 'spares': did you mean 'sparse'?",
            ),
            (
                "task.docstring]",
                "task.docstrin]",
                "circuit.task.docstrin: no task in this section 'docstrin': did you me",
            ),
            ("n = 16", "m = 16", "circuit.task.docstring.m: no setting of circuit 'm'"),
            ("n = 16", "n = 0", "circuit.task.docstring.n is 0: it must be at least 1."),
            (
                "corruption = ",
                "corrupt = ",
                "docstring.options.corrupt: no option of the task docstring 'corrupt': did yo",
            ),
            (
                '= "answer"',
                '= "answr"',
                "circuit.task.docstring.options.corruption: the task docstring has no corruption",
            ),
            (
                "options = { corruption",
                "options = [1] # {",
                "circuit.task.docstring.options is [1]: it must be a table",
            ),
            ("[circuit.model.sparse]", "[circuit.model.big]", "circuit.model.big: no model in this section 'big'"),
            ("memory_gb = 8", "memory_gb = -8", "circuit.model.sparse.memory_gb is -8: it must be above 0."),
            ("memory_gb = 8", "options = {}", "circuit.model.sparse.options: no setting of circuit 'options'"),
            ('tasks = "syntax"', 'task = "syntax"', "gate.tasks is missing"),
            ('tasks = "syntax"', "tasks = []", "gate.tasks is []: it must have at least 1 item."),
            ('tasks = "syntax"', "", "gate.tasks is missing"),
            ("[0.2, 0.02]", "[0.2]", "gate.first_rate.1 is missing"),
            ("[0.2, 0.02]", "[0.2, 'x']", "gate.first_rate.1 is 'x': it must be a number."),
        ],
        ids=lambda value: value[:30] if isinstance(value, str) else "",
    )
    def test_names_the_key(self, old: str, new: str, message: str, tmp_path: Path) -> None:
        assert WHOLE.count(old) == 1 or old == "[circuit]"
        with pytest.raises(GatelensError) as error:
            read(tmp_path, WHOLE.replace(old, new, 1))
        assert str(error.value).startswith(f"{tmp_path / 'study.toml'}: ")
        assert message in str(error.value)
        assert "\n" not in str(error.value)

    @pytest.mark.parametrize(
        ("old", "new", "message"),
        [
            ("[0.2, 0.02]", "[0.2, 0.02", "is not valid TOML: Unclosed array"),
            ("n = 32", "n = 32 apples", "is not valid TOML: .*at line 15, column 8"),
            ("n = 32", "n = 32\nn = 33", "is not valid TOML: .*at line 16, column 7"),
        ],
    )
    def test_syntax_has_a_line_and_a_column(self, old: str, new: str, message: str, tmp_path: Path) -> None:
        with pytest.raises(GatelensError, match=message):
            read(tmp_path, WHOLE.replace(old, new, 1))

    def test_a_combination(self, tmp_path: Path) -> None:
        text = '[models]\nm = "smollm2"\n\n[circuit]\ntasks = "ioi"\nlevel = "attention"\nsource = "mean"\n'
        with pytest.raises(GatelensError, match=r"study\.toml: circuit: no source 'mean' for attention edges"):
            read(tmp_path, text)

    def test_one_of_several_sections(self, tmp_path: Path) -> None:
        text = '[models]\nm = "smollm2"\n[[circuit]]\ntasks = "ioi"\n[[circuit]]\ntasks = "ioi"\n'
        with pytest.raises(GatelensError, match=r"circuit\.1\.n is 0: it must be at least 1\."):
            read(tmp_path, f"{text}n = 0\n")
        with pytest.raises(GatelensError, match=r"circuit\.1: the cell heads-ioi-m is already in circuit\.0"):
            read(tmp_path, f"{text}n = 3\n")

    @pytest.mark.parametrize(
        ("text", "message"),
        [
            ("", r"study\.toml: models is missing"),
            ('[models]\nm = "smollm2"\n', r"there is nothing to run: a study needs a section \[circuit\] or \[gate\]"),
            ('models = 3\n[circuit]\ntasks = "ioi"', "models is 3: it must be a table"),
            ('[models]\n[circuit]\ntasks = "ioi"', "models is {}: it must have at least 1 item"),
            ('circuit = 3\n[models]\nm = "smollm2"\n', r"circuit: it must be a section: write \[circuit\]"),
        ],
    )
    def test_nothing_to_do(self, text: str, message: str, tmp_path: Path) -> None:
        with pytest.raises(GatelensError, match=message):
            read(tmp_path, text)

    @pytest.mark.parametrize("options", [[], ["--dry-run"]])
    def test_on_the_command_line(
        self,
        options: list[str],
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
        capsys: pytest.CaptureFixture[str],
    ) -> None:
        """One sentence, exit code 2, and nothing written."""
        monkeypatch.chdir(tmp_path)
        (tmp_path / "s.toml").write_text('[models]\nm = "smollm2"\n[circuit]\ntasks = "io"\n')
        assert run(monkeypatch, "study", "s.toml", *options) == 2
        assert (
            capsys.readouterr()
            .err.strip()
            .startswith("gatelens: s.toml: circuit.tasks.0: no task 'io': did you mean 'ioi'?")
        )
        assert run(monkeypatch, "study", "nowhere.toml", *options) == 2
        assert "cannot read the study nowhere.toml" in capsys.readouterr().err
        assert [path.name for path in tmp_path.iterdir()] == ["s.toml"]


@pytest.mark.parametrize("name", sorted(path.name for path in EXAMPLES.glob("*.toml")))
def test_the_examples_are_studies(name: str, tmp_path: Path) -> None:
    """Where an example names folders that the user makes, those are made here."""
    text = (EXAMPLES / name).read_text()
    for folder in ("models/sparse-gpt2", "models/sparse-olmo-7b", "shared/models/stories260k"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "main" / "examples").mkdir(parents=True)
    (tmp_path / "main" / "models").symlink_to(tmp_path / "models")
    (tmp_path / "main" / "examples" / name).write_text(text)
    study = read_study(tmp_path / "main" / "examples" / name)
    tasks = {cell.task for cell in study.cells}
    if name.startswith("head-ablation"):
        assert tasks == {"syntax", "common-sense", "math"}
    elif name.startswith("mib"):
        assert {(cell.level, cell.settings.areas, cell.settings.per_query_head) for cell in study.cells} == {
            ("edges", "signed", True)
        }
    elif name.startswith("methods"):  # heads: five on four tasks and five on two; edges: five on two
        assert len(study.cells) == len(study.models) * (5 * 4 + 5 * 2 + 5 * 2)
        learned = {cell.settings.method for cell in study.cells if cell.settings.method_options == ("updates=50",)}
        assert learned == {"edge-pruning", "ugs"}
    else:
        assert tasks == {"greater-than", "ioi", "docstring", "ioi-long"}
        settings = {(cell.level, cell.settings.ranking) for cell in study.cells}
        assert len(study.cells) == len(study.models) * 4 * len(settings)
        assert {spec.dense for spec in study.models.values()} - {None} < set(study.models)


def test_a_study_of_version_0_1_can_be_resumed(tmp_path: Path) -> None:
    """This folder in results/ was made by version 0.1. The same file still asks for the same cells."""
    name = "head-ablation-smollm2"
    saved = read_record(EXAMPLES.parent / "results" / name / "study.json", StudyRecord)
    (tmp_path / "a" / "examples").mkdir(parents=True)
    (tmp_path / "shared" / "models" / "stories260k").mkdir(parents=True)
    file = tmp_path / "a" / "examples" / f"{name}.toml"
    file.write_text((EXAMPLES / file.name).read_text())
    asked = StudyRecord.of(read_study(file))
    assert (saved.schema_version, asked.schema_version) == (1, 2)
    assert asked.cells.keys() == saved.cells.keys()
    refuse_changed(saved, asked, tmp_path, file)
