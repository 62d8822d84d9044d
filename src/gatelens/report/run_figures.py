"""The figures that the command line leaves in a run folder, drawn from the saved files."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from matplotlib.figure import Figure
from torch import Tensor

from gatelens.gates.roles import KINDS
from gatelens.measures.contrast_result import load_contrast
from gatelens.measures.relations_result import load_relations
from gatelens.measures.roles_result import load_roles
from gatelens.report._reading import sparsify_run
from gatelens.report.figures import ablation_figure, head_maps, relations_figure, save_figure, training_figure
from gatelens.runtime.files import read_json
from gatelens.runtime.run_folder import ASKED


def draw_run(folder: str | Path, formats: Sequence[str] = ("png",)) -> list[Path]:
    """Draw the figures of a finished run into its folder.

    Arguments:
        folder: the run folder.
        formats: any of png, svg and pdf.

    Returns:
        The files that were written; none if this kind of run has no figures of its own.
    """
    folder = Path(folder)
    kind = read_json(folder / ASKED).get("kind") if (folder / ASKED).exists() else "sparsify"
    draw = _FIGURES.get(str(kind))
    figures = {} if draw is None else draw(folder)
    return [path for name, figure in figures.items() for path in save_figure(figure, folder / name, formats)]


def _gate_figures(folder: Path) -> dict[str, Figure]:
    result = load_roles(folder)
    maps = {kind: result.roles.kind(kind).mean(0) for kind in KINDS}
    return {
        "roles": head_maps(maps, f"{result.task} in {result.model}"),
        "ablation": ablation_figure({result.task: {result.model: result.curves}}),
    }


def _contrast_figures(folder: Path) -> dict[str, Figure]:
    result = load_contrast(folder)
    title = f"keep {result.keep}, lose {result.lose}, in {result.model}"
    return {"gates": head_maps({"gates": result.contrast.gates.mean(0)}, title, "mean gate")}


def _relations_figures(folder: Path) -> dict[str, Figure]:
    result = load_relations(folder)
    gates: dict[str, list[Tensor]] = {}
    for fit in result.fits:
        gates.setdefault(f"keep {fit.keep}", []).append(fit.contrast.gates)
    maps = {name: torch.cat(fits).mean(0) for name, fits in gates.items()}
    return {
        "accuracy": relations_figure(result),
        "gates": head_maps(maps, f"contrastive gates of relations in {result.model}", "mean gate"),
    }


def _sparsify_figures(folder: Path) -> dict[str, Figure]:
    run = sparsify_run(folder)
    return {"training": training_figure(run.log, run.judged, run.target, run.name)}


_FIGURES: dict[str, Callable[[Path], dict[str, Figure]]] = {
    "gate": _gate_figures,
    "contrast": _contrast_figures,
    "relations": _relations_figures,
    "sparsify": _sparsify_figures,
}
