"""Hooks of the site's build: formulas become MathML, and tables of settings and commands are made from the code.

The notebooks of ``examples/`` become pages in ``notebooks/``, and the figures of ``results/`` are copied to
``results/``, so that the site has no second copy of either in the repository.

Formulas are written in a fence called ``math`` or as ``$`...`$``. They become MathML, which browsers draw without
scripts, fonts or network access. ``<!-- settings: module:Class -->`` and ``<!-- commands -->`` become tables that are
read from the code, so that the reference is always up to date.
"""

from __future__ import annotations

import importlib
import re
import sys
from pathlib import Path
from typing import Any

from latex2mathml.converter import convert
from mkdocs.structure.files import File, Files

sys.path.insert(0, str(Path(__file__).parent))
from notebooks import notebook_page

_ROOT = Path(__file__).parents[1]

_BLOCK = re.compile(r"^```math\n(.*?)\n```$", re.MULTILINE | re.DOTALL)
_INLINE = re.compile(r"\$`([^`]+)`\$")
_TEST = re.compile(r"<!-- test(?:-setup\n|: ).*?-->\n?", re.DOTALL)
_SETTINGS = re.compile(r"<!-- settings: (\S+) -->")
_PLACE = re.compile(r"(<p>)?@@formula-(\d+)@@(</p>)?")
_ROLE = re.compile(r":(?:func|class|meth|mod|attr):(?=<code>)")

_formulas: list[str] = []  # Markdown would interpret * and _ in them, so pages have placeholders meanwhile


def on_files(files: Files, config: Any, **_: Any) -> Files:
    """Add the notebooks and the figures of the results."""
    for notebook in sorted(_ROOT.glob("examples/*.ipynb")):
        page, images = notebook_page(notebook)
        for name, content in ((f"{notebook.stem}.md", page), *images.items()):
            files.append(File.generated(config, f"notebooks/{name}", content=content))
    for figure in sorted(_ROOT.glob("results/*/*.png")):
        place = f"results/{figure.parent.name}/{figure.name}"
        files.append(File.generated(config, place, abs_src_path=str(figure)))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Replace formulas by placeholders, remove instructions for the tests, and insert tables."""
    markdown = _TEST.sub("", markdown)
    markdown = _BLOCK.sub(lambda match: f"\n{_keep(match[1], 'block')}\n", markdown)
    markdown = _INLINE.sub(lambda match: _keep(match[1], "inline"), markdown)
    markdown = _SETTINGS.sub(lambda match: settings_table(match[1]), markdown)
    return markdown.replace("<!-- commands -->", commands()) if "<!-- commands -->" in markdown else markdown


def on_page_content(html: str, **_: Any) -> str:
    """Insert the formulas, and show Sphinx roles in docstrings as the name alone."""
    return _ROLE.sub("", _PLACE.sub(_formula, html))


def _keep(formula: str, display: str) -> str:
    _formulas.append(convert(formula.strip(), display=display))
    return f"@@formula-{len(_formulas) - 1}@@"


def _formula(match: re.Match[str]) -> str:
    before, number, after = match.groups()
    mathml = _formulas[int(number)]
    if before and after and 'display="block"' in mathml:
        return f'<div class="formula">{mathml}</div>'
    return f"{before or ''}{mathml}{after or ''}"


def settings_table(where: str) -> str:
    """The fields of a settings class, ``module:Class``, with defaults and meanings."""
    from gatelens.runtime.settings import setting_fields

    module, name = where.split(":")
    cls = getattr(importlib.import_module(module), name)
    lines = [
        f"| `{field.name}` | {_default(field.default)} | {_cell(field.help)} |"
        for field in setting_fields(cls)
        if field.help
    ]
    table = ["| field | default | meaning |", "|---|---|---|", *lines]
    if cls.presets:
        table += ["", f"Presets, for `{name}.preset(NAME)`, `--preset NAME` and `preset = NAME` in a study file:", ""]
        table += ["| preset | its values |", "|---|---|"]
        for preset, values in cls.presets.items():
            table.append(f"| `{preset}` | {', '.join(f'`{key}` {value}' for key, value in values.items())} |")
    return "\n".join(table)


def commands() -> str:
    """A section for each subcommand with its help, arguments and options."""
    import typer

    from gatelens import cli

    group: Any = typer.main.get_command(cli.make_app())
    parts: list[str] = []
    for name, command in group.commands.items():
        arguments = [p for p in command.params if p.param_type_name == "argument"]
        options = [p for p in command.params if p.param_type_name == "option" and p.name != "help"]
        usage = " ".join(["gatelens", name, *(_metavar(p) for p in arguments), *(["[OPTIONS]"] if options else [])])
        parts += [f"## {name}", "", _cell(command.help or ""), "", "```", usage, "```", ""]
        if options:
            parts += ["| option | default | meaning |", "|---|---|---|"]
            parts += [f"| {_flags(p)} | {_shown(p)} | {_cell(p.help or '')} |" for p in options]
            parts.append("")
    return "\n".join(parts)


def _metavar(argument: Any) -> str:
    name = (argument.metavar or argument.name.upper()).strip("[].")
    name += "..." if argument.nargs == -1 else ""
    return name if argument.required else f"[{name}]"


def _flags(option: Any) -> str:
    names = [*option.opts, *option.secondary_opts]
    return ", ".join(f"`{name}`" for name in names)


def _shown(option: Any) -> str:
    return "required" if option.required else _default(option.default)


def _default(value: Any) -> str:
    """A default value as code; empty if there is none."""
    return "" if value in (None, "", (), [], ...) or callable(value) else f"`{value}`"


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")
