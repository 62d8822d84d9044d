"""The report page: a folder that opens from disk, with a summary, figures and interactive views of saved runs.

Everything that a run contains (names, prompts, settings) is treated as data. The template escapes it, scripts set it as
text only, and the content policy of the page allows no script inside the page and no request to the network. The policy
allows ``file:`` besides ``'self'``, because for Firefox a page on disk and the files next to it have different origins.
"""

from __future__ import annotations

import importlib.util
import json
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

from gatelens.errors import GatelensError
from gatelens.report._describe import describe, models_with_shared_inputs, place
from gatelens.report._gallery import draw_pictures
from gatelens.report._numbers import decimal
from gatelens.report._plans import titles
from gatelens.report._reading import read_runs
from gatelens.report._runs import Runs
from gatelens.report._summary import summarise
from gatelens.report._views import attention_views, circuit_views, head_views
from gatelens.report.figures._saving import check_formats
from gatelens.runtime.files import write_folder, write_json
from gatelens.runtime.versions import versions

_ASSETS = Path(__file__).parent / "assets"
_SCRIPTS = ("page.js", "circuits.js", "heads.js", "attention.js")
_MARK = "gatelens-report.json"  # a folder with this file is a report, and may be replaced


@dataclass(frozen=True)
class Report:
    """A report that was written.

    Arguments:
        path: the page, ``index.html``.
        runs: the folders of the runs that it shows.
        figures: the number of figures.
        problems: what could not be shown, one sentence each.
    """

    path: Path
    runs: list[str]
    figures: int
    problems: list[str] = field(default_factory=list)


def write_report(folders: Sequence[str | Path], out: str | Path, formats: Sequence[str] = ("png",)) -> Report:
    """Write a page with the summary, the figures and interactive views of saved runs. No model is loaded.

    A run that cannot be read becomes one of the problems, and the others are shown. If no run can be read, an error is
    raised. Cost: about half a second per figure.

    Arguments:
        folders: run folders, or folders that contain run folders at any depth.
        out: the folder to write. An earlier report there is replaced; a folder with other files is refused.
        formats: the formats of the figures besides PNG, which the page shows: ``svg``, ``pdf``.

    Example:
        >>> gatelens.write_report(["runs/ioi-dense", "runs/ioi-sparse"], "report").path
        PosixPath('report/index.html')
    """
    check_formats(formats)
    out = Path(out) if Path(out).name else Path(out).resolve()  # "." has no name
    plotly = _plotly()
    _refuse_other_folders(out)
    runs = read_runs(folders)
    if not runs.all:
        raise GatelensError(f"there is nothing to report. {' '.join(runs.problems)}")
    reports: list[Report] = []
    with_png = tuple(dict.fromkeys(("png", *formats)))
    try:
        write_folder(out, lambda folder: reports.append(_write(runs, plotly, folder, out, with_png)), replace=True)
    except OSError as error:
        raise GatelensError(
            f"cannot write the report to {out} ({error.strerror or error}): give another --out."
        ) from error
    return reports[0]


def _write(runs: Runs, plotly: Path, folder: Path, out: Path, formats: Sequence[str]) -> Report:
    """Write all files of a report on ``out`` into a temporary folder."""
    # 1. The contents.
    groups = summarise(runs.circuits)
    pictures, not_drawn = draw_pictures(runs, groups, folder / "figures", formats)
    problems = [*runs.problems, *not_drawn]
    attention, patterns = attention_views(groups)
    data = {
        "circuits": circuit_views(groups),
        "heads": head_views(groups, titles(runs.roles)),
        "attention": attention,
    }
    # 2. Scripts and data. A page on disk may not fetch data, but it may run scripts next to it: data are scripts too.
    for name in ("page.css", *_SCRIPTS):
        shutil.copyfile(_ASSETS / name, folder / name)
    shutil.copyfile(plotly, folder / "plotly.min.js")
    (folder / "data").mkdir()
    _write_script(folder / "data" / "report.js", f"window.gatelens = {{data: {as_script(data)}}};")
    for i, pattern in enumerate(patterns):
        _write_script(folder / "data" / f"attention-{i}.js", f"window.gatelens.patterns[{i}] = {as_script(pattern)};")
    # 3. The page, and the file that marks the folder as a report.
    page = _render(
        groups=groups,
        circuits=data["circuits"],
        heads=data["heads"],
        attention=attention,
        pictures=pictures,
        formats=formats,
        runs=[describe(run) for run in runs.all],
        shared=models_with_shared_inputs(groups),
        problems=problems,
        scripts=("plotly.min.js", "data/report.js", *_SCRIPTS),
        made=f"{datetime.now():%Y-%m-%d %H:%M}",
        versions=versions(),
    )
    (folder / "index.html").write_text(page, encoding="utf-8")
    write_json(folder / _MARK, {"runs": [place(run.folder) for run in runs.all], "problems": problems})
    return Report(out / "index.html", [str(run.folder) for run in runs.all], len(pictures), problems)


def as_script(data: Any) -> str:
    """JSON that is safe inside a script and inside HTML: no text in it can end the script or start a tag."""
    text = json.dumps(data, allow_nan=False, separators=(",", ":"))  # escapes everything that is not ASCII
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
    env.filters |= {"decimal": decimal}
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
