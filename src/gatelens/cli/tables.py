"""What the command line prints: tables and progress bars. Text from prompts and files is escaped, never markup."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import TracebackType

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from rich.table import Column, Table

from gatelens.gates import LEVELS
from gatelens.measures.circuit_result import CircuitResult
from gatelens.measures.circuit_settings import CircuitSettings
from gatelens.measures.circuit_tests import CircuitTests
from gatelens.measures.contrast_result import ContrastResult
from gatelens.measures.curves import Curve
from gatelens.measures.mediation import PatchingComparison
from gatelens.measures.roles_result import RolesResult
from gatelens.measures.stability import Stability
from gatelens.model import Model
from gatelens.model.graph import Graph
from gatelens.report.frontier import FrontierPoint
from gatelens.sparse.in_model import is_sparse
from gatelens.sparse.sparsify import Judgement


class Bars:
    """One progress bar for each phase of the work; it is called as the progress of a run.

    Nothing is printed before the first call: a request that is refused leaves no empty line.
    """

    def __init__(self, console: Console) -> None:
        self.progress = Progress(
            TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(), console=console
        )
        self.bars: dict[str, TaskID] = {}

    def __enter__(self) -> Bars:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.bars:
            self.progress.stop()

    def __call__(self, title: str, done: int, total: int) -> None:
        if not self.bars:
            self.progress.start()
        if title not in self.bars:
            self.bars[title] = self.progress.add_task(escape(title), total=total)
        self.progress.update(self.bars[title], completed=done, total=total)


def anatomy_table(model: Model, length: int) -> Table:
    """A model's parts, and how many gates each level has."""
    graph = Graph.of(model.anatomy)
    n_gates = {name: f"{level.n_gates(graph, length):,}" for name, level in LEVELS.items()}
    shared = model.n_kv_heads != model.n_heads
    table = Table(title=escape(model.name), show_header=False)
    for label, value in (
        ("family", model.anatomy.model_type),
        ("layers", f"{model.n_layers}"),
        ("heads in each layer", f"{model.n_heads}"),
        ("KV heads in each layer", f"{model.n_kv_heads}"),
        ("width, head size", f"{model.anatomy.width}, {model.anatomy.head_dim}"),
        ("blocks", "parallel: attention and MLP read the same stream" if model.anatomy.parallel else "sequential"),
        ("parameters", f"{model.n_parameters:,}"),
        ("dtype, device", f"{model.dtype}, {model.device}".replace("torch.", "")),
        ("attention", "gated (sparse)" if is_sparse(model.hf) else "dense"),
        ("heads in all layers", n_gates["heads"]),
        ("edges of the component graph", n_gates["edges"] + (" (k and v inputs per KV head)" if shared else "")),
        (f"attention edges at {length} tokens", n_gates["attention"] + " (fewer if a window hides keys)"),
        ("fingerprint", model.fingerprint[:16]),
    ):
        table.add_row(label, escape(value))
    return table


def circuit_sentence(result: CircuitResult) -> str:
    """How many gates do the task, in one sentence."""
    noun, threshold = LEVELS[result.settings.level].noun, result.settings.threshold
    return escape(
        f"{result.task} in {result.model}: {result.count} of {result.curve.total:,} {noun} explain {threshold:.0%}."
    )


def circuit_table(result: CircuitResult) -> Table:
    """How many gates do the task, and how far that can be trusted."""
    validity, settings, curve = result.validity, result.settings, result.curve
    level = LEVELS[settings.level]
    per_prompt = "" if level.shared else " in each prompt"
    table = Table(title=f"{escape(result.task)} in {escape(result.model)}: {level.noun}", show_header=False)
    lines = [
        ("scored by", _scored_by(settings)),
        (f"{level.noun} needed for {settings.threshold:.0%}{per_prompt}, 95 % interval", str(result.count)),
        (f"{level.noun} in all{per_prompt}", f"{curve.total:,}"),
        ("a random ranking needs", "-" if curve.random is None else str(curve.random.counted(settings.threshold))),
        ("ranked by", f"{settings.ranking} score on {curve.sample.ranking}"),
        ("left out set to", settings.source),
        *_areas(curve),
        ("answered correctly by the whole model", f"{result.answered:.0%} of {curve.sample}"),
        ("effect of the circuit", f"{validity.effect:.2f}"),
        ("effect of all but the circuit", f"{validity.complement:.2f}"),
        ("rank correlation with exact patching, 95 % interval", validity.shown),
        *((f"  on {stratum.stratum} gates", stratum.shown) for stratum in validity.strata),
        ("overlap of the top k between task seeds", _or_dash(validity.overlap)),
        ("time", f"{result.seconds:.0f} s"),
    ]
    lines += [("best", line) for line in _best(result)]
    for label, value in lines:
        table.add_row(label, escape(value))
    return table


def tests_tables(tests: CircuitTests) -> list[Table]:
    """The hypothesis tests of a circuit, and what it loses without each of its gates."""
    outcomes = Table(title="tests of the circuit", show_header=False)
    outcomes.add_row("equivalence: as good as the whole model", str(tests.equivalence))
    outcomes.add_row("independence: the rest knows nothing", str(tests.independence))
    outcomes.add_row("minimality: every gate is needed", tests.minimality)
    caption = f"{tests.prompts} prompts; p against {tests.additions} random additions"
    dropped = Table("without", "effect lost, 95 % interval", "p", title="minimality", caption=caption)
    for gate in tests.dropped:
        dropped.add_row(escape(gate.gate), f"{gate.lost:+.3f} ({gate.low:+.3f} to {gate.high:+.3f})", f"{gate.p:.2g}")
    return [outcomes, dropped]


def stability_table(stability: Stability) -> Table:
    """How far circuits that were found on halves of the prompts agree, and what they explain of the other half."""
    header = ("other", "overlap, range over splits", "effect on own half", "effect transferred", "measured on")
    one = "" if len(stability.lines) > 1 else " All prompts have the same template, so that templates have no line."
    caption = f"Circuits of the top {stability.k:,}; effects with their 95 % intervals over prompts.{one}"
    table = Table(*header, title="stability", caption=caption)
    for line in stability.lines:
        table.add_row(line.other, *line.shown)
    return table


def _areas(curve: Curve) -> list[tuple[str, str]]:
    """MIB's two areas, if they were measured."""
    if curve.mib is None:
        return []
    return [
        (f"{name} by {curve.mib.ranking} score, as in MIB", str(getattr(curve, name.lower())))
        for name in ("CPR", "CMD")
    ]


def roles_table(result: RolesResult) -> Table:
    """How many heads are of each kind, in each seed, in all and in any, and what ablating them does to the response."""
    ablated = int(result.curves[0].ablated[-1])
    seeds = len(result.roles.plus)
    title = f"{escape(result.task)} in {escape(result.model)}: roles of heads, {seeds} seed{'s' * (seeds > 1)}"
    notes = [] if result.known is None else [f"{result.known:.0%} of the held-out response tokens are its first choice"]
    if early := _ended_early(result):
        notes.append(early)
    change = f"change in log p, {ablated} ablated"
    table = Table("kind", "heads", "in all", "in any", change, title=title, caption="\n".join(notes) or None)
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


def _ended_early(result: RolesResult) -> str:
    """How many fits ended because their gates stood still, and after how many updates; empty if none did."""
    updates, asked = result.roles.updates, result.settings.updates
    early = updates[updates < asked]
    if not len(early):
        return ""
    fewest, most = int(early.min()), int(early.max())
    after = f"{fewest}" if fewest == most else f"{fewest} to {most}"
    return f"{len(early)} of {updates.numel()} fits ended after {after} of {asked} updates: their gates stood still"


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
    """Facilitation of the heads that other scores mark, and of the others."""
    over = {"mean": "mean over seeds", "max": "maximum over seeds"}[comparison.over]
    table = Table(title=f"facilitation, {over}; {comparison.level} scored by {comparison.method}", show_header=False)
    marked, all_heads = len(comparison.marked), comparison.n_heads
    table.add_row("marked", comparison.rule)
    table.add_row(f"{marked} heads that are marked", f"{comparison.facilitation:.3f}")
    table.add_row(f"{all_heads - marked} other heads", f"{comparison.others:.3f}")
    table.add_row("Welch's t-test", f"t = {comparison.t:.2f}, p = {comparison.p:.2g}")
    table.add_row("heads", ", ".join(map(str, comparison.marked)))
    return table


def judgement_tables(judged: Mapping[str, Judgement], dense: bool = True, width: int = 80) -> list[Table]:
    """Loss and open keys on each text, then the share of open edges of every layer and head.

    Arguments:
        dense: whether the model was compared with a dense model, or with itself without gates.
        width: columns of the console, at least 80. The heads are split into as many tables as fit into it.
    """
    dense_loss, difference = "dense loss" if dense else "without gates", Column("difference", no_wrap=True)
    table = Table(Column("text", overflow="fold"), "tokens", dense_loss, "sparse loss", difference, "KL", "open edges")
    for name, judgement in judged.items():
        numbers = (
            f"{judgement.dense_loss:.4f}",
            f"{judgement.sparse_loss:.4f}",
            f"{judgement.above_dense:+.4f}",
            f"{judgement.kl:.4f}",
        )
        table.add_row(
            escape(name), f"{judgement.sequences} x {judgement.length}", *numbers, f"{judgement.open_share:.2%}"
        )
    sparsity = Table(
        Column("text", overflow="fold"),
        "keys per query",
        "idle heads",
        "queries without a key",
        "edges to first token",
        title="sparsity",
    )
    for name, judgement in judged.items():
        shares = (judgement.idle_share, judgement.without_key_share, judgement.to_first_share)
        sparsity.add_row(escape(name), f"{judgement.keys_per_query:.2f}", *(f"{share:.1%}" for share in shares))
    tables = [table, sparsity]
    for name, judgement in judged.items():
        heads = range(judgement.opened.shape[1])
        fit = (width - 22) // 9  # beside the first two columns, each with a border and "100.0%"
        for first in range(0, len(heads), fit):
            tables.append(_open_table(name, judgement, heads[first : first + fit]))
    return tables


def frontier_table(points: Sequence[FrontierPoint]) -> Table:
    """Every evaluation of every run: tokens, keys per query and head, loss above dense, KL, idle heads."""
    columns = ("step", "tokens", "keys per query", "above dense", "KL", "idle heads")
    table = Table(Column("run", overflow="fold"), Column("text", overflow="fold"), *columns)
    for point in points:
        idle = "" if point.idle is None else f"{point.idle:.0%}"
        losses = (f"{point.above_dense:+.4f}", f"{point.kl:.4f}")
        numbers = (f"{point.step:,}", f"{point.tokens:,}", f"{point.keys:.2f}", *losses, idle)
        table.add_row(escape(point.run), escape(point.text), *numbers)
    return table


def _open_table(name: str, judgement: Judgement, heads: range) -> Table:
    """The share of open edges in each layer, and in some of its heads."""
    table = Table("layer", "all heads", *(f"H{head}" for head in heads), title=f"open edges: {escape(name)}")
    for layer, (share, head_shares) in enumerate(
        zip(judgement.open_by_layer.tolist(), judgement.open_by_head.tolist(), strict=True)
    ):
        table.add_row(str(layer), f"{share:.2%}", *(f"{head_shares[head]:.1%}" for head in heads))
    return table


def _scored_by(settings: CircuitSettings) -> str:
    """The method with its settings: ``eap-ig, 5 steps, midpoint rule``. A switch is named if it is on."""
    values = settings.method_settings.model_dump()
    words = [name if value is True else f"{value} {name}" for name, value in values.items() if value is not False]
    return ", ".join([settings.method, *words]).replace("_", " ")


def _or_dash(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def _best(result: CircuitResult, k: int = 5) -> list[str]:
    return [f"{gate.name}  {gate.score:+.3f}" for gate in result.scores[0].top(k)] if result.scores else []
