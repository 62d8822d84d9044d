"""Train the built-in model `sparse-smollm2`: SmolLM2 with sparse attention. Takes hours on one core.

Run it from the top of the repository. If it is killed, the same command resumes it:

    nohup python examples/sparse_smollm2.py runs > sparse-smollm2.log 2>&1 &

It first writes the text (`sparse_smollm2_text.py`), and then does what

    gatelens sparsify smollm2 --text mixture.toml --steps ... --keys ... --bf16 --no-merge --out ...

does, with the settings below. wikitext2-test and sherlock-holmes are held out: the model is evaluated on them and never
trained on them, nor on the tasks. `pack_sparse_smollm2.py` makes the built-in model from the result.
"""

import sys
from pathlib import Path

import torch
from sparse_smollm2_text import HELD_OUT, write_texts

import gatelens
from gatelens.sparse.sparsify import SparsifySettings, sparsify

SETTINGS = SparsifySettings(
    steps=2200,
    keys=0.85,
    ramp=0.5,
    cooldown=0.35,
    bf16=True,
    merge=False,
    checkpoint_every=25,
    judge_every=250,
)


def run_folder(folder: Path) -> Path:
    return folder / "sparse-smollm2"


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)  # attention weights near 0 are slow to compute with otherwise
    mixture = write_texts(folder / "sparse-smollm2-text", lambda: gatelens.load("smollm2"))
    sparsify(
        gatelens.load("smollm2"),
        mixture,
        SETTINGS,
        out=run_folder(folder),
        held_out=list(HELD_OUT),
        show=True,
    )


if __name__ == "__main__":
    main(Path(sys.argv[1]))
