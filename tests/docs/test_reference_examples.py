"""Every entry of the Python reference has an example, and the examples run, on a small model."""

from __future__ import annotations

import inspect
import re
import textwrap
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import pytest
from blocks import ROOT

import gatelens
from gatelens.measures.exchange import write_graph
from gatelens.sparse.in_model import make_sparse

pytestmark = pytest.mark.filterwarnings("ignore::gatelens.errors.GatelensWarning")
PAGES = [page for page in (ROOT / "docs" / "reference" / "python").glob("*.md") if page.stem != "extensions"]
ENTRIES = sorted({name for page in PAGES for name in re.findall(r"^::: (\S+)", page.read_text(), re.MULTILINE)})
NOT_RUN = {
    "gatelens.jobs.circuit.find_circuit": "the page of jobs runs it",
    "gatelens.jobs.export.export_circuit": "tested in tests/jobs/test_export.py",
    "gatelens.jobs.relations.find_relations": "takes minutes",
    "gatelens.jobs.roles.find_roles": "takes minutes",
    "gatelens.jobs.study.file.read_study": "tested with all studies in examples/",
    "gatelens.jobs.study.run.run_study": "another entry runs it",
    "gatelens.loading.convert.Converted": "needs a checkpoint of nanoGPT",
    "gatelens.loading.convert.convert_adapter": "needs an adapter",
    "gatelens.loading.convert.convert_checkpoint": "needs a checkpoint of nanoGPT",
    "gatelens.measures.attribution_graph.write_attribution_graph": "tested in tests/measures",
    "gatelens.measures.relations_result.HeldOutRelation": "takes long; tested in tests/jobs/test_relations.py",
    "gatelens.measures.relations_result.RelationsResult": "takes long; tested in tests/jobs/test_relations.py",
    "gatelens.measures.relations_result.load_relations": "takes long; tested in tests/jobs/test_relations.py",
    "gatelens.report.page.write_report": "another entry runs it",
    "gatelens.sparse.gated_attention.gated_attention": "needs queries, keys and values",
    "gatelens.sparse.sparsify.run.sparsify": "trains a model",
}
# Readers see a task that smollm2 does and heads that it has; the small model has others.
SMALLER = {
    ', corruption="subject"': "",
    '"ioi"': '"gender-pronoun"',
    '"smollm2"': "TRAINED",
    "L9H6": "L3H6",
    "L10H0": "L2H1",
    "n=64": "n=4",
    "n=16": "n=4",
    "seeds=10": "seeds=1, updates=2",
    'TwoTaskSettings.preset("quick")': "TwoTaskSettings(seeds=1, updates=2, n=4, batch=2)",
    'ContrastSettings.preset("quick")': "ContrastSettings(seeds=1, updates=2, batch=2)",
    "most=50": "most=8",
    "above=3": "k=4",
}
STUDY = """
title = "Small"
[models]
small = "TRAINED"
[circuit]
tasks = ["gender-pronoun"]
method = "eap"
n = 4
points = 3
random_points = 0
sample = 0
describe = 0
allow_noise = true
"""


def entry_named(name: str) -> Any:
    """A function or class of the reference."""
    parts = name.split(".")
    module = next(end for end in range(len(parts), 0, -1) if _is_module(".".join(parts[:end])))
    entry: Any = import_module(".".join(parts[:module]))
    for part in parts[module:]:
        entry = getattr(entry, part)
    return entry


def example_of(name: str) -> str:
    """The code of an entry's example; empty if it has none. The output that a prompt shows is left out."""
    docstring = inspect.getdoc(entry_named(name)) or ""
    match = re.search(r"^Example:\n((?:[ ]{4}.*(?:\n|$)|\n)+)", docstring, re.MULTILINE)
    code = textwrap.dedent(match[1]) if match else ""
    shown = [line[4:] for line in code.splitlines() if line.startswith((">>> ", "... "))]
    return "\n".join(shown) if shown else code


def _is_module(name: str) -> bool:
    try:
        import_module(name)
    except ImportError:
        return False
    return True


@pytest.fixture(scope="module")
def names(trained_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    """What the examples speak of: a model and its sparse version, a task, scores, curves, roles and saved runs."""
    folder = tmp_path_factory.mktemp("examples")
    model, sparse = (gatelens.load(trained_folder, check=False) for _ in range(2))
    make_sparse(sparse.hf, 0.5)
    task = gatelens.task("gender-pronoun", model, n=4)
    scores, edge_scores = gatelens.attribute_heads(model, task), gatelens.attribute_edges(model, task)
    few = gatelens.CurveSettings(points=6, random_points=0, refine=0.0)
    curves = [gatelens.explained_effect(one, task, scores, few) for one in (model, sparse)]
    small = {"method": "eap", "n": 4, "points": 6, "random_points": 0, "sample": 0, "describe": 2, "allow_noise": True}
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        gatelens.find_circuit(model, task, gatelens.CircuitSettings(level="edges", **small), out="runs/ioi")
        fit = {"seeds": 1, "updates": 2, "batch": 2}
        found = gatelens.find_roles(
            model, task, gatelens.RolesSettings(**fit, n=2, held_out=2, most=4, every=2), out="runs/roles"
        )
        pair = gatelens.tasks.contrast(model, n=4)
        gatelens.find_contrast(model, *pair, gatelens.TwoTaskSettings(**fit, n=4), out="runs/contrast")
        write_graph("circuit.json", edge_scores, edge_scores.graph.edges, model.anatomy.width)
        Path("study.toml").write_text(STUDY.replace("TRAINED", str(trained_folder)))
        for name in ("text.txt", "held-out.txt"):
            Path(name).write_text("Once upon a time there was a cat. " * 400)
        yield {
            "gatelens": gatelens,
            "TRAINED": str(trained_folder),
            "model": model,
            "sparse": sparse,
            "dense": model,
            "task": task,
            "held_out_task": task,
            "scores": scores,
            "edge_scores": edge_scores,
            "curve": curves[0],
            "dense_curve": curves[0],
            "sparse_curve": curves[1],
            "roles": found.roles,
            **{
                name: getattr(gatelens, name)
                for name in ("Context", "compare_with_patching", "patch_edges", "patch_heads")
            },
        }
        plt.close("all")


@pytest.mark.parametrize("entry", ENTRIES)
def test_an_entry_has_an_example(entry: str) -> None:
    code = example_of(entry)
    assert code, f"{entry} has no example"
    compile(code, entry, "exec")


def test_what_is_not_run_is_in_the_reference() -> None:
    assert set(NOT_RUN) <= set(ENTRIES)


@pytest.mark.slow
@pytest.mark.parametrize("entry", [entry for entry in ENTRIES if entry not in NOT_RUN])
def test_the_example_runs(entry: str, names: dict[str, Any]) -> None:
    code = example_of(entry)
    for old, new in SMALLER.items():
        code = code.replace(old, new)
    exec(compile(code, entry, "exec"), dict(names))
