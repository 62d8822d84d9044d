"""Describe what heads do in a task: measure the lines of a `HeadTable`."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from gatelens.errors import GatelensError
from gatelens.gates.attention_runs import attention_of_query
from gatelens.gates.direct import direct_writes
from gatelens.gates.heads import HEADS
from gatelens.gates.interventions import gate_mask
from gatelens.gates.probes import probe_heads
from gatelens.gates.runs import capture
from gatelens.gates.scores import Scores, rank
from gatelens.measures.example import token_texts
from gatelens.measures.head_table import HeadLine, HeadTable, bootstrap_mean
from gatelens.methods.registry import score_gates
from gatelens.model import Model
from gatelens.model.components import Head
from gatelens.runtime.context import Context
from gatelens.sparse.in_model import is_sparse
from gatelens.tasks.base import Bucket, CircuitTask
from gatelens.tasks.batches import batches, check_circuit_task

_TOP_TOKENS = 3


def describe(
    model: Model,
    task: CircuitTask,
    heads: Any = 10,
    *,
    dense: Model | None = None,
    context: Context | None = None,
) -> HeadTable:
    """Say what some heads do in a task: how much they matter, where they look, what they write, which kind they are.

    Arguments:
        heads: heads or their names (``["L9H6", (9, 9)]``); scores, whose ten best heads are described; or how many
            heads, which are then chosen by attribution.
        dense: the dense model that this sparse one was made from. The table then has its numbers too.

    Returns:
        A line for each head, the highest absolute score first; `gatelens.measures.head_table` says what each number
        means. Cost: about F/2 for each head and 6 F, on all prompts of the task.

    Example:
        table = gatelens.describe(model, task, ["L9H6", "L10H0"])
        table["L9H6"].looks  # {"IO": 0.71, "S1": 0.06, ...}
    """
    check_circuit_task(task)
    context = context or Context()
    chosen = chosen_heads(model, task, heads, context)
    if not chosen:
        raise GatelensError("there is no head to describe: give at least one.")
    table = _table(model, task, chosen, context)
    if dense is None:
        return table
    check_dense(dense, model, task)
    return with_dense(table, task, dense, context)


def check_dense(dense: Model, sparse: Model, task: CircuitTask) -> None:
    """Raise an error if two models do not have the same heads, or not the same tokens in the prompts of a task."""
    remedy = "give the dense model that the sparse one was made from."
    if (dense.n_layers, dense.n_heads) != (sparse.n_layers, sparse.n_heads):
        raise GatelensError(
            f"{dense.name} has {dense.n_layers} x {dense.n_heads} heads and {sparse.name} {sparse.n_layers} x "
            f"{sparse.n_heads}: {remedy}"
        )
    ids = torch.cat([bucket.clean.flatten() for bucket in task.buckets]).unique().tolist()
    if dense.tokenizer.convert_ids_to_tokens(ids) != sparse.tokenizer.convert_ids_to_tokens(ids):
        raise GatelensError(f"{dense.name} and {sparse.name} do not have the same tokens: {remedy}")


def with_dense(table: HeadTable, task: CircuitTask, dense: Model, context: Context | None = None) -> HeadTable:
    """A table with the same heads of the dense model beside them.

    Cost: about F/2 for each head and 6 F of the dense model.

    Arguments:
        table: what heads of a sparse model do.
        task: the prompts of the table.
    """
    heads = [Head.parse(line.head) for line in table.lines]
    return table.beside(_table(dense, task, heads, (context or Context()).part("dense-model")))


def describe_cost(n_heads: int) -> float:
    """What a table of this many heads costs for one prompt, in forwards."""
    return 6 + HEADS.cost.patch * n_heads if n_heads else 0


def chosen_heads(model: Model, task: CircuitTask, heads: Any, context: Context) -> list[Head]:
    """The heads that were asked for (`describe`); none if the gates of the scores do not belong to heads."""
    if isinstance(heads, int) and not isinstance(heads, bool):
        return best_heads(score_gates("heads", model, task, "eap", context=context.part("choose-heads")), heads)
    if isinstance(heads, Scores):
        return best_heads(heads, 10)
    is_edges, mask = gate_mask(model, heads)
    if is_edges:
        raise GatelensError("only heads can be described: write a head as 'L3H7' or (3, 7).")
    return [Head(*place) for place in mask.nonzero().tolist()]


def best_heads(scores: Scores, n: int) -> list[Head]:
    """The n best heads of scores at any level; none if the gates do not belong to heads."""
    weights = scores.head_weights()
    if weights is None:
        return []
    n_heads = weights.shape[1]
    return [Head(*divmod(place, n_heads)) for place in rank(weights.abs().flatten())[:n].tolist()]


def _table(model: Model, task: CircuitTask, heads: Sequence[Head], context: Context) -> HeadTable:
    n, n_roles = len(heads), len(task.role_names)
    # 1. Everything that is measured on each prompt, in one tensor: (prompt, column).
    parts = batches(task, lambda length: _numbers(model, n, length), context)
    context.begin("what heads do", len(parts))
    measured = torch.empty(len(task), 2 + n * (6 + n_roles))
    pieces = context.pieces(
        [(f"heads-{i}", partial(_measure, model, task, batch, heads)) for i, batch in enumerate(parts)]
    )
    for batch, piece in zip(parts, pieces, strict=True):
        measured[batch.which] = piece.float()
    everything, none, rest = measured[:, 0], measured[:, 1], measured[:, 2:].unflatten(1, (n, -1))
    drops = everything[:, None] - rest[..., 0]  # (prompt, head)
    effect = float((everything - none).mean())
    # 2. What does not depend on all prompts.
    probes, written = probe_heads(model), _top_tokens(model, task, heads)
    lines = []
    for number, head in enumerate(heads):
        _, at_answer, at_wrong, answer, wrong, opened, *looks = rest[:, number].mean(0).tolist()
        score = float(drops[:, number].mean())
        low, high = bootstrap_mean(drops[:, number])
        lines.append(
            HeadLine(
                head=str(head),
                score=score,
                low=low,
                high=high,
                share=score / effect if abs(effect) > 1e-6 else 0.0,
                looks=dict(zip(task.role_names, looks, strict=True)),
                at_answer=at_answer,
                at_wrong=at_wrong,
                writes=written[number],
                answer=answer,
                wrong=wrong,
                probes={name: float(values[head.layer, head.index]) for name, values in probes.items()},
                open_keys=opened if is_sparse(model.hf) else None,
            )
        )
    lines.sort(key=lambda line: -abs(line.score))
    return HeadTable(model.name, task.name, len(task), f"{task.difference} difference", effect, tuple(lines))


def _numbers(model: Model, n: int, length: int) -> int:
    """How many numbers the work holds for one prompt: rows of gates with their logits, and what closed gates read."""
    rows = (n + 2) * (HEADS.row_numbers(model, length) + int(model.hf.config.vocab_size))
    return rows + HEADS.closed_numbers(model, length) + 4 * model.n_heads * length**2


@torch.no_grad()
def _measure(model: Model, task: CircuitTask, batch: Bucket, heads: Sequence[Head]) -> Float[Tensor, "prompt column"]:
    """What is measured on a batch.

    Returns:
        The metric with all heads and with none; then for each head: the metric without it, the attention on right and
        on wrong answers, the direct logits of both, the number of open keys, and the attention on each role.
    """
    # 1. The metric with all heads, with none, and without each head.
    gates = torch.ones(len(heads) + 2, model.n_layers, model.n_heads)
    gates[1] = 0
    for row, head in enumerate(heads, start=2):
        gates[row, head.layer, head.index] = 0
    clean, corrupt = capture(model, batch.clean), capture(model, batch.corrupt, streams=False)
    logits = HEADS.run(model, batch.clean, gates, corrupt.heads, start=clean, context=Context())
    metrics = task.metric(logits, batch).float().cpu()  # (row, prompt)
    # 2. Where the answer position looks.
    weights, edges = attention_of_query(model, batch.clean)
    layers, indices = [head.layer for head in heads], [head.index for head in heads]
    opened = edges[:, layers, indices].float()  # (prompt, head, key)
    looks = weights[:, layers, indices].float() * opened
    roles = torch.nn.functional.one_hot(task.roles(batch), len(task.role_names)).float()  # (prompt, key, role)
    at_answer, at_wrong = (
        torch.einsum("phk,pk->ph", looks, (batch.clean[:, :, None] == ids[batch.which][:, None]).any(2).float())
        for ids in (task.answer_ids, task.wrong_ids)
    )
    # 3. What it writes.
    direct = direct_writes(model, batch.clean, heads)
    answer, wrong = (
        direct.of_tokens(ids[batch.which]).nanmean(-1).float().cpu() for ids in (task.answer_ids, task.wrong_ids)
    )
    by_head = torch.stack([metrics[2:].T, at_answer, at_wrong, answer, wrong, opened.sum(-1)], -1)
    return torch.cat([metrics[:2].T, torch.cat([by_head, looks @ roles], -1).flatten(1)], 1)


def _top_tokens(model: Model, task: CircuitTask, heads: Sequence[Head]) -> list[tuple[str, ...]]:
    """The tokens with the largest direct logits of each head in the first prompt of the task."""
    first = next(bucket.clean[bucket.which == 0] for bucket in task.buckets if (bucket.which == 0).any())
    ids: Int[Tensor, "head k"] = direct_writes(model, first, heads).top(_TOP_TOKENS)[0].cpu()
    return [token_texts(model, row) for row in ids]
