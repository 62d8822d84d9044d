"""The command line: one subcommand for each job. Heavy imports are inside, so that ``--help`` answers at once."""

from __future__ import annotations

import dataclasses
import inspect
import json
import sys
import warnings
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_args, get_origin, get_type_hints

import typer

from gatelens.errors import GatelensError, GatelensWarning

if TYPE_CHECKING:
    from gatelens.model import Model

ModelName = Annotated[str, typer.Argument(help="a built-in name, a folder, a .gguf file or a hub id", metavar="MODEL")]
TaskName = Annotated[str, typer.Argument(help="a task (`gatelens tasks` lists them) or a .jsonl file", metavar="TASK")]
TaskOption = Annotated[
    list[str] | None, typer.Option("--option", help="an option of the task, as KEY=VALUE; repeatable")
]
SkipBad = Annotated[bool, typer.Option("--skip-bad", help="leave out bad lines of a .jsonl file instead of stopping")]


def _field(default: Any, help_: str) -> Any:
    return dataclasses.field(default=default, metadata={"help": help_})


@dataclasses.dataclass(frozen=True)
class Loader:
    """How to load a model. Its fields are options of every subcommand that takes one."""

    device: str | None = _field(None, "cpu, cuda, mps; default: cuda where there is one")
    dtype: str = _field("float32", "float32, bfloat16 or float16")
    device_map: str | None = _field(None, "spread a large model over devices: auto (needs accelerate)")
    check: bool = _field(True, "compare gated runs with plain ones when loading")
    allow_pickle: bool = _field(False, "also read pickled weights, which can run their author's code")

    def __call__(self, name: str) -> Model:
        import torch

        from gatelens.loading import load

        dtypes = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
        if self.dtype not in dtypes:
            raise GatelensError(f"no dtype '{self.dtype}': dtypes are {', '.join(dtypes)}.")
        if self.device is not None:
            try:
                torch.empty(0, device=self.device)
            except (RuntimeError, AssertionError) as error:  # torch asserts that it was built for the device
                raise GatelensError(
                    f"no device '{self.device}' here: give cpu, or cuda or mps where there is one."
                ) from error
        return load(
            name,
            device=self.device,
            dtype=dtypes[self.dtype],
            device_map=self.device_map,
            check=self.check,
            allow_pickle=self.allow_pickle,
        )


_COMMANDS: dict[str, tuple[Callable[..., None], str | None]] = {}


def command(name: str, settings: str | None = None) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Register a subcommand; ``settings`` names a class, ``module:Class``, whose fields become its options."""

    def register(function: Callable[..., None]) -> Callable[..., None]:
        _COMMANDS[name] = function, settings
        return function

    return register


def make_app(asked: str | None = None) -> typer.Typer:
    """The command line. With ``asked``, only that subcommand gets the options of its settings.

    Settings live beside their methods, whose imports take seconds; the other subcommands do not wait for them.
    """
    app = typer.Typer(
        help="Find the few heads and edges of a language model that do a job, and prove it.",
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
    )
    for name, (function, settings) in _COMMANDS.items():
        app.command(name)(_expand(function, settings if asked in (None, name) else None))
    return app


def main() -> None:
    """Run the command line; a user's mistake ends in one sentence and exit code 2, a warning is one too."""
    plain = warnings.showwarning

    def show(message: Any, category: type[Warning], *where: Any, **more: Any) -> None:
        if issubclass(category, GatelensWarning):
            print(f"gatelens: warning: {message}", file=sys.stderr)
        else:
            plain(message, category, *where, **more)

    warnings.showwarning = show
    try:
        make_app(next((word for word in sys.argv[1:] if not word.startswith("-")), ""))()
    except GatelensError as error:
        print(f"gatelens: {error}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        print("gatelens: stopped; the same command continues where it was.", file=sys.stderr)
        sys.exit(130)


def _expand(function: Callable[..., None], settings: str | None) -> Callable[..., None]:
    """The function with an option for each field of its settings (where they are named) and of its loader."""
    own = inspect.signature(function, eval_str=True).parameters.values()
    made: dict[str, Any] = {p.name: Loader for p in own if p.name == "load"}
    if settings is not None:
        module, name = settings.split(":")
        made["settings"] = getattr(import_module(module), name)

    def run(**given: Any) -> None:
        for name, cls in made.items():
            given[name] = cls(**{field.name: given.pop(field.name) for field in dataclasses.fields(cls)})
        function(**given)

    parameters = [p.replace(kind=p.KEYWORD_ONLY) for p in own if p.name not in ("load", "settings")]
    for cls in reversed(made.values()):
        parameters += _parameters(cls)
    run.__name__, run.__doc__ = function.__name__, function.__doc__
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {p.name: p.annotation for p in parameters}
    return run


def _parameters(cls: Any) -> list[inspect.Parameter]:
    hints = get_type_hints(cls)
    return [
        inspect.Parameter(
            field.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=field.default,
            annotation=Annotated[_option_type(hints[field.name]), typer.Option(help=field.metadata.get("help"))],
        )
        for field in dataclasses.fields(cls)
    ]


def _option_type(hint: Any) -> Any:
    """A tuple of any length is an option that can be repeated."""
    return list[get_args(hint)[0]] if get_origin(hint) is tuple and Ellipsis in get_args(hint) else hint  # type: ignore[misc]


def _options(given: list[str] | None, skip_bad: bool) -> dict[str, Any]:
    """KEY=VALUE pairs; values that read as JSON (numbers, true, lists) are taken so."""
    options: dict[str, Any] = {"skip_bad": True} if skip_bad else {}
    for pair in given or []:
        key, equals, value = pair.partition("=")
        if not equals or not key:
            raise GatelensError(f"'{pair}' is no task option: write it as KEY=VALUE, e.g. corruption=swap.")
        try:
            options[key] = json.loads(value)
        except ValueError:
            options[key] = value
    return options


@command("demo")
def demo(
    task: Annotated[list[str] | None, typer.Option(help="only this task; repeatable")] = None,
    out: Annotated[Path, typer.Option(help="folder of the study and its report")] = Path("runs/demo"),
) -> None:
    """Run the main job on the built-in models: how many heads do a task, dense against sparse SmolLM2."""
    from gatelens.demo import run_demo

    if run_demo(task, out).failed:
        raise typer.Exit(1)


@command("models")
def models() -> None:
    """List the built-in models and the families that can be loaded."""
    from rich.console import Console
    from rich.table import Table

    from gatelens.anatomy import FAMILIES
    from gatelens.loading import BUILT_IN

    table = Table("built-in", "what it is")
    for name, about in BUILT_IN.items():
        table.add_row(name, about)
    console = Console()
    console.print(table)
    console.print(f"Families: {', '.join(sorted(FAMILIES))}.", soft_wrap=True)
    console.print("Any hub id, folder or .gguf file of these families can be loaded.", soft_wrap=True)


@command("inspect")
def inspect_model(
    model: ModelName,
    length: Annotated[int, typer.Option(help="count attention edges of a prompt of this many tokens")] = 128,
    *,
    load: Loader,
) -> None:
    """Print a model's layers, heads, KV heads, parameters and numbers of edges."""
    from rich.console import Console

    from gatelens.show import anatomy_table

    if length < 1:
        raise GatelensError(f"a prompt has at least one token, not {length}.")
    Console().print(anatomy_table(load(model), length))


@command("tasks")
def tasks(
    task: Annotated[str | None, typer.Argument(help="show this task with --model", metavar="TASK")] = None,
    model: Annotated[str | None, typer.Option(help="try the task on this model")] = None,
    n: Annotated[int, typer.Option(help="prompts")] = 64,
    seed: Annotated[int, typer.Option(help="task seed")] = 0,
    option: TaskOption = None,
    skip_bad: SkipBad = False,
    *,
    load: Loader,
) -> None:
    """List the tasks; with a TASK and --model, show how the model does on it."""
    from rich.console import Console

    from gatelens.tasks import task as make_task
    from gatelens.tasks.preview import listing, preview, render

    console = Console()
    if task is None and model is None:
        console.print(listing())
        return
    if task is None or model is None:
        raise GatelensError("trying a task takes a TASK and a --model: e.g. `gatelens tasks ioi --model smollm2`.")
    loaded = load(model)
    made = make_task(task, loaded, n=n, seed=seed, **_options(option, skip_bad))
    console.print(render(preview(loaded, made)))


@command("circuit", settings="gatelens.circuit:CircuitSettings")
def circuit(
    model: ModelName,
    task: TaskName,
    settings: Any,
    out: Annotated[Path | None, typer.Option(help="the run's folder; default runs/MODEL-TASK-LEVEL-METHOD")] = None,
    option: TaskOption = None,
    skip_bad: SkipBad = False,
    *,
    load: Loader,
) -> None:
    """Find the heads or edges that do a task: score them, keep the top k, and say how much they explain."""
    from rich.console import Console

    from gatelens.circuit import find_circuit, memory_estimate
    from gatelens.show import Bars, circuit_table

    console = Console()
    loaded = load(model)
    folder = out or Path("runs") / f"{loaded.name}-{Path(task).stem}-{settings.level}-{settings.method}".replace(
        "/", "-"
    )
    weights, runs = memory_estimate(loaded, settings)
    console.print(f"memory: about {weights:.1f} GB for the weights and up to {runs:.1f} GB for runs (--memory-gb)")
    with Bars(console) as bars:
        options = _options(option, skip_bad)
        result = find_circuit(loaded, task, settings, out=folder, options=options, progress=bars)
    console.print(circuit_table(result))
    console.print(f"written to {folder}", soft_wrap=True)


@command("effect")
def effect(
    model: ModelName,
    task: TaskName,
    graph: Annotated[
        Path, typer.Argument(help="a circuit as EAP-IG and the MIB track write it (JSON)", metavar="GRAPH")
    ],
    n: Annotated[int, typer.Option(help="prompts")] = 64,
    seed: Annotated[int, typer.Option(help="task seed")] = 0,
    memory_gb: Annotated[float, typer.Option(help="memory for runs, in GB")] = 2.0,
    option: TaskOption = None,
    skip_bad: SkipBad = False,
    *,
    load: Loader,
) -> None:
    """Evaluate an edge circuit from elsewhere: how much of the task does it explain?"""
    from gatelens.curves import edges_effect
    from gatelens.exchange import read_graph
    from gatelens.graph import Graph
    from gatelens.tasks import task as make_task

    loaded = load(model)
    shape = Graph.of(loaded.anatomy)
    _, kept = read_graph(graph, shape)
    made = make_task(task, loaded, n=n, seed=seed, **_options(option, skip_bad))
    inside, rest = edges_effect(loaded, made, kept, memory_gb=memory_gb)  # type: ignore[arg-type]
    counted = int(shape.on_a_path(kept[None]).sum())
    print(f"{counted:,} of {shape.n_edges:,} edges on a path explain {inside:.3f}; all others explain {rest:.3f}")


@command("gate", settings="gatelens.gate:GateSettings")
def gate(
    model: ModelName,
    task: TaskName,
    settings: Any,
    out: Annotated[Path | None, typer.Option(help="the run's folder; default runs/MODEL-TASK-gate")] = None,
    option: TaskOption = None,
    skip_bad: SkipBad = False,
    *,
    load: Loader,
) -> None:
    """Learn which heads help, hinder or do not matter in a task, and prove it by ablation."""
    from rich.console import Console

    from gatelens.gate import find_roles
    from gatelens.processes import is_main
    from gatelens.show import Bars, roles_table

    console = Console(quiet=not is_main())
    loaded = load(model)
    folder = out or Path("runs") / f"{loaded.name}-{Path(task).stem}-gate".replace("/", "-")
    with Bars(console) as bars:
        options = _options(option, skip_bad)
        result = find_roles(loaded, task, settings, out=folder, options=options, progress=bars)
    console.print(roles_table(result))
    console.print(f"written to {folder}", soft_wrap=True)


@command("agree")
def agree(
    gates: Annotated[Path, typer.Argument(help="folder of a gate run", metavar="GATES")],
    patching: Annotated[
        Path, typer.Argument(help="folder of a circuit run: --level heads --method patching", metavar="PATCHING")
    ],
    k: Annotated[int, typer.Option(help="compare up to so many heads that patching marks with all others")] = 10,
) -> None:
    """Do learned gates and patching agree? The facilitation of heads that patching marks, against the others'."""
    from rich.console import Console

    from gatelens.mediation import compare_runs
    from gatelens.results import write_json
    from gatelens.show import agreement_table

    found = compare_runs(gates, patching, k)
    Console().print(agreement_table(found))
    about = dataclasses.asdict(found) | {"marked": [str(head) for head in found.marked], "patching": str(patching)}
    write_json(gates / "agreement.json", about)
    print(f"written to {gates / 'agreement.json'}")


@command("contrast", settings="gatelens.contrast:TwoTaskSettings")
def contrast(
    model: ModelName,
    keep: Annotated[str, typer.Argument(help="the task whose responses are kept", metavar="KEEP")],
    lose: Annotated[str, typer.Argument(help="the task whose responses are lost", metavar="LOSE")],
    settings: Any,
    out: Annotated[Path | None, typer.Option(help="the run's folder; default runs/MODEL-KEEP-LOSE-contrast")] = None,
    keep_option: Annotated[list[str] | None, typer.Option(help="an option of KEEP, as KEY=VALUE; repeatable")] = None,
    lose_option: Annotated[list[str] | None, typer.Option(help="an option of LOSE, as KEY=VALUE; repeatable")] = None,
    skip_bad: SkipBad = False,
    *,
    load: Loader,
) -> None:
    """Learn gates that keep one task's responses and lose another's: which heads tell two ways of asking apart?"""
    from rich.console import Console

    from gatelens.contrast import find_contrast
    from gatelens.processes import is_main
    from gatelens.show import Bars, contrast_table

    console = Console(quiet=not is_main())
    loaded = load(model)
    name = f"{loaded.name}-{Path(keep).stem}-{Path(lose).stem}-contrast".replace("/", "-")
    folder = out or Path("runs") / name
    with Bars(console) as bars:
        result = find_contrast(
            loaded,
            keep,
            lose,
            settings,
            out=folder,
            keep_options=_options(keep_option, skip_bad),
            lose_options=_options(lose_option, skip_bad),
            progress=bars,
        )
    console.print(contrast_table(result))
    console.print(f"written to {folder}", soft_wrap=True)


@command("report")
def report(
    folders: Annotated[
        list[Path], typer.Argument(help="folders of runs, or folders that hold such folders", metavar="DIR...")
    ],
    out: Annotated[Path | None, typer.Option(help="the report's folder; default: report beside the first DIR")] = None,
) -> None:
    """Write a page with the summary, figures and interactive views of saved runs; no model is loaded."""
    from gatelens.report.page import write_report

    written = write_report(folders, out or folders[0].parent / "report")
    for problem in written.problems:
        print(f"gatelens: {problem}", file=sys.stderr)
    runs = f"{len(written.runs)} run{'s' * (len(written.runs) != 1)}"
    print(f"{runs} and {written.figures} figures in {written.path}")


@command("sparsify", settings="gatelens.methods.sparsify:SparsifySettings")
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

    from gatelens.methods.sparsify import sparsify as run

    if track not in (None, "tensorboard", "wandb"):
        raise GatelensError(f"no tracker '{track}': trackers are tensorboard and wandb.")
    if load.device_map is not None:
        raise GatelensError("sparsify spreads a model by `accelerate launch`, not by --device-map.")
    dense = load(model)
    run(dense, text, settings, out, held_out=held_out or (), start=start, track=track, show=True)  # type: ignore[arg-type]
    Console().print(f"written to {out}: `gatelens evaluate {out} --text ...` judges it", soft_wrap=True)


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

    from gatelens.methods.sparsify import evaluate as judge
    from gatelens.results import write_json
    from gatelens.show import judgement_tables

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
    from gatelens.methods.sparsify.judge import made_from

    base = made_from(model)
    if base is None:
        return None
    try:
        return load(base)
    except GatelensError as error:
        said = f"compared with {model} without gates, as {base}, which it was made from, cannot be loaded: {error}"
        print(f"gatelens: {said}", file=sys.stderr)
        return None


@command("study")
def study(
    file: Annotated[Path, typer.Argument(help="the study: a TOML file", metavar="FILE.toml")],
    out: Annotated[Path | None, typer.Option(help="the study's folder; default runs/FILE")] = None,
    engine: Annotated[str, typer.Option(help="local, or ray: Ray's workers")] = "local",
    address: Annotated[str | None, typer.Option(help="an existing Ray cluster; default: a Ray of this machine")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="only list the cells, with time and memory")] = False,
) -> None:
    """Run a grid of models, tasks and settings; skip what is done, go on when a cell fails, end with the report."""
    from rich.console import Console

    from gatelens.study.cost import estimates, estimates_table
    from gatelens.study.file import read_study
    from gatelens.study.run import run_study

    console = Console()
    asked = read_study(file)
    folder = out or Path("runs") / file.stem
    if dry_run:
        console.print(estimates_table(asked, estimates(asked, folder)))
        return
    summary = run_study(asked, folder, engine=engine, address=address, console=console)  # type: ignore[arg-type]
    console.print(summary.table())
    for sentence in (*summary.failures(), *summary.problems):
        print(f"gatelens: {sentence}", file=sys.stderr)
    console.print(f"written to {folder}" + (f", report {summary.report}" if summary.report else ""), soft_wrap=True)
    if summary.failed:
        raise typer.Exit(1)


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

    An adapter, such as sparse-smollm2, becomes full weights, which plain transformers opens after `import gatelens`;
    all options but --out are for checkpoints.
    """
    from gatelens.convert import convert_adapter, convert_checkpoint, names_adapter

    made: object
    if not names_adapter(checkpoint):
        made = convert_checkpoint(checkpoint, out, tokenizer=tokenizer, bias=bias, heads=heads, activation=activation)
    elif (tokenizer, bias, heads, activation) == ("gpt2", None, None, "gelu"):
        made = convert_adapter(checkpoint, out)
    else:
        raise GatelensError(f"{checkpoint} is an adapter, which says all of its model: give --out alone.")
    print(f"written to {out}: {made}")
