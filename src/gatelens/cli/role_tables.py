"""Tables about the roles of heads over several fits, models and tasks."""

from __future__ import annotations

from rich.markup import escape
from rich.table import Table

from gatelens.measures.relations_result import RelationsResult


def relations_table(result: RelationsResult) -> Table:
    """How often responses are predicted on each relation that was held out, with all gates open and under the gates."""
    seeds = result.settings.seeds
    title = f"relations in {escape(result.model)}: response tokens predicted, {result.settings.n} pairs each"
    caption = f"all gates open -> under the gates, mean of {seeds} seed{'s' * (seeds > 1)}"
    table = Table("kept way", "held out", "kept", "lost", title=title, caption=caption)
    for fit in result.fits:
        accuracy = fit.accuracy
        table.add_row(
            escape(fit.keep),
            escape(fit.relation),
            f"{accuracy.keep_open:.0%} -> {accuracy.keep.mean():.0%}",
            f"{accuracy.lose_open:.0%} -> {accuracy.lose.mean():.0%}",
        )
    return table
