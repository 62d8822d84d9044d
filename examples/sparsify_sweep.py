"""Compare recipes of sparse post-training on smollm2, at equal training tokens.

    python examples/sparsify_sweep.py runs results/sparsify-sweep            100,000 tokens for each recipe
    python examples/sparsify_sweep.py runs results/sparsify-sweep 25000

Every recipe differs from the default in one thing. All share one teacher cache, so that the dense model reads a
sequence once. The control trains the same adapters on the same tokens with all gates open: what it gains on held-out
text is adaptation, and the rest of a recipe's difference to it is the price of sparsity. A run is a folder, so that the
same command resumes. The table and the figure are those of `gatelens frontier`, written again after each recipe, with
the settings and the numbers of every step beside them.
"""

import shutil
import sys
from pathlib import Path

import torch
from sparse_smollm2_text import HELD_OUT, write_texts

import gatelens
from gatelens.report.frontier import frontier
from gatelens.sparse.sparsify import SparsifySettings, sparsify

TOKENS, KEYS = 100_000, 1.0
NUMBERS = ("settings.json", "log.csv", "judged.csv")
RECIPES: dict[str, dict[str, object]] = {
    "default": {},
    "control": {"hold": "open"},
    "total": {"penalty": "total"},
    "per-head": {"penalty": "per-head", "total_share": 0.0},
    "score-gates": {"gate": "score"},
    "no-rest-values": {"rest": False},
    "all-linear": {"projections": ("all-linear",)},
    "rank-4": {"rank": 4},
    "one-length": {"lengths": ()},
    "per-query": {"penalty": "per-query"},
}


def main(folder: Path, out: Path, tokens: int) -> None:
    smollm2 = gatelens.load("smollm2")
    texts = write_texts(folder / "sparse-smollm2-text", lambda: smollm2)
    default = SparsifySettings(batch=2, length=256, keys=KEYS, bf16=True, merge=False, checkpoint_every=25)
    steps = tokens // (default.batch * default.length)
    default = default.replace(steps=steps, judge_every=steps)
    sweep, finished = folder / f"sweep-{tokens}", []
    for name, changes in RECIPES.items():
        run = sweep / name
        if not (run / "result.json").exists():
            cache = sweep / "teacher"
            settings = default.replace(**changes)
            sparsify(smollm2, texts, settings, run, held_out=list(HELD_OUT), teacher_cache=cache, show=True)
        (out / name).mkdir(parents=True, exist_ok=True)
        for file in NUMBERS:
            shutil.copyfile(run / file, out / name / file)
        finished.append(run)
        frontier(finished, out)


if __name__ == "__main__":
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)  # attention weights near 0 are slow to compute with otherwise
    main(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]) if len(sys.argv) > 3 else TOKENS)
