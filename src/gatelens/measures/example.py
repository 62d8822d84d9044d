"""One or two clean prompts of a run with the attention that the model pays to them: for people to look at."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from gatelens.errors import GatelensError
from gatelens.gates.attention_runs import attention_patterns
from gatelens.model import Model
from gatelens.runtime.files import read_json, read_tensors, write_json, write_tensors
from gatelens.sparse.in_model import is_sparse
from gatelens.tasks.base import CircuitTask

_MOST_PROMPTS = 2
_MOST_BYTES = 16_000_000  # of a run's example in all
_ABOUT, _TENSORS = "example.json", "example.safetensors"


@dataclass(frozen=True, eq=False)
class ExamplePrompt:
    """A prompt, token by token, and where each head looks."""

    tokens: list[str]
    answer: str
    attention: Tensor  # (layer, head, query, key) float16: the softmax over all visible keys
    open: Tensor | None  # the same shape, bool: where a sparse model's gates are open; None for a dense one


def save_example(model: Model, task: CircuitTask, folder: Path) -> None:
    """Write the task's first prompts, as many as stay small. Cost: 1 forward for each, or nothing where all are long.

    Attention grows with the square of the prompt's length: beyond 16 MB it is left out, and a note says so.
    """
    prompts = _first_prompts(task)
    tensors: dict[str, Tensor] = {}
    about: list[dict[str, Any]] = []
    for which, tokens in prompts:
        numbers = model.n_layers * model.n_heads * len(tokens) ** 2
        used = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
        if used + numbers * (3 if is_sparse(model.hf) else 2) > _MOST_BYTES:
            break
        weights, edges = attention_patterns(model, tokens[None])
        tensors[f"attention-{len(about)}"] = weights[0].half()
        if is_sparse(model.hf):
            tensors[f"open-{len(about)}"] = edges[0]
        about.append({"tokens": _texts(model, tokens), "answer": task.pairs[which].answers[0]})
    note = None if len(about) == len(prompts) else f"attention left out: it would take more than {_MOST_BYTES:,} bytes"
    write_tensors(folder / _TENSORS, tensors)
    write_json(folder / _ABOUT, {"prompts": about, "note": note})


def load_example(folder: str | Path) -> list[ExamplePrompt]:
    """The prompts of a saved run; none where they were too long, or where an earlier version saved the run."""
    folder = Path(folder)
    if not (folder / _ABOUT).exists():
        return []
    about, tensors = read_json(folder / _ABOUT), read_tensors(folder / _TENSORS)
    try:
        prompts = [
            ExamplePrompt(one["tokens"], one["answer"], tensors[f"attention-{i}"], tensors.get(f"open-{i}"))
            for i, one in enumerate(about["prompts"])
        ]
    except (KeyError, TypeError) as error:
        raise GatelensError(f"{folder / _ABOUT} is not of this version ({error}): run it again.") from error
    for prompt in prompts:
        length = len(prompt.tokens)
        shapes = {tuple(x.shape) for x in (prompt.attention, prompt.open) if x is not None}
        wanted = (*prompt.attention.shape[:2], length, length)
        if len(wanted) != 4 or shapes != {wanted} or not all(map(_is_text, prompt.tokens)):
            raise GatelensError(f"the attention in {folder} does not fit its {length} tokens: run it again.")
    return prompts


def _first_prompts(task: CircuitTask) -> list[tuple[int, Tensor]]:
    rows = {int(which): row for bucket in task.buckets for which, row in zip(bucket.which, bucket.clean, strict=True)}
    return sorted(rows.items())[:_MOST_PROMPTS]


def _texts(model: Model, tokens: Tensor) -> list[str]:
    """Each token as text; one that is a part of a character, by its name in the vocabulary."""
    texts = [str(model.tokenizer.decode([token])) for token in tokens.tolist()]
    names = model.tokenizer.convert_ids_to_tokens(tokens.tolist())
    return [str(name) if "\ufffd" in text or not text else text for text, name in zip(texts, names, strict=True)]


def _is_text(value: object) -> bool:
    return isinstance(value, str)
