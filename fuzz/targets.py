"""What is fuzzed: for every kind of input, how it is damaged and how it is used."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from hypothesis import strategies as st
from hypothesis.strategies import DrawFn, SearchStrategy
from rich.console import Console

from fuzz import samples
from fuzz.damage import (
    ODD_NUMBERS,
    ODD_TEXTS,
    Files,
    as_json,
    damaged_bytes,
    damaged_document,
    damaged_file,
    damaged_json,
    odd_values,
)
from gatelens import GatelensError, cli
from gatelens.cli.task_tables import render
from gatelens.jobs.study._folder import StudyFolder
from gatelens.jobs.study.file import read_study
from gatelens.loading import load
from gatelens.measures.exchange import read_graph
from gatelens.model import Model
from gatelens.model.graph import Graph
from gatelens.report.page import write_report
from gatelens.runtime.settings import setting_fields
from gatelens.tasks import task
from gatelens.tasks.preview import preview


@dataclass(frozen=True)
class Target:
    """One kind of input.

    Arguments:
        inputs: makes the strategy of damaged inputs.
        use: uses the input in a folder as a user would. It may raise a `GatelensError` and nothing else.
        share: how many inputs of this kind are tried, relative to the others; slow ones have less.
    """

    name: str
    inputs: Callable[[], SearchStrategy[Files]]
    use: Callable[[Path], None]
    share: float = 1.0


# A task of the user's own.


@st.composite
def own_tasks(draw: DrawFn) -> Files:
    valid = draw(st.sampled_from((samples.CIRCUIT_LINE, samples.RESPONSE_LINE)))
    lines = [as_json(valid), draw(damaged_json(valid))]
    lines += draw(st.lists(st.one_of(st.binary(max_size=20), odd_values().map(as_json)), max_size=1))
    data = draw(st.sampled_from((b"\n", b"\r\n", b"\n\n"))).join(draw(st.permutations(lines)))
    return {"mine.jsonl": data}


def use_task(folder: Path) -> None:
    try:
        show(samples.model(), folder / "mine.jsonl")
    finally:  # what skips bad lines reads the good ones
        show(samples.model(), folder / "mine.jsonl", skip_bad=True)


def show(model: Model, path: Path, **options: Any) -> None:
    made = task(path, model, **options)
    Console(file=StringIO()).print(render(preview(model, made)))
    made._repr_html_()


# A study.

_ODD_TOML = (
    "nan",
    "inf",
    "-inf",
    "-1",
    "0",
    "1",
    "[]",
    "{}",
    '""',
    '"\\u0000"',
    "true",
    "1979-05-27",
    "07:32:00",
    "1" * 400,
    "1e400",
    "9223372036854775808",
    "100000000000000000000",
    "[[1]]",
    '["heads", 1]',
    '"' + "n" * 300 + '"',
    '"' + "a/" * 3000 + '"',
    '"~nobody"',
    '"/dev/null"',
    '"../model"',
    '["mine.jsonl", "mine.jsonl"]',
    "{ a = { b = { c = 1 } } }",
    "[" * 500 + "]" * 500,
    "[" * 100_000,
)
_ODD_TOML_LINES = (
    "[circuit]",
    "[[circuit]]",
    "[models]",
    "[gate]",
    "[circuit.task.nothing]",
    "[" + ".".join("a" * 2000) + "]",
    '"" = 1',
    '"\\u0000" = "model"',
    "models = 1",
    "\ufeff",
    "= = =",
)


@st.composite
def studies(draw: DrawFn) -> Files:
    lines = samples.STUDY.splitlines()
    for _ in range(draw(st.integers(1, 2))):
        place = draw(st.integers(0, len(lines) - 1))
        how = draw(st.sampled_from(("value", "value", "value", "setting", "line", "remove")))
        key = lines[place].partition(" = ")[0]
        value = draw(st.sampled_from(_ODD_TOML))
        if how == "value" and " = " in lines[place]:
            lines[place] = f"{key} = {value}"
        elif how == "setting":
            names = ("method", "steps", "seeds", "source", "ranking", "options", "models", "sample", "method_options")
            lines.insert(place + 1, f"{draw(st.sampled_from(names))} = {value}")
        elif how == "line":
            lines.insert(place, draw(st.sampled_from(_ODD_TOML_LINES)))
        else:
            del lines[place]
    data = "\n".join(lines).encode()
    data = draw(damaged_bytes(data)) if draw(st.integers(0, 5)) == 0 else data
    return {"study.toml": data, "mine.jsonl": samples.own_task(), "model@": str(samples.model_folder()).encode()}


def use_study(folder: Path) -> None:
    study = read_study(folder / "study.toml")
    for cell in study.cells:
        cell.fingerprint()
    StudyFolder(folder / "out").claim(study)


# Saved runs.


@st.composite
def damaged_runs(draw: DrawFn) -> Files:
    files = samples.run_files()
    kind = draw(st.sampled_from(sorted({name.split("/")[0] for name in files})))
    own = {name: data for name, data in files.items() if name.startswith(kind)}
    if draw(st.integers(0, 3)) == 0:
        name = draw(st.sampled_from([name for name in own if name.endswith(".safetensors")] or [""]))
        if name:
            return {**own, name: draw(_damaged_tensors(own[name]))}
    return draw(damaged_file(own, safetensors=400))


@st.composite
def _damaged_tensors(draw: DrawFn, data: bytes) -> bytes:
    from safetensors.torch import load as read
    from safetensors.torch import save

    tensors = read(data)
    name = draw(st.sampled_from(sorted(tensors)))
    change = draw(st.sampled_from(sorted(_TENSOR_DAMAGE)))
    tensors[name] = _TENSOR_DAMAGE[change](tensors[name]).contiguous().clone()
    return save(tensors)


_TENSOR_DAMAGE: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "nan": lambda x: torch.full_like(x.float(), float("nan")),
    "inf": lambda x: torch.full_like(x.float(), float("inf")),
    "huge": lambda x: torch.full_like(x.float(), 1e38),
    "zero": torch.zeros_like,
    "negative": lambda x: -x.float() - 1,
    "empty": lambda x: x[:0],
    "shorter": lambda x: x[..., : x.shape[-1] // 2],
    "scalar": lambda x: x.flatten()[0],
    "flat": lambda x: x.flatten(),
    "deeper": lambda x: x[None],
    "bool": lambda x: x.bool(),
    "int": lambda x: x.long(),
    "double": lambda x: x.double(),
}


def use_runs(folder: Path) -> None:
    """A report of a good run and the damaged one: whatever the damage, the good one is shown."""
    with patch("gatelens.report.page.draw_pictures", lambda *_: ([], [])):  # figures take long: see `use_report`
        use_report(folder)


def use_report(folder: Path) -> None:
    """The same with all figures."""
    report = write_report([samples.good_run(), folder], folder.parent / "report")
    assert str(samples.good_run()) in report.runs


# Circuits of other programs.


def damaged_graphs() -> SearchStrategy[Files]:
    files = samples.graph_files()
    one = st.sampled_from(sorted(files)).map(lambda name: {name: files[name]})
    return one.flatmap(lambda file: damaged_file(file))


def use_graph(folder: Path) -> None:
    graph = Graph.of(samples.model().anatomy)
    for path in [*folder.iterdir()] or [folder / "circuit.json"]:
        read_graph(path, graph)


# Models.


@st.composite
def damaged_models(draw: DrawFn) -> Files:
    files = samples.model_files()
    if draw(st.integers(0, 2)) > 0:
        return draw(damaged_file(files, safetensors=1200))
    config = json.loads(files["config.json"])
    return {**files, "config.json": as_json(draw(damaged_document(config, most=1)))}


def use_model(folder: Path) -> None:
    use_loaded(load(folder), folder)


def use_loaded(model: Model, folder: Path) -> None:
    """A model that can be opened can be used."""
    path = folder / "mine.jsonl"
    path.write_bytes(samples.own_task())
    show(model, path)


def damaged_llama2c() -> SearchStrategy[Files]:
    return damaged_file(samples.llama2c_files(), bin=60)


def damaged_gguf() -> SearchStrategy[Files]:
    return damaged_bytes(samples.gguf_file(), within=3500).map(lambda data: {"model.gguf": data})


def use_gguf(folder: Path) -> None:
    os.environ["GATELENS_CACHE"] = str(folder / "cache")
    load(folder / "model.gguf")


@st.composite
def damaged_adapters(draw: DrawFn) -> Files:
    files = samples.adapter_files()
    if draw(st.integers(0, 3)) == 0:
        about = json.loads(files["adapter.json"])
        base = draw(st.sampled_from((".", "..", "SELF", *ODD_TEXTS)))
        return {**files, "adapter.json": as_json({**about, "base": base})}
    return draw(damaged_file(files, safetensors=300))


def use_adapter(folder: Path) -> None:
    about = folder / "adapter.json"
    if about.is_file():
        about.write_bytes(about.read_bytes().replace(b'"SELF"', as_json(str(folder))))
    load(folder)


# The command line.

_SMALL = {"circuit": ["--sample", "0", "--describe", "0", "--method", "eap"], "gate": ["--preset", "quick"]}


@st.composite
def command_lines(draw: DrawFn) -> Files:
    """A command with odd numbers, and sometimes with an odd path."""
    command = draw(st.sampled_from(("tasks", "tasks", "inspect", "circuit", "gate", "effect", "report", "export")))
    numbers = st.sampled_from([str(number) for number in (*ODD_NUMBERS, 10**9, "1e9", "", "abc", "--", "²")])
    texts = st.sampled_from([text for text in ODD_TEXTS if "\0" not in text and "\ud800" not in text])
    places = {"MODEL": "model", "TASK": "mine.jsonl", "GRAPH": "circuit.json"}
    if draw(st.integers(0, 3)) == 0:
        places[draw(st.sampled_from(sorted(places)))] = draw(texts)
    model, own, graph = places["MODEL"], places["TASK"], places["GRAPH"]
    positional = {
        "tasks": [draw(st.sampled_from((own, "induction"))), "--model", model],
        "inspect": [model],
        "effect": [model, own, graph],
        "report": [model],
        "export": [model, graph],
    }
    words = positional.get(command, [model, own])
    options = draw(st.lists(st.sampled_from(_numeric_options(command)), min_size=1, max_size=3, unique=True))
    for option in options:
        words += [option, draw(numbers)]
    return {"words.json": as_json([command, *_SMALL.get(command, []), *words])}


def _numeric_options(command: str) -> list[str]:
    from gatelens.measures.circuit_settings import CircuitSettings
    from gatelens.measures.roles_result import RolesSettings

    fixed = {
        "tasks": ["--n", "--seed"],
        "inspect": ["--length", "--bias"],
        "effect": ["--n", "--seed", "--memory-gb"],
        "report": ["--formats"],
        "export": ["--k"],
    }
    if command in fixed:
        return fixed[command]
    fields = setting_fields({"circuit": CircuitSettings, "gate": RolesSettings}[command])
    return [f"--{field.name.replace('_', '-')}" for field in fields if field.annotation in (int, float)]


def use_words(folder: Path) -> None:
    words = json.loads((folder / "words.json").read_bytes())
    (folder / "model").symlink_to(samples.model_folder())
    (folder / "mine.jsonl").write_bytes(samples.own_task())
    (folder / "circuit.json").write_bytes(samples.graph_files()["circuit.json"])
    before, arguments, output = os.getcwd(), sys.argv, StringIO()
    os.chdir(folder)
    sys.argv = ["gatelens", *words]
    try:
        with redirect_stdout(output), redirect_stderr(output):
            cli.main()
    except SystemExit as end:
        if end.code not in (0, 2):
            raise AssertionError(f"exit code {end.code}: {output.getvalue()}") from end
        if "nan" in output.getvalue().lower() and end.code == 0:
            raise AssertionError(f"a result that is not a number: {output.getvalue()}") from end
    finally:
        os.chdir(before)
        sys.argv = arguments


TARGETS = {
    target.name: target
    for target in (
        Target("own task", own_tasks, use_task),
        Target("study", studies, use_study),
        Target("saved runs", damaged_runs, use_runs, share=0.5),
        Target("report", damaged_runs, use_report, share=0.005),
        Target("circuit", damaged_graphs, use_graph),
        Target("model folder", damaged_models, use_model, share=0.5),
        Target("llama2.c", damaged_llama2c, use_model, share=0.5),
        Target("gguf", damaged_gguf, use_gguf, share=0.5),
        Target("adapter", damaged_adapters, use_adapter, share=0.5),
        Target("command line", command_lines, use_words, share=0.5),
    )
}

__all__ = ["TARGETS", "GatelensError", "Target"]
