"""What a run leaves: a sparse model as a folder, with a model card that says how it was made and how good it is."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from gatelens.errors import GatelensError
from gatelens.model import Model
from gatelens.runtime.files import follow_umask, replace_file
from gatelens.sparse.adapters import base_weights, write_adapter
from gatelens.sparse.in_model import gate_values, is_sparse, make_sparse, save_sparse
from gatelens.sparse.sparsify._student import SCALE, Student
from gatelens.sparse.sparsify.judge import Judgement
from gatelens.sparse.sparsify.settings import SparsifySettings

CARD, CONFIG = "README.md", "config.json"


def merged(student: Student) -> Any:
    """The trained Hugging Face model with merged weights and gates that are not learned: frozen, in evaluation mode.

    The student is used up. If it shares weights with the dense model, these are not changed: the weights that adapters
    are merged into are copied first.
    """
    hf = student.hf
    if student.trained is not hf:
        student.separate()
        hf = student.trained.merge_and_unload()
    make_sparse(hf, **vars(gate_values(hf)))
    if not all(weight.isfinite().all() for weight in hf.parameters()):
        raise GatelensError(
            "the trained model has weights that are NaN or infinite, and nothing is written: lower learning_rate or "
            "bias_learning_rate and give another folder."
        )
    if hf.is_gradient_checkpointing:
        hf.gradient_checkpointing_disable()
    return hf.eval().requires_grad_(False)


def write_result(
    hf: Any, trained: Mapping[str, Tensor], model: Model, folder: Path, settings: SparsifySettings, card: str
) -> None:
    """Write a merged model and its adapter, if there is one, into the run folder.

    Full weights, which transformers opens, are written if `settings.merge` asks for them. All files are written to a
    hidden folder and then moved. The old config is removed first and the new one is moved last, so that a folder with a
    config is complete.

    Arguments:
        trained: the trained parameters by name.
        card: the text of README.md.
    """
    unfinished = folder / ".result.part"
    shutil.rmtree(unfinished, ignore_errors=True)  # left by a run that was killed
    try:
        unfinished.mkdir(parents=True)
        replace_file(unfinished / CARD, card)
        if settings.weights == "lora":
            description = {"base": base_name(model), **base_weights(model.hf), "settings": settings.as_dict()}
            write_adapter(unfinished, trained, gate_values(hf), SCALE, description)
        if settings.merge or settings.weights == "full":
            save_sparse(hf, unfinished)
            model.tokenizer.save_pretrained(unfinished)
        follow_umask(unfinished)
        (folder / CONFIG).unlink(missing_ok=True)
        for old in folder.glob("model*.safetensors*"):  # with their index: without full weights the adapter counts
            old.unlink()
        for file in sorted(unfinished.iterdir(), key=lambda path: path.name == CONFIG):
            file.replace(folder / file.name)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)  # on a full disk it takes up space that is needed


def base_name(model: Model) -> str:
    """What `gatelens.load` opens as this model; the name of a model that was not loaded."""
    return model.source or model.name


def write_card(
    model: Model,
    sources: Sequence[object],
    settings: SparsifySettings,
    steps: int,
    judged: Mapping[str, Judgement],
    start: Path | None = None,
) -> str:
    """The text of README.md.

    Arguments:
        start: the folder of the run whose weights this one began with.
    """
    before, writer = (f"{model.name}'s", model.name) if is_sparse(model.hf) else ("dense", "the dense model")
    lines = [
        f"# Sparse {model.name}",
        "",
        f"{model.name} with gated attention, post-trained by gatelens so that few query-key edges stay open",
        "(Draye, Lei et al., arXiv 2512.05865). Open it with `gatelens.load`, or with transformers after",
        "`import gatelens.sparse`.",
        "",
        f"| text | sequences | {before} loss | sparse loss | difference | KL | keys per query and head "
        "| open edges | idle heads | queries without a key | edges to the first token |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for name, judgement in judged.items():
        lines.append(
            f"| {name} | {judgement.sequences} x {judgement.length} | {judgement.dense_loss:.4f} "
            f"| {judgement.sparse_loss:.4f} | {judgement.above_dense:+.4f} | {judgement.kl:.4f} "
            f"| {judgement.keys_per_query:.2f} | {100 * judgement.open_share:.2f} % "
            f"| {100 * judgement.idle_share:.1f} % | {100 * judgement.without_key_share:.1f} % "
            f"| {100 * judgement.to_first_share:.1f} % |"
        )
    lines += [
        "",
        "Losses are in nats per token. Edges are counted with the gates as they are in use, not sampled.",
        *(
            [f"{model.name} was sparse already: the comparison is with its own gated attention."]
            if is_sparse(model.hf)
            else []
        ),
        "",
        f"Trained for {steps} steps on: {', '.join(str(source) for source in sources)}"
        + (f", and {settings.self_text} sequences that {writer} wrote." if settings.self_text else ".")
        + ("" if start is None else f" It began with the weights and learned biases of the run {start}."),
        "",
        "```json",
        json.dumps(settings.as_dict(), indent=1),
        "```",
        "",
    ]
    return "\n".join(lines)
