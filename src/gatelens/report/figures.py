"""All figures: each takes loaded results and returns a matplotlib figure; ``save_figure`` writes it."""

from gatelens.report.attention_maps import attention_maps
from gatelens.report.circuit_graph import circuit_figure
from gatelens.report.kept import kept_figure
from gatelens.report.roles import STYLES, ablation_figure, head_maps
from gatelens.report.style import save_figure, task_title
from gatelens.report.training import loss_against_open_figure, open_edges_figure, training_figure

__all__ = [
    "STYLES",
    "ablation_figure",
    "attention_maps",
    "circuit_figure",
    "head_maps",
    "kept_figure",
    "loss_against_open_figure",
    "open_edges_figure",
    "save_figure",
    "task_title",
    "training_figure",
]
