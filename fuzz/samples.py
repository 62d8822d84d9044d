"""Valid inputs of every kind, as files. They are made once, and then damaged."""

from __future__ import annotations

import struct
import tempfile
from functools import cache
from pathlib import Path

import numpy as np
import torch
from families import tiny
from gguf_files import write_gguf
from made_runs import circuit_run, gate_run, sparsify_run

from fuzz.damage import Files, as_json
from gatelens.gates.edges import EdgeScores
from gatelens.loading import load
from gatelens.measures.exchange import write_graph
from gatelens.model import Model
from gatelens.model.graph import Graph
from gatelens.sparse.adapters import base_weights, write_adapter
from gatelens.sparse.in_model import GateValues

CIRCUIT_LINE = {
    "clean": "t3 t4 t5",
    "corrupt": "t3 t9 t5",
    "answer": " t7",
    "wrong": [" t8", " t9"],
    "roles": {"first": "t3", "second": ["t", 2]},
    "template": "one",
}
RESPONSE_LINE = {"prompt": "t3 t4", "response": " t5 t6"}
STUDY = """title = "A study"
[models]
small = "model"
other = { load = "model", dense = "small", bias = 0.0, dtype = "float32", cpus = 1.0, gpus = 0 }
[circuit]
tasks = ["mine.jsonl", "induction"]
level = ["heads", "edges"]
n = 4
seed = [0, 1]
threshold = 0.9
memory_gb = 0.5
[circuit.task.induction]
n = 2
options = { length = 4 }
[circuit.model.other]
seeds = 2
[[gate]]
tasks = ["mine.jsonl"]
models = ["small"]
preset = "quick"
"""


@cache
def workshop() -> Path:
    """A temporary folder for everything that is made once."""
    folder = tempfile.TemporaryDirectory(prefix="gatelens-fuzz-")
    _KEPT.append(folder)
    return Path(folder.name)


_KEPT: list[tempfile.TemporaryDirectory[str]] = []  # removed when the process ends


@cache
def model_folder() -> Path:
    """A tiny Llama as Hugging Face saves it."""
    folder = workshop() / "model"
    model = tiny("llama", num_hidden_layers=1, hidden_size=16, intermediate_size=16)
    model.hf.save_pretrained(folder)
    model.tokenizer.save_pretrained(folder)
    return folder


@cache
def model() -> Model:
    """The tiny Llama, loaded."""
    return load(model_folder())


@cache
def model_files() -> Files:
    return files_of(model_folder())


def own_task() -> bytes:
    """A circuit task of three prompts."""
    lines = [CIRCUIT_LINE, {**CIRCUIT_LINE, "clean": "t6 t4 t5 t3"}, {**CIRCUIT_LINE, "corrupt": "t3 t8 t5"}]
    lines[1]["corrupt"], lines[1]["roles"] = "t6 t9 t5 t3", {}
    return b"\n".join(map(as_json, lines))


@cache
def adapter_files() -> Files:
    """An adapter of the tiny Llama, which lies beside it."""
    folder, base = workshop() / "adapter", model()
    name = "base_model.model.model.layers.0.self_attn.q_proj.lora_{}.default.weight"
    matrices = {name.format("A"): torch.ones(2, 16), name.format("B"): torch.ones(16, 2)}
    about = {"base": str(model_folder()), **base_weights(base.hf)}
    write_adapter(folder, matrices, GateValues("score", torch.zeros(1, 4)), 2.0, about)
    return files_of(folder)


@cache
def gguf_file() -> bytes:
    """The tiny Llama as a gguf file."""
    path = workshop() / "model.gguf"
    return write_gguf(tiny("llama", num_hidden_layers=1, hidden_size=16, intermediate_size=16), path).read_bytes()


@cache
def llama2c_files() -> Files:
    """A llama2.c checkpoint of one layer, and its tokenizer of 12 pieces."""
    dim, hidden, layers, heads, kv_heads, vocab, length = header = (8, 8, 1, 2, 1, 12, 16)
    kv_dim = kv_heads * (dim // heads)
    per_layer = 2 * dim + 2 * dim * dim + 2 * kv_dim * dim + 3 * hidden * dim
    n_weights = vocab * dim + layers * per_layer + dim + length * (dim // heads)
    weights = np.random.default_rng(0).normal(size=n_weights).astype("<f4").tobytes()
    pieces = [b"<unk>", b"<s>", b"</s>", b" ", b"t", b"3", b"4", b"t3", b" t", b"a", b"b", b"ab"]
    listed = b"".join(struct.pack("<fi", -float(i), len(piece)) + piece for i, piece in enumerate(pieces))
    return {"model.bin": struct.pack("<7i", *header) + weights, "tok.bin": struct.pack("<i", 5) + listed}


@cache
def run_files() -> Files:
    """A good run beside one run of each kind: these are damaged, and the good one must still be reported."""
    folder = workshop() / "runs"
    circuit_run(folder / "bad" / "edges")
    circuit_run(folder / "bad" / "heads", level="heads", sparse=True)
    gate_run(folder / "bad" / "roles")
    sparsify_run(folder / "bad" / "sparsify")
    return files_of(folder / "bad")


@cache
def good_run() -> Path:
    return circuit_run(workshop() / "good", level="heads", task="docstring")


@cache
def graph_files() -> Files:
    """An edge circuit of the tiny Llama in both formats."""
    graph, folder = Graph.of(model().anatomy), workshop() / "graphs"
    folder.mkdir()
    scores = EdgeScores(torch.ones(graph.edges.shape) * graph.edges, graph, "made")
    for name in ("circuit.json", "circuit.pt"):
        write_graph(folder / name, scores, graph.edges, 16)
    return files_of(folder)


def files_of(folder: Path) -> Files:
    """All files in a folder."""
    paths = sorted(path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): path.read_bytes() for path in paths}
