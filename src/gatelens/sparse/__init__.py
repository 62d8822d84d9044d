"""Gated attention: the operator, its place in a Hugging Face model, and post-training."""
