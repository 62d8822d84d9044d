"""gatelens beside other libraries on the same work, and beside the floor: ``python -m bench.peers [LIBRARY ...]``.

Every library has an environment of its own, below the folder that the environment variable ``GATELENS_PEERS`` names
(~/.cache/gatelens/peers by default). All run the same random model of the shape of GPT-2 small on the same prompts,
with one thread. Each row of the table has a process of ours and one of theirs, which run in turn: a plain Hugging Face
forward, our job, their job, and again. Seconds are processor time, so other work on the machine has little influence.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from bench.circuits import LENGTH, PROMPTS, random_task
from bench.heads import gpt2_small, plain
from bench.measurements import AS_JSON, Measurement, arguments, quick, show
from bench.tables import markdown, processor, write_table
from gatelens.gates import HEADS
from gatelens.methods.attribution import attribute_heads
from gatelens.methods.patching import patch

HOME = Path(os.environ.get("GATELENS_PEERS", Path.home() / ".cache" / "gatelens" / "peers"))
SCRIPTS = Path(__file__).parent / "peer_scripts"
RESULTS = Path(__file__).parents[1] / "results" / "bench"
REPEATS = 1 if quick() else 3
HEADS_PATCHED = [(layer, head) for layer in (2, 6, 10) for head in range(1 if quick() else 8)]  # on average, half way


@dataclass(frozen=True)
class Peer:
    """A library: what pip installs, and the script that runs it. Without a script, ``why`` says why there is none."""

    package: str
    script: str = ""
    why: str = ""


PEERS: Mapping[str, Peer] = {
    "TransformerLens 4": Peer("transformer-lens==4.3.0", "transformer_lens_4.py"),
    "TransformerLens 3": Peer("transformer-lens==3.9.0", "transformer_lens_3.py"),
    "nnsight": Peer("nnsight==0.8.1", "with_nnsight.py"),
    "pyvene": Peer("pyvene==0.1.8", "with_pyvene.py"),
    "EAP-IG": Peer("", why="it is not on PyPI"),
}
FLOORS = {"patch heads": 0.5 * len(HEADS_PATCHED), "attribute heads": 3.0}
"""In forwards: half a forward for each head, because the layers below it are shared; a forward and an FB of 2 F."""


BEST = ("job", "floor, F", "ours, F", "library", "theirs, F", "theirs / ours")
"""The columns of the short table."""


def main() -> None:
    if sys.argv[1:2] == ["--row"]:
        print(json.dumps(row(*sys.argv[2:4])))
        return
    chosen = arguments() or list(PEERS)
    if unknown := [name for name in chosen if name not in PEERS]:
        sys.exit(f"no library '{unknown[0]}': there are {', '.join(PEERS)}.")
    print(f"GPT-2-small shape, {PROMPTS} prompts of {LENGTH} tokens, one thread, median of {REPEATS} (least to most)")
    records = []
    for name in chosen:
        problem = PEERS[name].why or install(name)
        if problem:
            records.append(record(name, note=problem))
            continue
        for job in FLOORS:
            command = [sys.executable, "-m", "bench.peers", "--row", name, job, *(["--quick"] if quick() else [])]
            done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
            lines = done.stdout.splitlines()
            records.append(json.loads(lines[-1]) if not done.returncode else record(name, job, note="it failed"))
            if (ratio := records[-1]["theirs / ours"]) is not None:
                show(Measurement(f"{job}, beside {name}", 1 / float(ratio.split()[0]), name, most=1 / 3))
    if not quick():
        short = markdown(best_peers(records))
        write_table(
            RESULTS / "peers.csv", records, f"{description()}\n\n## The best library for each job\n\n{short}\n\n## All"
        )
    if AS_JSON not in sys.argv:
        print(markdown(records))


def best_peers(records: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """For each job the floor, ours, and the library that takes the least time beside ours."""
    best = []
    for job in FLOORS:
        measured = [one for one in records if one["job"] == job and one["theirs / ours"] is not None]
        if measured:
            row = min(measured, key=lambda one: float(one["theirs / ours"].split()[0]))
            best.append(
                {name: row[name] for name in ("job", "floor, F", "ours, F", "library", "theirs, F", "theirs / ours")}
            )
    return best


def row(name: str, job: str) -> dict[str, Any]:
    """Measure one job in turn with one library."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = gpt2_small()
    task = random_task(model)
    [bucket] = task.buckets
    heads = torch.tensor([layer * model.n_heads + head for layer, head in HEADS_PATCHED])
    jobs: dict[str, Callable[[], Any]] = {
        "patch heads": lambda: patch(HEADS, model, task, gates=[heads]).scores.flatten()[heads],
        "attribute heads": lambda: attribute_heads(model, task).scores.flatten(),
    }
    work = {
        "clean": bucket.clean.tolist(),
        "corrupt": bucket.corrupt.tolist(),
        "right": task.answer_ids[bucket.which, 0].tolist(),
        "wrong": task.wrong_ids[bucket.which, 0].tolist(),
        "heads": HEADS_PATCHED,
    }
    command = [str(python_of(name)), PEERS[name].script]
    with subprocess.Popen(command, cwd=SCRIPTS, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None

        def ask(line: str) -> dict[str, Any]:
            process.stdin.write(line + "\n")  # type: ignore[union-attr]
            process.stdin.flush()  # type: ignore[union-attr]
            return json.loads(process.stdout.readline())  # type: ignore[union-attr, no-any-return]

        if job not in ask(json.dumps(work))["jobs"]:
            process.stdin.close()
            return record(name, job, note="not measured: no script for it")
        forward = plain(model, bucket.clean, times=3)
        forward()
        scores, their_scores = jobs[job](), torch.tensor(ask(job)["scores"])  # the first runs are not measured
        times = []
        for _ in range(REPEATS):
            unit = seconds(forward) / 3
            times.append((seconds(jobs[job]) / unit, ask(job)["seconds"] / unit))
        process.stdin.close()
    difference = float((scores - their_scores).abs().max() / scores.abs().max())
    return record(name, job, times, difference)


def record(
    name: str,
    job: str = "",
    times: Sequence[tuple[float, float]] = (),
    difference: float | None = None,
    note: str = "",
) -> dict[str, Any]:
    """A line of the table; ``times`` has ours and theirs of each repetition, in forwards."""
    ours, theirs = ([pair[side] for pair in times] for side in (0, 1))
    return {
        "library": name,
        "job": job,
        "floor, F": FLOORS.get(job),
        "ours, F": spread(ours),
        "theirs, F": spread(theirs),
        "theirs / ours": spread([their / our for our, their in times]),
        "largest difference of scores": None if difference is None else f"{difference:.0e}",
        "note": note,
    }


def spread(values: Sequence[float]) -> str | None:
    """The median, with the smallest and the largest value."""
    if not values:
        return None
    return f"{statistics.median(values):.3g} ({min(values):.3g} to {max(values):.3g})"


def seconds(job: Callable[[], object]) -> float:
    start = time.process_time()
    job()
    return time.process_time() - start


def description() -> str:
    return (
        "# gatelens beside other libraries\n\n"
        f"`python -m bench.peers` on: {processor()}, torch {torch.__version__}. A random model of the shape of GPT-2 "
        f"small, {PROMPTS} prompts of {LENGTH} tokens, one thread. F is a plain Hugging Face forward of the same "
        f"prompts with all logits, in the same run. Median of {REPEATS} repetitions in turn, "
        "smallest and largest in brackets; processor time. `patch heads` closes 24 heads one at a time, "
        "8 in each of the layers 2, 6 and 10, of which half a forward is above them; `attribute heads` is "
        "attribution patching of all 144 heads. The difference is relative to the largest score. The other core, and "
        "this one too, were busy with other work."
    )


def python_of(name: str) -> Path:
    return HOME / name.lower().replace(" ", "-").replace("transformerlens", "transformer-lens") / "bin" / "python"


def install(name: str) -> str:
    """Install a library into its environment unless it is there; return why it cannot be used, or an empty text."""
    python = python_of(name)
    folder = python.parents[1]
    if (folder / "ready").exists():
        return ""
    if quick():
        return "not installed yet, and a quick run does not install it"
    print(f"installing {PEERS[name].package} into {folder}, once", flush=True)
    for command in (
        [sys.executable, "-m", "venv", "--clear", str(folder)],
        [
            str(python),
            "-m",
            "pip",
            "install",
            "--quiet",
            f"torch=={torch.__version__.split('+')[0]}",
            PEERS[name].package,
        ],
    ):
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            return f"it cannot be installed: {' '.join(done.stderr.split())[-200:]}"
    (folder / "ready").touch()
    return ""


if __name__ == "__main__":
    main()
