"""Find the few heads and edges of a language model that do a job, and prove it.

Names are imported when they are first used, so that ``import gatelens`` and ``gatelens --help`` take no time.
"""

from __future__ import annotations

import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gatelens.errors import GatelensError as GatelensError
    from gatelens.gates.roles import HeadRoles as HeadRoles
    from gatelens.jobs.circuit import find_circuit as find_circuit
    from gatelens.jobs.roles import find_roles as find_roles
    from gatelens.loading.loader import load as load
    from gatelens.measures.ablation import AblationCurve as AblationCurve
    from gatelens.measures.ablation import ablation_curve as ablation_curve
    from gatelens.measures.circuit_result import CircuitSettings as CircuitSettings
    from gatelens.measures.curves import Curve as Curve
    from gatelens.measures.curves import CurveSettings as CurveSettings
    from gatelens.measures.curves import explained_effect as explained_effect
    from gatelens.measures.curves import multiplier as multiplier
    from gatelens.measures.mediation import compare_with_patching as compare_with_patching
    from gatelens.measures.roles_result import RolesResult as RolesResult
    from gatelens.measures.roles_result import RolesSettings as RolesSettings
    from gatelens.measures.roles_result import load_roles as load_roles
    from gatelens.methods.attribution import attribute_attention as attribute_attention
    from gatelens.methods.attribution import attribute_edges as attribute_edges
    from gatelens.methods.attribution import attribute_heads as attribute_heads
    from gatelens.methods.contrast import ContrastSettings as ContrastSettings
    from gatelens.methods.contrast import fit_contrast as fit_contrast
    from gatelens.methods.head_gating import HeadGatingSettings as HeadGatingSettings
    from gatelens.methods.head_gating import fit_head_gates as fit_head_gates
    from gatelens.methods.patching import patch_attention as patch_attention
    from gatelens.methods.patching import patch_edges as patch_edges
    from gatelens.methods.patching import patch_heads as patch_heads
    from gatelens.model import Model as Model
    from gatelens.model.components import Head as Head
    from gatelens.report.page import write_report as write_report
    from gatelens.sparse.gated_attention import gated_attention as gated_attention
    from gatelens.sparse.sparsify import SparsifySettings as SparsifySettings
    from gatelens.sparse.sparsify import sparsify as sparsify
    from gatelens.tasks import task as task

__version__ = "0.1.0"

_WHERE = {
    "AblationCurve": "gatelens.measures.ablation",
    "CircuitSettings": "gatelens.jobs.circuit",
    "Curve": "gatelens.measures.curves",
    "CurveSettings": "gatelens.measures.curves",
    "GatelensError": "gatelens.errors",
    "Head": "gatelens.model.components",
    "ContrastSettings": "gatelens.methods.contrast",
    "HeadGatingSettings": "gatelens.methods.head_gating",
    "HeadRoles": "gatelens.gates.roles",
    "Model": "gatelens.model",
    "RolesResult": "gatelens.measures.roles_result",
    "RolesSettings": "gatelens.measures.roles_result",
    "SparsifySettings": "gatelens.sparse.sparsify",
    "ablation_curve": "gatelens.measures.ablation",
    "compare_with_patching": "gatelens.measures.mediation",
    "attribute_attention": "gatelens.methods.attribution",
    "attribute_edges": "gatelens.methods.attribution",
    "attribute_heads": "gatelens.methods.attribution",
    "explained_effect": "gatelens.measures.curves",
    "find_circuit": "gatelens.jobs.circuit",
    "find_roles": "gatelens.jobs.roles",
    "fit_contrast": "gatelens.methods.contrast",
    "fit_head_gates": "gatelens.methods.head_gating",
    "gated_attention": "gatelens.sparse.gated_attention",
    "load": "gatelens.loading.loader",
    "load_roles": "gatelens.measures.roles_result",
    "multiplier": "gatelens.measures.curves",
    "patch_attention": "gatelens.methods.patching",
    "patch_edges": "gatelens.methods.patching",
    "patch_heads": "gatelens.methods.patching",
    "sparsify": "gatelens.sparse.sparsify",
    "task": "gatelens.tasks",
    "write_report": "gatelens.report.page",
}
__all__ = sorted(_WHERE)

# Importing gatelens.sparse registers gated attention with transformers. That imports transformers' model code, which
# takes seconds, so it is done here only if that code is loaded anyway.
if "transformers.modeling_utils" in sys.modules:
    import_module("gatelens.sparse")


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module 'gatelens' has no attribute {name!r}: it has {', '.join(__all__)}")
    return getattr(import_module(_WHERE[name]), name)


def __dir__() -> list[str]:
    return __all__
