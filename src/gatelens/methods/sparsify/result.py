"""What a run leaves: a sparse model as a folder, with a card that says how it was made and how good it is."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from gatelens.adapters import write_adapter
from gatelens.anatomy import describe
from gatelens.gates.sparse import gate_biases, make_sparse, save_sparse
from gatelens.methods.sparsify.judge import Judgement
from gatelens.methods.sparsify.settings import SparsifySettings
from gatelens.methods.sparsify.student import SCALE, Student
from gatelens.model import Model

CARD = "README.md"


def merged(student: Student) -> Any:
    """The trained Hugging Face model as plain weights and fixed biases: frozen, in evaluation mode.

    Adapters are merged in place: their base must not be shared with the dense model.
    """
    hf = student.trained.merge_and_unload() if student.trained is not student.hf else student.hf
    make_sparse(hf, gate_biases(hf))
    if hf.is_gradient_checkpointing:
        hf.gradient_checkpointing_disable()
    return hf.eval().requires_grad_(False)


def write_result(student: Student, model: Model, folder: Path | None, settings: SparsifySettings, card: str) -> Model:
    """Merge, write into the run's folder, and return the sparse model.

    With `settings.merge`, full weights that transformers opens; in any case the adapter, if there is one. Files are
    written beside the old ones and then moved, the config last: a folder with a config is whole.
    """
    part = None if folder is None else folder / ".result.part"
    if part is not None:
        shutil.rmtree(part, ignore_errors=True)
        part.mkdir(parents=True)
        (part / CARD).write_text(card)
        if student.trained is not student.hf:
            about = {"base": base_name(model), "settings": settings.as_dict()}
            write_adapter(part, student.state(), gate_biases(student.hf), SCALE, about)
    hf = merged(student)
    if part is not None and folder is not None:
        if settings.merge or settings.weights == "full":
            save_sparse(hf, part)
            model.tokenizer.save_pretrained(part)
        for file in sorted(part.iterdir(), key=lambda path: path.name == "config.json"):
            file.replace(folder / file.name)
        part.rmdir()
    name = f"sparse-{model.name}" if folder is None else folder.resolve().name
    return Model(name, hf, model.tokenizer, describe(hf))


def base_name(model: Model) -> str:
    """What `gatelens.load` opens as this model: a built-in name or a hub id, else the folder it came from."""
    path = getattr(model.hf.config, "_name_or_path", "")
    known = path and Path(path).is_dir() and "-transformers-" not in path  # not a built-in model's cache
    return str(Path(path).resolve()) if known else model.name


def write_card(
    model: Model, sources: Sequence[object], settings: SparsifySettings, steps: int, judged: Mapping[str, Judgement]
) -> str:
    """The text of README.md."""
    lines = [
        f"# Sparse {model.name}",
        "",
        f"{model.name} with gated attention, post-trained by gatelens so that few query-key edges stay open",
        "(Draye, Lei et al., arXiv 2512.05865). Open it with `gatelens.load`, or with transformers after",
        "`import gatelens.gates.sparse`.",
        "",
        "| text | sequences | dense loss | sparse loss | difference | KL | open edges |",
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
        "",
        f"Trained for {steps} steps on: {', '.join(str(source) for source in sources)}"
        + (f", and {settings.self_text} sequences that the dense model wrote." if settings.self_text else "."),
        "",
        "```json",
        json.dumps(settings.as_dict(), indent=1),
        "```",
        "",
    ]
    return "\n".join(lines)
