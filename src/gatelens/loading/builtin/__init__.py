"""Models that come with gatelens as adapters of another built-in model, made by the scripts in examples/."""

from __future__ import annotations

from pathlib import Path

ADAPTERS = {"sparse-smollm2": Path(__file__).parent / "sparse_smollm2"}
"""Folders that `gatelens.sparse.adapters.apply_adapter` reads, by built-in name."""
