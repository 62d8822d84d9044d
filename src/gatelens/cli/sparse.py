"""Make sparse models, judge them, and turn them into model folders."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gatelens.cli.app import command
from gatelens.cli.options import Loader, ModelName
from gatelens.errors import GatelensError

if TYPE_CHECKING:
    from gatelens.model import Model


@command("sparsify", settings="gatelens.sparse.sparsify:SparsifySettings")
def sparsify(
    model: ModelName,
    settings: Any,
    text: Annotated[list[str], typer.Option(help="a text file, a folder, a .jsonl file or a hub data set; repeatable")],
    out: Annotated[Path, typer.Option(help="the run's folder; the result is a model that can be loaded from it")],
    held_out: Annotated[list[str] | None, typer.Option(help="text to judge on, never trained on; repeatable")] = None,
    start: Annotated[Path | None, typer.Option(help="begin with the weights and biases of this earlier run")] = None,
    track: Annotated[str | None, typer.Option(help="also log to tensorboard or wandb, through accelerate")] = None,
    *,
    load: Loader,
) -> None:
    """Post-train a model so that its attention uses few of its edges, at an unchanged loss."""
    from rich.console import Console

    from gatelens.report.run_figures import draw_run
    from gatelens.runtime.processes import is_main
    from gatelens.sparse.sparsify import sparsify as run

    if track not in (None, "tensorboard", "wandb"):
        raise GatelensError(f"no tracker '{track}': trackers are tensorboard and wandb.")
    if load.device_map is not None:
        raise GatelensError("sparsify spreads a model by `accelerate launch`, not by --device-map.")
    dense = load(model)
    run(dense, text, settings, out, held_out=held_out or (), start=start, track=track, show=True)  # type: ignore[arg-type]
    if is_main():
        draw_run(out)
    said = f"written to {out}: `gatelens evaluate {out} --text ...` judges it"
    Console().print(said, soft_wrap=True, markup=False)


@command("evaluate")
def evaluate(
    model: ModelName,
    text: Annotated[list[str], typer.Option(help="a text file, a folder, a .jsonl file or a hub data set; repeatable")],
    dense: Annotated[
        str | None,
        typer.Option(help="the dense model to compare with; default: what it was made from, if told, or no gates"),
    ] = None,
    length: Annotated[int, typer.Option(help="tokens in a sequence")] = 256,
    most: Annotated[int, typer.Option(help="sequences read of each text (0: all)")] = 64,
    skip: Annotated[int, typer.Option(help="sequences of each text to leave out at its beginning")] = 0,
    out: Annotated[Path | None, typer.Option(help="also write all numbers to this JSON file")] = None,
    *,
    load: Loader,
) -> None:
    """Print loss and open edges of a sparse model on text, beside the dense one's, per layer and head."""
    from rich.console import Console

    from gatelens.cli.tables import judgement_tables
    from gatelens.runtime.files import write_json
    from gatelens.sparse.sparsify import evaluate as judge

    if out is not None and not out.absolute().parent.is_dir():
        raise GatelensError(f"no folder {out.parent} to write {out.name} into: make it, or give another --out.")
    ours = load(model)
    theirs = _dense_of(model, load) if dense is None else load(dense)
    judged = judge(ours, text, theirs, length=length, most=most or None, skip=skip)
    console = Console()
    console.width = max(console.width, 80)  # in a narrower terminal lines are broken, but no number is cut
    for table in judgement_tables(judged, theirs is not None, console.width):
        console.print(table)
    if out is not None:
        numbers = {name: one.as_dict() for name, one in judged.items()}
        try:
            write_json(out, {"model": ours.name, "dense": theirs and theirs.name, "texts": numbers})
        except OSError as error:
            raise GatelensError(f"cannot write {out} ({error.strerror}): give another --out.") from error


def _dense_of(model: str, load: Loader) -> Model | None:
    """What a sparse model was made from, where that is known and here."""
    from gatelens.loading import made_from

    base = made_from(model)
    if base is None:
        return None
    try:
        return load(base)
    except GatelensError as error:
        said = f"compared with {model} without gates, as {base}, which it was made from, cannot be loaded: {error}"
        print(f"gatelens: {said}", file=sys.stderr)
        return None


@command("convert")
def convert(
    checkpoint: Annotated[
        str,
        typer.Argument(help="a nanoGPT-layout GPT-2 checkpoint, or a sparse model as an adapter", metavar="CHECKPOINT"),
    ],
    out: Annotated[Path, typer.Option(help="the model folder to write")],
    tokenizer: Annotated[str, typer.Option(help="the folder or hub id whose tokenizer the model uses")] = "gpt2",
    bias: Annotated[
        float | None, typer.Option(help="make it a model of gated attention with this bias, e.g. 0.0; default: dense")
    ] = None,
    heads: Annotated[int | None, typer.Option(help="heads in a layer, where the checkpoint does not tell")] = None,
    activation: Annotated[str, typer.Option(help="of the MLPs: gelu (nanoGPT's) or gelu_new (OpenAI's)")] = "gelu",
) -> None:
    """Turn a nanoGPT-layout GPT-2 checkpoint (final.pth) or an adapter of `gatelens sparsify` into a model folder.

    An adapter, such as sparse-smollm2, becomes full weights, which plain transformers opens after
    `import gatelens.sparse`; all options but --out are for checkpoints.
    """
    from gatelens.loading.builtin import names_adapter
    from gatelens.loading.convert import convert_adapter, convert_checkpoint

    made: object
    if not names_adapter(checkpoint):
        made = convert_checkpoint(checkpoint, out, tokenizer=tokenizer, bias=bias, heads=heads, activation=activation)
    elif (tokenizer, bias, heads, activation) == ("gpt2", None, None, "gelu"):
        made = convert_adapter(checkpoint, out)
    else:
        raise GatelensError(f"{checkpoint} is an adapter, which says all of its model: give --out alone.")
    print(f"written to {out}: {made}")
