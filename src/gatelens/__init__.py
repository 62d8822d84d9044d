"""Find the few heads and edges of a language model that do a task, and prove it.

All public names are here, in the order of the rooms of this package. They are imported when they are first used, so
that ``import gatelens`` and ``gatelens --help`` are fast.
"""

from __future__ import annotations

import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

from gatelens.version import __version__ as __version__

if TYPE_CHECKING:
    from gatelens.errors import GatelensError as GatelensError
    from gatelens.gates.attention import AttentionScores as AttentionScores
    from gatelens.gates.circuit import Circuit as Circuit
    from gatelens.gates.circuit import Explanation as Explanation
    from gatelens.gates.edges import EdgeScores as EdgeScores
    from gatelens.gates.heads import HeadScores as HeadScores
    from gatelens.gates.role_edges import RoleEdgeScores as RoleEdgeScores
    from gatelens.gates.roles import Contrast as Contrast
    from gatelens.gates.roles import ContrastAccuracy as ContrastAccuracy
    from gatelens.gates.roles import HeadRoles as HeadRoles
    from gatelens.gates.runs import Run as Run
    from gatelens.gates.scores import ScoredGate as ScoredGate
    from gatelens.gates.scores import Scores as Scores
    from gatelens.jobs.circuit import find_circuit as find_circuit
    from gatelens.jobs.contrast import find_contrast as find_contrast
    from gatelens.jobs.export import export_circuit as export_circuit
    from gatelens.jobs.relations import find_relations as find_relations
    from gatelens.jobs.roles import find_roles as find_roles
    from gatelens.jobs.study.file import Study as Study
    from gatelens.jobs.study.file import read_study as read_study
    from gatelens.jobs.study.run import run_study as run_study
    from gatelens.jobs.study.summary import Summary as Summary
    from gatelens.loading.convert import Converted as Converted
    from gatelens.loading.convert import convert_adapter as convert_adapter
    from gatelens.loading.convert import convert_checkpoint as convert_checkpoint
    from gatelens.loading.loader import load as load
    from gatelens.measures.ablation import AblationCurve as AblationCurve
    from gatelens.measures.ablation import ablation_curve as ablation_curve
    from gatelens.measures.attribution_graph import write_attribution_graph as write_attribution_graph
    from gatelens.measures.circuit_result import CircuitResult as CircuitResult
    from gatelens.measures.circuit_result import load_circuit as load_circuit
    from gatelens.measures.circuit_settings import CircuitSettings as CircuitSettings
    from gatelens.measures.contrast_result import ContrastResult as ContrastResult
    from gatelens.measures.contrast_result import TwoTaskSettings as TwoTaskSettings
    from gatelens.measures.contrast_result import load_contrast as load_contrast
    from gatelens.measures.counts import Count as Count
    from gatelens.measures.counts import Interval as Interval
    from gatelens.measures.counts import Multiplier as Multiplier
    from gatelens.measures.curves import Curve as Curve
    from gatelens.measures.curves import multiplier as multiplier
    from gatelens.measures.curves import pool as pool
    from gatelens.measures.describe import describe as describe
    from gatelens.measures.effect import CurveSettings as CurveSettings
    from gatelens.measures.effect import edges_effect as edges_effect
    from gatelens.measures.effect import explained_effect as explained_effect
    from gatelens.measures.exchange import read_graph as read_graph
    from gatelens.measures.exchange import write_graph as write_graph
    from gatelens.measures.head_attention import HeadAttention as HeadAttention
    from gatelens.measures.head_attention import attention as attention
    from gatelens.measures.head_table import HeadLine as HeadLine
    from gatelens.measures.head_table import HeadTable as HeadTable
    from gatelens.measures.mediation import PatchingComparison as PatchingComparison
    from gatelens.measures.mediation import compare_runs as compare_runs
    from gatelens.measures.mediation import compare_with_patching as compare_with_patching
    from gatelens.measures.relations_result import HeldOutRelation as HeldOutRelation
    from gatelens.measures.relations_result import RelationsResult as RelationsResult
    from gatelens.measures.relations_result import RelationsSettings as RelationsSettings
    from gatelens.measures.relations_result import load_relations as load_relations
    from gatelens.measures.role_summary import RoleSummary as RoleSummary
    from gatelens.measures.role_summary import summarise_runs as summarise_runs
    from gatelens.measures.roles_result import RolesResult as RolesResult
    from gatelens.measures.roles_result import RolesSettings as RolesSettings
    from gatelens.measures.roles_result import load_roles as load_roles
    from gatelens.measures.validity import Validity as Validity
    from gatelens.methods.attribution import attribute as attribute
    from gatelens.methods.attribution import attribute_attention as attribute_attention
    from gatelens.methods.attribution import attribute_edges as attribute_edges
    from gatelens.methods.attribution import attribute_heads as attribute_heads
    from gatelens.methods.contrast import ContrastSettings as ContrastSettings
    from gatelens.methods.contrast import fit_contrast as fit_contrast
    from gatelens.methods.head_gating import HeadGatingSettings as HeadGatingSettings
    from gatelens.methods.head_gating import fit_head_gates as fit_head_gates
    from gatelens.methods.patching import patch as patch
    from gatelens.methods.patching import patch_attention as patch_attention
    from gatelens.methods.patching import patch_edges as patch_edges
    from gatelens.methods.patching import patch_heads as patch_heads
    from gatelens.methods.registry import score_gates as score_gates
    from gatelens.model import Model as Model
    from gatelens.model.components import Head as Head
    from gatelens.report.page import Report as Report
    from gatelens.report.page import write_report as write_report
    from gatelens.runtime.context import Context as Context
    from gatelens.sparse.gated_attention import gated_attention as gated_attention
    from gatelens.sparse.sparsify import Judgement as Judgement
    from gatelens.sparse.sparsify import SparsifySettings as SparsifySettings
    from gatelens.sparse.sparsify import evaluate as evaluate
    from gatelens.sparse.sparsify import sparsify as sparsify
    from gatelens.tasks import task as task
    from gatelens.tasks.base import CircuitTask as CircuitTask
    from gatelens.tasks.base import ResponseTask as ResponseTask

_MODULES = {
    # errors
    "gatelens.errors": ("GatelensError",),
    # runtime
    "gatelens.runtime.context": ("Context",),
    # model
    "gatelens.model": ("Model",),
    "gatelens.model.components": ("Head",),
    # tasks
    "gatelens.tasks": ("task",),
    "gatelens.tasks.base": ("CircuitTask", "ResponseTask"),
    # sparse
    "gatelens.sparse.gated_attention": ("gated_attention",),
    "gatelens.sparse.sparsify": ("Judgement", "SparsifySettings", "evaluate", "sparsify"),
    # gates
    "gatelens.gates.runs": ("Run",),
    "gatelens.gates.scores": ("ScoredGate", "Scores"),
    "gatelens.gates.heads": ("HeadScores",),
    "gatelens.gates.edges": ("EdgeScores",),
    "gatelens.gates.role_edges": ("RoleEdgeScores",),
    "gatelens.gates.attention": ("AttentionScores",),
    "gatelens.gates.circuit": ("Circuit", "Explanation"),
    "gatelens.gates.roles": ("Contrast", "ContrastAccuracy", "HeadRoles"),
    # loading
    "gatelens.loading.loader": ("load",),
    "gatelens.loading.convert": ("Converted", "convert_adapter", "convert_checkpoint"),
    # methods
    "gatelens.methods.registry": ("score_gates",),
    "gatelens.methods.patching": ("patch", "patch_attention", "patch_edges", "patch_heads"),
    "gatelens.methods.attribution": ("attribute", "attribute_attention", "attribute_edges", "attribute_heads"),
    "gatelens.methods.head_gating": ("HeadGatingSettings", "fit_head_gates"),
    "gatelens.methods.contrast": ("ContrastSettings", "fit_contrast"),
    # measures
    "gatelens.measures.counts": ("Count", "Interval", "Multiplier"),
    "gatelens.measures.curves": ("Curve", "multiplier", "pool"),
    "gatelens.measures.effect": ("CurveSettings", "edges_effect", "explained_effect"),
    "gatelens.measures.validity": ("Validity",),
    "gatelens.measures.describe": ("describe",),
    "gatelens.measures.head_table": ("HeadLine", "HeadTable"),
    "gatelens.measures.head_attention": ("HeadAttention", "attention"),
    "gatelens.measures.circuit_settings": ("CircuitSettings",),
    "gatelens.measures.circuit_result": ("CircuitResult", "load_circuit"),
    "gatelens.measures.ablation": ("AblationCurve", "ablation_curve"),
    "gatelens.measures.roles_result": ("RolesResult", "RolesSettings", "load_roles"),
    "gatelens.measures.contrast_result": ("ContrastResult", "TwoTaskSettings", "load_contrast"),
    "gatelens.measures.relations_result": (
        "HeldOutRelation",
        "RelationsResult",
        "RelationsSettings",
        "load_relations",
    ),
    "gatelens.measures.mediation": ("PatchingComparison", "compare_runs", "compare_with_patching"),
    "gatelens.measures.role_summary": ("RoleSummary", "summarise_runs"),
    "gatelens.measures.exchange": ("read_graph", "write_graph"),
    "gatelens.measures.attribution_graph": ("write_attribution_graph",),
    # jobs
    "gatelens.jobs.circuit": ("find_circuit",),
    "gatelens.jobs.roles": ("find_roles",),
    "gatelens.jobs.contrast": ("find_contrast",),
    "gatelens.jobs.relations": ("find_relations",),
    "gatelens.jobs.export": ("export_circuit",),
    "gatelens.jobs.study.file": ("Study", "read_study"),
    "gatelens.jobs.study.run": ("run_study",),
    "gatelens.jobs.study.summary": ("Summary",),
    # report
    "gatelens.report.page": ("Report", "write_report"),
}
_MODULE_OF = {name: module for module, names in _MODULES.items() for name in names}
__all__ = sorted(_MODULE_OF)

# Importing gatelens.sparse registers gated attention with transformers. That imports transformers' model code, which
# takes seconds, so it is done here only if that code is already loaded.
if "transformers.modeling_utils" in sys.modules:
    import_module("gatelens.sparse")


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'gatelens' has no attribute {name!r}: it has {', '.join(__all__)}")
    return getattr(import_module(_MODULE_OF[name]), name)


def __dir__() -> list[str]:
    return __all__
