"""Train the built-in model `sparse-smollm2`: SmolLM2 with sparse attention. Takes hours on one core.

Run it from the top of the repository. If it is killed, the same command resumes it:

    nohup python examples/sparse_smollm2.py runs > sparse-smollm2.log 2>&1 &

It first writes the text (`sparse_smollm2_text.py`). Then it trains three times, each time from the model before: to
one open key per query and head, to half a key with half of the heads idle, which is the built-in model, and a little
back, to see how many answers recover. It does what

    gatelens sparsify smollm2 --text mixture.toml --steps ... --keys ... --bf16 --no-merge --out RUN
    gatelens sparsify smollm2 --text mixture.toml --start RUN --steps ... --keys ... --bf16 --no-merge --out NEXT

do, with the settings below. wikitext2-test and sherlock-holmes are held out: the model is evaluated on them and never
trained on them, nor on the tasks. `pack_sparse_smollm2.py` makes the built-in model from the result.
"""

import sys
from pathlib import Path

import torch
from sparse_smollm2_text import HELD_OUT, write_texts

import gatelens
from gatelens.sparse.sparsify import SparsifySettings, sparsify

TO_ONE_KEY = SparsifySettings(
    steps=2200,
    batch=2,
    length=256,
    lengths=(32, 64, 64, 128, 128, 256, 256),
    keys=0.85,
    ramp=0.5,
    cooldown=0.35,
    bf16=True,
    merge=False,
    checkpoint_every=25,
    judge_every=250,
)
"""From all keys to one open key per query and head. The penalty is mostly on the total, which costs the least loss."""

TO_HALF_KEY = TO_ONE_KEY.replace(steps=2600, keys=0.5, ramp=0.55, cooldown=0.4, total_share=0.1)
"""From there to half a key. The penalty is mostly per head: heads become idle on text that does not use them."""

RECOVER = TO_HALF_KEY.replace(
    steps=1200, keys=0.68, ramp=0.05, cooldown=0.8, total_share=0.0, learning_rate=6e-4, multiplier=8.0, seed=1
)
"""Keys rise a little and stay, heads stay idle, and the learning rate falls for most of the run: answers recover."""

RUNS = {"to-one-key": TO_ONE_KEY, "to-half-key": TO_HALF_KEY, "recover": RECOVER}
"""The settings of each run, in the order in which they are made."""

BUILT_IN = "to-half-key"
"""The run whose result is the built-in model."""


def run_folder(folder: Path, name: str) -> Path:
    return folder / f"sparse-smollm2-{name}"


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)  # attention weights near 0 are slow to compute with otherwise
    mixture = write_texts(folder / "sparse-smollm2-text", lambda: gatelens.load("smollm2"))
    start = None
    for name, settings in RUNS.items():
        out = run_folder(folder, name)
        if not (out / "adapter.safetensors").exists():
            dense = gatelens.load("smollm2")
            sparsify(dense, mixture, settings, out=out, held_out=list(HELD_OUT), start=start, show=True)
        start = out


if __name__ == "__main__":
    main(Path(sys.argv[1]))
