"""What a run leaves: a sparse model as a folder, with a card that says how it was made and how good it is."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from gatelens.errors import GatelensError
from gatelens.model import Model
from gatelens.sparse.adapters import base_weights, write_adapter
from gatelens.sparse.in_model import gate_values, is_sparse, make_sparse, save_sparse
from gatelens.sparse.sparsify.judge import Judgement
from gatelens.sparse.sparsify.settings import SparsifySettings
from gatelens.sparse.sparsify.student import SCALE, Student

CARD, CONFIG = "README.md", "config.json"


def merged(student: Student) -> Any:
    """The trained Hugging Face model as plain weights and fixed biases: frozen, in evaluation mode.

    Adapters are merged in place: their base must not be shared with the dense model.
    """
    hf = student.trained.merge_and_unload() if student.trained is not student.hf else student.hf
    make_sparse(hf, **vars(gate_values(hf)))
    if not all(weight.isfinite().all() for weight in hf.parameters()):
        raise GatelensError(
            "the trained model has weights that are no numbers: nothing is written; lower learning_rate or "
            "bias_learning_rate and write to another folder."
        )
    if hf.is_gradient_checkpointing:
        hf.gradient_checkpointing_disable()
    return hf.eval().requires_grad_(False)


def write_result(
    hf: Any, trained: Mapping[str, Tensor], model: Model, folder: Path, settings: SparsifySettings, card: str
) -> None:
    """Write a merged model, and what training changed, by name, into the run's folder.

    With `settings.merge`, full weights that transformers opens; in any case the adapter, if there is one. Files are
    written beside the old ones and then moved. The old config goes first and the new one comes last: a folder with a
    config is whole.
    """
    part = folder / ".result.part"
    shutil.rmtree(part, ignore_errors=True)  # of a run that was killed
    try:
        part.mkdir(parents=True)
        (part / CARD).write_text(card)
        if settings.weights == "lora":
            about = {"base": base_name(model), **base_weights(model.hf), "settings": settings.as_dict()}
            write_adapter(part, trained, gate_values(hf), SCALE, about)
        if settings.merge or settings.weights == "full":
            save_sparse(hf, part)
            model.tokenizer.save_pretrained(part)
        (folder / CONFIG).unlink(missing_ok=True)
        for old in folder.glob("model*.safetensors*"):  # with their index; without full weights the adapter counts
            old.unlink()
        for file in sorted(part.iterdir(), key=lambda path: path.name == CONFIG):
            file.replace(folder / file.name)
    finally:
        shutil.rmtree(part, ignore_errors=True)  # on a full disk it takes the room that is lacking


def base_name(model: Model) -> str:
    """What `gatelens.load` opens as this model; for one that was not loaded, the name that it was given."""
    return model.source or model.name


def write_card(
    model: Model,
    sources: Sequence[object],
    settings: SparsifySettings,
    steps: int,
    judged: Mapping[str, Judgement],
    start: Path | None = None,
) -> str:
    """The text of README.md. start: the run whose weights were the first."""
    before, wrote = (f"{model.name}'s", model.name) if is_sparse(model.hf) else ("dense", "the dense model")
    lines = [
        f"# Sparse {model.name}",
        "",
        f"{model.name} with gated attention, post-trained by gatelens so that few query-key edges stay open",
        "(Draye, Lei et al., arXiv 2512.05865). Open it with `gatelens.load`, or with transformers after",
        "`import gatelens.sparse`.",
        "",
        f"| text | sequences | {before} loss | sparse loss | difference | KL | open edges |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, found in judged.items():
        lines.append(
            f"| {name} | {found.sequences} x {found.length} | {found.dense_loss:.4f} | {found.sparse_loss:.4f} "
            f"| {found.above_dense:+.4f} | {found.kl:.4f} | {100 * found.open_share:.2f} % |"
        )
    lines += [
        "",
        "Losses are in nats per token; an edge is open where score + bias > 0, as in use.",
        *([f"{model.name} was sparse already: it is compared with as it was, gated."] if is_sparse(model.hf) else []),
        "",
        f"Trained for {steps} steps on: {', '.join(str(source) for source in sources)}"
        + (f", and {settings.self_text} sequences that {wrote} wrote." if settings.self_text else ".")
        + ("" if start is None else f" It began with the weights and learned biases of the run {start}."),
        "",
        "```json",
        json.dumps(settings.as_dict(), indent=1),
        "```",
        "",
    ]
    return "\n".join(lines)
