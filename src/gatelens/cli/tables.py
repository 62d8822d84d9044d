"""What the command line prints: tables and progress bars. Text from prompts and files is data, never markup."""

from __future__ import annotations

from collections.abc import Mapping
from types import TracebackType

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from rich.table import Column, Table

from gatelens.measures.circuit_result import CircuitResult
from gatelens.measures.contrast_result import ContrastResult
from gatelens.measures.mediation import PatchingComparison
from gatelens.measures.roles_result import RolesResult
from gatelens.model import Model
from gatelens.model.graph import Graph
from gatelens.sparse.in_model import is_sparse
from gatelens.sparse.sparsify import Judgement


class Bars:
    """One progress bar for each part of the work; call it as the journal's progress."""

    def __init__(self, console: Console) -> None:
        self.progress = Progress(
            TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(), console=console
        )
        self.bars: dict[str, TaskID] = {}

    def __enter__(self) -> Bars:
        self.progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.progress.stop()

    def __call__(self, what: str, done: int, total: int) -> None:
        if what not in self.bars:
            self.bars[what] = self.progress.add_task(escape(what), total=total)
        self.progress.update(self.bars[what], completed=done, total=total)


def anatomy_table(model: Model, length: int) -> Table:
    """A model's parts, and how many gates there are of each kind."""
    graph = Graph.of(model.anatomy)
    pairs = length * (length + 1) // 2 * model.n_layers * model.n_heads
    shared = model.n_kv_heads != model.n_heads
    table = Table(title=escape(model.name), show_header=False)
    for what, value in (
        ("family", model.anatomy.model_type),
        ("layers", f"{model.n_layers}"),
        ("heads in each layer", f"{model.n_heads}"),
        ("KV heads in each layer", f"{model.n_kv_heads}"),
        ("width, head size", f"{model.anatomy.width}, {model.anatomy.head_dim}"),
        ("blocks", "parallel: attention and MLP read the same stream" if model.anatomy.parallel else "sequential"),
        ("parameters", f"{model.n_parameters:,}"),
        ("dtype, device", f"{model.dtype}, {model.device}".replace("torch.", "")),
        ("attention", "gated (sparse)" if is_sparse(model.hf) else "dense"),
        ("heads in all", f"{model.n_layers * model.n_heads:,}"),
        ("edges of the component graph", f"{graph.n_edges:,}" + (" (k and v inputs per KV head)" if shared else "")),
        (f"attention edges at {length} tokens", f"{pairs:,}" + (" (less where a window hides keys)")),
        ("fingerprint", model.fingerprint[:16]),
    ):
        table.add_row(what, escape(value))
    return table


def circuit_table(result: CircuitResult) -> Table:
    """How many gates do the job, and what speaks for it."""
    validity, settings, curve = result.validity, result.settings, result.curve
    count = "not reached" if result.count is None else f"{result.count:,.0f} of {curve.total:,}"
    random = None if curve.random is None else curve.random.count_at(settings.threshold)
    per_prompt = " in each prompt" if settings.level == "attention" else ""
    table = Table(title=f"{escape(result.task)} in {escape(result.model)}: {settings.level}", show_header=False)
    rows = [
        ("scored by", settings.method + (f", {settings.steps} steps" if settings.method == "eap-ig" else "")),
        ("prompts", f"{settings.n} x {settings.seeds} seed{'s' * (settings.seeds > 1)}"),
        (f"{settings.level} needed for {settings.threshold:.0%}{per_prompt}", count),
        ("a random ranking needs", "-" if random is None else f"{random:,.0f}"),
        ("ranked by, left out at", f"{settings.ranking} score, {settings.source}"),
        ("effect of the circuit", f"{validity.effect:.2f}"),
        ("effect of all but the circuit", f"{validity.complement:.2f}"),
        ("rank correlation with exact patching", _or_dash(validity.correlation, f" on {validity.sampled} gates")),
        ("overlap of the top k between seeds", _or_dash(validity.overlap)),
        ("time", f"{result.seconds:.0f} s"),
    ]
    rows += [("best", line) for line in _best(result)]
    for what, value in rows:
        table.add_row(what, escape(value))
    return table


def roles_table(result: RolesResult) -> Table:
    """How many heads are of each kind, in each seed, in all and in any, and what ablating them does to the response."""
    ablated = int(result.curves[0].ablated[-1])
    seeds = len(result.roles.plus)
    title = f"{escape(result.task)} in {escape(result.model)}: roles of heads, {seeds} seed{'s' * (seeds > 1)}"
    known = None if result.known is None else f"{result.known:.0%} of the held-out response tokens are its first choice"
    change = f"change in log p, {ablated} ablated"
    table = Table("kind", "heads", "in all", "in any", change, title=title, caption=known)
    summary = result.roles.summary()
    for curve in result.curves:
        shares = [f"{share:.0%}" for share in summary.get(curve.kind, {}).values()] or ["-", "-"]
        fewest, most = int(curve.heads.min()), int(curve.heads.max())
        heads = "-" if curve.kind == "random" else f"{fewest}" if fewest == most else f"{fewest} to {most}"
        band = f"  ({curve.low[-1]:+.2f} to {curve.high[-1]:+.2f})" if seeds > 1 else ""
        change = f"{curve.change[-1]:+.2f}{band}"
        if curve.own is not None and fewest < ablated:  # past these the order goes on with heads of no such kind
            change += f"\n{curve.own.mean():+.2f}  with just these heads"
        table.add_row(curve.kind, heads, *shares, change)
    return table


def contrast_table(result: ContrastResult) -> Table:
    """What contrastive gates do to the responses of both tasks, and how many heads they open or close in all seeds."""
    contrast = result.contrast
    table = Table(title=f"contrast in {escape(result.model)}, held-out examples", show_header=False)
    for verb, name, gated, opened in (
        ("keep", result.keep, contrast.keep, contrast.keep_open),
        ("lose", result.lose, contrast.lose, contrast.lose_open),
    ):
        table.add_row(f"{verb} {escape(name)}", f"log p {opened:+.2f} -> {gated.mean():+.2f}")
    for state, heads in (("open", contrast.gates >= 0.5), ("closed", contrast.gates < 0.5)):
        table.add_row(f"heads {state} in all seeds", f"{int(heads.all(0).sum())} of {contrast.gates[0].numel()}")
    return table


def patching_table(comparison: PatchingComparison) -> Table:
    """Facilitation of the heads that patching marks, and of the others."""
    table = Table(title="facilitation, mean over seeds", show_header=False)
    table.add_row(f"{len(comparison.marked)} heads that patching marks", f"{comparison.facilitation:.3f}")
    table.add_row("all other heads", f"{comparison.others:.3f}")
    table.add_row("Welch's t-test", f"t = {comparison.t:.2f}, p = {comparison.p:.2g}")
    table.add_row("marked", ", ".join(map(str, comparison.marked)))
    return table


def judgement_tables(judged: Mapping[str, Judgement], dense: bool = True, width: int = 80) -> list[Table]:
    """Loss and open edges on each text, then the share of open edges of every layer and head.

    dense: whether it was compared with a dense model, or with itself without gates. width: columns of the console, 80
    or more; heads go into as many tables as it takes to show their numbers whole.
    """
    dense_loss, difference = "dense loss" if dense else "without gates", Column("difference", no_wrap=True)
    table = Table(Column("text", overflow="fold"), "tokens", dense_loss, "sparse loss", difference, "KL", "open edges")
    for name, one in judged.items():
        numbers = (f"{one.dense_loss:.4f}", f"{one.sparse_loss:.4f}", f"{one.above_dense:+.4f}", f"{one.kl:.4f}")
        table.add_row(escape(name), f"{one.sequences} x {one.length}", *numbers, f"{one.open_share:.2%}")
    tables = [table]
    for name, one in judged.items():
        heads = range(one.opened.shape[1])
        fit = (width - 22) // 9  # beside the first two columns, each with a border and "100.0%"
        for first in range(0, len(heads), fit):
            tables.append(_open_table(name, one, heads[first : first + fit]))
    return tables


def _open_table(name: str, one: Judgement, heads: range) -> Table:
    """The share of open edges in each layer, and in these of its heads."""
    table = Table("layer", "all heads", *(f"H{head}" for head in heads), title=f"open edges: {escape(name)}")
    for layer, (share, row) in enumerate(zip(one.open_by_layer.tolist(), one.open_by_head.tolist(), strict=True)):
        table.add_row(str(layer), f"{share:.2%}", *(f"{row[head]:.1%}" for head in heads))
    return table


def _or_dash(value: float | None, more: str = "") -> str:
    return "-" if value is None else f"{value:.2f}{more}"


def _best(result: CircuitResult, k: int = 5) -> list[str]:
    return [f"{gate.name}  {gate.score:+.3f}" for gate in result.scores[0].top(k)] if result.scores else []
