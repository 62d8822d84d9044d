"""Switch parts of a model off while it is used as usual: plain calls of ``model.hf`` and ``generate``.

Inside ``with model.ablate(...)``, ``model.keep(...)`` or ``model.patch(...)`` every forward pass of the Hugging Face
model runs under gates: 1 for an open gate, 0 for a closed one. It works with a key-value cache, for all families and
for sparse models. The hooks are gone when the block ends, also after an exception.

A part of a model is written as everywhere: a head ``L3H7``, an edge ``L3H7 -> L5H2.q``, or another component (``M3``,
``embed``), whose outgoing edges are meant. Heads alone are gated at their output z. Together with edges or other
components they are gated at the edges that leave them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import Tensor

from gatelens.errors import GatelensError
from gatelens.gates._live import LiveEdges, Places, replace_heads
from gatelens.gates.component_runs import Components, capture_components, with_sources
from gatelens.gates.edges import EDGES
from gatelens.gates.heads import HEADS
from gatelens.gates.hooks import Hooks
from gatelens.gates.runs import Run, capture
from gatelens.model import Model
from gatelens.model.components import Component, Head
from gatelens.model.graph import Graph
from gatelens.tasks.base import CircuitTask, ResponseTask
from gatelens.tasks.tokens import encode

Part = str | Head | tuple[int, int]
"""A head, as ``Head``, as (layer, head) or by its name; an edge or another component, by its name."""
ClosedBy = Literal["zero", "mean"] | Run
Reading = str | Sequence[str] | Tensor | CircuitTask | ResponseTask
"""What a mean is taken over: a text, several texts, tokens (prompt, position), or a task."""


@contextmanager
def ablate(model: Model, parts: Any, source: ClosedBy = "zero", *, on: Reading | None = None) -> Iterator[None]:
    """Close the gates of some parts of a model; `Model.ablate` describes it."""
    with _closed(model, parts, source, on, keep=False):
        yield


@contextmanager
def keep(model: Model, parts: Any, source: ClosedBy = "zero", *, on: Reading | None = None) -> Iterator[None]:
    """Close all gates but those of some parts; `Model.keep` describes it."""
    with _closed(model, parts, source, on, keep=True):
        yield


@contextmanager
def patch(model: Model, parts: Any, run: Run, *, positions: Iterable[int] | None = None) -> Iterator[None]:
    """Let some parts of a model read another run; `Model.patch` describes it."""
    if not isinstance(run, Run):
        raise GatelensError(f"{run!r} is not a run: capture one with model.capture(text).")
    with _closed(model, parts, run, None, keep=False, positions=positions):
        yield


def capture_text(model: Model, text: str | Tensor) -> Run:
    """Run a text and capture the outputs of all heads; `Model.capture` describes it."""
    return capture(model, tokens_of(model, text))


def generate(model: Model, text: str | Sequence[str], max_new_tokens: int = 20, **options: Any) -> str | list[str]:
    """Continue a text; `Model.generate` describes it."""
    if not isinstance(text, str):
        return [str(generate(model, each, max_new_tokens, **options)) for each in text]
    tokens = tokens_of(model, text).to(model.device)
    pad = model.tokenizer.pad_token_id
    defaults = {"do_sample": False, "pad_token_id": model.tokenizer.eos_token_id if pad is None else pad}
    settings = {"max_new_tokens": max_new_tokens, **defaults, **options}
    with torch.no_grad():
        whole = model.hf.generate(tokens, attention_mask=torch.ones_like(tokens), **settings)
    return str(model.tokenizer.decode(whole[0, tokens.shape[1] :], skip_special_tokens=True))


def tokens_of(model: Model, text: str | Tensor) -> Tensor:
    """The tokens of a text (1, position), or tokens (prompt, position) as they are."""
    if isinstance(text, Tensor):
        if text.ndim != 2 or text.numel() == 0:
            raise GatelensError(f"tokens must have the shape (prompt, position), and not {tuple(text.shape)}.")
        return text
    if not isinstance(text, str):
        raise GatelensError(f"{text!r} is not a text: give a string, or tokens of the shape (prompt, position).")
    [ids] = encode(model.tokenizer, [text])
    if not ids:
        raise GatelensError("the text is empty: give at least one token.")
    return torch.tensor([ids])


@contextmanager
def _closed(
    model: Model,
    parts: Any,
    source: ClosedBy,
    on: Reading | None,
    *,
    keep: bool,
    positions: Iterable[int] | None = None,
) -> Iterator[None]:
    """Close the gates of these parts, or all others."""
    if not (isinstance(source, Run) or source in ("zero", "mean")):
        raise GatelensError(f"no source {source!r}: closed gates read 'zero', 'mean' or a run (model.capture(text)).")
    if source == "mean" and on is None:
        raise GatelensError("the source 'mean' needs what the mean is taken over: give on=task or on='some text'.")
    edges, mask = gate_mask(model, parts)
    opened = mask if keep else ~mask
    chosen = None if positions is None else torch.tensor(sorted(positions), dtype=torch.int64)
    with Hooks() as hooks:
        if bool(opened.all()):
            yield
            return
        if edges:
            _hook_edges(model, opened, source, on, chosen, hooks)
        else:
            _hook_heads(model, opened, source, on, chosen, hooks)
        yield


def _hook_heads(
    model: Model, opened: Tensor, source: ClosedBy, on: Reading | None, positions: Tensor | None, hooks: Hooks
) -> None:
    values: Sequence[Tensor | None] = [None] * model.n_layers
    if isinstance(source, Run):
        values = source.heads
    elif source == "mean":
        values = HEADS.mean(model, _batches(model, on)) or values
    places = Places(model, hooks)
    for layer, block in enumerate(model.anatomy.blocks):
        if not bool(opened[layer].all()):
            hooks.before(block.out, replace_heads(~opened[layer], values[layer], places, positions))


def _hook_edges(
    model: Model, opened: Tensor, source: ClosedBy, on: Reading | None, positions: Tensor | None, hooks: Hooks
) -> None:
    constant, reference = not isinstance(source, Run), _reference(model, source, on)
    live = LiveEdges(model, opened.float(), reference, constant=constant, positions=positions)
    live.hook(hooks, Places(model, hooks))


def _reference(model: Model, source: ClosedBy, on: Reading | None) -> Components:
    """What closed edges read: a run, or one value (1, 1) for all prompts and positions."""
    if isinstance(source, Run):
        return capture_components(model, source.tokens)
    any_token = capture_components(model, torch.zeros(1, 1, dtype=torch.int64))
    sources = torch.zeros_like(any_token.sources) if source == "zero" else EDGES.mean(model, _batches(model, on))
    return with_sources(model, any_token, sources)


def _batches(model: Model, on: Reading | None) -> list[Tensor]:
    """The tokens that a mean is taken over. Of a circuit task these are the corrupt prompts, as everywhere."""
    if isinstance(on, CircuitTask):
        return [bucket.corrupt for bucket in on.buckets]
    if isinstance(on, ResponseTask):
        return [torch.tensor([example.prompt_ids + example.response_ids]) for example in on.examples]
    if isinstance(on, str | Tensor):
        return [tokens_of(model, on)]
    texts = list(on or ())
    if not texts:
        raise GatelensError("there is no text to take the mean over: give on= at least one text.")
    return [tokens_of(model, text) for text in texts]


def gate_mask(model: Model, parts: Any) -> tuple[bool, Tensor]:
    """The gates of some parts of a model.

    Arguments:
        parts: a part (`Part`), several of them, or a circuit that has gates on heads or on edges.

    Returns:
        Whether these are gates on edges, and bool (source, destination), or else (layer, head): True for the parts.
    """
    graph = Graph.of(model.anatomy)
    ready: Tensor | None = getattr(parts, "mask", None)
    if ready is not None:
        for is_edges, shape in ((False, (model.n_layers, model.n_heads)), (True, tuple(graph.edges.shape))):
            if tuple(ready.shape) == shape:
                return is_edges, ready.bool()
        raise GatelensError(
            f"this circuit has gates of the shape {tuple(ready.shape)}, which {model.name} does not have: give a "
            "circuit of heads or of edges of this model. Attention edges belong to single prompts, and edges by role "
            "to prompts of a task."
        )
    several = [parts] if isinstance(parts, str | Head) or _is_pair(parts) else list(parts)
    parsed = [_parse(model, graph, part) for part in several]
    heads = [part for part in parsed if isinstance(part, Head)]
    if len(heads) == len(parsed):
        mask = torch.zeros(model.n_layers, model.n_heads, dtype=torch.bool)
        for head in heads:
            mask[head.layer, head.index] = True
        return False, mask
    mask = torch.zeros(graph.n_sources, graph.n_destinations, dtype=torch.bool)
    for part in parsed:
        if isinstance(part, Head):
            mask[graph.heads(part.layer).start + part.index] = True
        else:
            mask[part] = True
    return True, mask & graph.edges


def _is_pair(parts: Any) -> bool:
    return isinstance(parts, tuple) and len(parts) == 2 and all(type(number) is int for number in parts)


def _parse(model: Model, graph: Graph, part: Any) -> Head | int | tuple[int, int]:
    """A head, the number of another source, or the numbers of both ends of an edge."""
    if isinstance(part, Head):
        return model.check_head(part)
    if _is_pair(part):
        return model.check_head(Head(*part))
    if not isinstance(part, str):
        raise GatelensError(
            f"{part!r} is not a part of a model: write a head as 'L3H7' or (3, 7), and an edge as 'L3H7 -> L5H2.q'."
        )
    if "->" in part:
        return graph.edge(part)
    component = Component.find(part)
    if component is not None and component.kind == "H":
        return model.check_head(Head(component.layer, component.index))
    if part not in graph.source_names:
        raise GatelensError(
            f"no part '{part}' in {model.name}: write a head as L3H7, an MLP as M3, the embedding as embed, an edge "
            f"as '{graph.source_names[0]} -> {graph.destination_names[0]}'. It has {model.n_layers} layers with "
            f"{model.n_heads} heads."
        )
    return graph.source_names.index(part)
