"""The figures. Each function takes loaded results and returns a matplotlib figure; `save_figure` writes it to files."""

from gatelens.report.figures._attention_maps import attention_maps
from gatelens.report.figures._circuit_graph import circuit_figure
from gatelens.report.figures._kept import kept_figure
from gatelens.report.figures._methods import methods_figure
from gatelens.report.figures._open_edges import open_edges_figure
from gatelens.report.figures._relations import relations_figure
from gatelens.report.figures._role_circuit import role_circuit_figure
from gatelens.report.figures._role_distribution import role_distribution_figure
from gatelens.report.figures._roles import STYLES, ablation_figure, head_maps
from gatelens.report.figures._saving import FORMATS, save_figure
from gatelens.report.figures._text import task_title
from gatelens.report.figures._thresholds import thresholds_figure
from gatelens.report.figures._training import frontier_figure, training_figure

__all__ = [
    "FORMATS",
    "STYLES",
    "ablation_figure",
    "attention_maps",
    "circuit_figure",
    "frontier_figure",
    "head_maps",
    "kept_figure",
    "methods_figure",
    "open_edges_figure",
    "relations_figure",
    "role_circuit_figure",
    "role_distribution_figure",
    "save_figure",
    "task_title",
    "thresholds_figure",
    "training_figure",
]
