"""Sparse post-training: loss and open edges by step, and against each other.

Records are the lines of a run's ``log.csv`` and ``judged.csv`` by column name. Their values may still be text.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from gatelens.errors import GatelensError
from gatelens.report.figures._style import BLACK, GREY, colours, log_axis, styled
from gatelens.report.figures._text import shown

Records = Sequence[Mapping[str, float | str]]


@styled
def training_figure(log: Records, judged: Records = (), target: float | None = None, title: str = "") -> Figure:
    """Loss and open edges against steps.

    The upper panel shows nats per token above the dense model, and the KL divergence; the lower one shows open edges in
    percent, on a log scale.

    Arguments:
        log: one record per step, on the training text with sampled gates: the loss that is held at the target, and the
            share of open edges.
        judged: measurements on each held-out text, with gates as they are in use.
        target: the target of the loss; a dashed line.
    """
    if not log:
        raise GatelensError("a training figure needs at least one line of log.csv, and the log is empty.")
    figure = Figure(figsize=(6.6, 4.2), layout="constrained")
    above, below = figure.subplots(2, 1, sharex=True)
    steps = _column(log, "step")
    above.axhline(0, color="0.8", linewidth=0.8)
    above.plot(steps, _column(log, "loss"), color=GREY, linewidth=0.8, label="training text: loss")
    below.plot(steps, _percent(_column(log, "open")), color=GREY, linewidth=0.8, label="training text")
    if target is not None:
        above.axhline(target, linestyle="--", color=BLACK, linewidth=0.9, label=f"target {target:g}")
    texts = judged_texts(judged)
    for name, (colour, _) in colours(texts).items():
        records = _judged_on(name, judged)
        judged_steps = _column(records, "step")
        marks = {"color": colour, "marker": "o", "markersize": 3}
        above.plot(judged_steps, _column(records, f"{name} above dense"), **marks, label=f"{shown(name)}: above dense")
        above.plot(judged_steps, _column(records, f"{name} kl"), **marks, linestyle=":", label=f"{shown(name)}: KL")
        below.plot(judged_steps, _percent(_column(records, f"{name} open")), **marks, label=shown(name))
    above.set_ylabel("nats per token")
    below.set(ylabel="open edges, %", xlabel="step")
    _log_axis(below, "y", [value for line in below.get_lines() for value in line.get_ydata()])
    below.xaxis.set_major_locator(MaxNLocator(7, integer=True))
    for axis in (above, below):
        axis.grid()
        axis.legend(loc="upper left", bbox_to_anchor=(1.01, 1), borderaxespad=0)
    figure.suptitle(shown(title))
    return figure


@styled
def frontier_figure(runs: Mapping[str, Records], title: str = "") -> Figure:
    """What sparsity costs: loss above the dense model, and KL, against open keys per query and head (log scale).

    Each held-out text has a column of two panels, each run a line, and each evaluation a point. Training goes from
    right to left. A run that is further down has the better recipe, if it read as many tokens.

    Arguments:
        runs: the records of ``judged.csv`` of one or several runs, by the name of the run.
    """
    runs = {run: _with_keys(records) for run, records in runs.items()}
    texts = list(dict.fromkeys(name for records in runs.values() for name in judged_texts(records)))
    if not texts:
        raise GatelensError("there is no frontier to draw: no run has evaluated held-out text yet.")
    figure = Figure(figsize=(1.9 + 2.6 * len(texts), 4.2), layout="constrained")
    axes = figure.subplots(2, len(texts), sharex=True, sharey="row", squeeze=False)
    lines = colours(runs)
    all_keys: list[float] = []
    for (above, below), name in zip(axes.T, texts, strict=True):
        above.axhline(0, color="0.6", linewidth=0.8, linestyle="--")
        for run, records in runs.items():
            judged = _judged_on(name, records)
            keys = _column(judged, f"{name} keys per query")
            colour, line = lines[run]
            style = {"color": colour, "linestyle": line, "marker": "o", "markersize": 3}
            above.plot(keys, _column(judged, f"{name} above dense"), **style, label=shown(run))
            below.plot(keys, _column(judged, f"{name} kl"), **style)
            all_keys += keys
        above.set_title(shown(name))
        below.set(xlabel="open keys per query and head")
        for axis in (above, below):
            axis.grid()
    for row in axes:
        for axis in row:
            _log_axis(axis, "x", all_keys)
    axes[0, 0].set_ylabel("loss above dense,\nnats per token")
    axes[1, 0].set_ylabel("KL from dense,\nnats per token")
    axes[0, -1].legend(loc="upper left", bbox_to_anchor=(1.01, 1), borderaxespad=0)
    figure.suptitle(shown(title))
    return figure


def judged_texts(judged: Records) -> list[str]:
    """The names of the texts that were judged, in the order of their columns."""
    columns = dict.fromkeys(key for record in judged for key in record if key.endswith(" open"))
    return [column.removesuffix(" open") for column in columns]


def has_keys(judged: Records) -> bool:
    """Whether a frontier can be drawn: version 0.1 did not measure open keys per query."""
    return bool(_with_keys(judged))


def _with_keys(judged: Records) -> Records:
    """The records that have open keys per query."""
    return [record for record in judged if any(column.endswith(" keys per query") for column in record)]


def _judged_on(text: str, judged: Records) -> Records:
    """The records of one text. A run that was resumed may have started or stopped judging it later than the others."""
    return [record for record in judged if f"{text} open" in record]


def _column(records: Records, name: str) -> list[float]:
    try:
        return [float(record[name]) for record in records]
    except (KeyError, TypeError, ValueError) as error:
        raise GatelensError(
            f"a line of the training log has no number '{name}': the file is damaged; run the job again."
        ) from error


def _percent(shares: Sequence[float]) -> list[float]:
    return [100 * share for share in shares]


def _log_axis(axes: Axes, which: str, values: Sequence[float]) -> None:
    """Give an axis a log scale around these values that spans at least a factor of 20."""
    known = [value for value in values if value > 0] or [100.0]
    low, high = min(known) / 1.3, max(known) * 1.3
    log_axis(axes, which, min(low, high / 20), high, "{:g}".format, times=(1, 2, 5))
