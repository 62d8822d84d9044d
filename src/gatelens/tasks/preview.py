"""A preview of a task: how well a model does on it, prompt by prompt."""

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from gatelens.errors import GatelensError
from gatelens.tasks.base import CircuitTask, ResponseTask

# A model has a behaviour if it answers this share of the prompts correctly, or if its first choice is right for this
# share of the response tokens.
ENOUGH_PROMPTS = 0.7
ENOUGH_TOKENS = 0.5
BATCH_SIZE = 16
BATCH_TOKENS = 4096

CIRCUIT_NOTE = {
    "logit": "The score is the logit difference: the largest logit of the right answers minus the largest logit of the "
    "wrong answers.",
    "probability": "The score is the probability difference: the total probability of the right answers minus that of "
    "the wrong answers.",
}
RIGHT_NOTE = (
    "A prompt is right if its score is above zero. Only these answers are compared, so the model's top token may be "
    "another word."
)
RESPONSE_NOTE = (
    "The model reads the prompt and the response, and its first choice for each response token is shown. A response is "
    "right if all of them are. The score is the log-probability of the response in nats."
)


class Runnable(Protocol):
    """A model that `gatelens.load` returns."""

    @property
    def name(self) -> str: ...
    @property
    def hf(self) -> Any: ...
    @property
    def tokenizer(self) -> Any: ...


@dataclass(frozen=True)
class PreviewedPrompt:
    """A prompt as it is shown: its text, its answers, and what the model predicts."""

    prompt: str
    answers: str
    predicted: str
    right: bool
    score: float  # the metric on the clean prompt, or the log-probability of the response


@dataclass(frozen=True)
class Preview:
    """How well a model does on a task: figures over all prompts, and the first few prompts."""

    task: str
    model: str
    n: int
    figures: dict[str, float]  # the name of a figure -> its value
    shown: list[PreviewedPrompt]
    note: str  # how to read the scores
    warning: str | None


def preview(model: Runnable, task: CircuitTask | ResponseTask, show: int = 10) -> Preview:
    """Run the unchanged model on all prompts of the task, and summarise.

    Arguments:
        show: the number of prompts that are shown.
    """
    with torch.no_grad():
        result = _circuit(model, task, show) if isinstance(task, CircuitTask) else _response(model, task, show)
    if not all(map(math.isfinite, result.figures.values())):
        raise GatelensError(
            f"{model.name} computes NaN or infinity on the prompts of {task.name}: load it with its check (without "
            "--no-check), or in float32."
        )
    return result


def _circuit(model: Runnable, task: CircuitTask, show: int) -> Preview:
    clean, corrupt = torch.zeros(len(task)), torch.zeros(len(task))
    right = torch.zeros(len(task), dtype=torch.bool)
    predicted: dict[int, str] = {}
    # Logits are reduced batch by batch: those of all prompts would not fit into memory.
    for batch in (part for bucket in task.buckets for part in bucket.parts(_batch_size(bucket.clean.shape[1]))):
        logits = _last_logits(model, batch.clean)
        clean[batch.which] = task.metric(logits, batch)
        right[batch.which] = task.correct(logits, batch)
        corrupt[batch.which] = task.metric(_last_logits(model, batch.corrupt), batch)
        for i, prompt_logits in zip(batch.which.tolist(), logits, strict=True):
            if i < show:
                predicted[i] = _top(model.tokenizer, prompt_logits)
    share = right.float().mean().item()
    shown = [
        PreviewedPrompt(
            pair.clean,
            f"right: {_several(pair.answers)}\nwrong: {_several(pair.wrong)}",
            predicted[i],
            bool(right[i]),
            clean[i].item(),
        )
        for i, pair in enumerate(task.pairs[:show])
    ]
    metric = f"{task.difference} difference"
    figures = {
        "answered correctly": share,
        f"{metric} on clean prompts": clean.mean().item(),
        f"{metric} on corrupt prompts": corrupt.mean().item(),
    }
    note = (
        f"{CIRCUIT_NOTE[task.difference]} {RIGHT_NOTE}\nThe corrupt prompt of the first pair: {task.pairs[0].corrupt}"
    )
    warning = lacks_behaviour(model.name, task.name, share)
    return Preview(task.name, model.name, len(task), figures, shown, note, warning)


def lacks_behaviour(model: str, task: str, share: float) -> str | None:
    """A warning if the model hardly has the behaviour of a circuit task, else None.

    Arguments:
        model, task: their names.
        share: the share of prompts that the model answers correctly.
    """
    if share >= ENOUGH_PROMPTS:
        return None
    return (
        f"{model} answers {share:.0%} of {task} correctly, less than {ENOUGH_PROMPTS:.0%}. It hardly has the "
        "behaviour, so a circuit for it means little."
    )


def _last_logits(model: Runnable, tokens: Tensor) -> Tensor:
    """Logits of one batch at the last position, (prompt, vocab) float32 on the CPU."""
    logits: Tensor = model.hf(tokens.to(model.hf.device), logits_to_keep=1).logits[:, -1]
    return logits.float().cpu()


def _batch_size(length: int) -> int:
    """How many prompts of this length run together."""
    return max(1, min(BATCH_SIZE, BATCH_TOKENS // length))


def _top(tokenizer: Any, logits: Tensor, k: int = 3) -> str:
    """The k most probable tokens with their probabilities."""
    values, ids = logits.softmax(-1).topk(k)
    return "\n".join(f"{tokenizer.decode([i])!r} {p:.0%}" for i, p in zip(ids.tolist(), values.tolist(), strict=True))


def _several(answers: tuple[str, ...], most: int = 3) -> str:
    """The first answers, and the number of the others."""
    shown = ", ".join(repr(answer) for answer in answers[:most])
    others = len(answers) - most
    return shown if others < 1 else f"{shown} or {others} other{'s' if others > 1 else ''}"


def _response(model: Runnable, task: ResponseTask, show: int) -> Preview:
    choices, hits, scores = {}, {}, {}
    for i, ids, log_probs in _responses(model, task):
        target = torch.tensor(task.examples[i].response_ids)
        choices[i], hits[i] = ids, ids == target
        scores[i] = log_probs.gather(-1, target[:, None]).sum().item()
    tokens = torch.cat(list(hits.values())).float().mean().item()
    shown = [
        PreviewedPrompt(
            example.prompt,
            repr(example.response),
            repr(model.tokenizer.decode(choices[i].tolist())),
            bool(hits[i].all()),
            scores[i],
        )
        for i, example in enumerate(task.examples[:show])
    ]
    figures = {
        "responses predicted whole": sum(bool(hit.all()) for hit in hits.values()) / len(task),
        "response tokens predicted": tokens,
        "log-probability of a response": sum(scores.values()) / len(task),
    }
    warning = hardly_known(model.name, task, tokens)
    return Preview(task.name, model.name, len(task), figures, shown, RESPONSE_NOTE, warning)


def _responses(model: Runnable, task: ResponseTask) -> Iterator[tuple[int, Tensor, Tensor]]:
    """For each example, teacher-forced: the model's first choices (token,) and log-probabilities (token, vocab)."""
    device = model.hf.device
    for batch in task.batches(_batch_size(max(map(len, task.examples)))):
        # Only the logits that predict a response token of any example are computed.
        before = batch.targets[:, 1:]
        used = before.any(0).nonzero()[:, 0]
        logits = model.hf(
            batch.tokens.to(device),
            attention_mask=batch.mask.to(device),
            use_cache=False,
            logits_to_keep=used.to(device),
        ).logits
        for i, targets, example_logits in zip(batch.which.tolist(), before[:, used], logits, strict=True):
            log_probs = example_logits[targets.to(device)].float().log_softmax(-1).cpu()
            yield i, log_probs.argmax(-1), log_probs


def hardly_known(model: str, task: ResponseTask, share: float) -> str | None:
    """A warning if the model hardly has the behaviour, else None.

    Arguments:
        model: the model's name.
        share: the share of response tokens that are the model's first choice. It is too small if it is below 50 %, or
            if guessing could reach it (`by_guessing`).
    """
    guessed, luck = by_guessing(task)
    if share < ENOUGH_TOKENS:
        reason = f"less than {ENOUGH_TOKENS:.0%}"
    elif share <= guessed + luck:
        reason = (
            f"hardly more than always giving the most common response ({guessed:.0%}, with luck {guessed + luck:.0%})"
        )
    else:
        return None
    return (
        f"{model} predicts {share:.0%} of the response tokens of {task.name}, {reason}. It hardly has the behaviour, "
        "so the roles of its heads mean little."
    )


def by_guessing(task: ResponseTask) -> tuple[float, float]:
    """What always giving the same response would score.

    Returns:
        The share of the most common response, and two standard errors of this share, which luck may add. Both are 0 if
        the task is not a choice between a few responses of one token each.
    """
    counts = Counter(example.response_ids for example in task.examples if not example.also)
    if len(counts) < 2 or counts.total() < len(task) or any(len(ids) > 1 for ids in counts):
        return 0.0, 0.0
    share = counts.most_common(1)[0][1] / len(task)
    return share, 2 * math.sqrt(share * (1 - share) / len(task))
