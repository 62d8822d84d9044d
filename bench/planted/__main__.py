"""Judge every registered method on all planted circuits, and write the tables into docs/planted.md.

python -m bench.planted               all models; about ten minutes on one core
python -m bench.planted eap acdc      only these methods; prints, and does not write
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path

import torch

from bench.planted.by_hand import BY_HAND
from bench.planted.case import Case
from bench.planted.judge import LEVELS, Judged, judge, summary
from bench.planted.trained import TRAINED
from gatelens.methods.registry import method_named, methods

PAGE = Path(__file__).parents[2] / "docs" / "planted.md"
FOLDER = Path("runs") / "planted"
CASES: list[Case] = [*BY_HAND, *TRAINED]
BEGIN, END = "<!-- tables: python -m bench.planted -->", "<!-- end of tables -->"
PUBLISHED = {"acdc": 0.95, "eap-ig": 0.90, "eap": 0.20}  # medians on the 86 models of InterpBench


def main() -> int:
    torch.set_num_threads(1)
    names = sys.argv[1:] or list(methods())
    for name in names:
        method_named(name)
    judged: list[Judged] = []
    lines: list[list[str]] = []
    for case in CASES:
        line, results = judge_case(case, names)
        lines.append(line)
        judged += results
        shown = [f"{one.method} {one.auroc:.2f}" for one in results if one.level == "edges"]
        print(f"{case.name} ({case.kind}): {', '.join(shown)}", flush=True)
    text = tables(judged, lines)
    if sys.argv[1:]:
        print(text)
        return 0
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    PAGE.write_text(before + BEGIN + "\n\n" + text + "\n" + END + rest.partition(END)[2], encoding="utf-8")
    return 0


def judge_case(case: Case, names: list[str]) -> tuple[list[str], list[Judged]]:
    """The line of a model in the table of models, and its results by these methods; only what is not saved is run."""
    path = FOLDER / f"{case.name}-{case.kind}.json".replace(" ", "-")
    saved = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {"results": []}
    done = {one["method"] for one in saved["results"]}
    if missing := [name for name in names if name not in done]:
        planted = case.plant()
        obeys = "" if planted.obeys is None else f"{100 * planted.obeys:.1f} %"
        saved["line"] = [case.name, case.kind, case.says, str(len(planted.edges)), obeys]
        saved["results"] += [asdict(one) for one in judge(case.name, case.kind, planted, missing)]
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(saved), encoding="utf-8")
    return saved["line"], [Judged(**one) for one in saved["results"] if one["method"] in names]


def tables(judged: list[Judged], cases: list[list[str]]) -> str:
    """The tables of the page, as Markdown: the models, the medians of each level, and the edges of every model."""
    parts = ["### Models\n", _table(["model", "planted", "what it answers", "edges", "obeys"], cases)]
    for level in LEVELS:
        parts.append(f"### AUROC of {level}, {len(cases)} models\n")
        header = ["method", "median", "by hand", "trained", "lowest", "seconds"]
        published = level == "edges"
        lines = []
        for method, row in summary(judged, level).items():
            numbers = [f"{row[column]:.2f}" for column in header[1:-1]] + [f"{row['seconds']:.0f}"]
            medians = [f"{PUBLISHED[method]:.2f}" if method in PUBLISHED else ""] if published else []
            lines.append([f"`{method}`", *numbers, *medians])
        parts.append(_table([*header, *(["published"] if published else [])], lines))
    parts.append("### AUROC of edges, every model\n")
    names = [name for name in methods() if any(one.method == name and one.level == "edges" for one in judged)]
    values = {(one.case, one.kind, one.method): one.auroc for one in judged if one.level == "edges"}
    lines = [[f"{name}, {kind}", *(f"{values[name, kind, m]:.2f}" for m in names)] for name, kind, *_ in cases]
    parts.append(_table(["model", *(f"`{name}`" for name in names)], lines))
    return "\n".join(parts)


def _table(header: list[str], lines: list[list[str]]) -> str:
    cells = [header, ["---"] * len(header), *lines]
    return "".join("| " + " | ".join(line) + " |\n" for line in cells)


if __name__ == "__main__":
    sys.exit(main())
