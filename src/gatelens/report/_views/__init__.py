"""What the interactive parts of the page show, as plain JSON: curves, tables of heads, circuit graphs, attention, maps.

The page gets only what a person can look at: the first edges of a circuit, and the strongest pairs of tokens of a head.
Whole attention patterns are separate files, which the page loads when they are asked for.
"""

from gatelens.report._views.attention import attention_views
from gatelens.report._views.circuits import circuit_views
from gatelens.report._views.curves import curve_views
from gatelens.report._views.head_tables import task_views
from gatelens.report._views.maps import map_views

__all__ = ["attention_views", "circuit_views", "curve_views", "map_views", "task_views"]
