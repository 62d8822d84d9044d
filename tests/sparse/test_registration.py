"""Plain transformers opens a sparse model after `import gatelens.sparse`, in whichever order."""

from __future__ import annotations

import copy
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from families import prompts, tiny
from safetensors.torch import load_file, save_file

from gatelens.sparse.in_model import make_sparse, save_sparse

IMPORTS = {
    "gatelens.sparse first": "import gatelens.sparse; import transformers",
    "gatelens.sparse last": "import transformers, gatelens.sparse",
    "gatelens after transformers' model code": "import transformers, transformers.modeling_utils; import gatelens",
}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A sparse model's folder, with its logits."""
    folder = tmp_path_factory.mktemp("sparse")
    hf = copy.deepcopy(tiny("llama").hf)
    make_sparse(hf, 0.2)
    save_sparse(hf, folder)
    with torch.no_grad():
        save_file({"tokens": prompts(), "logits": hf(prompts()).logits}, folder / "wanted.tensors")
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("order", IMPORTS)
def test_a_sparse_model_opens_with_plain_transformers(order: str, saved: Path) -> None:
    code = (
        f"{IMPORTS[order]}\n"
        "import torch; from safetensors.torch import load_file\n"
        f"wanted = load_file({str(saved / 'wanted.tensors')!r})\n"
        f"hf = transformers.AutoModelForCausalLM.from_pretrained({str(saved)!r})\n"
        "with torch.no_grad(): logits = hf(wanted['tokens']).logits\n"
        "torch.testing.assert_close(logits, wanted['logits'])\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_its_logits_are_not_the_dense_models(saved: Path) -> None:
    with torch.no_grad():
        dense = tiny("llama").hf(prompts()).logits
    assert not torch.allclose(load_file(saved / "wanted.tensors")["logits"], dense, atol=0.1)
