"""The list of tasks, and the preview of a task, as the command line prints them."""

from __future__ import annotations

from collections import Counter

from rich.console import Group, RenderableType
from rich.markup import escape
from rich.table import Table

from gatelens.tasks import TASKS, Entry
from gatelens.tasks.preview import Preview


def listing() -> RenderableType:
    """A table of all built-in tasks: what each asks, its options and an example."""
    kinds = Counter(entry.kind for entry in TASKS.values())
    title = f"{kinds['circuit']} circuit tasks and {kinds['response']} response tasks"
    table = Table("task", "kind", "what it asks, its options, and an example", title=title, show_lines=True)
    for name, entry in TASKS.items():
        prompt, answer = (escape(text.strip()) for text in entry.example)
        options = f"\noptions: {escape(_options(entry))}" if entry.options() else ""
        label = "answer" if entry.kind == "circuit" else "response"
        table.add_row(name, entry.kind, f"{escape(entry.description)}{options}\n[dim]{prompt}[/dim]\n{label}: {answer}")
    footer = (
        "Try a task on a model: `gatelens tasks ioi --model smollm2`. Give an option as --option corruption=subject. A "
        "circuit task has clean and corrupt prompts and asks for one token; a response task has prompts with a target "
        "response. Both can also be read from your own .jsonl file."
    )
    return Group(table, footer)


def _options(entry: Entry) -> str:
    """The task's options, with their values if there are only a few."""
    values = {option: " | ".join(entry.choices.get(option, ())) for option in entry.options()}
    return ", ".join(f"{option} = {choices}" if choices else option for option, choices in values.items())


def render(result: Preview) -> RenderableType:
    """The preview as it is printed."""
    title = f"{result.task} on {result.model}: {len(result.shown)} of {result.n} prompts"
    table = Table("prompt", "answer", "the model predicts", "score", title=title, show_lines=True)
    for shown in result.shown:
        mark = "[green]right[/green]" if shown.right else "[red]wrong[/red]"
        table.add_row(
            escape(shown.prompt), escape(shown.answers), escape(shown.predicted), f"{shown.score:+.2f}\n{mark}"
        )
    lines = [escape(result.note), f"Over all {result.n} prompts:"]
    lines += [f"  {name}: {_figure(name, value)}" for name, value in result.figures.items()]
    if result.warning:
        lines.append(f"[yellow]Warning: {escape(result.warning)}[/yellow]")
    return Group(table, *lines)


def _figure(name: str, value: float) -> str:
    share = name.startswith(("answered", "response"))
    return f"{value:.1%}" if share else f"{value:+.3f} on average"
