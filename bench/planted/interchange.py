"""Train a model so that a given circuit does its task: interchange-intervention training on edges.

A program says what each component computes from what its edges carry. In every step some edges of the model, chosen at
random, read the run of another prompt. The same edges of the program read the other prompt's values, and the model
must answer as the program does. Edges that the program does not have must therefore not matter. (Geiger et al., arXiv
2112.00826; Gupta et al., arXiv 2407.14494, who exchange the outputs of whole components.)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from families import wrap
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel

from bench.planted.case import Planted, from_pairs
from gatelens.model.graph import Graph

LAYERS, HEADS, WIDTH, INNER = 2, 4, 32, 64
PROMPTS = 24
UNDEFINED = -1


@dataclass(frozen=True)
class Node:
    """One component of a program.

    Arguments:
        edges: the names of the edges that it reads; all of them enter the same component.
        compute: its value (prompt, ...) from the values that its edges carry; `UNDEFINED` where it has none.
    """

    edges: Sequence[str]
    compute: Callable[..., Tensor]

    @property
    def component(self) -> str:
        return self.edges[0].split(" -> ")[1].partition(".")[0]


@dataclass(frozen=True, eq=False)
class Program:
    """What the components of a circuit compute.

    Arguments:
        says: what it answers, in a few words.
        vocab: the number of tokens.
        draw: called as draw(n, generator); n prompts (prompt, position).
        nodes: the components in the order in which they are computed. The last one is the logits, and its value is
            the token to answer.
        steps: how many steps a model is trained.
    """

    name: str
    says: str
    vocab: int
    draw: Callable[[int, torch.Generator], Tensor]
    nodes: Sequence[Node]
    steps: int = 800

    @property
    def edges(self) -> list[str]:
        """The circuit."""
        return [edge for node in self.nodes for edge in node.edges]

    def values(
        self, tokens: Tensor, other: Mapping[str, Tensor] | None = None, is_own: Mapping[str, Tensor] | None = None
    ) -> dict[str, Tensor]:
        """The value of every component.

        Arguments:
            other: the values of another prompt.
            is_own: for every edge, bool (prompt,): whether it carries this prompt's value, not the other one's.
        """
        values = {"embed": tokens}
        for node in self.nodes:
            carried = []
            for edge in node.edges:
                value = values[edge.split(" -> ")[0]]
                if other is not None and is_own is not None:
                    own = is_own[edge].view(-1, *[1] * (value.ndim - 1))
                    value = torch.where(own, value, other[edge.split(" -> ")[0]])
                carried.append(value)
            values[node.component] = node.compute(*carried)
        return values

    def answers(self, tokens: Tensor) -> Tensor:
        """The token that follows each prompt: (prompt,)."""
        return self.values(tokens)["logits"]


def train(program: Program, steps: int | None = None, batch: int = 64, rate: float = 5e-3, seed: int = 0) -> Planted:
    """A model in which the edges of a program do its task, and no other edges matter. The seed decides everything."""
    steps = steps or program.steps
    torch.manual_seed(seed)
    generator = torch.Generator().manual_seed(seed)
    hf: Any = GPT2LMHeadModel(_config(program, len(program.draw(1, generator)[0])))
    graph = Graph(LAYERS, HEADS, HEADS)
    optimizer = torch.optim.AdamW(hf.parameters(), lr=rate, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, rate, total_steps=steps, pct_start=0.1)
    for _ in range(steps):
        logits, answers = _interchange(hf, program, graph, batch, generator)
        loss = torch.nn.functional.cross_entropy(logits, answers, ignore_index=UNDEFINED)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
    with torch.no_grad():
        logits, answers = _interchange(hf, program, graph, 1000, generator)
        defined = answers != UNDEFINED
        obeys = float((logits.argmax(-1) == answers)[defined].float().mean())
    model = wrap(hf.eval().requires_grad_(False), f"trained-{program.name}")
    return Planted(model, _task(program, generator), program.edges, obeys)


def _config(program: Program, length: int) -> GPT2Config:
    return GPT2Config(
        vocab_size=program.vocab, n_positions=length, n_embd=WIDTH, n_head=HEADS, n_layer=LAYERS, n_inner=INNER,
        tie_word_embeddings=False, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip


def _task(program: Program, generator: torch.Generator) -> Any:
    """Pairs of random prompts with different answers."""
    clean, corrupt = (program.draw(40 * PROMPTS, generator) for _ in range(2))
    answers, wrong = program.answers(clean), program.answers(corrupt)
    which = (answers != wrong).nonzero()[:PROMPTS, 0]
    return from_pairs(clean[which], corrupt[which], answers[which], wrong[which])


def _interchange(hf: Any, program: Program, graph: Graph, n: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """The logits of n prompts after a random interchange each, and the answers of the program after the same one."""
    own, other = program.draw(n, generator), program.draw(n, generator)
    gates = random_gates(n, graph, program.edges, generator)
    is_own = {edge: gates[(slice(None), *graph.edge(edge))].bool() for edge in program.edges}
    answers = program.values(own, program.values(other), is_own)["logits"]
    return exchanged_logits(hf, graph, own, other, gates), answers


def random_gates(n: int, graph: Graph, circuit: Sequence[str], generator: torch.Generator) -> Tensor:
    """Which edges read the prompt itself (1) and which the other prompt (0): (prompt, source, destination).

    For half of the prompts all edges of the circuit read the prompt itself; otherwise a random half of them does. The
    other edges read the prompt itself, the other prompt, or for each edge one of the two at random.
    """

    def chance() -> Tensor:
        return torch.rand(n, 1, 1, generator=generator)

    coins = torch.rand(n, *graph.edges.shape, generator=generator) < 0.5
    kind = chance()
    outside = torch.where(kind < 0.5, coins, kind < 0.75)
    inside = coins | (chance() < 0.5)
    in_circuit = torch.zeros_like(graph.edges)
    for edge in circuit:
        in_circuit[graph.edge(edge)] = True
    return torch.where(in_circuit, inside, outside).float()


def exchanged_logits(hf: Any, graph: Graph, own: Tensor, other: Tensor, gates: Tensor) -> Tensor:
    """The logits at the last position if edges read the runs of two prompts. Gradients reach the weights.

    Arguments:
        own, other: tokens (prompt, position).
        gates: (prompt, source, destination); with 1 an edge reads the first prompt's run, with 0 the plain run of the
            second one.
    """
    others: list[Tensor] = []
    _decode(hf, graph, other, lambda _, sources: sum(sources), others)

    def mix(destinations: slice, sources: list[Tensor]) -> Tensor:
        n = len(sources)
        at = gates[:, :n, destinations]
        return torch.einsum("psd,sptw->dptw", at, torch.stack(sources)) + torch.einsum(
            "psd,sptw->dptw", 1 - at, torch.stack(others[:n])
        )

    return _decode(hf, graph, own, mix, [])


def _decode(
    hf: Any, graph: Graph, tokens: Tensor, mix: Callable[[slice, list[Tensor]], Any], sources: list[Tensor]
) -> Tensor:
    """A GPT-2 that is written out source by source.

    Arguments:
        mix: called as mix(destinations, outputs of the sources so far); the sum that each destination reads.
        sources: filled with the outputs of all sources.
    """
    transformer, biases = hf.transformer, 0.0
    n_heads, length = graph.n_heads, tokens.shape[1]
    sources.append(transformer.wte(tokens) + transformer.wpe.weight[:length])
    hidden = torch.ones(length, length, dtype=torch.bool).triu(1)
    for layer, block in enumerate(transformer.h):
        inputs = mix(graph.attention_inputs(layer), sources) + biases  # (q of all heads, then k, then v) or one for all
        normed = block.ln_1(inputs).expand(3 * n_heads, *tokens.shape, -1).unflatten(0, (3, n_heads))
        weight = block.attn.c_attn.weight.unflatten(1, (3, n_heads, -1))
        bias = block.attn.c_attn.bias.view(3, n_heads, 1, 1, -1)
        q, k, v = torch.einsum("ihptw,wihd->ihptd", normed, weight) + bias
        scores = (q @ k.mT / q.shape[-1] ** 0.5).masked_fill(hidden, -torch.inf)
        z = scores.softmax(-1) @ v  # (head, prompt, position, dim)
        out = block.attn.c_proj.weight.unflatten(0, (n_heads, -1))
        sources += list(torch.einsum("hptd,hdw->hptw", z, out))
        biases = biases + block.attn.c_proj.bias
        at = graph.mlp_input(layer)
        read = mix(slice(at, at + 1), sources) + biases
        sources.append(block.mlp(block.ln_2(read)).view_as(sources[0]))
    read = mix(slice(graph.logits, graph.logits + 1), sources) + biases
    return hf.lm_head(transformer.ln_f(read)).view(*tokens.shape, -1)[:, -1]
