"""Loss and open edges of a sparse model on text, with gates as they are in use, not sampled."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from gatelens.errors import GatelensError
from gatelens.model import Model
from gatelens.sparse.in_model import dense_attention, is_sparse
from gatelens.sparse.recording import OpenRecord, record_open
from gatelens.sparse.sparsify._losses import losses
from gatelens.sparse.text import TextSource, sequences

IDLE = 0.05  # a head with fewer open keys per query on a sequence is idle


@dataclass(frozen=True, eq=False)
class Judgement:
    """A sparse model beside a dense one on the same sequences. Counts are sums over all sequences.

    Example:
        judgement = gatelens.evaluate(sparse, "text.txt", model, n_sequences=8)["text"]
        judgement.above_dense, judgement.kl, judgement.keys_per_query, judgement.open_by_head
    """

    sequences: int  # number of sequences
    length: int  # tokens in each sequence
    dense_loss: float  # cross-entropy in nats per token
    sparse_loss: float  # of the sparse model, in nats per token
    kl: float  # KL(dense || sparse) in nats per token, 0 or more
    opened: Float[Tensor, "layer head"]  # number of open edges
    pairs: Float[Tensor, "layer head"]  # number of visible pairs
    idle: Float[Tensor, "layer head"]  # number of sequences with fewer than 0.05 open keys per query
    without_key: Float[Tensor, "layer head"]  # number of queries without an open key
    to_first: Float[Tensor, "layer head"]  # number of open edges to the first token

    def as_dict(self) -> dict[str, Any]:
        """All numbers as JSON."""
        return {
            "sequences": self.sequences,
            "length": self.length,
            "dense_loss": self.dense_loss,
            "sparse_loss": self.sparse_loss,
            "above_dense": self.above_dense,
            "kl": self.kl,
            "keys_per_query": self.keys_per_query,
            "open": self.open_share,
            "idle_heads": self.idle_share,
            "queries_without_key": self.without_key_share,
            "edges_to_first_token": self.to_first_share,
            "open_by_layer": self.open_by_layer.tolist(),
            "open_by_head": self.open_by_head.tolist(),
        }

    @property
    def above_dense(self) -> float:
        """What sparsity costs, in nats per token."""
        return self.sparse_loss - self.dense_loss

    @property
    def keys_per_query(self) -> float:
        """Open keys per query and head, mean over all heads."""
        return float(self.opened.mean()) / (self.sequences * self.length)

    @property
    def open_share(self) -> float:
        """Share of visible pairs whose gate is open, 0..1. It depends on the length: see `keys_per_query`."""
        return float(self.opened.sum() / self.pairs.sum())

    @property
    def idle_share(self) -> float:
        """Share of heads that are idle on a sequence, mean over sequences, 0..1."""
        return float(self.idle.mean()) / self.sequences

    @property
    def without_key_share(self) -> float:
        """Share of queries without an open key, mean over heads, 0..1."""
        return float(self.without_key.mean()) / (self.sequences * self.length)

    @property
    def to_first_share(self) -> float:
        """Share of the open edges that lead to the first token of a sequence, 0..1; 0 if no edge is open."""
        return float(self.to_first.sum() / self.opened.sum().clamp(min=1))

    @property
    def open_by_head(self) -> Float[Tensor, "layer head"]:
        """Share of visible pairs whose gate is open, for each head."""
        return self.opened / self.pairs

    @property
    def open_by_layer(self) -> Float[Tensor, " layer"]:
        """Share of visible pairs whose gate is open, for each layer."""
        return self.opened.sum(1) / self.pairs.sum(1)


def evaluate(
    model: Model,
    text: TextSource | Sequence[TextSource],
    dense: Model | None = None,
    *,
    length: int = 256,
    n_sequences: int | None = 64,
    skip: int = 0,
    batch: int = 2,
    announce: Callable[[int], None] | None = None,
) -> dict[str, Judgement]:
    """Measure loss and open edges of a sparse model on each text, beside a dense one. Cost: two forwards of the text.

    Arguments:
        model: the sparse model, from `gatelens.load`.
        text: a text file, a folder, a JSON-lines file or a hub data set; or several.
        dense: what to compare with; by default the same weights without gates, which is not the model that the sparse
            one was made from.
        length: tokens in each sequence.
        n_sequences: number of sequences to read of each text, after the first `skip`; None reads all.
        skip: sequences at the beginning of each text that are not read.
        batch: sequences that run together.
        announce: is called before the models are run, with the number of sequences of all texts.

    Returns:
        A judgement for each text, by the name of the text.

    Example:
        judged = gatelens.evaluate(sparse, "held-out.txt", dense, n_sequences=8)
        print({name: (one.above_dense, one.keys_per_query) for name, one in judged.items()})
    """
    if not is_sparse(model.hf):
        raise GatelensError(f"{model.name} is dense: all its edges are open. Give a model made by `gatelens sparsify`.")
    check_length(model, length)
    if dense is not None:
        _check_dense(dense, model)
        check_length(dense, length)
    for name, value, least in (("n_sequences", n_sequences, 1), ("skip", skip, 0), ("batch", batch, 1)):
        if value is not None and value < least:
            raise GatelensError(f"{name} should be at least {least}, not {value}.")
    texts: dict[str, Tensor] = {}
    for name, source in named(text).items():
        tokens = sequences(model.tokenizer, source, length, None if n_sequences is None else skip + n_sequences)
        if len(tokens) <= skip:
            raise GatelensError(
                f"the text {source} has {len(tokens)} sequences of {length} tokens, and {skip} are to be skipped: skip "
                "fewer, or give more text or a smaller length."
            )
        texts[name] = tokens[skip:]
    if announce is not None:
        announce(sum(map(len, texts.values())))
    dense_hf = None if dense is None else dense.hf
    return {name: judge(dense_hf, model.hf, tokens, batch) for name, tokens in texts.items()}


def named(text: TextSource | Sequence[TextSource]) -> dict[str, TextSource]:
    """Texts by the last part of their path, preceded by as many folders as it takes to make all names different."""
    sources = [text] if isinstance(text, str | Path) else list(dict.fromkeys(text))
    parts = [_path_parts(source) for source in sources]
    depths = range(1, 1 + max(map(len, parts), default=0))
    names = {}
    for source, own in zip(sources, parts, strict=True):
        others = [other for other in parts if other is not own]
        unique = (depth for depth in depths if all(own[-depth:] != other[-depth:] for other in others))
        depth = next(unique, None)  # None if only the file suffixes differ
        names[str(source) if depth is None else "/".join(own[-depth:])] = source
    return names


def _path_parts(source: TextSource) -> tuple[str, ...]:
    """The folders of a text, and its name without the suffix."""
    path = Path(os.path.abspath(source)) if Path(source).exists() else Path(source)
    return (*path.parts[:-1], path.stem)


def check_length(model: Model, length: int) -> None:
    """Raise an error if sequences are too short to predict a token, or longer than the model's context."""
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
def judge(dense: Any, sparse: Any, tokens: Int[Tensor, "sequence token"], batch: int = 2) -> Judgement:
    """Run a dense and a sparse Hugging Face model on sequences.

    Arguments:
        dense: None stands for the sparse model without gates.
    """
    device = sparse.get_input_embeddings().weight.device
    sums = torch.zeros(3, dtype=torch.float64)
    counts = torch.zeros((), dtype=torch.float64)
    for some in tokens.to(device).split(batch):
        if dense is None:
            with dense_attention(sparse):
                dense_logits = _logits(sparse, some)
        else:
            dense_logits = _logits(dense, some)
        with record_open(sparse, first=True) as record:
            sparse_logits = _logits(sparse, some)
        kl, sparse_loss, dense_loss = losses(sparse_logits, dense_logits, some)
        sums += torch.stack([loss.sum().double().cpu() for loss in (dense_loss, sparse_loss, kl)])
        counts = counts + _counts(record)
    return Judgement(len(tokens), tokens.shape[1], *(sums / len(tokens)).tolist(), *counts)


def _counts(record: OpenRecord) -> Float[Tensor, "5 layer head"]:
    """Open edges, pairs, idle sequences, queries without a key and edges to the first token, summed over the batch."""
    keys, visible = record.open_keys, record.visible_keys
    per_query = keys.sum(-1) / (visible > 0).sum(-1)
    idle, without_key = per_query < IDLE, ((keys == 0) & (visible > 0)).sum(-1)
    counted = (keys.sum(-1), record.pairs, idle, without_key, record.first.sum(-1))
    return torch.stack([x.sum(1).double().cpu() for x in counted])


def _logits(hf: Any, tokens: Int[Tensor, "sequence token"]) -> Float[Tensor, "sequence token vocab"]:
    logits: Tensor = hf(input_ids=tokens, use_cache=False).logits
    return logits
