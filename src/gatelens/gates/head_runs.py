"""Run a model with gates on its heads.

A head gate g mixes the head's output z with a source: ``z <- g * z + (1 - g) * source``. The source is zero, a
mean, or another run's output (the corrupt run's). Gates carry a leading row axis: many circuits in one batch.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from gatelens.errors import GatelensError
from gatelens.gates.hooks import Edit, Hooks
from gatelens.gates.runs import LogitsAt, Run, forward, rows_that_fit, skip_to
from gatelens.model import Model
from gatelens.runtime.context import Context

HeadSource = Sequence[Tensor] | None
"""What a closed gate lets through, for each layer: a tensor that broadcasts to (prompt, position, head, dim),
e.g. ``corrupt.heads`` of a captured run, or :func:`mean_heads` of one. None is zero."""


def run_heads(
    model: Model,
    tokens: Tensor,
    gates: Tensor,
    source: HeadSource = None,
    *,
    mask: Tensor | None = None,
    start: Run | None = None,
    logits_at: LogitsAt = "last",
    context: Context | None = None,
) -> Tensor:
    """Logits of the prompts under each row of gates: (row, prompt, vocab), or (row, ..., vocab) as ``logits_at`` says.

    gates: (row, layer, head); 1 is the clean output, 0 the source's. They may require gradients.
    start: the plain run of the same tokens; layers below the first closed gate are then not run again.
    Rows are evaluated together as far as the memory budget allows. Cost: at most 1 forward per row.
    """
    _check_gates(model, gates)
    if start is not None and (not start.streams or start.tokens.shape != tokens.shape):
        raise GatelensError("start is a run of other prompts, or was captured without streams: capture these prompts.")
    n_logits = tokens.numel() if logits_at == "all" else len(tokens)
    n_logits = int(logits_at.sum()) if isinstance(logits_at, Tensor) else n_logits
    grad = gates.requires_grad and torch.is_grad_enabled()
    at_once = rows_that_fit(model, tokens, n_logits, grad=grad, context=context or Context())
    if start is None or grad:
        return torch.cat([_run_rows(model, tokens, g, source, mask, start, logits_at) for g in gates.split(at_once)])
    # Rows that share their first closed layer share the layers that are left out.
    first = _first_closed(gates)
    order = first.argsort(stable=True)
    groups = [part for same in order.split(first.bincount().tolist()) for part in same.split(at_once) if len(part)]
    parts = [_run_rows(model, tokens, gates[part], source, mask, start, logits_at) for part in groups]
    return torch.cat(parts)[order.argsort().to(parts[0].device)]


def _first_closed(gates: Tensor) -> Tensor:
    """The lowest layer of each row with a gate that is not 1; the last layer where there is none."""
    closed = (gates != 1).any(2)
    closed[:, -1] = True
    return closed.int().argmax(1)


def _run_rows(
    model: Model,
    tokens: Tensor,
    gates: Tensor,
    source: HeadSource,
    mask: Tensor | None,
    start: Run | None,
    logits_at: LogitsAt,
) -> Tensor:
    rows = len(gates)
    # A gate that is learned matters also while it is 1.
    touched = [True] * model.n_layers if gates.requires_grad else (gates != 1).flatten(2).any(2).any(0).tolist()
    with torch.set_grad_enabled(gates.requires_grad and torch.is_grad_enabled()), Hooks() as hooks:
        if start is not None:
            first = touched.index(True) if True in touched else model.n_layers - 1
            skip_to(model, first, start.streams[first], hooks, rows)
        for layer, block in enumerate(model.anatomy.blocks):
            if touched[layer]:
                hooks.before(block.out, _mix(gates[:, layer], None if source is None else source[layer]))
        logits = forward(model, tokens, mask, hooks, logits_at, rows)
    return logits.unflatten(0, (rows, -1))


def _mix(gates: Tensor, source: Tensor | None) -> Edit:
    """The edit of one layer's z (row * prompt, position, head * dim) by its gates (row, head)."""
    rows, heads = gates.shape

    def edit(z: Tensor) -> Tensor:
        own = z.unflatten(-1, (heads, -1)).unflatten(0, (rows, -1))
        # In float32 also for a half-precision model: gates near 1 and their gradients would be lost otherwise.
        open_ = gates.to(z.device, torch.promote_types(z.dtype, torch.float32))[:, None, None, :, None]
        mixed = own * open_
        if source is not None:
            mixed = mixed + (1 - open_) * source.to(z.device)
        return mixed.to(z.dtype).view_as(z)

    return edit


def mean_heads(run: Run) -> list[Tensor]:
    """Each head's mean output over all real tokens of a run: (head, dim) for each layer."""
    if run.mask is None:
        return [z.mean((0, 1)) for z in run.heads]
    return [z[run.mask.to(z.device, torch.bool)].mean(0) for z in run.heads]


def _check_gates(model: Model, gates: Tensor) -> None:
    wanted = (model.n_layers, model.n_heads)
    if gates.ndim != 3 or tuple(gates.shape[1:]) != wanted or len(gates) == 0:
        raise GatelensError(
            f"head gates of {model.name} have the shape (row, {wanted[0]}, {wanted[1]}): row, layer, head; "
            f"these have {tuple(gates.shape)}."
        )
