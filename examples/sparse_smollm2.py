"""Train the built-in model `sparse-smollm2`: SmolLM2 with sparse attention. Takes hours on one core.

Run it from the top of the repository; killed at any moment, the same command continues where it was:

    nohup nice -n 5 python examples/sparse_smollm2.py > runs/sparse-smollm2/output.log 2>&1 &

Every stage starts from the last one's weights with a fresh optimizer. The first closes most gates within a hundred
steps, at large learning rates and a KL above its target; the second brings the KL back to the target, the third spends
what that has left. wikitext2-test and sherlock-holmes are held out: they are looked at, never trained on. Nor are the
tasks. `pack_sparse_smollm2.py` makes the built-in model of the last checkpoint.
"""

from typing import Any

import torch

import gatelens
from gatelens.methods.sparsify import SparsifySettings, sparsify

OUT = "runs/sparse-smollm2"
DATA = "../shared/data/text"
NOVELS = ("great-expectations", "pride-and-prejudice", "tale-of-two-cities")
TRAIN = [f"{DATA}/{name}.txt" for name in ("wikitext2-valid", *NOVELS)]
HELD_OUT = [f"{DATA}/{name}.txt" for name in ("wikitext2-test", "sherlock-holmes")]


def stage(seed: int, **changes: Any) -> SparsifySettings:
    """Settings of a stage: two sequences of 256 tokens a step, two in five of them written by the dense model."""
    often: dict[str, Any] = {"checkpoint_every": 20, "judge_every": 80}
    text: dict[str, Any] = {"batch": 2, "length": 256, "self_text": 160, "self_share": 0.4}
    return SparsifySettings(seed=seed, bf16=True, merge=False, **text, **often, **changes)


STAGES = [
    stage(
        seed=0,
        steps=120,
        target=0.08,
        learning_rate=2e-3,
        bias_learning_rate=0.08,
        multiplier=5.0,
        multiplier_damping=0.0,
    ),
    stage(
        seed=1,
        steps=320,
        target=0.08,
        learning_rate=1e-3,
        bias_learning_rate=0.03,
        multiplier=8.0,
        cooldown=0.7,
    ),
    stage(
        seed=2,
        steps=160,
        target=0.14,
        learning_rate=1.5e-3,
        bias_learning_rate=0.06,
        multiplier=8.0,
        cooldown=0.5,
    ),
]


def main() -> None:
    torch.set_num_threads(1)
    dense = gatelens.load("smollm2")
    start = None
    for number, settings in enumerate(STAGES, 1):
        out = f"{OUT}/{number}"
        sparsify(dense, TRAIN, settings, out=out, held_out=HELD_OUT, start=start, show=True)
        start = out


if __name__ == "__main__":
    main()
