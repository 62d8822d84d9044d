"""What the interactive parts of the page show, as plain JSON: circuit graphs, head maps and attention.

The page gets only what a person can look at: the first 1,000 edges of a circuit, and the strongest pairs of tokens of a
head. Whole attention patterns are separate files, which the page loads when they are asked for.
"""

from gatelens.report._views.attention import attention_views
from gatelens.report._views.circuits import circuit_views
from gatelens.report._views.heads import head_views

__all__ = ["attention_views", "circuit_views", "head_views"]
