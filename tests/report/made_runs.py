"""Run folders with known contents, in the format that runs are saved in."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gatelens.gates.roles import KINDS
from gatelens.measures.circuit_settings import CircuitSettings
from gatelens.measures.curve_files import save_curve
from gatelens.measures.curves import Curve
from gatelens.measures.head_table import HeadLine, HeadTable, save_head_table
from gatelens.measures.roles_result import RolesSettings
from gatelens.measures.validity import Validity
from gatelens.model.graph import Graph
from gatelens.runtime.files import write_json, write_tensors
from gatelens.runtime.versions import versions

ROLES = ("S1 & more", "IO", "END")
SEES = torch.tensor([[1, 0, 0], [1, 1, 0], [1, 1, 1]]).bool()
SMALL = Graph(n_layers=3, n_heads=4, n_kv_heads=2)
HOSTILE = "</script><script>window.hacked = 1</script><img src=x onerror='window.hacked = 1'>"
TOKENS = ["Once", " <script>window.hacked = 1</script>", " the", "\n", " <b>cat</b>", " &amp; sat"]

PARTS = (("everything", 0.75, 1, 0.125), ("circuit alone", 0.5, 1, 0.25), ("without the circuit", 0.0625, 9, 0.5))


def curve(level: str, total: int, needed: int) -> Curve:
    """Reaches 0.9 of the effect with ``needed`` gates and stays there; the random baseline takes all gates."""
    kept = torch.tensor([0.0, needed / 2, needed, total])

    def of(effects: Sequence[float], random: Curve | None) -> Curve:
        metrics = torch.tensor(effects)[None, :, None].expand(1, 4, 3)
        asked = [0, max(1, needed // 2), needed, total]
        ends = metrics[:, 0], metrics[:, -1]
        return Curve(level, total, asked, kept, metrics, *ends, random=random, fingerprints=("prompts",))

    return of([0.0, 0.5, 0.95, 1.0], of([0.0, 0.1, 0.2, 1.0], None))


def circuit_run(
    folder: Path,
    *,
    model: str = "small",
    task: str = "ioi",
    level: str = "edges",
    sparse: bool = False,
    needed: int = 8,
    scores: Tensor | None = None,
    graph: Graph = SMALL,
    tokens: Sequence[str] = TOKENS,
    seed: int = 0,
    described: Sequence[str] = (),
) -> Path:
    """Write a circuit run with a table of the described heads; returns its folder."""
    generator = torch.Generator().manual_seed(seed)
    gates = gates_of(level, graph)
    if scores is None:
        scores = torch.randn(gates.shape, generator=generator) * gates
    settings = CircuitSettings(level=level, n=3, method="eap")  # type: ignore[arg-type]
    total = int(gates.sum())
    folder.mkdir(parents=True)
    _asked(folder, "circuit", model, task, settings.model_dump(mode="json"))
    save_curve(curve(level, total, needed), folder)
    tensors = {"scores": scores}
    if level == "edges-by-role":
        tensors |= {"roles": torch.tensor(list("\n".join(ROLES).encode()), dtype=torch.uint8), "sees": SEES}
    write_tensors(folder / "scores.safetensors", {f"seed-0.{name}": tensor for name, tensor in tensors.items()})
    _example(folder, graph, tokens, sparse, generator)
    if described:
        lines = tuple(_line(name, 1.0 - 0.25 * i, tokens) for i, name in enumerate(described))
        save_head_table(HeadTable(model, task, 3, "logit difference", 2.0, lines), folder)
    validity = Validity(correlation=0.875, sampled=24, kept=needed, effect=0.95, complement=-0.125, overlap=None)
    result = {
        "model": model,
        "task": task,
        "sparse": sparse,
        "graph": asdict(graph),
        "settings": settings.model_dump(mode="json"),
        "count": needed,
        "total": total,
        "validity": validity.model_dump(mode="json"),
        "seconds": 1.0,
    }
    write_json(folder / "result.json", result)
    return folder


def gates_of(level: str, graph: Graph = SMALL) -> Tensor:
    """Where there is a gate, in the shape of the scores."""
    if level == "heads":
        return torch.ones(graph.n_layers, graph.n_heads, dtype=torch.bool)
    if level == "edges":
        return graph.edges
    gates = graph.edges.repeat(len(ROLES), 1, 1)
    gates[:-1, :, graph.logits] = False  # the logits are read at the last role only
    return gates


def gate_run(folder: Path, *, model: str = "small", task: str = "syntax") -> Path:
    """Write a gate run of 2 seeds, 3 layers and 4 heads; returns its folder."""
    generator = torch.Generator().manual_seed(0)
    gates, plus, minus = (torch.rand(2, 3, 4, generator=generator) for _ in range(3))
    ablated = torch.tensor([0, 2, 4])
    changes = {kind: torch.tensor([[0.0, -1.0, -2.0], [0.0, -3.0, -4.0]]) * i for i, kind in enumerate(_KINDS)}
    settings = RolesSettings(seeds=2, n=4, held_out=4, most=4, every=2)
    folder.mkdir(parents=True)
    _asked(folder, "gate", model, task, settings.identity())
    write_tensors(
        folder / "roles.safetensors",
        {
            "gates": gates,
            "plus": plus,
            "minus": minus,
            "losses": torch.rand(3, 5, 2),
            "ablated": ablated,
            **{f"changes.{kind}": change for kind, change in changes.items()},
        },
    )
    result = {
        "model": model,
        "task": task,
        "sparse": False,
        "settings": settings.model_dump(mode="json"),
        "seconds": 2.0,
    }
    write_json(folder / "result.json", result)
    return folder


def sparsify_run(folder: Path, steps: int = 4) -> Path:
    """Write the files of a sparsify run whose last log line is incomplete; returns its folder."""
    folder.mkdir(parents=True)
    write_json(folder / "settings.json", {"model": "abc", "text": "def", "settings": {"steps": 9, "target": 0.1}})
    header = "step,loss,kl,cross_entropy,above_dense,expected_open,open,multiplier,tokens_per_second"
    rows = [f"{i + 1},0.1,0.1,3.0,0.05,{0.5 / (i + 1)},{0.4 / (i + 1)},8,100" for i in range(steps)]
    (folder / "log.csv").write_text("\n".join([header, *rows, "9,0.1"]))
    (folder / "judged.csv").write_text(
        "step,book dense loss,book above dense,book kl,book open,book keys per query\n4,3.0,0.01,0.1,0.2,2.5\n"
    )
    return folder


_KINDS = (*KINDS, "random")


def _asked(folder: Path, kind: str, model: str, task: str, settings: dict[str, Any]) -> None:
    asked = {
        "kind": kind,
        "model": {"name": model},
        "task": {"name": task},
        "settings": settings,
        "versions": versions(),
    }
    write_json(folder / "asked.json", asked)


def _example(folder: Path, graph: Graph, tokens: Sequence[str], sparse: bool, generator: torch.Generator) -> None:
    length = len(tokens)
    hidden = torch.ones(length, length).triu(1).bool()
    logits = 3 * torch.randn(graph.n_layers, graph.n_heads, length, length, generator=generator)
    tensors = {"attention-0": logits.masked_fill(hidden, -torch.inf).softmax(-1).half()}
    if sparse:
        tensors["open-0"] = (logits > 0) & ~hidden
    write_tensors(folder / "example.safetensors", tensors)
    parts = [
        {"part": part, "probability": share, "rank": rank, "wrong": wrong, "top": [" mat", tokens[1]]}
        for part, share, rank, wrong in PARTS
    ]
    prompt = {"tokens": list(tokens), "answer": " mat", "wrong": " rug", "size": 8, "parts": parts}
    write_json(folder / "example.json", {"prompts": [prompt], "note": None})


def _line(head: str, score: float, tokens: Sequence[str]) -> HeadLine:
    return HeadLine(
        head=head,
        score=score,
        low=score - 0.5,
        high=score + 0.5,
        share=score / 2,
        looks={"IO": 0.7, "first token": 0.2},
        at_answer=0.7,
        at_wrong=0.0,
        writes=tuple(tokens[:2]),
        answer=1.5,
        wrong=-0.5,
    )
