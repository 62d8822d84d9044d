"""The subcommands about sparse models: train one, evaluate it, compare runs, and convert it to a model folder."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gatelens.cli.app import command
from gatelens.cli.options import DenseLoader, Loader, ModelName
from gatelens.errors import GatelensError
from gatelens.runtime.settings import unknown_name

TRACKERS = ("tensorboard", "wandb")

if TYPE_CHECKING:
    from gatelens.model import Model


@command("sparsify", settings="gatelens.sparse.sparsify:SparsifySettings")
def sparsify(
    model: ModelName,
    settings: Any,
    text: Annotated[list[str], typer.Option(help="a text file, a folder, a .jsonl file or a hub data set; repeatable")],
    out: Annotated[Path, typer.Option(help="the run folder; the result is a model that can be loaded from it")],
    held_out: Annotated[list[str] | None, typer.Option(help="text to evaluate on after training; repeatable")] = None,
    start: Annotated[
        str | None, typer.Option(help="start from the weights and gates of this earlier run, or of an adapter")
    ] = None,
    teacher_cache: Annotated[
        Path | None,
        typer.Option(help="a folder for the dense model's distributions: runs that share it need no dense forward"),
    ] = None,
    track: Annotated[str | None, typer.Option(help="also log to tensorboard or wandb, through accelerate")] = None,
    *,
    load: DenseLoader,
) -> None:
    """Post-train a model so that its attention uses few of its edges, at an unchanged loss."""
    from rich.console import Console

    from gatelens.jobs.cost import sparsify_cost
    from gatelens.loading.builtin import path_of
    from gatelens.report.run_figures import draw_run
    from gatelens.runtime.checkpoints import Checkpoints
    from gatelens.runtime.rank import is_main
    from gatelens.sparse.mixture import check_texts
    from gatelens.sparse.sparsify import sparsify as run

    if track not in (None, *TRACKERS):
        raise GatelensError(unknown_name("tracker", track, TRACKERS))
    if load.device_map is not None:
        raise GatelensError("sparsify has no --device-map: use `accelerate launch` to spread a model over devices.")
    check_texts([*text, *(held_out or ())])
    dense = load(model)
    if is_main():
        done = max(Checkpoints(out / "checkpoints").steps(), default=0)
        cached = "" if teacher_cache is None else ", a third less for batches that are in the teacher cache"
        print(f"cost: {sparsify_cost(dense, settings, min(done, settings.steps))}{cached}", flush=True)
    first = None if start is None else path_of(start)
    run(
        dense,
        text,
        settings,
        out,
        held_out=held_out or (),
        start=first,
        teacher_cache=teacher_cache,
        track=track,  # type: ignore[arg-type]
        show=True,
    )
    if is_main():
        draw_run(out)
    message = f"written to {out}; `gatelens evaluate {out} --text ...` evaluates it"
    Console().print(message, soft_wrap=True, markup=False)


@command("evaluate", settings="gatelens.jobs.evaluation:EvaluateSettings")
def evaluate(
    model: ModelName,
    settings: Any,
    text: Annotated[list[str], typer.Option(help="a text file, a folder, a .jsonl file or a hub data set; repeatable")],
    dense: Annotated[
        str | None,
        typer.Option(help="the dense model to compare with; default: what it was made from, or no gates"),
    ] = None,
    out: Annotated[Path | None, typer.Option(help="also write all numbers to this JSON file")] = None,
    *,
    load: Loader,
) -> None:
    """Print the loss and the open edges of a sparse model on text, next to the loss of the dense model."""
    from rich.console import Console

    from gatelens.cli.tables import judgement_tables
    from gatelens.jobs.evaluation import evaluate_cost
    from gatelens.runtime.files import write_json
    from gatelens.sparse.mixture import check_texts
    from gatelens.sparse.sparsify import evaluate as judge

    if out is not None and not out.absolute().parent.is_dir():
        raise GatelensError(f"there is no folder {out.parent} for {out.name}: create it, or give another --out.")
    check_texts(text)
    sparse_model = load(model)
    dense_model = _dense_of(model, load) if dense is None else load.replace(bias=None)(dense)
    judged = judge(
        sparse_model,
        text,
        dense_model,
        length=settings.length,
        n_sequences=settings.sequences or None,
        skip=settings.skip,
        announce=lambda n: print(f"cost: {evaluate_cost(sparse_model, settings.length, n)}", flush=True),
    )
    console = Console()
    console.width = max(console.width, 80)  # a narrower terminal breaks lines, but no number is cut
    for table in judgement_tables(judged, dense_model is not None, console.width):
        console.print(table)
    if out is not None:
        texts = {name: judgement.as_dict() for name, judgement in judged.items()}
        try:
            write_json(out, {"model": sparse_model.name, "dense": dense_model and dense_model.name, "texts": texts})
        except OSError as error:
            raise GatelensError(f"cannot write {out} ({error.strerror}): give another --out.") from error


@command("frontier")
def frontier(
    runs: Annotated[list[Path], typer.Argument(help="run folders of `gatelens sparsify`", metavar="RUN...")],
    out: Annotated[Path, typer.Option(help="the folder for frontier.csv and the figure")] = Path("runs/frontier"),
) -> None:
    """Compare recipes: loss and KL on held-out text against open keys per query, for one or several runs."""
    from rich.console import Console

    from gatelens.cli.tables import frontier_table
    from gatelens.report.frontier import frontier as draw

    points = draw(runs, out)
    console = Console()
    console.width = max(console.width, 80)
    console.print(frontier_table(points))
    console.print(f"written to {out}", soft_wrap=True, markup=False)


def _dense_of(model: str, load: Loader) -> Model | None:
    """The model that a sparse one was made from, if this is known and it can be loaded."""
    from gatelens.loading import made_from

    base = made_from(model)
    if base is None:
        return None
    try:
        return load.replace(bias=None)(base)
    except GatelensError as error:
        print(
            f"gatelens: {model} is compared with itself without gates, because {base}, which it was made from, cannot "
            f"be loaded: {error}",
            file=sys.stderr,
        )
        return None


@command("convert")
def convert(
    checkpoint: Annotated[
        str,
        typer.Argument(
            help="a GPT-2 checkpoint of nanoGPT, an adapter, a model folder or a hub id", metavar="CHECKPOINT"
        ),
    ],
    out: Annotated[Path, typer.Option(help="the model folder to write")],
    tokenizer: Annotated[str, typer.Option(help="the folder or hub id whose tokenizer the model uses")] = "gpt2",
    bias: Annotated[
        float | None,
        typer.Option(help="bias of all gates, for example 0.0; default for a checkpoint: a dense model"),
    ] = None,
    heads: Annotated[int | None, typer.Option(help="heads in a layer, if the checkpoint does not say it")] = None,
    activation: Annotated[str, typer.Option(help="activation of MLPs: gelu (nanoGPT) or gelu_new (OpenAI)")] = "gelu",
) -> None:
    """Convert a GPT-2 checkpoint of nanoGPT, an adapter of `gatelens sparsify`, or a model without gates to a folder.

    An adapter, such as sparse-smollm2, becomes full weights. A model folder or hub id with plain attention gets gates
    with --bias. Plain transformers opens the result after `import gatelens.sparse`. --tokenizer, --heads and
    --activation are for checkpoints of nanoGPT.
    """
    from gatelens.loading.builtin import names_adapter
    from gatelens.loading.convert import convert_adapter, convert_checkpoint, convert_model

    of_checkpoints = (tokenizer, heads, activation) != ("gpt2", None, "gelu")
    converted: object
    if names_adapter(checkpoint):
        if of_checkpoints or bias is not None:
            raise GatelensError(f"{checkpoint} is an adapter, which describes its model: give no option except --out.")
        converted = convert_adapter(checkpoint, out)
    elif Path(checkpoint).is_file() or Path(checkpoint).suffix in (".pth", ".pt"):
        converted = convert_checkpoint(
            checkpoint, out, tokenizer=tokenizer, bias=bias, heads=heads, activation=activation
        )
    elif of_checkpoints:
        raise GatelensError(f"{checkpoint} is not a file: --tokenizer, --heads and --activation are for checkpoints.")
    else:
        converted = convert_model(checkpoint, out, bias=bias)
    print(f"written to {out}: {converted}")
