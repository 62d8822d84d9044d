"""Train the built-in model `sparse-smollm2`: SmolLM2 with sparse attention. Takes hours on one core.

Run it from the top of the repository; killed at any moment, the same command continues where it was:

    nohup nice -n 5 python examples/sparse_smollm2.py > sparse-smollm2.log 2>&1 &

Every stage starts from the last one's weights with a fresh optimizer. The first closes most gates within a hundred
steps, at large learning rates and a KL above its target; the second brings the KL back to the target, the third spends
what that has left. By then eight heads of the first two layers hold a third of all open edges, their gates so wide open
that no gradient reaches them: the fourth stage lowers their biases, adds Python code to the text, and holds
cross-entropy as well as KL; the fifth holds it in each row, so that a gain on one kind of text pays for no loss on
another; the last one, on KL alone again and at a fixed weight of it, comes to rest.

wikitext2-test and sherlock-holmes are held out: they are looked at, never trained on. Nor are the tasks.
`pack_sparse_smollm2.py` makes the built-in model of the last checkpoint.
"""

from pathlib import Path
from typing import Any

import torch

import gatelens
from gatelens.methods.sparsify import SparsifySettings, sparsify

OUT = "runs/sparse-smollm2"
DATA = "../shared/data/text"
NOVELS = ("great-expectations", "pride-and-prejudice", "tale-of-two-cities")
TRAIN = [f"{DATA}/{name}.txt" for name in ("wikitext2-valid", *NOVELS)]
CODE = f"{OUT}/code.txt"
PACKAGES = ("requests", "urllib3", "rich", "packaging", "cachecontrol", "platformdirs")
HELD_OUT = [f"{DATA}/{name}.txt" for name in ("wikitext2-test", "sherlock-holmes")]


def stage(seed: int, **changes: Any) -> SparsifySettings:
    """Settings of a stage: two sequences of 256 tokens a step, two in five of them written by the dense model."""
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
        target=0.15,
        learning_rate=1.5e-3,
        bias_learning_rate=0.05,
        multiplier=11.0,
        multiplier_low=11.0,
        multiplier_high=11.0,
        cooldown=1.0,
        self_text=320,
        self_share=0.5,
    ),
]


def write_code() -> None:
    """Python as people write it, from packages that come with pip: about as much as a novel."""
    import pip

    folder = Path(pip.__file__).parent / "_vendor"
    files = [file for package in PACKAGES for file in sorted((folder / package).rglob("*.py"))]
    texts = [text for file in files if len(text := file.read_text(encoding="utf-8")) < 60_000]  # longer ones are tables
    Path(CODE).parent.mkdir(parents=True, exist_ok=True)
    Path(CODE).write_text("\n\n".join(texts), encoding="utf-8")


def main() -> None:
    torch.set_num_threads(1)
    dense = gatelens.load("smollm2")
    write_code()
    start = None
    for number, settings in enumerate(STAGES, 1):
        out = f"{OUT}/{number}"
        text = [*TRAIN, CODE] if number > 3 else TRAIN
        sparsify(dense, text, settings, out=out, held_out=HELD_OUT, start=start, show=True)
        start = out


if __name__ == "__main__":
    main()
