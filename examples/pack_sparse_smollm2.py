"""Pack the last checkpoint of a run of sparse_smollm2.py as the built-in model `sparse-smollm2`, and judge it.

    python examples/pack_sparse_smollm2.py

Adapter and biases are written in float16, with a model card and the run's log, to src/gatelens/builtin/sparse_smollm2.
What the card says was measured on the packed numbers themselves.
"""

import copy
import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file
from sparse_smollm2 import HELD_OUT, OUT, SECOND, TRAIN

import gatelens
from gatelens.adapters import apply_adapter, write_adapter
from gatelens.builtin import ADAPTERS
from gatelens.checkpoints import Checkpoints
from gatelens.methods.sparsify import evaluate
from gatelens.methods.sparsify.result import write_card
from gatelens.methods.sparsify.student import SCALE
from gatelens.model import Model

torch.set_num_threads(1)
RUN, FOLDER = Path(OUT) / "2", ADAPTERS["sparse-smollm2"]
SEQUENCES = 32

last = Checkpoints(RUN / "checkpoints").last()
assert last is not None, f"no checkpoint in {RUN}"
steps = json.loads((last / "state.json").read_text())["steps"]
weights = load_file(last / "weights.safetensors")
biases = torch.stack([weights[name] for name in weights if name.endswith("gate_bias")])
about = {"base": "smollm2", "steps": steps, "settings": SECOND.as_dict()}
write_adapter(FOLDER, weights, biases, SCALE, about, torch.float16)
for name in ("log.csv", "judged.csv", "curve.png"):
    if (RUN / name).exists():
        shutil.copy(RUN / name, FOLDER / name)

dense = gatelens.load("smollm2")
hf = apply_adapter(copy.deepcopy(dense.hf), FOLDER)
sparse = Model("sparse-smollm2", hf, dense.tokenizer, dense.anatomy)
judged = evaluate(sparse, HELD_OUT, dense, length=256, most=SEQUENCES)
card = write_card(dense, [Path(text).name for text in TRAIN], SECOND, steps, judged)
(FOLDER / "README.md").write_text(card)
print(card)
