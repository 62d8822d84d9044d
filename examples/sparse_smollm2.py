"""Train the built-in model `sparse-smollm2`: SmolLM2 with sparse attention. Takes hours on one core.

Run it from the top of the repository; killed at any moment, the same command continues where it was:

    nohup nice -n 5 python examples/sparse_smollm2.py > runs/sparse-smollm2/output.log 2>&1 &

The first stage closes most gates within a hundred steps, at large learning rates and a KL above its target. The second
one starts from there with a fresh optimizer, holds the target and lets learning rates fall to 0. wikitext2-test and
sherlock-holmes are held out: they are looked at, never trained on. Nor are the tasks.
"""

import torch

import gatelens
from gatelens.methods.sparsify import SparsifySettings, sparsify

torch.set_num_threads(1)
OUT = "runs/sparse-smollm2"
DATA = "../shared/data/text"
TRAIN = [
    f"{DATA}/{name}.txt"
    for name in ("wikitext2-valid", "great-expectations", "pride-and-prejudice", "tale-of-two-cities")
]
HELD_OUT = [f"{DATA}/{name}.txt" for name in ("wikitext2-test", "sherlock-holmes")]
BOTH = {
    "batch": 2,
    "length": 256,
    "target": 0.08,
    "self_text": 160,
    "self_share": 0.4,
    "bf16": True,
    "checkpoint_every": 20,
    "judge_every": 80,
    "merge": False,
}
FIRST = SparsifySettings(
    steps=120,
    learning_rate=2e-3,
    bias_learning_rate=0.08,
    multiplier=5.0,
    multiplier_damping=0.0,
    **BOTH,
)
SECOND = SparsifySettings(
    steps=320,
    learning_rate=1e-3,
    bias_learning_rate=0.03,
    multiplier=8.0,
    cooldown=0.7,
    seed=1,
    **BOTH,
)

if __name__ == "__main__":
    dense = gatelens.load("smollm2")
    sparsify(dense, TRAIN, FIRST, out=f"{OUT}/1", held_out=HELD_OUT, show=True)
    sparsify(dense, TRAIN, SECOND, out=f"{OUT}/2", held_out=HELD_OUT, start=f"{OUT}/1", show=True)
