"""The two ways to say how clearly a model prefers the answers to the wrong ones.

Both take logits (..., prompt, vocab) at the last position and ids (prompt, choice), where -1 fills up rows with fewer
choices, and give float32 (..., prompt): above zero means that the answers win.
"""

from collections.abc import Callable
from typing import Literal

from torch import Tensor

Difference = Literal["logit", "probability"]


def logit_difference(logits: Tensor, answers: Tensor, wrong: Tensor) -> Tensor:
    """The largest logit of the answers minus the largest of the wrong ones, in logits."""
    return _pick(logits, answers).amax(-1) - _pick(logits, wrong).amax(-1)


def probability_difference(logits: Tensor, answers: Tensor, wrong: Tensor) -> Tensor:
    """The probability of all answers together minus that of all wrong ones, from -1 to 1."""
    total = logits.float().logsumexp(-1, keepdim=True)
    right, other = ((_pick(logits, ids) - total).exp().sum(-1) for ids in (answers, wrong))
    return right - other


METRICS: dict[Difference, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "logit": logit_difference,
    "probability": probability_difference,
}


def _pick(logits: Tensor, ids: Tensor) -> Tensor:
    """Logits of the ids, (..., prompt, choice) float32; minus infinity where the id is -1."""
    index = ids.clamp(min=0).expand(*logits.shape[:-1], ids.shape[-1])
    return logits.gather(-1, index).float().masked_fill(ids < 0, float("-inf"))
