"""Loss and open edges of a sparse model on text, with gates as they are in use: steps, not draws."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gatelens.errors import GatelensError
from gatelens.model import Model
from gatelens.sparse.in_model import dense_attention, is_sparse
from gatelens.sparse.recording import record_open
from gatelens.sparse.sparsify.losses import cross_entropy, kl_divergence
from gatelens.sparse.text import Source, sequences


@dataclass(frozen=True, eq=False)
class Judgement:
    """A sparse model beside a dense one on the same sequences.

    dense_loss, sparse_loss: cross-entropy in nats per token. kl: KL(dense || sparse) in nats per token, 0 or more.
    opened, pairs: (layer, head), open edges and visible pairs, counted over all sequences.
    """

    sequences: int
    length: int
    dense_loss: float
    sparse_loss: float
    kl: float
    opened: Tensor
    pairs: Tensor

    def as_dict(self) -> dict[str, Any]:
        """All numbers, as JSON has them."""
        return {
            "sequences": self.sequences,
            "length": self.length,
            "dense_loss": self.dense_loss,
            "sparse_loss": self.sparse_loss,
            "above_dense": self.above_dense,
            "kl": self.kl,
            "open": self.open_share,
            "open_by_layer": self.open_by_layer.tolist(),
            "open_by_head": self.open_by_head.tolist(),
        }

    @property
    def above_dense(self) -> float:
        """What sparsity costs, in nats per token."""
        return self.sparse_loss - self.dense_loss

    @property
    def open_share(self) -> float:
        """Share of visible pairs whose gate is open, 0..1."""
        return float(self.opened.sum() / self.pairs.sum())

    @property
    def open_by_head(self) -> Tensor:
        """(layer, head)"""
        return self.opened / self.pairs

    @property
    def open_by_layer(self) -> Tensor:
        """(layer,)"""
        return self.opened.sum(1) / self.pairs.sum(1)


def evaluate(
    model: Model,
    text: Source | Sequence[Source],
    dense: Model | None = None,
    *,
    length: int = 256,
    most: int | None = 64,
    skip: int = 0,
    batch: int = 2,
) -> dict[str, Judgement]:
    """Loss and open edges of a sparse model on each text, beside those of a dense one. Cost: two forwards of the text.

    dense: what to compare with; by default the same weights without gates, which is not the model that it was made
    from. most: sequences read of each text, after the first `skip`; None reads it all.
    """
    if not is_sparse(model.hf):
        raise GatelensError(f"{model.name} is dense: all its edges are open. Give a model made by `gatelens sparsify`.")
    check_length(model, length)
    if dense is not None:
        _check_dense(dense, model)
        check_length(dense, length)
    for name, value, least in (("most", most, 1), ("skip", skip, 0), ("batch", batch, 1)):
        if value is not None and value < least:
            raise GatelensError(f"{name} should be at least {least}, not {value}.")
    found = {}
    for name, source in named(text).items():
        tokens = sequences(model.tokenizer, source, length, None if most is None else skip + most)
        if len(tokens) <= skip:
            raise GatelensError(
                f"the text {source} has {len(tokens)} sequences of {length} tokens, all of them among the {skip} to "
                "skip: skip fewer, or give more text or a smaller length."
            )
        found[name] = judge(None if dense is None else dense.hf, model.hf, tokens[skip:], batch)
    return found


def named(text: Source | Sequence[Source]) -> dict[str, Source]:
    """Texts by the last part of their names, with so many of the folders before it that no two are called the same."""
    sources = [text] if isinstance(text, str | Path) else list(dict.fromkeys(text))
    parts = [_parts(source) for source in sources]
    depths = range(1, 1 + max(map(len, parts), default=0))
    names = {}
    for source, mine in zip(sources, parts, strict=True):
        others = [other for other in parts if other is not mine]
        alone = (depth for depth in depths if all(mine[-depth:] != other[-depth:] for other in others))
        depth = next(alone, None)  # none where only their endings differ
        names[str(source) if depth is None else "/".join(mine[-depth:])] = source
    return names


def _parts(source: Source) -> tuple[str, ...]:
    """The folders of a text and its name without its ending."""
    path = Path(os.path.abspath(source)) if Path(source).exists() else Path(source)
    return (*path.parts[:-1], path.stem)


def check_length(model: Model, length: int) -> None:
    """Refuse sequences that a model cannot predict anything in, or was not made for."""
    if not 2 <= length <= model.context:
        raise GatelensError(
            f"the length should be from 2 to {model.context} tokens, which is what {model.name} reads, not {length}."
        )


def _check_dense(dense: Model, sparse: Model) -> None:
    if is_sparse(dense.hf):
        raise GatelensError(
            f"{dense.name} is sparse too: compare with the dense model that {sparse.name} was made from."
        )
    same = dense.hf.config.vocab_size == sparse.hf.config.vocab_size
    if not same or dense.tokenizer.get_vocab() != sparse.tokenizer.get_vocab():
        raise GatelensError(
            f"{dense.name} has another vocabulary than {sparse.name}: compare with the model that it was made from."
        )


@torch.no_grad()
def judge(dense: Any, sparse: Any, tokens: Tensor, batch: int = 2) -> Judgement:
    """Run a dense (None: the sparse one without gates) and a sparse Hugging Face model over (sequence, token)."""
    device = sparse.get_input_embeddings().weight.device
    sums = torch.zeros(3, dtype=torch.float64)
    opened = pairs = torch.zeros((), dtype=torch.float64)
    for rows in tokens.to(device).split(batch):
        if dense is None:
            with dense_attention(sparse):
                right = _log_probs(sparse, rows)
        else:
            right = _log_probs(dense, rows)
        with record_open(sparse) as record:
            ours = _log_probs(sparse, rows)
        losses = (cross_entropy(right, rows), cross_entropy(ours, rows), kl_divergence(right, ours))
        sums += torch.stack([loss.sum().double().cpu() for loss in losses])
        opened = opened + (record.open_share * record.pairs).sum(1).double().cpu()
        pairs = pairs + record.pairs.sum(1).double().cpu()
    dense_loss, sparse_loss, kl = (sums / len(tokens)).tolist()
    return Judgement(len(tokens), tokens.shape[1], dense_loss, sparse_loss, kl, opened, pairs)


def _log_probs(hf: Any, rows: Tensor) -> Tensor:
    return hf(input_ids=rows, use_cache=False).logits.float().log_softmax(-1)
