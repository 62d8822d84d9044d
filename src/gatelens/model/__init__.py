"""What a model is made of: its parts, the graph of its components, and the loaded model itself."""

from gatelens.model.model import Model

__all__ = ["Model"]
