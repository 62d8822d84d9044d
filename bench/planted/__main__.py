"""Judge every registered method on all planted circuits, and write the tables into docs/planted.md.

python -m bench.planted               all models; about fifteen minutes on one core
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
from bench.planted.hard import HARD
from bench.planted.judge import LEVELS, Judged, complete, judge, summary
from bench.planted.trained import TRAINED
from gatelens.methods.registry import method_named, methods

PAGE = Path(__file__).parents[2] / "docs" / "planted.md"
FOLDER = Path("runs") / "planted"
CASES: list[Case] = [*BY_HAND, *TRAINED, *HARD]
GROUPS = {"Circuits without traps": ("by hand", "trained"), "Hard circuits": ("hard",)}
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
    """The tables of the page, as Markdown: the models, and for each group of them the medians and every model.

    A method that was not run on all models of a group is not in its tables.
    """
    parts = ["### Models\n", _table(["model", "planted", "what it answers", "edges", "obeys"], cases)]
    for title, kinds in GROUPS.items():
        group = [(name, kind) for name, kind, *_ in cases if kind in kinds]
        if not group:
            continue
        for level in LEVELS:
            results = complete(judged, level, group)
            parts += [f"### {title}, {level}, medians of {len(group)} models\n", _medians(results, kinds, level)]
        results = complete(judged, "edges", group)
        parts.append(f"### {title}, every model: AUROC of edges, and precision\n")
        header = ["model", *(f"`{method}`" for method in results)]
        lines = [
            [f"{name}, {kind}", *(f"{of[i].auroc:.2f}, {of[i].precision:.2f}" for of in results.values())]
            for i, (name, kind) in enumerate(group)
        ]
        parts.append(_table(header, lines))
    return "\n".join(parts)


def _medians(results: dict[str, list[Judged]], kinds: tuple[str, ...], level: str) -> str:
    columns = ["median", *(kinds if len(kinds) > 1 else ()), "lowest", "precision", "lowest precision"]
    published = ["published"] if level == "edges" and "hard" not in kinds else []
    lines = []
    for method, row in summary(results, kinds).items():
        medians = [f"{PUBLISHED[method]:.2f}" if method in PUBLISHED else ""] if published else []
        lines.append([f"`{method}`", *(f"{row[column]:.2f}" for column in columns), f"{row['seconds']:.0f}", *medians])
    return _table(["method", *columns, "seconds", *published], lines)


def _table(header: list[str], lines: list[list[str]]) -> str:
    cells = [header, ["---"] * len(header), *lines]
    return "".join("| " + " | ".join(line) + " |\n" for line in cells)


if __name__ == "__main__":
    sys.exit(main())
