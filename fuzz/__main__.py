"""Try 20,000 damaged inputs: ``python -m fuzz [--inputs N] [--seed N] [--out FOLDER] [KIND ...]``.

An input fails if it raises anything but a `GatelensError`, takes more than 20 seconds of processor time, or more than
1 GB. The inputs that fail are written to the folder, each with its error.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

import torch

from fuzz.harness import limit_memory, save, survey
from fuzz.targets import TARGETS


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m fuzz", description=__doc__.splitlines()[0])
    parser.add_argument("kinds", nargs="*", metavar="KIND", help=f"one of {', '.join(TARGETS)}; default: all")
    parser.add_argument("--inputs", type=int, default=20_000, help="inputs of all kinds together")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("runs/fuzz"), help="where inputs that fail are written")
    chosen = parser.parse_args()
    for name in chosen.kinds:
        if name not in TARGETS:
            parser.error(f"no kind '{name}': there are {', '.join(TARGETS)}")
    torch.set_num_threads(1)
    targets = [TARGETS[name] for name in chosen.kinds or TARGETS]
    for target in targets:  # imports and valid inputs take memory once, and are not counted
        survey(target, 2, chosen.seed)
    limit_memory(1.0)
    failed, total = 0, sum(target.share for target in targets)
    for target in targets:
        start, examples = time.perf_counter(), max(1, round(chosen.inputs * target.share / total))
        errors = survey(target, examples, chosen.seed)
        save(errors, target, chosen.out)
        seconds = time.perf_counter() - start
        print(f"{target.name}: {examples:,} inputs, {len(errors)} errors, {seconds:.0f} s", flush=True)
        for error in errors:
            print(f"  {error}".encode(errors="backslashreplace").decode(), flush=True)
        failed += len(errors)
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
