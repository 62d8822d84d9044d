"""Set heads of a finished `gatelens gate` run to 0, to their fitted gate G+, and to 1, and compare the responses.

    python examples/half_open_heads.py results/head-ablation-smollm2/cells/roles-math-smollm2 50

There are two groups: the interfering heads, and the heads that follow them in the ranking. The script prints for each
seed the log-probability of the held-out responses (mean over examples) with a whole group closed, as fitted and open,
and for how many heads of the group each of the three is best if only that head is changed.
"""

import sys

import torch

import gatelens as gl
from gatelens.gates.responses import score_responses
from gatelens.measures.ablation import ablation_order, forced
from gatelens.tasks.batches import as_responses, split


def main(folder: str, most: int) -> None:
    run = gl.load_roles(folder)
    model, settings = gl.load(run.model), run.settings
    whole = as_responses(gl.task(run.task, model, n=settings.n + settings.held_out, seed=settings.seed))
    _, held_out = split(whole, settings.n)
    for seed, plus in enumerate(run.roles.plus):
        order = ablation_order(run.roles, "interference", seed)
        count = int(run.roles.is_kind("interference")[seed].sum())
        for group_name, heads in (("interfering", order[:count]), ("next in order", order[count:most])):
            groups = [heads, *heads.split(1)]  # all together, then each alone
            rows = [plus, *(forced(plus, group, value) for group in groups for value in (0.0, 1.0))]
            log_probs = score_responses(model, held_out, torch.stack(rows)).log_probs.mean(1)
            fitted, ends = log_probs[0], log_probs[1:].view(-1, 2)  # (group, closed or open)
            best = torch.cat([ends[1:], fitted.expand(len(heads), 1)], 1).argmax(1).bincount(minlength=3).tolist()
            print(
                f"seed {seed}, {len(heads)} {group_name}, gates {plus.flatten()[heads].min():.2f} to "
                f"{plus.flatten()[heads].max():.2f}: log p {ends[0, 0]:.1f} closed, {fitted:.1f} as fitted, "
                f"{ends[0, 1]:.1f} open; one at a time best closed {best[0]}, as fitted {best[2]}, open {best[1]}",
                flush=True,
            )


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
