"""Train the built-in model `sparse-smollm2`: SmolLM2 with sparse attention. Takes hours on one core.

Run it from the top of the repository. If it is killed, the same command resumes it:

    nohup nice -n 5 python examples/sparse_smollm2.py > sparse-smollm2.log 2>&1 &

Every stage starts from the weights of the stage before, with a new optimizer:

    1       closes most gates within a hundred steps, with large learning rates and a KL above its target
    2, 3    bring the KL back to the target, then close more gates
    4       Eight heads of the first two layers now have a third of all open edges, and their gates are so wide open
            that they have no gradient. This stage lowers their biases, adds Python code to the text, and constrains
            the cross-entropy as well as the KL.
    5       constrains the cross-entropy of each sequence, so that a gain on one kind of text does not make up for a
            loss on another
    6, 7    use the KL alone, with a fixed weight
    8       adds Python code that documents its parameters (stopped at step 460)
    9       adds short passages that are repeated, so that the model does not forget to copy from its context
    10-12   read much more of these passages, and more documented functions each (stage 10 was stopped at step 320)

`sparse_smollm2_text.py` writes the text. wikitext2-test and sherlock-holmes are held out: the model is evaluated on
them and never trained on them, nor on the tasks. `pack_sparse_smollm2.py` makes the built-in model from the last
checkpoint.
"""

from pathlib import Path
from typing import Any

import torch
from sparse_smollm2_text import HELD_OUT, PROSE, Mixture, write_code, write_own, write_twice

import gatelens
from gatelens.sparse.sparsify import SparsifySettings, sparsify

OUT = "runs/sparse-smollm2"
CODE, MORE_CODE, TWICE, WRITTEN = (f"{OUT}/{name}.txt" for name in ("code", "more-code", "twice", "written"))
MIXTURES = {
    10: Mixture(prose=(110, 60), code=(60, 60), functions=1, twice=250),
    11: Mixture(prose=(75, 60), code=(30, 30), functions=3, twice=150),
    12: Mixture(prose=(50, 50), code=(20, 20), functions=6, twice=100),
}


def stage(seed: int, fixed: float | None = None, **changes: Any) -> SparsifySettings:
    """The settings of a stage: two sequences of 256 tokens per step, of which the dense model wrote 40 %.

    Arguments:
        fixed: a constant weight of the KL; the target then has no effect.
    """
    if fixed is not None:
        changes |= {"target": 0.15, "multiplier": fixed, "multiplier_low": fixed, "multiplier_high": fixed}
    often: dict[str, Any] = {"checkpoint_every": 20, "judge_every": 100}
    text: dict[str, Any] = {"batch": 2, "length": 256, "self_text": 160, "self_share": 0.4}
    return SparsifySettings(seed=seed, bf16=True, merge=False, **{**text, **often, **changes})


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
    stage(
        seed=3,
        steps=320,
        constraint="cross-entropy",
        target=0.05,
        distill=5.0,
        most_open=0.5,
        learning_rate=1.5e-3,
        bias_learning_rate=0.05,
        multiplier=5.0,
        multiplier_damping=0.5,
        multiplier_smoothing=0.95,
    ),
    stage(
        seed=4,
        steps=120,
        constraint="cross-entropy",
        each_row=True,
        target=0.07,
        distill=6.0,
        learning_rate=1.5e-3,
        bias_learning_rate=0.05,
        multiplier=8.0,
        multiplier_damping=0.5,
        multiplier_smoothing=0.95,
    ),
    stage(
        seed=6,
        steps=170,
        learning_rate=1.5e-3,
        bias_learning_rate=0.05,
        fixed=11.0,
        cooldown=1.0,
        self_text=320,
        self_share=0.5,
    ),
    stage(
        seed=7,
        steps=520,
        learning_rate=1.2e-3,
        bias_learning_rate=0.04,
        fixed=14.0,
        self_text=512,
        self_share=0.5,
    ),
    stage(
        seed=8,
        steps=840,
        learning_rate=1e-3,
        bias_learning_rate=0.04,
        fixed=12.0,
        cooldown=1.0,
        self_text=512,
        self_share=0.5,
    ),
    stage(
        seed=9,
        steps=540,
        learning_rate=8e-4,
        bias_learning_rate=0.03,
        fixed=16.0,
        cooldown=1.0,
        self_text=512,
        self_share=0.4,
    ),
    stage(
        seed=10,
        steps=900,
        learning_rate=1e-3,
        bias_learning_rate=0.03,
        fixed=16.0,
        cooldown=1.0,
        self_text=512,
        self_share=0.4,
    ),
    stage(
        seed=11,
        steps=600,
        learning_rate=8e-4,
        bias_learning_rate=0.03,
        fixed=15.0,
        cooldown=1.0,
        self_text=512,
        self_share=0.3,
    ),
    stage(
        seed=12,
        steps=280,
        learning_rate=7e-4,
        bias_learning_rate=0.02,
        fixed=14.0,
        cooldown=1.0,
        self_text=512,
        self_share=0.35,
    ),
]


def write_texts(dense: gatelens.Model) -> None:
    """Write the texts that do not exist yet."""
    every_code = (CODE, MORE_CODE)
    if not all(Path(path).exists() for path in every_code):
        write_code(CODE, MORE_CODE)
    if not Path(TWICE).exists():
        write_twice((*PROSE, *every_code), TWICE)
    if not Path(WRITTEN).exists():
        write_own(dense, every_code, WRITTEN)
    for number, mixture in MIXTURES.items():
        if not Path(_mixture(number)).exists():
            mixture.write(PROSE, every_code, TWICE, WRITTEN, _mixture(number))


def _mixture(number: int) -> str:
    return f"{OUT}/mixture-{number}.txt"


def text_of(number: int) -> list[str]:
    """The texts of a stage; stages are counted from 1."""
    if number in MIXTURES:
        return [_mixture(number)]
    return [*PROSE, *(text for first, text in ((4, CODE), (8, MORE_CODE), (9, TWICE)) if number >= first)]


def main() -> None:
    torch.set_num_threads(1)
    dense = gatelens.load("smollm2")
    write_texts(dense)
    start = None
    for number, settings in enumerate(STAGES, 1):
        out = f"{OUT}/{number}"
        sparsify(dense, text_of(number), settings, out=out, held_out=list(HELD_OUT), start=start, show=True)
        start = out


if __name__ == "__main__":
    main()
