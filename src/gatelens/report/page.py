"""The report page: one folder that opens from disk, with summary, figures and interactive views of saved runs.

Everything that a run brings (names, prompts, settings) is data: the template escapes it, scripts only ever set it as
text, and the page's policy lets no script run that stands in the page and nothing load from the network. It names files
beside the folder itself: in Firefox, a page on disk is not of the same origin as the files next to it.
"""

from __future__ import annotations

import importlib.util
import json
import math
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

from gatelens.errors import GatelensError
from gatelens.report.gallery import draw_pictures, titled
from gatelens.report.runs import CircuitRun, Run, Runs, SparsifyRun, read_runs
from gatelens.report.summary import Group, summarise
from gatelens.report.views import attention_views, circuit_views, head_views
from gatelens.runtime.versions import versions

_ASSETS = Path(__file__).parent / "assets"
_SCRIPTS = ("page.js", "circuits.js", "heads.js", "attention.js")
_MARK = "gatelens-report.json"  # tells a report's folder, which may be written anew, from any other


@dataclass(frozen=True)
class Report:
    """Where a report is, what it shows, and what could not be reported."""

    path: Path  # of index.html
    runs: list[str]  # the folders that were reported
    figures: int
    problems: list[str] = field(default_factory=list)  # one sentence each


def write_report(folders: Sequence[str | Path], out: str | Path) -> Report:
    """Write the report of all runs in these folders, at any depth, into the folder ``out``.

    A run that cannot be read is a sentence among the problems, and the rest is reported; an error if nothing is left.
    An earlier report in ``out`` is replaced; any other folder there is refused. No model is loaded. Cost: about a
    second for each figure.
    """
    out = Path(out) if Path(out).name else Path(out).resolve()  # "." has no name of its own
    plotly = _plotly()
    _check_out(out)
    runs = read_runs(folders)
    if not runs.all:
        raise GatelensError(f"nothing to report. {' '.join(runs.problems)}")
    temporary = out.with_name(f".{out.name}.{os.getpid()}.tmp")
    try:
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
        report = _write(runs, plotly, temporary, out)
        _replace(out, temporary)
    except OSError as error:
        raise GatelensError(
            f"cannot write the report to {out}: {error.strerror or error}. Give another --out."
        ) from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return report


def _write(runs: Runs, plotly: Path, folder: Path, out: Path) -> Report:
    # 1. What is to be seen.
    groups = summarise(runs.circuits)
    pictures, undrawn = draw_pictures(runs, groups, folder / "figures")
    problems = [*runs.problems, *undrawn]
    attention, patterns = attention_views(groups)
    data = {
        "circuits": circuit_views(groups),
        "heads": head_views(groups, titled(runs.gates)),
        "attention": attention,
    }
    # 2. Scripts and data. Pages on disk may not fetch, but they may run scripts beside them: data are scripts too.
    for name in ("page.css", *_SCRIPTS):
        shutil.copyfile(_ASSETS / name, folder / name)
    shutil.copyfile(plotly, folder / "plotly.min.js")
    (folder / "data").mkdir()
    _write_script(folder / "data" / "report.js", f"window.gatelens = {{data: {as_script(data)}}};")
    for i, one in enumerate(patterns):
        _write_script(folder / "data" / f"attention-{i}.js", f"window.gatelens.patterns[{i}] = {as_script(one)};")
    # 3. The page, and the mark that it is ours.
    page = _render(
        groups=groups,
        circuits=data["circuits"],
        heads=data["heads"],
        attention=attention,
        pictures=pictures,
        runs=[_about(run) for run in runs.all],
        shared=_shared(groups),
        problems=problems,
        scripts=("plotly.min.js", "data/report.js", *_SCRIPTS),
        made=f"{datetime.now():%Y-%m-%d %H:%M}",
        versions=versions(),
    )
    (folder / "index.html").write_text(page, encoding="utf-8")
    reported = [str(run.folder) for run in runs.all]
    mark = {"runs": [_place(run.folder) for run in runs.all], "problems": problems}
    (folder / _MARK).write_text(json.dumps(mark, indent=2))
    return Report(out / "index.html", reported, len(pictures), problems)


def as_script(data: Any) -> str:
    """JSON that is safe inside a script and inside HTML: nothing in it can end the one or begin the other."""
    text = json.dumps(data, allow_nan=False, separators=(",", ":"))  # escapes all that is not ASCII
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _write_script(path: Path, text: str) -> None:
    path.write_text(text + "\n", encoding="ascii")


def _render(**values: Any) -> str:
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    env = Environment(
        loader=FileSystemLoader(_ASSETS),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    env.filters |= {"count": _count, "figure": _figure, "times": _times}
    return env.get_template("index.html").render(**values)


def _about(run: Run) -> dict[str, Any]:
    """A run's title, and all that is known of how it was made, as (name, value) rows."""
    if isinstance(run, SparsifyRun):
        title = f"sparsify: {run.name}"
        more: dict[str, Any] = {"steps made": int(run.log[-1]["step"])}
    else:
        result = run.result
        what = f", {run.result.settings.level}, {run.result.settings.method}" if isinstance(run, CircuitRun) else ""
        title = f"{run.asked['kind']}: {result.task} in {result.model}{what}"
        attention = "gated (sparse)" if run.sparse else "dense"
        more = {"attention": attention, "seconds": f"{result.seconds:.0f}"}
        if isinstance(run, CircuitRun) and run.graph is None:
            more["note"] = "saved by an earlier version: no circuit graph and no attention"
        elif isinstance(run, CircuitRun) and not run.prompts:
            more["note"] = "no attention: the prompts are too long for it to be saved"
    rows = [("folder", _place(run.folder)), *_flat(more), *_flat(run.asked)]
    return {"title": title, "rows": rows}


def _place(folder: Path) -> str:
    """A run's folder from here, or the end of its path: a page that is passed on need not tell of this machine."""
    near = os.path.relpath(folder)
    return "/".join(folder.resolve().parts[-2:]) if near.startswith("..") else near


def _flat(data: Mapping[str, Any], before: str = "") -> Iterator[tuple[str, str]]:
    for key, value in data.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{before}{key}: ")
        else:
            yield f"{before}{key}", value if isinstance(value, str) else json.dumps(value)


def _shared(groups: Sequence[Group]) -> list[str]:
    """Models whose edge counts take the k and v inputs of several heads as one."""
    graphs = {
        line.run.result.model: line.run.graph for group in groups for line in group.lines if group.level == "edges"
    }
    return [model for model, graph in graphs.items() if graph is not None and graph.n_heads != graph.n_kv_heads]


def _plotly() -> Path:
    spec = importlib.util.find_spec("plotly")
    places = [] if spec is None else spec.submodule_search_locations or []
    for place in places:
        if (path := Path(place) / "package_data" / "plotly.min.js").exists():
            return path
    raise GatelensError("the report page needs plotly: run `pip install 'gatelens[report]'`.")


def _check_out(out: Path) -> None:
    if out.exists() and not (out / _MARK).exists() and not (out.is_dir() and not any(out.iterdir())):
        raise GatelensError(f"{out} exists and is no report of gatelens: give another --out, or an empty folder.")


def _replace(out: Path, new: Path) -> None:
    """Put the new folder in the old one's place."""
    old = new.with_suffix(".old")
    if out.exists():
        out.rename(old)
    new.rename(out)
    shutil.rmtree(old, ignore_errors=True)


# How numbers are written in the summary


def _count(value: float | None) -> str:
    return "not reached" if value is None else f"{value:,.0f}"


def _figure(value: float | None) -> str:
    return "-" if value is None else f"{round(value, 2) + 0.0:.2f}"  # no -0.00


def _times(value: float | None) -> str:
    return "-" if value is None else "∞x" if math.isinf(value) else f"{value:.1f}x"
