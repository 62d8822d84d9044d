"""Gated attention: the operator, its place in a Hugging Face model, and post-training.

Importing this package registers gated attention with transformers. After ``import gatelens.sparse``, plain
``AutoModelForCausalLM.from_pretrained`` opens a sparse model that gatelens saved.
"""

from gatelens.sparse import in_model as in_model
