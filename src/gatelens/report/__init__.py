"""Figures and the report page. Everything here reads saved files: no model is loaded."""
