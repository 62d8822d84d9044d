"""What a user sees of tasks before running anything: the list, and how well a model does on one of them."""

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from rich.console import Group, RenderableType
from rich.markup import escape
from rich.table import Table
from torch import Tensor

from gatelens.tasks import TASKS
from gatelens.tasks.base import CircuitTask, ResponseTask

# Below these shares the model hardly has the behaviour: of prompts answered correctly, and of response tokens that are
# the model's first choice.
LEVEL = 0.7
TOKEN_LEVEL = 0.5
ROWS = 16  # prompts in one forward


class Runnable(Protocol):
    """A model as `gatelens.load` gives it."""

    @property
    def name(self) -> str: ...
    @property
    def hf(self) -> Any: ...
    @property
    def tokenizer(self) -> Any: ...


@dataclass(frozen=True)
class Shown:
    """One prompt as shown: its text, the right answer, and what the model would say."""

    prompt: str
    answer: str
    says: str
    right: bool
    score: float  # the metric on the clean prompt, or the log-probability of the response


@dataclass(frozen=True)
class Preview:
    """How a model does on a task: figures over all its prompts, and the first few of them."""

    task: str
    model: str
    n: int
    figures: dict[str, float]  # what is measured -> its value
    shown: list[Shown]
    warning: str | None


def preview(model: Runnable, task: CircuitTask | ResponseTask, show: int = 10) -> Preview:
    """Run the model on all prompts of the task, plainly, and sum up."""
    with torch.no_grad():
        return _circuit(model, task, show) if isinstance(task, CircuitTask) else _response(model, task, show)


def _circuit(model: Runnable, task: CircuitTask, show: int) -> Preview:
    clean, corrupt = torch.zeros(len(task)), torch.zeros(len(task))
    right = torch.zeros(len(task), dtype=torch.bool)
    says: dict[int, str] = {}
    for bucket in task.buckets:
        logits = _last_logits(model, bucket.clean)
        clean[bucket.which] = task.metric(logits, bucket)
        right[bucket.which] = task.correct(logits, bucket)
        corrupt[bucket.which] = task.metric(_last_logits(model, bucket.corrupt), bucket)
        for i, row in zip(bucket.which.tolist(), logits, strict=True):
            if i < show:
                says[i] = _top(model.tokenizer, row)
    share = right.float().mean().item()
    shown = [
        Shown(pair.clean, _several(pair.answers), says[i], bool(right[i]), clean[i].item())
        for i, pair in enumerate(task.pairs[:show])
    ]
    kind = f"{task.difference} difference"
    figures = {
        "answered correctly": share,
        f"{kind} on clean prompts": clean.mean().item(),
        f"{kind} on corrupt prompts": corrupt.mean().item(),
    }
    warning = None
    if share < LEVEL:
        warning = (
            f"{model.name} answers {share:.0%} of {task.name} correctly, less than {LEVEL:.0%}: it hardly has the "
            f"behaviour, so a circuit of it means little."
        )
    return Preview(task.name, model.name, len(task), figures, shown, warning)


def _last_logits(model: Runnable, tokens: Tensor) -> Tensor:
    """Logits at the last position, (prompt, vocab) float32 on the CPU."""
    logits = [model.hf(part.to(model.hf.device), logits_to_keep=1).logits[:, -1] for part in tokens.split(ROWS)]
    return torch.cat(logits).float().cpu()


def _top(tokenizer: Any, logits: Tensor, k: int = 3) -> str:
    values, ids = logits.softmax(-1).topk(k)
    return ", ".join(f"{tokenizer.decode([i])!r} {p:.0%}" for i, p in zip(ids.tolist(), values.tolist(), strict=True))


def _response(model: Runnable, task: ResponseTask, show: int) -> Preview:
    said: dict[int, tuple[Tensor, Tensor, Tensor]] = {}
    for i, ids, log_probs in _responses(model, task):
        target = torch.tensor(task.examples[i].response_ids)
        said[i] = ids, ids == target, log_probs.gather(-1, target[:, None]).squeeze(-1)
    tokens = torch.cat([hit for _, hit, _ in said.values()]).float().mean().item()
    whole = sum(bool(hit.all()) for _, hit, _ in said.values()) / len(task)
    shown = [
        Shown(
            example.prompt,
            repr(example.response),
            repr(model.tokenizer.decode(said[i][0].tolist())),
            bool(said[i][1].all()),
            said[i][2].sum().item(),
        )
        for i, example in enumerate(task.examples[:show])
    ]
    figures = {
        "responses predicted whole": whole,
        "response tokens predicted": tokens,
        "log-probability of a response": sum(scores.sum().item() for _, _, scores in said.values()) / len(task),
    }
    return Preview(task.name, model.name, len(task), figures, shown, hardly_known(model.name, task, tokens))


def hardly_known(model: str, task: ResponseTask, share: float) -> str | None:
    """A warning, where the model's own first choices are too small a share of the response tokens, or luck would do."""
    guessed, luck = by_guessing(task)
    if share < TOKEN_LEVEL:
        less = f"less than {TOKEN_LEVEL:.0%}"
    elif share <= guessed + luck:
        less = f"hardly more than always giving the commonest response ({guessed:.0%}, by luck {guessed + luck:.0%})"
    else:
        return None
    return (
        f"{model} predicts {share:.0%} of the response tokens of {task.name}, {less}: it hardly has the behaviour, so "
        "the roles of its heads mean little."
    )


def by_guessing(task: ResponseTask) -> tuple[float, float]:
    """The share of responses that are the commonest one, and what luck may add: two standard errors. A choice between
    few responses, all of one token, can be guessed so; other responses cannot: 0 and 0.
    """
    said = Counter(example.response_ids for example in task.examples if not example.also)
    if len(said) < 2 or said.total() < len(task) or any(len(ids) > 1 for ids in said):
        return 0.0, 0.0
    share = said.most_common(1)[0][1] / len(task)
    return share, 2 * math.sqrt(share * (1 - share) / len(task))


def _responses(model: Runnable, task: ResponseTask) -> Iterator[tuple[int, Tensor, Tensor]]:
    """For each example, teacher-forced: the model's first choices (token,) and log-probabilities (token, vocab)."""
    for batch in task.batches(ROWS):
        device = model.hf.device
        logits = model.hf(batch.tokens.to(device), attention_mask=batch.mask.to(device)).logits
        for row, i in enumerate(batch.which.tolist()):
            before = batch.targets[row].nonzero().squeeze(-1) - 1
            log_probs = logits[row, before.to(device)].float().log_softmax(-1).cpu()
            yield i, log_probs.argmax(-1), log_probs


def _several(answers: tuple[str, ...], most: int = 3) -> str:
    more = f" or {len(answers) - most} others" if len(answers) > most else ""
    return ", ".join(repr(answer) for answer in answers[:most]) + more


def listing() -> RenderableType:
    """All built-in tasks with one line and one example each."""
    table = Table("task", "kind", "what it asks", title=f"{_kinds()}", show_lines=True)
    for name, entry in TASKS.items():
        prompt, answer = entry.example
        table.add_row(
            name, entry.kind, f"{escape(entry.description)}\n[dim]{escape(prompt)}[/dim] -> {escape(repr(answer))}"
        )
    return table


def _kinds() -> str:
    kinds = Counter(entry.kind for entry in TASKS.values())
    return f"{kinds['circuit']} circuit tasks and {kinds['response']} response tasks"


def render(shown: Preview) -> RenderableType:
    """The preview as it is printed."""
    table = Table("prompt", "answer", "model says", "score", title=f"{shown.task} on {shown.model}", show_lines=True)
    for row in shown.shown:
        mark = "[green]right[/green]" if row.right else "[red]wrong[/red]"
        table.add_row(escape(row.prompt), escape(row.answer), escape(row.says), f"{row.score:+.2f}\n{mark}")
    lines = [f"over {shown.n} prompts:"] + [f"  {what}: {_figure(what, x)}" for what, x in shown.figures.items()]
    if shown.warning:
        lines.append(f"[yellow]Warning: {escape(shown.warning)}[/yellow]")
    return Group(table, *lines)


def _figure(what: str, value: float) -> str:
    share = what.startswith(("answered", "response"))
    return f"{value:.1%}" if share else f"{value:+.3f}"
