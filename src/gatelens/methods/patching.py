"""Score gates exactly: close one at a time and see what the metric does.

Every score is ``metric with the gate open - metric with it closed``, mean over prompts. Noising starts from the clean
run and closes one gate; denoising starts from the corrupt run and opens one.
"""

from __future__ import annotations

from functools import cache, lru_cache, partial
from typing import Literal

import torch
from torch import Tensor

from gatelens.errors import GatelensError
from gatelens.gates.attention import AttentionRun, attention_numbers, capture_attention, run_attention
from gatelens.gates.edges import Components, capture_components, edge_numbers, run_edges
from gatelens.gates.heads import run_heads
from gatelens.gates.runs import Run, capture, moment_numbers
from gatelens.gates.scores import AttentionScores, EdgeScores, HeadScores
from gatelens.model import Model
from gatelens.model.graph import Graph
from gatelens.runtime.journal import Journal
from gatelens.tasks.base import Bucket, CircuitTask
from gatelens.tasks.batches import batches, join

Direction = Literal["noising", "denoising"]


def patch_heads(
    model: Model,
    task: CircuitTask,
    direction: Direction = "noising",
    sample: int | None = None,
    *,
    seed: int = 0,
    memory_gb: float = 2.0,
    journal: Journal | None = None,
) -> HeadScores:
    """The score of every head, or of a random sample of them, by activation patching.

    Cost: 2 forwards and about half a forward per head.
    Noising: the head's output in the clean run is replaced by the corrupt run's; the score is how much is lost.
    Denoising: in the corrupt run it is replaced by the clean run's; the score is how much is gained.
    """
    if direction not in ("noising", "denoising"):
        raise GatelensError(f"no direction '{direction}': heads are patched by 'noising' or by 'denoising'.")
    journal = journal or Journal()
    # Some rows of a layer at a time: larger batches leave the processor's cache and gain nothing.
    parts = batches(task, lambda length: moment_numbers(model) * length * model.n_heads, memory_gb)
    measured = torch.zeros(model.n_layers * model.n_heads, dtype=torch.bool)
    measured[_choose(len(measured), sample, seed)] = True
    measured = measured.view(model.n_layers, model.n_heads)
    layers = [n for n in range(model.n_layers) if measured[n].any()]
    journal.begin("patch heads", len(parts) * len(layers))
    sign = 1 if direction == "noising" else -1

    def patch(batch: Bucket, layer: int) -> Tensor:
        base, other = runs(batch)
        chosen = measured[layer].nonzero()[:, 0]
        gates = torch.ones(len(chosen), model.n_layers, model.n_heads)
        gates[torch.arange(len(chosen)), layer, chosen] = 0
        logits = run_heads(model, base.tokens, gates, other.heads, start=base, memory_gb=memory_gb)
        lost = task.metric(base.logits, batch) - task.metric(logits, batch)  # (head, prompt)
        return sign * lost.sum(1)

    @cache
    def runs(batch: Bucket) -> tuple[Run, Run]:
        clean, corrupt = capture(model, batch.clean), capture(model, batch.corrupt)
        return (clean, corrupt) if direction == "noising" else (corrupt, clean)

    scores = torch.zeros(measured.shape, dtype=model.wide_dtype)
    for i, batch in enumerate(parts):
        for layer in layers:
            scores[layer, measured[layer]] += journal.piece(f"heads-{i}-{layer}", partial(patch, batch, layer))
        runs.cache_clear()
    return HeadScores(scores / len(task), f"patching ({direction})", None if sample is None else measured)


def patch_edges(
    model: Model,
    task: CircuitTask,
    sample: int | None = None,
    *,
    seed: int = 0,
    memory_gb: float = 2.0,
    journal: Journal | None = None,
) -> EdgeScores:
    """The score of every edge, or of a random sample of them, by closing it alone in the clean run.

    Cost: 2 forwards and, per edge, the part of a forward that lies above its destination.
    """
    journal = journal or Journal()
    graph = Graph.of(model.anatomy)
    sources, destinations = graph.edges.T.nonzero(as_tuple=True)[::-1]  # in the order of destinations
    chosen = sorted(_choose(len(sources), sample, seed))
    sources, destinations = sources[chosen], destinations[chosen]
    rows_at_once = 16
    parts = batches(task, lambda length: rows_at_once * edge_numbers(model, length), memory_gb)
    cuts = list(torch.arange(len(chosen)).split(rows_at_once))
    journal.begin("patch edges", len(parts) * len(cuts))

    def patch(batch: Bucket, cut: Tensor) -> Tensor:
        clean, corrupt = runs(batch)
        gates = torch.ones(len(cut), graph.n_sources, graph.n_destinations)
        gates[torch.arange(len(cut)), sources[cut], destinations[cut]] = 0
        logits = run_edges(model, batch.clean, gates, corrupt, start=clean, memory_gb=memory_gb)
        return (task.metric(clean.logits, batch) - task.metric(logits, batch)).sum(1)

    @cache
    def runs(batch: Bucket) -> tuple[Components, Components]:
        return capture_components(model, batch.clean), capture_components(model, batch.corrupt)

    sums = torch.zeros(len(chosen), dtype=model.wide_dtype)
    for i, batch in enumerate(parts):
        pieces = [journal.piece(f"edges-{i}-{n}", partial(patch, batch, cut)) for n, cut in enumerate(cuts)]
        sums += torch.cat(pieces)
        runs.cache_clear()
    scores = torch.zeros(graph.n_sources, graph.n_destinations, dtype=sums.dtype)
    measured = torch.zeros(graph.n_sources, graph.n_destinations, dtype=torch.bool)
    scores[sources, destinations] = sums / len(task)
    measured[sources, destinations] = True
    return EdgeScores(scores, graph, "patching", None if sample is None else measured)


def patch_attention(
    model: Model,
    task: CircuitTask,
    sample: int | None = None,
    *,
    seed: int = 0,
    memory_gb: float = 2.0,
    journal: Journal | None = None,
) -> AttentionScores:
    """The score of every attention edge of every prompt, or of ``sample`` random ones of each, by closing it alone.

    Cost: 4 forwards and one forward for each edge of a prompt; all prompts of a length are patched together.
    """
    journal = journal or Journal()
    parts = batches(task, lambda length: 8 * attention_numbers(model, length), memory_gb)

    def all_edges(batch: Bucket) -> Tensor:
        clean, corrupt = runs(batch)
        return clean.edges | corrupt.edges  # closed in both runs, an edge is none

    @lru_cache(maxsize=1)
    def runs(batch: Bucket) -> tuple[AttentionRun, AttentionRun]:
        return capture_attention(model, batch.clean), capture_attention(model, batch.corrupt)

    def patch(batch: Bucket, rows: Tensor) -> Tensor:
        clean, corrupt = runs(batch)
        shape = clean.edges.shape[1:]
        lost: list[Tensor] = []
        for some in rows.split(8):
            gates = torch.ones(len(some), len(batch), shape.numel()).scatter_(2, some[..., None], 0)
            logits = run_attention(model, batch.clean, gates.unflatten(2, shape), corrupt, memory_gb=memory_gb)
            lost.append(task.metric(clean.logits, batch) - task.metric(logits, batch))
        return torch.cat(lost)  # (row, prompt)

    edges = [all_edges(batch) for batch in parts]  # (prompt, layer, head, query, key) of each batch
    cuts = [_places(there, batch, sample, seed).split(64) for there, batch in zip(edges, parts, strict=True)]
    journal.begin("patch attention edges", sum(map(len, cuts)))
    scores: list[Tensor] = []
    measured: list[Tensor] = []
    for i, (batch, there) in enumerate(zip(parts, edges, strict=True)):
        flat = torch.zeros(len(batch), there[0].numel(), dtype=model.wide_dtype)
        chosen = torch.zeros(flat.shape, dtype=torch.bool)
        for n, rows in enumerate(cuts[i]):
            lost = journal.piece(f"attention-{i}-{n}", partial(patch, batch, rows))
            flat.scatter_(1, rows.T, lost.T.to(flat))
            chosen.scatter_(1, rows.T, True)
        scores.append(flat.view(there.shape))
        measured.append(chosen.view(there.shape) & there)
    return AttentionScores(join(task, scores), join(task, measured), "patching", sampled=sample is not None)


def _places(edges: Tensor, batch: Bucket, sample: int | None, seed: int) -> Tensor:
    """Which edge of each prompt every row closes: (row, prompt). One with fewer edges closes its last again."""
    seeds = [seed * 1_000_003 + prompt for prompt in batch.which.tolist()]
    every = [one.flatten().nonzero()[:, 0] for one in edges]
    mine = [places[_choose(len(places), sample, seed)] for places, seed in zip(every, seeds, strict=True)]
    rows = max(map(len, mine))
    # A prompt without any open edge closes what is none, which changes nothing.
    last = [places[-1:] if len(places) else torch.zeros(1, dtype=torch.int64) for places in mine]
    filled = [torch.cat([places, end.expand(rows - len(places))]) for places, end in zip(mine, last, strict=True)]
    return torch.stack(filled, 1)


def _choose(n: int, sample: int | None, seed: int) -> list[int]:
    """All of n, or a random sample of them that depends on the seed only."""
    if sample is None or sample >= n:
        return list(range(n))
    return torch.randperm(n, generator=torch.Generator().manual_seed(seed))[:sample].tolist()
