"""What do two choices of head gating change: the clipped gradient, and the same examples for all seeds?

    OMP_NUM_THREADS=1 python examples/gating_choices.py smollm2 syntax --out runs/gating-choices

The gates are fitted three times, from the same uniform starts: as by default, with the gradient clipped at norm 1, and
with another order of the examples for each seed. The script prints for each kind of score

- clip: the mean absolute difference between the scores with and without the clip, over all heads and seeds, and the
  share of heads whose role (a score of 0.5 or more) differs;
- spread: the standard deviation of a head's score between seeds, mean over heads, with the same examples for all seeds
  and with another order for each.

Scores are between 0 and 1. The same command resumes a killed run. Cost: 9 x updates x seeds forward-backwards of
a batch.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import gatelens as gl
from gatelens.gates.roles import KINDS, HeadRoles
from gatelens.runtime.files import write_csv


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("task")
    parser.add_argument("--out", type=Path, required=True, help="folder for the fits and choices.csv")
    parser.add_argument("--n", type=int, default=96, help="examples to fit on")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--updates", type=int, default=24)
    parser.add_argument("--batch", type=int, default=4)
    asked = parser.parse_args()
    model = gl.load(asked.model)
    task = gl.task(asked.task, model, n=asked.n, seed=0)
    plain = gl.HeadGatingSettings(seeds=asked.seeds, updates=asked.updates, batch=asked.batch, autocast=True)
    choices = {"default": plain, "clip": plain.replace(clip=1.0), "own-order": plain.replace(paired=False)}
    fitted = {
        name: gl.fit_head_gates(model, task, settings, context=gl.Context.in_folder(asked.out / name))
        for name, settings in choices.items()
    }
    records = [record(kind, fitted) for kind in KINDS]
    write_csv(asked.out / "choices.csv", list(records[0]), [list(line.values()) for line in records])
    for line in records:
        print(
            ", ".join(
                f"{name} {value if isinstance(value, str) else format(value, '.3f')}" for name, value in line.items()
            )
        )


def record(kind: str, fitted: dict[str, HeadRoles]) -> dict[str, str | float]:
    """The effect of both choices on the scores of one kind."""
    default, clipped, own_order = (fitted[name] for name in ("default", "clip", "own-order"))
    difference = (default.kind(kind) - clipped.kind(kind)).abs().mean()
    changed = (default.is_kind(kind) != clipped.is_kind(kind)).float().mean()
    return {
        "kind": kind,
        "difference by clip": float(difference),
        "roles changed by clip": float(changed),
        "spread, same examples": float(default.kind(kind).std(0).mean()),
        "spread, own order": float(own_order.kind(kind).std(0).mean()),
    }


if __name__ == "__main__":
    main()
