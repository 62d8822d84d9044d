"""The command line: one subcommand for each job. Functions import torch themselves, so ``--help`` is fast."""

from gatelens.cli import look, circuits, roles, sparse, studies  # noqa: F401, I001  in the order of the help
from gatelens.cli.app import COMMANDS, main, make_app

__all__ = ["COMMANDS", "main", "make_app"]
