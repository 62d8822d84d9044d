"""What the loss needs of the dense model's distribution: its most probable tokens, and the mass of all others.

The KL divergence counts all other tokens as one. With k = vocab it is the exact divergence; with a smaller k it is a
lower bound of it (a coarser view of two distributions never tells them apart better).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.autograd.function import once_differentiable

from gatelens.sparse.sparsify._losses import Losses, chunks, next_tokens

LARGEST_LOG_RATIO = 80.0  # of the rest masses of both models: exp of it is still finite


class TopK(NamedTuple):
    """The distribution of the next token in the dense model, for each token of some sequences."""

    tokens: Int[Tensor, "sequence token k"]  # the k most probable tokens
    log_probs: Float[Tensor, "sequence token k"]  # their log-probabilities
    log_rest: Float[Tensor, "sequence token"]  # log of the probability of all other tokens together
    of_next: Float[Tensor, "sequence token"]  # log-probability of the token that follows; 0 for the last one


@torch.no_grad()
def top_k_of(logits: Float[Tensor, "sequence token vocab"], tokens: Int[Tensor, "sequence token"], k: int) -> TopK:
    """The top k of a model's distributions, computed in float32.

    Arguments:
        tokens: the sequences that the model has read.
    """
    flat, labels = logits.flatten(0, 1), next_tokens(tokens).flatten()
    parts = []
    for rows in chunks(flat):
        log_probs = flat[rows].float().log_softmax(-1)
        top, indices = log_probs.topk(min(k, flat.shape[1]))
        of_next = log_probs.gather(1, labels[rows].clamp(min=0)[:, None])[:, 0] * (labels[rows] >= 0)
        # The sum of what is left is exact also where it is far below the rounding of 1 - sum of the top.
        log_rest = log_probs.scatter_(1, indices, -torch.inf).logsumexp(-1)
        parts.append((indices.to(torch.int32), top, log_rest, of_next))
    return TopK(*(torch.cat(part).unflatten(0, tuple(tokens.shape)) for part in zip(*parts, strict=True)))


def top_k_losses(
    sparse: Float[Tensor, "sequence token vocab"], dense: TopK, tokens: Int[Tensor, "sequence token"]
) -> Losses:
    """KL divergence and cross-entropy of each sequence, as `losses` computes them from the logits of both models."""
    of_dense = (dense.tokens.long(), dense.log_probs, dense.log_rest)
    labels = next_tokens(tokens).flatten()
    kl, ce = _TokenLosses.apply(sparse.flatten(0, 1), *(x.flatten(0, 1) for x in of_dense), labels)  # type: ignore[no-untyped-call]
    predicted = tokens.shape[1] - 1
    return Losses(
        kl.view_as(tokens).mean(-1), ce.view_as(tokens).sum(-1) / predicted, -dense.of_next.sum(-1) / predicted
    )


class _TokenLosses(torch.autograd.Function):
    """(token, vocab) logits s and the top k of the dense model -> KL and cross-entropy of each token.

    With q and p the distributions of the sparse and the dense model, and q_rest and p_rest the masses outside the top
    k, the gradient of the KL by the sparse logits is q - p for a token of the top k and q (1 - p_rest / q_rest) for
    any other; that of the cross-entropy is q - 1[label].
    """

    @staticmethod
    def forward(
        ctx: Any, sparse: Tensor, top: Tensor, log_probs: Tensor, log_rest: Tensor, labels: Tensor
    ) -> tuple[Tensor, Tensor]:
        kl, ce, log_sum, log_ratio = torch.zeros(4, len(labels), device=sparse.device).unbind()
        has_rest = log_rest > -torch.inf
        for rows in chunks(sparse):
            s = sparse[rows].float()
            of_top, label = s.gather(1, top[rows]), labels[rows].clamp(min=0)[:, None]
            of_label = s.gather(1, label)[:, 0]
            log_rest_sum = s.scatter(1, top[rows], -torch.inf).logsumexp(-1)
            log_sum[rows] = torch.logaddexp(of_top.logsumexp(-1), log_rest_sum)
            ce[rows] = (log_sum[rows] - of_label) * (labels[rows] >= 0)
            ratio = torch.where(has_rest[rows], log_rest[rows] - log_rest_sum + log_sum[rows], 0.0)
            p = log_probs[rows].exp()
            kl[rows] = (p * (log_probs[rows] - of_top + log_sum[rows, None])).sum(-1) + log_rest[rows].exp() * ratio
            log_ratio[rows] = torch.where(has_rest[rows], ratio, -torch.inf)
        ctx.save_for_backward(sparse, top, log_probs, labels, log_sum, log_ratio)
        return kl, ce

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dkl: Tensor, dce: Tensor) -> tuple[Tensor, None, None, None, None]:
        sparse, top, log_probs, labels, log_sum, log_ratio = ctx.saved_tensors
        dce = dce * (labels >= 0)
        of_others = dkl * (1 - log_ratio.clamp(max=LARGEST_LOG_RATIO).exp()) + dce
        dsparse = torch.empty_like(sparse)
        for rows in chunks(sparse):
            q = (sparse[rows].float() - log_sum[rows, None]).exp_()
            in_top = q.gather(1, top[rows]) * (dkl + dce)[rows, None] - log_probs[rows].exp() * dkl[rows, None]
            gradient = q.mul_(of_others[rows, None]).scatter_(1, top[rows], in_top)
            gradient.scatter_add_(1, labels[rows].clamp(min=0)[:, None], -dce[rows, None])
            dsparse[rows] = gradient
        return dsparse, None, None, None, None
