"""Do the tests notice a wrong line? ``python -m bench.mutation --sample 100 --seed 0 src/gatelens/gates ...``

A mutant is the library with one small fault, for example `<=` instead of `<`; cosmic-ray makes it (install the extra
`mutation`). It is killed if a test fails, and it survives if all tests pass. A random sample of each package is run:

1. pytest collects the tests once. Each test runs once on the correct code, which records its CPU time and the functions
   that it calls.
2. For each mutant the process forks. The child replaces the code of one function in memory and runs the tests that call
   this function: those that import its module first, then the cheap ones, up to a budget of CPU time. The first failure
   kills the mutant.

Source files are never changed. Mutants are drawn from the bodies of functions. Left out are defaults, decorators,
annotations, class bodies, `raise` statements, texts for display, estimates of memory (functions `*numbers`), and
operators that mostly give a TypeError (`a << b` for `a + b`). What has run is kept in `runs/mutation`, so that the same
command resumes. `--again` runs the survivors with the tests as they are now. `--control` runs the tests of each mutant
without its fault: all of them must survive. The table and the survivors are written beside this file; the column
`verdict` is written by hand and kept.
"""

from __future__ import annotations

import argparse
import csv
import gc
import importlib
import json
import os
import signal
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from itertools import chain, zip_longest
from pathlib import Path
from types import FunctionType

import pytest
from scipy.stats import binomtest

from bench.mutation.recording import Recorder, TestRecord, passes, read_lines, test_name
from bench.mutation.sample import ROOT, Mutant, changed_function, draw, key, mutated_source

KEPT = ROOT / "runs" / "mutation"
TABLE, SURVIVORS = (Path(__file__).parent / name for name in ("table.md", "survivors.csv"))


def in_child(work: Callable[[], int]) -> int:
    """Run in a forked process. Returns its exit code, negative if a signal ended it."""
    child = os.fork()
    if not child:
        code = 70
        try:
            code = work()
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


class Mutation:
    """The pytest plugin that runs mutants instead of tests."""

    def __init__(self, options: argparse.Namespace, mutants: list[Mutant]) -> None:
        self.options, self.mutants = options, mutants
        self.live: dict[tuple[str, str, int], list[FunctionType]] = defaultdict(list)
        self.tests: dict[str, TestRecord] = {}

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        self.session = session
        self.capture = session.config.pluginmanager.getplugin("capturemanager")
        for package in self.options.packages:  # also modules that are imported late
            for path in (ROOT / package).rglob("*.py"):
                parts = path.relative_to(ROOT / "src").with_suffix("").parts
                importlib.import_module(".".join(parts[:-1] if parts[-1] == "__init__" else parts))
        for value in gc.get_objects():
            if isinstance(value, FunctionType) and value.__code__.co_filename.startswith(str(ROOT / "src")):
                self.live[value.__code__.co_filename, *key(value.__code__)].append(value)
        self.record()
        with self.options.outcomes.open("a") as outcomes:
            for number, mutant in enumerate(self.mutants, start=1):
                began = time.time()
                outcome, test = self.run(mutant)
                seconds = round(time.time() - began, 1)
                print(json.dumps([mutant.name, outcome, test, seconds]), file=outcomes, flush=True)
                self.say(f"{number}/{len(self.mutants)} {seconds} s {outcome}: {mutant.name} {mutant.function} {test}")
        return True

    def say(self, text: str) -> None:
        with self.capture.global_and_fixture_disabled():
            print(text, flush=True)

    def record(self) -> None:
        """Record the tests that are new or changed, each file in a child."""
        file = KEPT / "tests.jsonl"
        self.tests = {record["test"]: record for record in read_lines(file)}
        missing: dict[Path, list[pytest.Item]] = defaultdict(list)
        for item in self.session.items:
            if test_name(item) not in self.tests:
                missing[item.path].append(item)
        for path, items in missing.items():
            recorder, began = Recorder(self.options.packages, self.options.slow), time.time()

            def work(recorder: Recorder = recorder, items: list[pytest.Item] = items) -> int:
                self.session.config.pluginmanager.register(recorder)
                recorder.run(items, file)
                return 0

            code = in_child(work)
            self.say(f"recorded {len(items)} tests of {path.name} in {time.time() - began:.0f} s (exit code {code})")
        self.tests = {record["test"]: record for record in read_lines(file)}

    def chosen(self, mutant: Mutant) -> list[pytest.Item]:
        """The tests that call the function and fit into the budget, file by file, so that fixtures are made once."""
        function = f"{mutant.module}:{mutant.function}"
        name = mutant.module.removeprefix("src/").removesuffix(".py").replace("/", ".")
        callers: list[tuple[bool, float, int, pytest.Item]] = []
        for place, item in enumerate(self.session.items):
            record = self.tests.get(test_name(item))
            if record and record["passed"] and function in record["calls"]:
                near = f"from {name} import" in item.path.read_text()
                callers.append((not near, record["seconds"], place, item))
        callers.sort(key=lambda caller: caller[:3])
        cost: dict[Path, float] = defaultdict(float)
        kept: list[tuple[int, pytest.Item]] = []
        for _, seconds, place, item in callers:
            if sum(cost.values()) + seconds <= self.options.budget:
                cost[item.path] += seconds
                kept.append((place, item))
        kept.sort(key=lambda one: (cost[one[1].path], one[0]))
        return [item for _, item in kept]

    def run(self, mutant: Mutant) -> tuple[str, str]:
        """The outcome for one mutant, and the test that killed it."""
        path, items = ROOT / mutant.module, self.chosen(mutant)
        code = changed_function(path, mutated_source(mutant))
        live = self.live[str(path), *key(code)] if code else []
        if not live or code is None:
            return "not applied", ""
        if not items:
            return "survived", "no test calls it"
        message = KEPT / "killer"
        message.write_text("")

        def work() -> int:
            limit = 5 * sum(self.tests[test_name(item)]["seconds"] for item in items) + 20
            signal.setitimer(signal.ITIMER_PROF, limit)  # the signals end the process
            signal.setitimer(signal.ITIMER_REAL, 8 * limit)
            for function in () if self.options.control else live:
                function.__code__ = code
            for item, following in zip(items, [*items[1:], None], strict=True):
                if not passes(item, following):
                    message.write_text(item.nodeid)
                    return 1
            return 0

        status = in_child(work)
        if status == 0:
            return "survived", f"{len(items)} tests"
        return ("timeout", "") if status in (-signal.SIGPROF, -signal.SIGALRM) else ("killed", message.read_text())


def verdicts() -> dict[str, str]:
    """What was written about each survivor by hand; `equivalent: ...` if no test could notice the fault."""
    if not SURVIVORS.exists():
        return {}
    with SURVIVORS.open() as text:
        return {line["mutant"]: line["verdict"] for line in csv.DictReader(text)}


def report(mutants: list[Mutant], seed: int) -> None:
    """Write the table of kill rates and the list of mutants that survived the first run."""
    first: dict[str, str] = {}
    last: dict[str, tuple[str, str]] = {}
    for name, outcome, test, _ in read_lines(KEPT / "outcomes.jsonl"):
        first.setdefault(name, outcome)
        last[name] = outcome, test
    old = verdicts()
    titles = ["package", "mutants", "killed", "timeouts among them", "killed after mending", "95 % interval"]
    titles += ["equivalent", "killed of the others", "95 % interval"]
    lines = [f"| {' | '.join(titles)} |", "|---" * len(titles) + "|"]
    for package in dict.fromkeys(mutant.package for mutant in mutants):
        names = [m.name for m in mutants if m.package == package and first.get(m.name, "not applied") != "not applied"]
        before = sum(first[name] != "survived" for name in names)
        after = sum(last[name][0] != "survived" for name in names)
        slow = sum(first[name] == "timeout" for name in names)
        same = sum(last[name][0] == "survived" and old.get(name, "").startswith("equivalent") for name in names)
        cells = [
            package,
            len(names),
            rate(before, len(names)),
            slow,
            rate(after, len(names)),
            interval(after, len(names)),
        ]
        cells += [same, rate(after, len(names) - same), interval(after, len(names) - same)]
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    TABLE.write_text("\n".join([*lines, "", f"Seed {seed}.", ""]))
    with SURVIVORS.open("w", newline="") as text:
        table = csv.writer(text, lineterminator="\n")
        table.writerow(["mutant", "line", "function", "before", "after", "now", "test", "verdict"])
        for m in mutants:
            if first.get(m.name) == "survived":
                verdict = old.get(m.name, "")
                table.writerow([m.name, m.line, m.function, m.before, m.after, *last[m.name], verdict])


def rate(killed: int, count: int) -> str:
    return f"{killed} ({killed / count:.1%})" if count else "0"


def interval(killed: int, count: int) -> str:
    """The 95 % Wilson interval of a kill rate."""
    if not count:
        return ""
    found = binomtest(killed, count).proportion_ci(method="wilson")
    return f"{found.low:.1%} to {found.high:.1%}"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.mutation")
    parser.add_argument("packages", nargs="+", help="folders of source files, such as src/gatelens/gates")
    parser.add_argument("--sample", type=int, default=100, help="mutants of each package")
    parser.add_argument("--seed", type=int, default=0, help="seed of the sample")
    parser.add_argument("--tests", nargs="+", default=["tests/gates", "tests/measures", "tests/sparse"])
    parser.add_argument("--budget", type=float, default=20, help="CPU seconds of tests for a mutant")
    parser.add_argument("--slow", type=float, default=4, help="tests of more CPU seconds are left out")
    parser.add_argument("--again", action="store_true", help="run the survivors again, with the tests as they are now")
    parser.add_argument("--control", action="store_true", help="run the tests without the faults")
    parser.add_argument("--report", action="store_true", help="only write the table")
    options = parser.parse_args()
    options.packages = [str(Path(package).resolve().relative_to(ROOT)) for package in options.packages]
    options.outcomes = KEPT / ("control.jsonl" if options.control else "outcomes.jsonl")
    KEPT.mkdir(parents=True, exist_ok=True)
    samples = [draw(package, options.sample, options.seed) for package in options.packages]
    mutants = [mutant for mutant in chain(*zip_longest(*samples)) if mutant is not None]  # packages in turn
    if not options.report:
        last = {name: outcome for name, outcome, *_ in read_lines(options.outcomes)}
        asked = [m for m in mutants if last.get(m.name) == ("survived" if options.again else None)]
        same = {name for name, verdict in verdicts().items() if verdict.startswith("equivalent")}
        asked = [m for m in asked if m.name not in same]
        settings = ["-p", "no:cacheprovider", "-p", "no:xdist", f"--basetemp={KEPT / 'temporary'}"]
        pytest.main([*settings, *options.tests], plugins=[Mutation(options, asked)])
    report(mutants, options.seed)
    return 0


if __name__ == "__main__":
    sys.exit(main())
