"""Run a model with gates on its heads.

A head gate g mixes the head's output z with a source: ``z <- g * z + (1 - g) * source``. The source is zero, a mean, or
the output of another run (the corrupt one). Each row of gates is one circuit; many circuits run in one batch.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import Float, Int, Shaped
from torch import Tensor

from gatelens.errors import GatelensError
from gatelens.gates.hooks import Edit, Hooks
from gatelens.gates.runs import LogitsAt, Run, branch, forward, only_last_position, rows_that_fit, skip_to
from gatelens.model import Model
from gatelens.runtime.context import Context

HeadSource = Sequence[Tensor] | None
"""What a closed gate reads, for each layer: a tensor that broadcasts to (prompt, position, head, dim), such as the
``heads`` of a captured run or their means (`mean_heads`). None is zero."""


def run_heads(
    model: Model,
    tokens: Int[Tensor, "prompt position"],
    gates: Float[Tensor, "row ..."],
    source: HeadSource = None,
    *,
    mask: Shaped[Tensor, "prompt position"] | None = None,
    start: Run | None = None,
    start_gates: Shaped[Tensor, "layer head"] | None = None,
    logits_at: LogitsAt = "last",
    context: Context | None = None,
) -> Float[Tensor, "row ... vocab"]:
    """Logits of the prompts under each row of gates.

    Example:
        clean, corrupt = capture(model, tokens), capture(model, corrupt_tokens)
        gates = torch.ones(1, model.n_layers, model.n_heads)
        gates[0, 9, 6] = 0  # head L9H6 reads the corrupt run
        logits = run_heads(model, tokens, gates, corrupt.heads, start=clean)

    Arguments:
        gates: (row, layer, head). A gate of 1 gives the head's own output, a gate of 0 that of the source. Gates may
            require gradients.
        source: what closed gates read. It may require gradients.
        mask: nonzero for real tokens; None if there is no padding.
        start: the plain run of the same tokens; layers below the first closed gate are then not run again.
        start_gates: the gates of ``start``, if it is a run with gates (`capture_circuit`); layers below the first gate
            that differs from them are then not run again.
        logits_at: the positions whose logits are computed.
        context: its memory budget decides how many rows run together.

    Returns:
        (row, prompt, vocab) at the last position, or (row, ..., vocab) as ``logits_at`` says. Cost: at most 1 forward
        for each row. Rows share the layers below the first gate in which they differ.
    """
    _check_gates(model, gates)
    if start is not None and (not start.streams or start.tokens.shape != tokens.shape):
        raise GatelensError(
            "start is a run of other prompts, or was captured without streams: capture these prompts with streams."
        )
    n_logits = tokens.numel() if logits_at == "all" else len(tokens)
    n_logits = int(logits_at.sum()) if isinstance(logits_at, Tensor) else n_logits
    grad = _requires_grad(gates, source) and torch.is_grad_enabled()
    at_once = rows_that_fit(model, tokens, n_logits, grad=grad, context=context or Context())
    if grad:
        return torch.cat([_run_rows(model, tokens, g, source, mask, start, logits_at) for g in gates.split(at_once)])
    # Rows in lexical order share the layers below the first gate in which they differ, and equal rows run once.
    distinct, which = gates.detach().unique(dim=0, return_inverse=True)
    changed = _changed_layers(distinct, start_gates) if start is not None else distinct.new_ones(distinct.shape[:2])
    changed[:, -1] = True
    first = changed.int().argmax(1)
    # Rows with the same first changed layer skip the same layers, so they run together.
    order = first.argsort(stable=True)
    groups = [part for same in order.split(first.bincount().tolist()) for part in same.split(at_once) if len(part)]
    parts = [_run_rows(model, tokens, distinct[part], source, mask, start, logits_at, start_gates) for part in groups]
    return torch.cat(parts)[order.argsort()[which].to(parts[0].device)]


def capture_circuit(
    model: Model,
    tokens: Int[Tensor, "prompt position"],
    gates: Float[Tensor, "layer head"],
    source: HeadSource = None,
) -> Run:
    """Run the model with one row of gates and capture the input of every layer. Cost: 1 forward.

    Returns:
        The run, without the outputs of heads. Runs whose gates differ from these can start from it (`run_heads`).
    """
    streams: list[Tensor] = []
    with torch.no_grad(), Hooks() as hooks:
        for layer, block in enumerate(model.anatomy.blocks):
            hooks.before(block.layer, streams.append)
            if (gates[layer] != 1).any():
                hooks.before(block.out, _mix(gates[None, layer], None if source is None else source[layer]))
        logits = forward(model, tokens, None, hooks, "last")
    return Run(tokens, None, logits, [], streams)


def _changed_layers(gates: Tensor, start_gates: Tensor | None) -> Tensor:
    """The layers of each row with a gate that differs from that of the start, which is 1 by default: (row, layer)."""
    return (gates != (1 if start_gates is None else start_gates.to(gates))).any(2)


def _run_rows(
    model: Model,
    tokens: Tensor,
    gates: Tensor,
    source: HeadSource,
    mask: Tensor | None,
    start: Run | None,
    logits_at: LogitsAt,
    start_gates: Tensor | None = None,
) -> Tensor:
    grad = _requires_grad(gates, source) and torch.is_grad_enabled()
    # A learned gate needs its gradient even while it is 1.
    touched = [True] * model.n_layers if gates.requires_grad else (gates != 1).flatten(2).any(2).any(0).tolist()
    with torch.set_grad_enabled(grad), Hooks() as hooks:
        first = 0
        if start is not None:
            changed = touched if start_gates is None else _changed_layers(gates, start_gates).any(0).tolist()
            first = changed.index(True) if True in changed else model.n_layers - 1
            skip_to(model, first, start.streams[first], hooks)
        if isinstance(logits_at, str) and logits_at == "last" and mask is None and not grad and any(touched):
            only_last_position(model, hooks)
        below = torch.zeros(1, dtype=torch.int64, device=gates.device)
        for layer, rows in list(enumerate(_distinct_rows(gates, share=not grad)))[first:]:
            if len(rows) > 1:
                branch(model, layer, torch.searchsorted(below, rows, right=True) - 1, len(tokens), hooks)
            if touched[layer]:
                hooks.before(
                    model.anatomy.blocks[layer].out, _mix(gates[rows, layer], None if source is None else source[layer])
                )
            below = rows
        logits = forward(model, tokens, mask, hooks, logits_at)
    return logits.unflatten(0, (len(gates), -1))


def _distinct_rows(gates: Shaped[Tensor, "row layer head"], *, share: bool) -> list[Int[Tensor, " _row"]]:
    """For each layer, the rows that it runs: those whose gates up to this layer differ from those of the row before.

    Arguments:
        gates: in lexical order, so that rows that are equal up to a layer are neighbours.
        share: if False, every layer runs all rows.
    """
    differs = torch.ones_like(gates[..., 0], dtype=torch.bool)
    if share:
        differs[1:] = (gates[1:] != gates[:-1]).any(2).cumsum(1) > 0
    return [layer.nonzero()[:, 0] for layer in differs.T]


def _requires_grad(gates: Tensor, source: HeadSource) -> bool:
    return gates.requires_grad or any(values.requires_grad for values in source or ())


def _mix(gates: Tensor, source: Tensor | None) -> Edit:
    """Mix one layer's z (row * prompt, position, head * dim) with its source by the gates (row, head)."""
    rows, heads = gates.shape

    def edit(z: Tensor) -> Tensor:
        own = z.unflatten(-1, (heads, -1)).unflatten(0, (rows, -1))
        # In float32 even for a half-precision model: half precision would round gates near 1, and their gradients.
        open_ = gates.to(z.device, torch.promote_types(z.dtype, torch.float32))[:, None, None, :, None]
        mixed = own * open_
        if source is not None:
            mixed = mixed + (1 - open_) * source.to(z.device)
        return mixed.to(z.dtype).view_as(z)

    return edit


def mean_heads(run: Run) -> list[Float[Tensor, "head dim"]]:
    """The mean output of each head over all real tokens of a run, for each layer."""
    if run.mask is None:
        return [z.mean((0, 1)) for z in run.heads]
    return [z[run.mask.to(z.device, torch.bool)].mean(0) for z in run.heads]


def _check_gates(model: Model, gates: Tensor) -> None:
    shape = (model.n_layers, model.n_heads)
    if gates.ndim != 3 or tuple(gates.shape[1:]) != shape or len(gates) == 0:
        raise GatelensError(
            f"head gates of {model.name} must have the shape (row, {shape[0]}, {shape[1]}), that is (row, layer, "
            f"head), and not {tuple(gates.shape)}."
        )
