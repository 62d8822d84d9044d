"""Tables about the roles of heads over several fits, models and tasks."""

from __future__ import annotations

from rich.markup import escape
from rich.table import Table
from torch import Tensor

from gatelens.measures.relations_result import RelationsResult
from gatelens.measures.role_statistics import Correlation, Share
from gatelens.measures.role_summary import RoleSummary

_BARS = " .:-=+*#%@"  # of a histogram, from no score to the most


def relations_table(result: RelationsResult) -> Table:
    """How often responses are predicted on each relation that was held out, with all gates open and under the gates."""
    seeds = result.settings.seeds
    title = f"relations in {escape(result.model)}: response tokens predicted, {result.settings.n} pairs each"
    over = f"mean of {seeds} seeds (lowest to highest)" if seeds > 1 else "1 seed"
    caption = f"all gates open -> under the gates, {over}"
    table = Table("held out", "kept way", "kept", "lost way", "lost", title=title, caption=caption)
    for fit in result.fits:
        accuracy = fit.accuracy
        table.add_row(
            escape(fit.relation),
            escape(fit.keep),
            f"{accuracy.keep_open:.0%} -> {_over_seeds(accuracy.keep)}",
            escape(fit.lose),
            f"{accuracy.lose_open:.0%} -> {_over_seeds(accuracy.lose)}",
        )
    return table


def _over_seeds(accuracies: Tensor) -> str:
    between = f" ({accuracies.min():.0%} to {accuracies.max():.0%})" if len(accuracies) > 1 else ""
    return f"{accuracies.mean():.0%}{between}"


def role_summary_tables(summary: RoleSummary) -> list[Table]:
    """All tables of a summary of head roles that have a line."""
    shares = Table(
        "task",
        "model",
        "kind",
        "mean of seeds (lowest to highest)",
        "in all seeds",
        "in any seed",
        "scores from 0 to 1",
        title="share of heads with a score of 0.5 or more",
        caption="\\[ ]: published, for the paper's own data: mean over its Llama 3 models; in all and in any of ten "
        "seeds of Llama-3.1-8B",
    )
    for share in summary.shares:
        seeds = f" ({share.lowest:.1%} to {share.highest:.1%})" if share.seeds > 1 else ""
        shares.add_row(
            escape(share.task),
            escape(f"{share.model}, {share.seeds} seeds, {share.examples} examples"),
            share.kind,
            f"{share.share:.1%}{seeds}{_published(share, 'share')}",
            f"{share.all_seeds:.1%}{_published(share, 'all_seeds')}",
            f"{share.any_seed:.1%}{_published(share, 'any_seed')}",
            _histogram(share),
        )
    correlations = Table(
        "between",
        "kind",
        "of",
        "and",
        "correlation",
        title="correlation of the scores of heads",
        caption="between seeds: mean of all pairs (lowest to highest); otherwise of mean scores (95 % interval)",
    )
    for line in summary.correlations:
        correlations.add_row(line.between, line.kind, escape(line.first), escape(line.second), _with_interval(line))
    overlaps = Table(
        "task", "kind", "of", "and", "in both", "by chance", title="heads of a kind in at least half of the seeds"
    )
    for overlap in summary.overlaps:
        overlaps.add_row(
            escape(overlap.task),
            overlap.kind,
            f"{escape(overlap.first)}: {overlap.in_first}",
            f"{escape(overlap.second)}: {overlap.in_second}",
            str(overlap.in_both),
            f"{overlap.by_chance:.1f}",
        )
    mediation = Table(
        "run",
        "scored by",
        "marked",
        "their facilitation",
        "others",
        "Welch's t",
        "p",
        title="facilitation of the heads that other scores mark, maximum over seeds",
        caption="Welch's t-test of equal means, two-sided",
    )
    for name, comparison in summary.mediation:
        mediation.add_row(
            escape(name),
            f"{comparison.method}, {comparison.level}",
            f"{len(comparison.marked)} of {comparison.n_heads} ({comparison.rule})",
            f"{comparison.facilitation:.3f}",
            f"{comparison.others:.3f}",
            f"{comparison.t:.2f}",
            f"{comparison.p:.2g}",
        )
    return [table for table in (shares, correlations, overlaps, mediation) if table.row_count]


def _published(share: Share, field: str) -> str:
    return f" [dim]\\[{share.published[field]:.1%}][/dim]" if field in share.published else ""


def _histogram(share: Share) -> str:
    """The distribution of the scores as bars, from the lowest to the highest tenth."""
    most = max(share.distribution)
    return "".join(_BARS[min(int(part / most * len(_BARS)), len(_BARS) - 1)] for part in share.distribution)


def _with_interval(line: Correlation) -> str:
    if line.correlation is None or line.low is None or line.high is None:
        return "-"
    return f"{line.correlation:+.2f} ({line.low:+.2f} to {line.high:+.2f}), {line.heads} heads"
