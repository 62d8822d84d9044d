"""Figures from saved results: nothing here needs a model."""
