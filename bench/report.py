"""The report page of 8 runs of 50,000 edges: the seconds to build it, and the milliseconds that its slider takes.

``python -m bench.report``. These are the only benchmark numbers that are not ratios, because people wait in seconds.
The processor time is given beside the elapsed time, which includes waiting for other work on the machine.
"""

from __future__ import annotations

import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from bench.measurements import Measurement, quick, show
from gatelens.model.graph import Graph
from gatelens.report.page import write_report

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "report"))
from made_runs import circuit_run

GRAPH = Graph(n_layers=26, n_heads=9, n_kv_heads=3)
TASKS = ("ioi", "docstring", "greater-than", "ioi-long")
WORDS = [" token"] * 20

# Move the slider through its positions, or between the last two; wait after each move until the browser has painted.
MOVE = """
const [first, done] = arguments, slider = document.querySelector("#graph-sides input"), durations = [];
const most = Number(slider.max), places = [];
for (let place = first; place <= most; place += 6) places.push(place);
if (first === most) for (let i = 0; i < 12; i++) places.push(most - (i % 2));
function move() {
  if (!places.length) return done(durations);
  const start = performance.now();
  slider.value = places.shift();
  slider.dispatchEvent(new Event("input"));
  requestAnimationFrame(() => setTimeout(() => { durations.push(performance.now() - start); move(); }));
}
move();
"""


def main() -> None:
    graph = Graph(3, 4, 2) if quick() else GRAPH
    folder = Path(tempfile.mkdtemp())
    try:
        for i, task in enumerate(TASKS[: 1 if quick() else 4]):
            common = {"task": task, "graph": graph, "tokens": WORDS, "needed": graph.n_edges // 20}
            circuit_run(folder / f"{task}-dense", **common, seed=i)
            circuit_run(folder / f"{task}-sparse", **common, model="sparse", sparse=True, seed=9 + i)
        start, processor_start = time.perf_counter(), time.process_time()
        report = write_report([folder], folder / "report")
        elapsed, processor = time.perf_counter() - start, time.process_time() - processor_start
        size = sum(path.stat().st_size for path in report.path.parent.rglob("*") if path.is_file()) / 1e6
        print(f"{len(report.runs)} runs of {graph.n_edges:,} edges, {report.figures} figures, {size:.1f} MB")
        show(Measurement("build the page, processor time", processor, "seconds", most=20))
        show(Measurement("build the page, elapsed time", elapsed, "seconds", most=20))
        for name, thread, painted in slider_times(report.path):
            show(Measurement(f"move the slider {name}, processor time of the page", thread, "milliseconds", most=100))
            show(
                Measurement(
                    f"move the slider {name}, elapsed time until it is painted", painted, "milliseconds", most=100
                )
            )
    finally:
        shutil.rmtree(folder)


def slider_times(page: Path) -> list[tuple[str, float, float]]:
    """Mean milliseconds of a move: processor time, and elapsed time until it is painted. Empty without a browser."""
    from selenium import webdriver

    if shutil.which("chromium") is None or shutil.which("chromedriver") is None:
        print("slider: not measured, because chromium or chromedriver is not installed")
        return []
    options: Any = webdriver.ChromeOptions()
    options.binary_location = shutil.which("chromium")
    for argument in ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"):
        options.add_argument(argument)
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(shutil.which("chromedriver")))
    try:
        driver.set_window_size(1600, 1000)
        driver.set_script_timeout(300)
        driver.get(page.as_uri())
        driver.execute_cdp_cmd("Performance.enable", {"timeDomain": "threadTicks"})
        last = int(driver.execute_script("return document.querySelector('#graph-sides input').max"))
        return [_measure(driver, name, first) for name, first in (("anywhere", 0), ("at its end", last))]
    finally:
        driver.quit()


def _measure(driver: Any, name: str, first: int) -> tuple[str, float, float]:
    driver.execute_async_script(MOVE, first)  # the first moves are slower, because the browser compiles the scripts
    before = _thread_seconds(driver)
    painted = driver.execute_async_script(MOVE, first)
    return name, 1000 * (_thread_seconds(driver) - before) / len(painted), statistics.mean(painted)


def _thread_seconds(driver: Any) -> float:
    """The processor time of the page so far: scripts, styles, layout and painting."""
    metrics = driver.execute_cdp_cmd("Performance.getMetrics", {})["metrics"]
    return next(float(metric["value"]) for metric in metrics if metric["name"] == "TaskDuration")


if __name__ == "__main__":
    main()
