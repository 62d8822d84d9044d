"""Heads of a gate run at 0, as fitted (G+) and at 1: the interfering ones, and those that follow in their order.

    python examples/half_open_heads.py results/head-ablation-smollm2/cells/roles-math-smollm2 50

Prints the log-probability of the held-out responses, mean over examples, for each seed. Heads that do best as fitted
are best half open: they neither interfere nor are they irrelevant.
"""

import sys

import torch

import gatelens as gl
from gatelens.ablation import ablation_order, forced
from gatelens.batches import as_responses, split
from gatelens.gate import load_roles
from gatelens.gates.responses import response_log_probs


def main(folder: str, most: int) -> None:
    run = load_roles(folder)
    model, settings = gl.load(run.model), run.settings
    whole = as_responses(gl.task(run.task, model, n=settings.n + settings.held_out, seed=settings.seed))
    _, held_out = split(whole, settings.n)
    for seed, plus in enumerate(run.roles.plus):
        order = ablation_order(run.roles, "interference", seed)
        count = int(run.roles.of_kind("interference")[seed].sum())
        rows = [plus, *(forced(plus, heads, x) for heads in (order[:count], order[count:most]) for x in (0.0, 1.0))]
        sums = torch.zeros(len(rows))
        with torch.no_grad():
            for batch in held_out.batches(4):
                sums += response_log_probs(model, batch, torch.stack(rows)).sum(1)
        fitted, closed, opened, next_closed, next_opened = (sums / len(held_out)).tolist()
        gates = plus.flatten()[order[count:most]]
        print(
            f"seed {seed}: as fitted {fitted:.1f}; the {count} interfering heads at 0 {closed:.1f}, at 1 {opened:.1f}; "
            f"the next, up to {most}, with gates from {gates.min():.2f} to {gates.max():.2f}, at 0 {next_closed:.1f}, "
            f"at 1 {next_opened:.1f}"
        )


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
