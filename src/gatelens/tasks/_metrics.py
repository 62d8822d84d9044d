"""The two metrics of circuit tasks: how clearly a model prefers the right answers to the wrong answers.

Both take logits (..., prompt, vocab) at the last position and token ids (prompt, choice), with -1 where a prompt has
fewer choices. Both return float32 (..., prompt), above zero where the right answers win.
"""

from collections.abc import Callable
from typing import Literal

from torch import Tensor

Difference = Literal["logit", "probability"]
Target = Literal["metric", "mean"]
"""What gradients are taken of: the metric, or the difference of mean logits."""


def logit_difference(logits: Tensor, answers: Tensor, wrong: Tensor) -> Tensor:
    """The largest logit of the right answers minus the largest logit of the wrong answers."""
    return _gather(logits, answers).amax(-1) - _gather(logits, wrong).amax(-1)


def probability_difference(logits: Tensor, answers: Tensor, wrong: Tensor) -> Tensor:
    """The total probability of the right answers minus that of the wrong answers, between -1 and 1."""
    total = logits.float().logsumexp(-1, keepdim=True)
    right_probability, wrong_probability = ((_gather(logits, ids) - total).exp().sum(-1) for ids in (answers, wrong))
    return right_probability - wrong_probability


def mean_difference(logits: Tensor, answers: Tensor, wrong: Tensor) -> Tensor:
    """The mean logit of the right answers minus the mean logit of the wrong answers."""
    right_mean, wrong_mean = (
        _gather(logits, ids).where(ids >= 0, 0.0).sum(-1) / (ids >= 0).sum(-1) for ids in (answers, wrong)
    )
    return right_mean - wrong_mean


METRICS: dict[Difference, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "logit": logit_difference,
    "probability": probability_difference,
}


def _gather(logits: Tensor, ids: Tensor) -> Tensor:
    """Logits of the ids, (..., prompt, choice) float32; minus infinity where the id is -1."""
    index = ids.clamp(min=0).expand(*logits.shape[:-1], ids.shape[-1])
    return logits.gather(-1, index).float().masked_fill(ids < 0, float("-inf"))
