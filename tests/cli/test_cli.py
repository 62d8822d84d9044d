"""The command line: what it prints, and how it says that something is wrong."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from commands import run

import gatelens
from gatelens import GatelensError, Model, RolesSettings, cli
from gatelens.gates.edges import EdgeScores
from gatelens.measures.circuit_result import load_circuit
from gatelens.measures.exchange import write_graph
from gatelens.methods.registry import methods
from gatelens.model.graph import Graph

COMMANDS = sorted(cli.COMMANDS)


class TestHelp:
    @pytest.mark.parametrize("command", COMMANDS)
    def test_of_each_command(
        self, command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert run(monkeypatch, command, "--help") == 0
        said = capsys.readouterr()
        assert "Usage" in said.out
        assert not said.err

    def test_settings_are_options(self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
        monkeypatch.setenv("COLUMNS", "200")
        run(monkeypatch, "circuit", "--help")
        said = capsys.readouterr().out
        for option in ("--level", "--method", "--steps", "--out", "--memory-gb", "--seeds", "--threshold", "--ranking"):
            assert option in said

    @pytest.mark.parametrize("command", ["circuit", "gate", "contrast", "relations", "sparsify"])
    def test_common_options_come_before_advanced_ones(
        self, command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        monkeypatch.setenv("COLUMNS", "200")
        run(monkeypatch, command, "--help")
        common, advanced = capsys.readouterr().out.split(" Advanced options ")
        advanced, loading = advanced.split(" Loading the model ")
        listed = [set(re.findall(r"│ [* ]*(--[a-z0-9-]+)", part)) for part in (common, advanced, loading)]
        assert {"--out", "--quick", "--batch" if command != "circuit" else "--n"} <= listed[0]
        assert {"--clip"} <= listed[1] if command != "circuit" else {"--refine"} <= listed[1]
        assert {"--device", "--dtype"} <= listed[2]

    def test_every_registered_method_is_listed(
        self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        monkeypatch.setenv("COLUMNS", "4000")  # no line is wrapped
        run(monkeypatch, "circuit", "--help")
        printed = " ".join(capsys.readouterr().out.replace("│", " ").split())  # a long help text is wrapped
        for name, method in methods().items():
            assert f"{name} ({method.help})" in printed

    def test_version(self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
        assert run(monkeypatch, "--version") == 0
        assert capsys.readouterr().out == f"gatelens {gatelens.__version__}\n"

    def test_comes_at_once(self) -> None:
        """Help, and importing the package, load none of the packages that take seconds to import."""
        code = (
            "import sys; sys.argv = ['gatelens', '--help']\n"
            "import gatelens, gatelens.cli\n"
            "try: gatelens.cli.main()\n"
            "except SystemExit: pass\n"
            "slow = {'torch', 'transformers', 'numpy', 'scipy', 'matplotlib', 'safetensors', 'accelerate', 'peft'}\n"
            "print(sorted(slow & set(sys.modules)))"
        )
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
        assert done.stdout.splitlines()[-1] == "[]"
        for command in COMMANDS:
            assert command in done.stdout


class TestMistakes:
    """One sentence on stderr, exit code 2, and nothing written."""

    @pytest.mark.parametrize(
        ("words", "message"),
        [
            (["NOWHERE", "induction"], "NOWHERE"),
            (["MODEL", "inductoin"], "Did you mean 'induction'"),
            (["MODEL", "aba-abb"], "target responses"),
            (["MODEL", "lines.jsonl"], "lines.jsonl"),
            (["MODEL", "induction", "--level", "neurons"], "neurons"),
            (["MODEL", "induction", "--method", "magic"], "magic"),
            (["MODEL", "induction", "--steps", "0"], "steps is 0: it must be at least 1"),
            (["MODEL", "induction", "--n", "-4"], "n is -4: it must be at least 1"),
            (["MODEL", "induction", "--sample", "-1"], "sample is -1: it must be at least 0"),
            (["MODEL", "induction", "--threshold", "2"], "threshold"),
            (["MODEL", "induction", "--memory-gb", "0"], "memory_gb is 0.0: it must be above 0"),
            (["MODEL", "induction", "--source", "noise"], "noise"),
            (["MODEL", "induction", "--level", "attention", "--source", "mean"], "no source 'mean' for attention"),
            (["MODEL", "induction", "--dtype", "int8"], "int8"),
            (["MODEL", "induction", "--device", "abacus"], "abacus"),
            (["MODEL", "induction", "--option", "length"], "is not a task option"),
            (["MODEL", "induction", "--option", "width=3"], "no option 'width'"),
            (["MODEL", "induction", "--option", "length=9999"], "length"),
        ],
        ids=lambda value: " ".join(value) if isinstance(value, list) else "",
    )
    def test_say_what_is_wrong(
        self,
        words: list[str],
        message: str,
        trained_folder: Path,
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
        capsys: pytest.CaptureFixture[str],
    ) -> None:
        monkeypatch.chdir(tmp_path)
        words = [str(trained_folder) if word == "MODEL" else word for word in words]
        assert run(monkeypatch, "circuit", *words, "--no-check", "--out", str(tmp_path / "out")) == 2
        said = capsys.readouterr().err.strip()
        assert message in said
        assert "Traceback" not in said
        assert said.startswith("gatelens: ")
        assert len(said.splitlines()) == 1
        assert not list(tmp_path.iterdir())

    def test_a_folder_of_another_job(
        self, trained_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        """Nothing is printed but the cost and the sentence, and the run stays as it is."""
        (tmp_path / "run").mkdir()
        (tmp_path / "run" / "asked.json").write_text('{"kind": "circuit"}')
        words = ["gate", str(trained_folder), "syntax", "--n", "2", "--held-out", "1", "--no-check"]
        assert run(monkeypatch, *words, "--out", str(tmp_path / "run")) == 2
        said = capsys.readouterr()
        assert said.out.startswith("cost: ")
        assert len(said.out.splitlines()) == 1
        assert "holds a run of `gatelens circuit`, not of `gatelens gate`: give another folder." in said.err
        assert (tmp_path / "run" / "asked.json").read_text() == '{"kind": "circuit"}'

    @pytest.mark.parametrize(
        ("words", "message"),
        [
            (["circuit", "MODEL", "iou"], "no task 'iou'"),
            (["circuit", "MODEL", "ioi", "--n", "900000000"], "n is 900000000: it must be at most 1000000."),
            (["circuit", "MODEL", "ioi", "--option", "colour=red"], "the task ioi has no option 'colour'"),
            (["circuit", "MODEL", "missing.jsonl"], "missing.jsonl cannot be read: there is no such file"),
            (["gate", "MODEL", "syntaxx"], "no task 'syntaxx'"),
            (["contrast", "MODEL", "ioi", "iou"], "no task 'iou'"),
            (["contrast", "MODEL", "ioi", "ioi"], "ioi cannot be kept and lost at once"),
            (["effect", "MODEL", "iou", "circuit.json"], "no task 'iou'"),
            (["gate", "MODEL", "syntax", "--n", "900000000"], "n is 900000000: it must be at most 1000000."),
            (["contrast", "MODEL", "ioi", "syntax", "--n", "900000000"], "n is 900000000: it must be at most 1000000."),
            (["relations", "MODEL", "--n", "900000000"], "n is 900000000: it must be at most 1000000."),
            (["relations", "MODEL", "--source", "nowhere"], "nowhere has 0 files of relations"),
            (["effect", "MODEL", "ioi", "circuit.json", "--n", "900000000"], "n is 900000000: it must be at most"),
            (["tasks", "iou", "--model", "MODEL"], "no task 'iou'"),
            (["tasks", "ioi", "--model", "MODEL", "--n", "900000000"], "n is 900000000: a task has 1 to 1,000,000"),
        ],
        ids=lambda value: " ".join(value) if isinstance(value, list) else "",
    )
    def test_are_found_before_the_model_is_loaded(
        self, words: list[str], message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        def load(*args: object, **kwargs: object) -> None:
            raise AssertionError("the model was loaded")

        monkeypatch.setattr("gatelens.jobs.load_settings.LoadSettings.open", load)
        assert run(monkeypatch, *words) == 2
        assert message in capsys.readouterr().err

    @pytest.mark.parametrize(
        ("words", "message"),
        [
            (["--nonsense"], "no such option: --nonsense: see `gatelens --help`."),
            (["cirquit"], "no such command 'cirquit'. Did you mean 'circuit'? See `gatelens --help`."),
            (["circuit", "a", "b", "c"], "got unexpected extra argument(s) (c): see `gatelens circuit --help`."),
            (
                ["circuit", "a", "b", "--lvel", "c"],
                "no such option: --lvel (Possible options: --help, --level): see `gatelens circuit --help`.",
            ),
            (["circuit", "a", "b", "--n"], "option '--n' requires an argument: see `gatelens --help`."),
            (["sparsify", "a", "--text", "b"], "missing option '--out': see `gatelens sparsify --help`."),
            (["circuit"], "missing argument 'MODEL': see `gatelens circuit --help`."),
            (["circuit", "a"], "missing argument 'TASK': see `gatelens circuit --help`."),
            (
                ["circuit", "a", "b", "--n", "x"],
                "invalid value for '--n': it must be a whole number: see `gatelens circuit --help`.",
            ),
        ],
        ids=lambda value: " ".join(value) if isinstance(value, list) else "",
    )
    def test_words_that_the_command_line_does_not_know(
        self, words: list[str], message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert run(monkeypatch, *words) == 2
        assert capsys.readouterr().err == f"gatelens: {message}\n"

    def test_no_words_print_the_help(self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
        assert run(monkeypatch) == 0
        assert "circuit" in capsys.readouterr().out

    def test_out_is_a_file(
        self, trained_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        out = tmp_path / "out"
        out.write_text("mine")
        assert run(monkeypatch, "circuit", str(trained_folder), "induction", "--no-check", "--out", str(out)) == 2
        assert "is a file" in capsys.readouterr().err
        assert out.read_text() == "mine"


class TestPresets:
    @pytest.fixture
    def asked(self, monkeypatch: pytest.MonkeyPatch, trained_folder: Path) -> Callable[..., RolesSettings]:
        """Calls ``gatelens gate`` with further words; returns the settings that its job gets."""
        seen: list[RolesSettings] = []

        def job(model: object, task: object, settings: RolesSettings, **_: object) -> None:
            seen.append(settings)
            raise GatelensError("enough")

        def ask(*words: str) -> RolesSettings:
            monkeypatch.setattr("gatelens.jobs.roles.find_roles", job)
            assert run(monkeypatch, "gate", str(trained_folder), "induction", "--no-check", *words) == 2
            return seen.pop()

        return ask

    def test_options_take_precedence_even_with_their_default_value(self, asked: Callable[..., RolesSettings]) -> None:
        assert asked() == RolesSettings()
        assert asked("--preset", "published") == RolesSettings.preset("published")
        assert asked("--preset", "published", "--clip", "1", "--seeds", "3") == RolesSettings.preset(
            "published", clip=1.0, seeds=RolesSettings().seeds
        )

    def test_quick_is_a_preset(self, asked: Callable[..., RolesSettings]) -> None:
        assert asked("--quick", "--batch", "2") == RolesSettings.preset("quick", batch=2)

    @pytest.mark.parametrize(
        ("words", "message"),
        [
            (["--preset", "publishd"], "no preset 'publishd': did you mean 'published'?"),
            (["--quick", "--preset", "published"], "--quick and --preset published ask for different settings"),
        ],
    )
    def test_mistakes(
        self, words: list[str], message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert run(monkeypatch, "gate", "smollm2", "syntax", *words) == 2
        assert message in capsys.readouterr().err


def test_an_interruption_is_one_sentence(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def interrupt(*args: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("gatelens.jobs.study.file.read_study", interrupt)
    assert run(monkeypatch, "study", "study.toml") == 130
    assert capsys.readouterr().err == "gatelens: stopped; the same command starts again.\n"


@pytest.mark.parametrize(
    "command", ["circuit", "contrast", "effect", "evaluate", "gate", "relations", "sparsify", "study", "tasks"]
)
def test_every_command_that_runs_a_model_for_long_has_a_quick_one(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, command, "--help") == 0
    assert "--quick" in capsys.readouterr().out


def test_a_study_gets_its_option_quick(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[bool] = []

    def read(file: Path, quick: bool) -> None:
        asked.append(quick)
        raise GatelensError("enough")

    monkeypatch.setattr("gatelens.jobs.study.file.read_study", read)
    assert run(monkeypatch, "study", "study.toml", "--quick") == 2
    assert run(monkeypatch, "study", "study.toml") == 2
    assert asked == [True, False]


@pytest.mark.parametrize(
    ("words", "passes"), [(["induction", "--quick"], 16), (["induction", "--quick", "--n", "3"], 6), (["syntax"], 64)]
)
def test_trying_a_task_says_its_cost_first(
    words: list[str], passes: int, trained_folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    """A circuit task runs its clean and its corrupt prompts, a response task each prompt once."""
    assert run(monkeypatch, "tasks", *words, "--model", str(trained_folder), "--no-check") == 0
    assert capsys.readouterr().out.startswith(f"cost: about {passes} forward passes of one prompt, ")


class TestCircuit:
    def test_the_dense_model_beside_a_sparse_one(
        self, trained_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        monkeypatch.setenv("COLUMNS", "160")
        sizes = (
            "--method eap --n 3 --points 4 --sample 0 --random-points 0 --describe 2 --allow-noise --option length=4"
        )
        words = ["circuit", str(trained_folder), "induction", *sizes.split()]
        assert run(monkeypatch, *words, "--out", str(tmp_path / "dense")) == 0
        assert " dense " not in capsys.readouterr().out
        for n, dense in enumerate((trained_folder, tmp_path / "dense")):
            given = ["--bias", "0.5", "--dense", str(dense), "--out", str(tmp_path / f"sparse-{n}")]
            assert run(monkeypatch, *words, *given) == 0
            saved = load_circuit(tmp_path / f"sparse-{n}")
            assert saved.dense == load_circuit(tmp_path / "dense").model
            assert saved.heads is not None
            assert saved.heads.dense is not None
            said = capsys.readouterr().out.splitlines()
            printed = [line.split("│")[2].strip() for line in said if line.startswith("│ dense")]
            scores = [saved.heads.dense.line(own.head) for own in saved.heads.lines]
            shown = [f"{one.score:+.2f} ({one.low:+.2f} to {one.high:+.2f})" if one else "-" for one in scores]
            assert printed == shown
        assert run(monkeypatch, *words, "--dense", "nowhere", "--out", str(tmp_path / "new")) == 2
        assert "nowhere" in capsys.readouterr().err
        assert not (tmp_path / "new").exists()

    def test_writes_a_run_and_says_so(
        self, trained_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        monkeypatch.setenv("COLUMNS", "160")
        settings = "--level edges --method eap-ig --steps 2 --n 3 --points 4 --sample 6 --allow-noise --option length=4"
        words = ["circuit", str(trained_folder), "induction", *settings.split(), "--out", str(tmp_path / "out")]
        assert run(monkeypatch, *words) == 0
        said = capsys.readouterr()
        assert "memory: about" in said.out
        result = load_circuit(tmp_path / "out")
        assert result.heads is not None
        best = result.heads.lines[0]
        line = next(line for line in said.out.splitlines() if f" {best.head} " in line)
        assert f"{best.score:+.2f} ({best.low:+.2f} to {best.high:+.2f})" in line
        assert said.out.index("what the best heads do") < said.out.index(line) < said.out.index("needed for 90%")
        assert (result.settings.level, result.settings.steps, result.task) == ("edges", 2, "induction")
        assert json.loads((tmp_path / "out" / "asked.json").read_text())["task"]["options"] == {"length": 4}
        assert run(monkeypatch, *words) == 0  # complete: shown again, not computed
        assert load_circuit(tmp_path / "out").seconds == result.seconds

    def test_the_effect_of_all_edges_is_the_whole_effect(
        self, trained: Model, trained_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
    ) -> None:
        graph = Graph.of(trained.anatomy)
        scores = EdgeScores(torch.ones(graph.edges.shape), graph, "any")
        write_graph(tmp_path / "all.json", scores, graph.edges, trained.anatomy.width)
        words = ["effect", str(trained_folder), "gender-pronoun", str(tmp_path / "all.json"), "--quick"]
        assert run(monkeypatch, *words) == 0
        cost, answer = capsys.readouterr().out.splitlines()
        assert cost.startswith("cost: about 72 forward passes of one prompt, ")  # 8 x (2 captures + 4 circuits of 1.75)
        count = f"{graph.n_edges:,}"
        assert answer == (
            f"{count} of {count} edges are on a path in the circuit and explain 1.000; all other edges explain 0.000 "
            "(8 prompts)"
        )
        assert run(monkeypatch, *words, "--n", "3") == 0
        assert "(3 prompts)" in capsys.readouterr().out
        assert run(monkeypatch, *(word.replace("gender-pronoun", "syntax") for word in words)) == 2
        assert "the task syntax has target responses and no corrupt prompts" in capsys.readouterr().err

    def test_a_default_folder(
        self, trained_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        monkeypatch.chdir(tmp_path)
        words = [
            "--method",
            "eap",
            "--n",
            "3",
            "--points",
            "3",
            "--sample",
            "0",
            "--option",
            "length=4",
            "--no-check",
            "--allow-noise",
        ]
        assert run(monkeypatch, "circuit", str(trained_folder), "induction", *words) == 0
        assert load_circuit("runs/trained_model-induction-heads-eap").validity.correlation is None


def test_inspect_prints_counts(
    trained_folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    assert run(monkeypatch, "inspect", str(trained_folder), "--length", "10", "--no-check") == 0
    said = capsys.readouterr().out
    # 4 layers: 1 + 9 l sources below layer l, read by 8 + 4 + 4 inputs, and with 8 heads by the MLP; 37 by the logits.
    assert f"{sum(16 * (1 + 9 * n) + (9 + 9 * n) for n in range(4)) + 37:,} (k and v inputs per KV head)" in said
    assert f"{55 * 32:,}" in said
