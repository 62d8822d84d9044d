"""``python -m gatelens`` is the command line."""

from gatelens.cli import main

main()
