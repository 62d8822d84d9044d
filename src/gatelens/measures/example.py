"""The first clean prompts of a run, with attention and with what the circuit predicts, for the report page."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from jaxtyping import Bool, Float, Int
from pydantic import Field
from torch import Tensor

from gatelens.errors import GatelensError
from gatelens.gates.attention_runs import attention_patterns
from gatelens.gates.circuit import Circuit
from gatelens.gates.level import Source
from gatelens.gates.runs import capture
from gatelens.model import Model
from gatelens.runtime.files import read_tensors, write_json, write_tensors
from gatelens.runtime.precision import widen
from gatelens.runtime.records import SCHEMA_VERSION, Record, read_record
from gatelens.runtime.settings import Settings
from gatelens.sparse.in_model import is_sparse
from gatelens.tasks.base import CircuitTask

PROMPT_SOURCES = ("corrupt", "zero")
"""What closed gates may read if a circuit predicts after one prompt. Means and constants belong to many prompts."""
_N_PROMPTS = 2
_MAX_BYTES = 16_000_000  # of all attention that is saved for a run
_RECORD, _TENSORS = "example.json", "example.safetensors"


class PartRecord(Settings):
    """What the model predicts after a prompt with some of its gates open (`ExplainedPart`)."""

    part: str = Field(description="which gates are open: everything, circuit alone, without the circuit")
    probability: float = Field(description="of the right answers together")
    rank: int = Field(description="of the best right answer among all tokens, from 1")
    wrong: float | None = Field(default=None, description="probability of the wrong answers together")
    top: tuple[str, ...] = Field(default=(), description="the most probable tokens")


class PromptRecord(Settings):
    """A prompt in ``example.json``."""

    tokens: tuple[str, ...]
    answer: str
    probability: float | None = Field(default=None, description="of the answer, after this prompt")
    wrong: str | None = Field(default=None, description="the first wrong answer; None: the task has none")
    size: int | None = Field(default=None, description="gates of the circuit, if prompts share their gates")
    parts: tuple[PartRecord, ...] = Field(default=(), description="predictions with and without the circuit")


class ExampleRecord(Record):
    """The schema of ``example.json``."""

    prompts: tuple[PromptRecord, ...]
    note: str | None = Field(default=None, description="why attention is missing")


@dataclass(frozen=True, eq=False)
class ExamplePrompt:
    """A prompt, token by token, and where each head looks."""

    record: PromptRecord  # what ``example.json`` says
    attention: Float[Tensor, "layer head query key"]  # float16: the softmax over all visible keys
    open: Bool[Tensor, "layer head query key"] | None  # where a sparse model's gates are open; None for a dense model

    @property
    def tokens(self) -> list[str]:
        return list(self.record.tokens)

    @property
    def answer(self) -> str:
        return self.record.answer


def save_example(
    model: Model, task: CircuitTask, folder: Path, circuit: Circuit | None = None, source: Source = "corrupt"
) -> None:
    """Save the first prompts of a task with their attention, and what a circuit predicts after them.

    Cost: 2 forwards for each prompt that is saved, and 3 circuits on it.

    Attention grows with the square of the prompt's length. Prompts that would need more than 16 MB in total are left
    out, and ``example.json`` says so.

    Arguments:
        circuit: the circuit that predicts; by default no predictions are saved.
        source: what closed gates read, one of `PROMPT_SOURCES`.
    """
    first_prompts = _first_prompts(task)
    tensors: dict[str, Tensor] = {}
    prompts: list[PromptRecord] = []
    bytes_per_edge = 3 if is_sparse(model.hf) else 2
    for number, tokens in first_prompts:
        n_edges = model.n_layers * model.n_heads * len(tokens) ** 2
        n_bytes = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
        if n_bytes + n_edges * bytes_per_edge > _MAX_BYTES:
            break
        weights, edges = attention_patterns(model, tokens[None])
        tensors[f"attention-{len(prompts)}"] = weights[0].half()
        if is_sparse(model.hf):
            tensors[f"open-{len(prompts)}"] = edges[0]
        logits = capture(model, tokens[None], streams=False).logits[0]
        probability = widen(logits).softmax(-1)[task.answer_ids[number, 0]]
        pair = task.pairs[number]
        prompt = PromptRecord(
            tokens=token_texts(model, tokens),
            answer=pair.answers[0],
            probability=float(probability),
            wrong=next(iter(pair.wrong), None),
        )
        prompts.append(prompt if circuit is None else _explained(prompt, circuit, model, task, number, source))
    missing = f"attention left out: it would need more than {_MAX_BYTES:,} bytes"
    note = None if len(prompts) == len(first_prompts) else missing
    write_tensors(folder / _TENSORS, tensors)
    record = ExampleRecord(schema_version=SCHEMA_VERSION, prompts=tuple(prompts), note=note)
    write_json(folder / _RECORD, record.model_dump(mode="json"))


def load_example(folder: str | Path) -> list[ExamplePrompt]:
    """Read the example prompts of a saved run. A run whose prompts were too long, or of version 0.1, has no prompts."""
    folder = Path(folder)
    if not (folder / _RECORD).exists():
        return []
    record, tensors = read_record(folder / _RECORD, ExampleRecord), read_tensors(folder / _TENSORS)
    prompts: list[ExamplePrompt] = []
    for number, prompt in enumerate(record.prompts):
        attention, opened = tensors.get(f"attention-{number}"), tensors.get(f"open-{number}")
        length = len(prompt.tokens)
        shapes = {tuple(x.shape[2:]) if x.ndim == 4 else () for x in (attention, opened) if x is not None}
        if attention is None or shapes != {(length, length)}:
            raise GatelensError(f"the attention in {folder} does not fit its {length} tokens: run the job again.")
        prompts.append(ExamplePrompt(prompt, attention, opened))
    return prompts


def load_prompts(folder: str | Path) -> tuple[PromptRecord, ...]:
    """The texts of the example prompts of a saved run, with their answers. A run of version 0.1 has none."""
    path = Path(folder) / _RECORD
    return read_record(path, ExampleRecord).prompts if path.exists() else ()


def _explained(
    record: PromptRecord, circuit: Circuit, model: Model, task: CircuitTask, number: int, source: Source
) -> PromptRecord:
    """The prompt with what the circuit predicts after it."""
    explanation = circuit.explain(model, task, number, source=source)
    parts = tuple(PartRecord(**vars(part)) for part in explanation.parts)
    return record.replace(size=explanation.size if circuit.level.shared else None, parts=parts)


def _first_prompts(task: CircuitTask) -> list[tuple[int, Int[Tensor, " position"]]]:
    """The first prompts of the task with their numbers."""
    prompts = {
        int(number): tokens
        for bucket in task.buckets
        for number, tokens in zip(bucket.which, bucket.clean, strict=True)
    }
    return sorted(prompts.items())[:_N_PROMPTS]


def token_texts(model: Model, tokens: Int[Tensor, " position"]) -> tuple[str, ...]:
    """Each token as text. A token that is only part of a character is shown by its name in the vocabulary."""
    texts = [str(model.tokenizer.decode([token])) for token in tokens.tolist()]
    names = model.tokenizer.convert_ids_to_tokens(tokens.tolist())
    return tuple(str(name) if "\ufffd" in text or not text else text for text, name in zip(texts, names, strict=True))
