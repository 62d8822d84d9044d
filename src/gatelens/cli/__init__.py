"""The command line: one subcommand for each job. Heavy imports are inside, so that ``--help`` answers at once."""

from gatelens.cli import look, circuits, roles, sparse, studies  # noqa: F401, I001  in the order of the help
from gatelens.cli.app import COMMANDS, main, make_app

__all__ = ["COMMANDS", "main", "make_app"]
