"""Notebooks as pages of the site: their text, code and stored outputs. The pictures of the site come from there too."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any


def notebook_page(path: Path) -> tuple[str, dict[str, bytes]]:
    """A notebook as Markdown, and its images by the name under which the page refers to them.

    Arguments:
        path: a notebook with stored outputs.
    """
    images: dict[str, bytes] = {}
    parts: list[str] = []
    for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]:
        source = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            parts.append(source)
            continue
        parts.append(f"```py\n{source}\n```")
        for output in cell["outputs"]:
            parts.append(_output(output, f"{path.stem}-{len(images) + 1}.png", images))
    return "\n\n".join(filter(None, parts)) + "\n", images


def _output(output: Any, image: str, images: dict[str, bytes]) -> str:
    """One output: an image, an HTML table or text."""
    data = output.get("data", {})
    if "image/png" in data:
        images[image] = base64.b64decode(data["image/png"])
        return f"![Output of the cell above]({image})"
    if "text/html" in data:
        return f'<div class="output">{"".join(data["text/html"])}</div>'
    text = "".join(output.get("text", data.get("text/plain", "")))
    return f"```text\n{text.rstrip()}\n```" if text.strip() else ""
