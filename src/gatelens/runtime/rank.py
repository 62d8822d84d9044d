"""Which of several processes this one is, as its launcher says. Needs no torch, so that help comes at once."""

import os


def n_processes() -> int:
    """The number of processes that were started together for this run."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def is_main() -> bool:
    """Whether this process is the one that writes files and prints."""
    return int(os.environ.get("RANK", "0")) == 0
