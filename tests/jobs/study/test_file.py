"""Study files: what they mean, and where their mistakes are."""

from __future__ import annotations

from pathlib import Path

import pytest
from commands import run

from gatelens import CircuitSettings, GatelensError
from gatelens.jobs.study.file import read_study
from gatelens.jobs.study.lines import Toml
from gatelens.measures.roles_result import RolesSettings

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

    def test_settings_of_tasks_and_models(self, tmp_path: Path) -> None:
        read(tmp_path, WHOLE)
        study = read_study(tmp_path / "study.toml")
        cells = {cell.name: cell for cell in study.cells}
        assert cells["heads-ioi-small"].settings == CircuitSettings(n=32)
        one = cells["edges-docstring-sparse-seed-1"]
        assert one.settings == CircuitSettings(n=16, level="edges", seed=1, memory_gb=8.0)
        assert one.options == {"corruption": "answer"}
        assert (one.model.dtype, one.model.dense, one.model.cpus) == ("bfloat16", "small", 2.0)
        assert cells["roles-syntax-big"].settings == RolesSettings(first_rate=(0.2, 0.02))
        assert study.title == "Some heads"

    def test_paths_are_relative_to_the_file(self, tmp_path: Path) -> None:
        (tmp_path / "models" / "mine").mkdir(parents=True)
        (tmp_path / "mine.jsonl").write_text("{}")
        text = '[models]\nm = "models/mine"\n[gate]\ntasks = ["mine.jsonl"]\n'
        assert read(tmp_path, text) == ["roles-mine-m"]
        (cell,) = read_study(tmp_path / "study.toml").cells
        assert (cell.model.where, cell.where) == (str(tmp_path / "models" / "mine"), str(tmp_path / "mine.jsonl"))
        assert str(tmp_path) not in str(cell.identity())  # a study's folder can be moved and shown

    def test_so_are_the_sources_of_tasks(self, tmp_path: Path) -> None:
        text = '[models]\nm = "smollm2"\n[gate]\ntasks = "syntax"\n'
        text += '[gate.task.syntax]\noptions = { source = "s.jsonl" }\n'
        seen = set()
        for content in ("{}", "[]"):
            (tmp_path / "s.jsonl").write_text(content)
            read(tmp_path, text)
            (cell,) = read_study(tmp_path / "study.toml").cells
            assert cell.whole_options == {"source": str(tmp_path / "s.jsonl")}
            assert cell.identity()["options"] == {"source": "s.jsonl"}
            seen.add(cell.fingerprint())
        assert len(seen) == 2  # other lines are another task

    def test_a_section_may_stand_several_times(self, tmp_path: Path) -> None:
        text = (
            '[models]\nm = "smollm2"\n[[circuit]]\ntasks = "ioi"\n[[circuit]]\ntasks = "ioi"\nlevel = "edges"\nn = 3\n'
        )
        assert read(tmp_path, text) == ["heads-ioi-m", "edges-ioi-m"]

    def test_names_are_safe_for_folders(self, tmp_path: Path) -> None:
        assert read(tmp_path, '[models]\n"../a b" = "smollm2"\n[circuit]\ntasks = "ioi"\n') == ["heads-ioi-..-a-b"]

    def test_a_grid_of_pairs(self, tmp_path: Path) -> None:
        text = '[models]\nm = "smollm2"\n[gate]\ntasks = "ioi"\nfirst_rate = [[0.1, 0.01], [0.2, 0.1]]\n'
        names = read(tmp_path, text)
        assert names[0] == "roles-ioi-m"
        assert len(names) == 2


class TestMistakes:
    """Each of these changes one line of the file above; the error tells its number."""

    @pytest.mark.parametrize(
        ("old", "new", "line", "message"),
        [
            ('title = "Some heads"', "title = 3", 1, "the title is a text"),
            ('title = "Some heads"', "titel = 'x'", 1, "no key 'titel': did you mean 'title'?"),
            ('small = "smollm2"', 'small = "smolm2"', 4, "no model 'smolm2': did you mean 'smollm2'?"),
            ('small = "smollm2"', 'small = "../nowhere"', 4, "no folder or file '../nowhere'"),
            ('small = "smollm2"', "small = 3", 4, "small is what to load"),
            ("dtype =", "dtipe =", 5, "no model option 'dtipe': did you mean 'dtype'?"),
            ('"bfloat16"', '"float61"', 5, "no dtype 'float61': did you mean 'float16'?"),
            ('dense = "small"', 'dense = "smal"', 5, "no dense model 'smal': did you mean 'small'?"),
            ('small = "smollm2"', 'small = "~nobody-here/m"', 4, "no folder or file '~nobody-here/m'"),
            ("cpus = 2", "cpus = 0", 5, "cpus is above 0"),
            ("cpus = 2", "gpus = 1.5", 5, "a whole number above 1"),
            ("cpus = 2", 'cpus = "all"', 5, "cpus is a number, not 'all'"),
            ("[circuit]", "[circuits]\n[circuit]", 8, "no key 'circuits': did you mean 'circuit'?"),
            ('    "docstring",', '    "docstrings",', 11, "no task 'docstrings': did you mean 'docstring'?"),
            ('    "docstring",', '    "ioi",', 11, "ioi stands twice"),
            ('    "docstring",', '    "syntax",', 11, "it belongs in [gate]"),
            ('    "docstring",', '    "mine.jsonl",', 11, "no file 'mine.jsonl'"),
            ('["heads", "edges"]', '["heads", "edge"]', 13, "no level 'edge': did you mean 'edges'?"),
            ("seed = [0, 1]", "seed = []", 14, "seed is an empty list"),
            ("seed = [0, 1]", "sead = [0, 1]", 14, "no setting of circuit 'sead': did you mean 'seed'?"),
            ("seed = [0, 1]", 'method = "eap_ig"', 14, "no method 'eap_ig': did you mean 'eap-ig'?"),
            ("n = 32", "n = 0", 15, "n is 0: it must be at least 1."),
            ("n = 32", "n = true", 15, "n is a whole number, not True"),
            ("n = 32", "n = 1.5", 15, "n is a whole number, not 1.5"),
            ("n = 32", "threshold = 2", 15, "threshold is 2.0: it must be at most 1"),
            ('["small", "sparse"]', '["small", "spares"]', 16, "no model 'spares': did you mean 'sparse'?"),
            ("[circuit.task.docstring]", "[circuit.task.docstrin]", 17, "did you mean 'docstring'?"),
            ("n = 16", "m = 16", 18, "no setting of circuit 'm'"),
            ("corruption = ", "corrupt = ", 19, "did you mean 'corruption'?"),
            ("[circuit.model.sparse]", "[circuit.model.big]", 20, "no model of this section 'big'"),
            ("memory_gb = 8", "memory_gb = -8", 21, "memory_gb is -8.0: it must be above 0"),
            ('tasks = "syntax"', 'task = "syntax"', 24, "names stand in `tasks`"),
            ('tasks = "syntax"', "", 23, "the section [gate] needs tasks"),
            ("[0.2, 0.02]", "[0.2]", 26, "first_rate is a list of 2 values"),
            ("[0.2, 0.02]", "[0.2, 0.02", 26, "this is no TOML"),
            ("n = 32", "n = 32 apples", 15, "this is no TOML"),
            ("n = 32", "n = 32\nn = 33", 16, "this is no TOML"),
        ],
        ids=lambda value: value[:30] if isinstance(value, str) else "",
    )
    def test_are_pointed_at(self, old: str, new: str, line: int, message: str, tmp_path: Path) -> None:
        assert WHOLE.count(old) == 1 or old == "[circuit]"
        with pytest.raises(GatelensError) as error:
            read(tmp_path, WHOLE.replace(old, new, 1))
        said = str(error.value)
        assert f"study.toml, line {line}: " in said
        assert message in said

    def test_a_combination(self, tmp_path: Path) -> None:
        text = '[models]\nm = "smollm2"\n\n[circuit]\ntasks = "ioi"\nlevel = "attention"\nsource = "mean"\n'
        with pytest.raises(GatelensError, match="line 4: no source 'mean' for attention edges"):
            read(tmp_path, text)

    def test_two_cells_of_one_name(self, tmp_path: Path) -> None:
        text = '[models]\nm = "smollm2"\n[[circuit]]\ntasks = "ioi"\n[[circuit]]\ntasks = "ioi"\nn = 3\n'
        with pytest.raises(GatelensError, match=r"line 5: the cell heads-ioi-m is asked .* \(first on line 3\)"):
            read(tmp_path, text)

    @pytest.mark.parametrize(
        ("text", "message"),
        [
            ("", r"line 1: a study names its models"),
            ('[models]\nm = "smollm2"\n', "nothing to run"),
            ('models = 3\n[circuit]\ntasks = "ioi"', "a study names its models"),
            ('circuit = 3\n[models]\nm = "smollm2"\n', r"line 1: circuit is a section"),
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
        assert capsys.readouterr().err.strip().startswith("gatelens: s.toml, line 4: no task 'io': did you mean 'ioi'?")
        assert run(monkeypatch, "study", "nowhere.toml", *options) == 2
        assert "cannot read the study nowhere.toml" in capsys.readouterr().err
        assert [path.name for path in tmp_path.iterdir()] == ["s.toml"]


class TestLines:
    def test_of_every_form_of_key(self, tmp_path: Path) -> None:
        text = 'a.b = 1\n\n# c = 2\n"c d" = """\nx = 3\n"""\nlist = [\n  "x",\n  "y",\n]\n'
        text += "[t]\nin = { side = 4 }\n[[r]]\n[[r]]\nz = 5\n"
        (tmp_path / "f.toml").write_text(text)
        toml = Toml(tmp_path / "f.toml")
        places = {("a", "b"): 1, ("c d",): 4, ("list",): 7, ("list", 1): 9, ("t",): 11, ("t", "in", "side"): 12}
        places |= {("r", 0): 13, ("r", 1): 14, ("r", 1, "z"): 15, ("t", "absent"): 11, ("absent",): 1}
        assert {keys: toml.line(*keys) for keys in places} == places

    def test_a_string_that_looks_like_lines(self, tmp_path: Path) -> None:
        (tmp_path / "f.toml").write_bytes('a = "one\u2028b = 2"\r\nc = 3\r\n'.encode())
        assert Toml(tmp_path / "f.toml").line("c") == 2


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
    else:
        assert tasks == {"greater-than", "ioi", "docstring", "ioi-long"}
        assert len(study.cells) == len(study.models) * 4 * len({cell.level for cell in study.cells})
        assert {spec.dense for spec in study.models.values()} - {None} < set(study.models)
