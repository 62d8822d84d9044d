"""Mutation testing: see ``__main__.py``."""
