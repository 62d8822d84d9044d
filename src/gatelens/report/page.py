"""The report page: a folder or a single file that opens from disk, with figures and interactive views of saved runs.

Everything that a run contains (names, prompts, settings) is treated as data. The template escapes it, scripts set it as
text only, and the content policy of the page allows no script but its own and no request to the network.
"""

from __future__ import annotations

import importlib.util
import json
import shutil
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from pathlib import Path
from typing import Any, TypeVar

from gatelens.errors import GatelensError, shortened
from gatelens.report._bundle import FolderBundle, SingleFileBundle
from gatelens.report._counts import count_columns, first_view, heading, lead
from gatelens.report._describe import describe, models_with_shared_inputs, place
from gatelens.report._gallery import count_pictures, draw_pictures
from gatelens.report._plans import titles
from gatelens.report._reading import read_runs
from gatelens.report._runs import Run, Runs
from gatelens.report._summary import Group, summarise
from gatelens.report._views import attention_views, circuit_views, curve_views, map_views, task_views
from gatelens.report.figures._saving import check_formats
from gatelens.runtime.files import replace_file, write_folder, write_json
from gatelens.runtime.inputs import usable_path
from gatelens.runtime.versions import versions

_ASSETS = Path(__file__).parent / "assets"
_STYLE, _VENDORED = "page.css", "dagre.min.js"
_SHARED = ("page.js", "selection.js", "export.js", "layout.js")
_VIEWS = ("curves.js", "heads.js", "graph.js", "attention.js", "maps.js")
_MARK = "gatelens-report.json"  # a folder with this file is a report, and may be replaced
_FILE_MARK = b'<meta name="generator" content="gatelens report">'  # and so may a file that contains this
FORMATS = ("png", "svg")
"""The formats of figures, unless others are asked for."""

R = TypeVar("R", bound=Run)


@dataclass(frozen=True)
class Report:
    """A report that was written.

    Arguments:
        path: the page, ``index.html``.
        runs: the folders of the runs that it shows.
        figures: the number of figures.
        problems: what could not be shown, one sentence each.

    Example:
        report = gatelens.write_report(["runs/ioi"], "report")
        report.path, report.figures, report.problems
    """

    path: Path
    runs: list[str]
    figures: int
    problems: list[str] = field(default_factory=list)


def write_report(
    folders: Sequence[str | Path],
    out: str | Path,
    formats: Sequence[str] = FORMATS,
    *,
    single_file: bool = False,
    announce: Callable[[int, int], None] | None = None,
) -> Report:
    """Write a page with the figures and interactive views of saved runs. No model is loaded.

    A run that cannot be read becomes one of the problems, and the others are shown. If no run can be read, an error is
    raised. Cost: about half a second for each figure.

    Arguments:
        folders: run folders, or folders that contain run folders at any depth.
        out: the folder or, for a single file, the file to write. An earlier report there is replaced; anything else is
            refused.
        formats: the formats of the figures besides PNG, which the page shows: ``svg``, ``pdf``.
        single_file: write one HTML file that contains everything.
        announce: is called before the figures are drawn, with the number of runs and of figures.

    Example:
        >>> gatelens.write_report(["runs/ioi-dense", "runs/ioi-sparse"], "report").path
        PosixPath('report/index.html')
    """
    check_formats(formats)
    out = usable_path(out)
    out = out if out.name else out.resolve()  # "." has no name
    plotly = _plotly()
    if single_file:
        _refuse_other_files(out)
    else:
        _refuse_other_folders(out)
    runs = _showable(read_runs(folders))
    if not runs.all:
        raise GatelensError(f"there is nothing to report. {' '.join(runs.problems)}")
    with_png = tuple(dict.fromkeys(("png", *formats)))
    if announce is not None:
        announce(len(runs.all), count_pictures(runs))
    try:
        if single_file:
            with tempfile.TemporaryDirectory() as temporary:
                page, report = _write(runs, plotly, Path(temporary), out, with_png, single_file=True)
            out.parent.mkdir(parents=True, exist_ok=True)
            replace_file(out, page)
            return report
        reports: list[Report] = []

        def write(folder: Path) -> None:
            page, report = _write(runs, plotly, folder, out / "index.html", with_png)
            replace_file(folder / "index.html", page)
            reports.append(report)

        write_folder(out, write, replace=True)
        return reports[0]
    except OSError as error:
        raise GatelensError(
            f"cannot write the report to {out} ({error.strerror or error}): give another --out."
        ) from error


def _showable(runs: Runs) -> Runs:
    """The runs that can be shown. Each is tried alone, so that one with odd contents does not stop the others."""
    circuits = [run for run in runs.circuits if _is_shown(runs, run, lambda run: _contents(Runs(circuits=[run])))]
    roles = [run for run in runs.roles if _is_shown(runs, run, lambda run: _contents(Runs(roles=[run])))]
    sparsified = [run for run in runs.sparsified if _is_shown(runs, run, describe)]
    return replace(runs, circuits=circuits, roles=roles, sparsified=sparsified)


def _is_shown(runs: Runs, run: R, show: Callable[[R], object]) -> bool:
    """Whether a run can be shown. If it cannot, the reason becomes one of the problems."""
    try:
        show(run)
        describe(run)
    except Exception as error:  # any error: the file has values that a run does not have
        reason = shortened(" ".join(str(error).split()))
        runs.problems.append(f"cannot show {run.folder} ({type(error).__name__}: {reason}): run the job again.")
        return False
    return True


def _contents(runs: Runs) -> tuple[Sequence[Group], dict[str, Any], list[str]]:
    """The circuits by task, the data of the interactive views, and the attention patterns as scripts."""
    groups, roles = summarise(runs.circuits), titles(runs.roles)
    attention, patterns = attention_views(groups)
    data = {
        "tasks": task_views(groups, roles),
        "first": first_view(groups),
        "curves": curve_views(groups),
        "circuits": circuit_views(groups),
        "attention": attention,
        "maps": map_views(groups, roles),
    }
    as_script(data)
    return groups, data, [as_script(pattern) for pattern in patterns]


def _write(
    runs: Runs, plotly: Path, folder: Path, path: Path, formats: Sequence[str], single_file: bool = False
) -> tuple[str, Report]:
    """Write the files that the page needs into a folder, and return the page. path: where the page will be."""
    # 1. The contents.
    groups, data, patterns = _contents(runs)
    pictures, not_drawn = draw_pictures(runs, groups, folder / "figures", formats)
    problems = [*runs.problems, *not_drawn]
    # 2. Scripts and data. A page on disk may not fetch data, but it may run scripts next to it: data are scripts too.
    for name in (_STYLE, *_SHARED, *_VIEWS, f"vendor/{_VENDORED}"):
        shutil.copyfile(_ASSETS / name, folder / Path(name).name)
    licences = sorted(path.name for path in (_ASSETS / "vendor").glob("*.LICENSE"))
    for name in licences:
        shutil.copyfile(_ASSETS / "vendor" / name, folder / name)
    shutil.copyfile(plotly, folder / "plotly.min.js")
    (folder / "data").mkdir()
    _write_script(folder / "data" / "report.js", f"window.gatelens = {{data: {as_script(data)}}};")
    pattern_files = [f"data/attention-{i}.js" for i in range(len(patterns))]
    for i, (file, pattern) in enumerate(zip(pattern_files, patterns, strict=True)):
        _write_script(folder / file, f"window.gatelens.patterns[{i}] = {pattern};")
    write_json(folder / _MARK, {"runs": [place(run.folder) for run in runs.all], "problems": problems})
    # 3. The page. A single file has all attention patterns in it; a folder loads them when they are asked for.
    first = ("plotly.min.js", _VENDORED, "data/report.js", *_SHARED)
    inside = SingleFileBundle(folder, _STYLE, (*first, *pattern_files, *_VIEWS), licences)
    page = _render(
        bundle=inside if single_file else FolderBundle(_STYLE, (*first, *_VIEWS)),
        heading=heading(groups),
        lead=lead(groups),
        groups=groups,
        columns=count_columns(groups),
        tasks=data["tasks"],
        tables=any(model["table"] or model["interfering"] for task in data["tasks"] for model in task["models"]),
        circuits=data["circuits"],
        maps=data["maps"],
        attention=data["attention"],
        pictures=pictures,
        formats=formats,
        runs=[describe(run) for run in runs.all],
        shared=models_with_shared_inputs(groups),
        problems=problems,
        made=f"{datetime.now():%Y-%m-%d %H:%M}",
        versions=versions(),
    )
    return page, Report(path, [str(run.folder) for run in runs.all], len(pictures), problems)


def as_script(data: Any) -> str:
    """JSON that is safe inside a script and inside HTML: no text in it can end the script or start a tag."""
    text = json.dumps(data, allow_nan=False, separators=(",", ":"))  # escapes everything that is not ASCII
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _write_script(path: Path, text: str) -> None:
    replace_file(path, text + "\n")


def _render(**values: Any) -> str:
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    env = Environment(
        loader=FileSystemLoader(_ASSETS),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return env.get_template("index.html").render(**values)


def _plotly() -> Path:
    """The script that draws the interactive views, from the installed plotly package."""
    spec = importlib.util.find_spec("plotly")
    places = [] if spec is None else spec.submodule_search_locations or []
    for package in places:
        if (path := Path(package) / "package_data" / "plotly.min.js").exists():
            return path
    raise GatelensError("the report page needs plotly: run `pip install 'gatelens[report]'`.")


def _refuse_other_folders(out: Path) -> None:
    """Raise an error if ``out`` exists and is neither an earlier report nor an empty folder."""
    if out.exists() and not (out / _MARK).exists() and not (out.is_dir() and not any(out.iterdir())):
        raise GatelensError(f"{out} exists and is not a report of gatelens: give another --out, or an empty folder.")


def _refuse_other_files(out: Path) -> None:
    """Raise an error if ``out`` exists and is not an earlier report in a single file."""
    if out.is_dir():
        raise GatelensError(f"{out} is a folder: give the name of a file as --out, such as report.html.")
    if out.exists() and _FILE_MARK not in out.read_bytes():
        raise GatelensError(f"{out} exists and is not a report of gatelens: give another --out.")
