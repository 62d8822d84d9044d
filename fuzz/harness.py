"""Try many damaged inputs of one kind: each is written to a folder of its own and used there."""

from __future__ import annotations

import logging
import shutil
import signal
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

from hypothesis import HealthCheck, Phase, given, seed, settings

from fuzz.damage import Files
from fuzz.targets import Target
from gatelens import GatelensError

SECONDS = 20
"""No input may take longer."""


def attempt(target: Target, files: Files) -> str:
    """Use one input.

    Returns:
        The sentence with which it was refused; empty if it was not. Every other error is raised.
    """
    with tempfile.TemporaryDirectory(prefix="gatelens-fuzz-") as name:
        folder = Path(name) / "input"
        write(files, folder)
        try:
            with _silence():
                target.use(folder)
        except GatelensError as error:
            sentence = str(error)
            if not sentence.strip() or len(sentence) > 5000:
                raise AssertionError(f"not one clear sentence: {len(sentence)} characters") from error
            return sentence
    return ""


@contextmanager
def _silence() -> Iterator[None]:
    """Show no warnings and no log."""
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(logging.NOTSET)


def write(files: Files, folder: Path) -> None:
    """Write the files of an input."""
    folder.mkdir()
    for name, data in files.items():
        path = folder / name.removesuffix("@")
        path.parent.mkdir(parents=True, exist_ok=True)
        if name.endswith("@"):
            path.symlink_to(data.decode())
        else:
            path.write_bytes(data)


def check(target: Target, examples: int, number: int | None = None) -> None:
    """Try some inputs. The error about a bad one has the smallest input that hypothesis found.

    Arguments:
        number: the seed. By default the inputs are the same in every call.
    """

    def test(files: Files) -> None:
        attempt(target, files)

    run: Callable[[], Any] = given(target.inputs())(test)
    run = settings(
        max_examples=examples,
        derandomize=number is None,
        database=None,
        deadline=None,
        phases=(Phase.generate, Phase.shrink),
        suppress_health_check=list(HealthCheck),
        report_multiple_bugs=True,
    )(run if number is None else seed(number)(run))
    run()


def survey(target: Target, examples: int, number: int) -> dict[str, Files]:
    """Try some inputs and go on after an error.

    Returns:
        Error -> the first input that raised it. An input that takes too long is one of them.
    """
    errors: dict[str, Files] = {}

    def test(files: Files) -> None:
        start = time.process_time()  # on a busy machine the clock on the wall says nothing
        previous = signal.signal(signal.SIGPROF, _too_long)
        signal.setitimer(signal.ITIMER_PROF, SECONDS)
        try:
            attempt(target, files)
        except Exception as error:
            errors.setdefault(_signature(error), files)
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0)
            signal.signal(signal.SIGPROF, previous)
        if time.process_time() - start > SECONDS:
            errors.setdefault(f"took more than {SECONDS} s of processor time", files)

    run: Callable[[], Any] = seed(number)(given(target.inputs())(test))
    settings(
        max_examples=examples,
        database=None,
        deadline=None,
        phases=(Phase.generate,),
        suppress_health_check=list(HealthCheck),
    )(run)()
    return errors


def save(errors: dict[str, Files], target: Target, out: Path) -> None:
    """Write the inputs that raised errors, each with the error, so that they can be tried again."""
    for number, (error, files) in enumerate(errors.items()):
        folder = out / f"{target.name.replace(' ', '-')}-{number}"
        shutil.rmtree(folder, ignore_errors=True)
        folder.parent.mkdir(parents=True, exist_ok=True)
        write(files, folder)
        (folder / "ERROR.txt").write_text(error, errors="backslashreplace")


def _too_long(number: int, frame: FrameType | None) -> None:
    raise TimeoutError(f"took more than {SECONDS} s")


def _signature(error: Exception) -> str:
    """The error and the last place in gatelens where it passed."""
    place, trace = "", error.__traceback__
    while trace is not None:
        code = trace.tb_frame.f_code
        if "gatelens" in code.co_filename and "fuzz" not in code.co_filename:
            place = f"{code.co_filename.rpartition('gatelens/')[2]}:{trace.tb_lineno} {code.co_name}"
        trace = trace.tb_next
    return f"{type(error).__name__} at {place or 'no line of gatelens'}: {str(error)[:300]}"


def limit_memory(gigabytes: float) -> None:
    """Let this process take only this much more memory than it has now."""
    import resource

    pages = int(Path("/proc/self/statm").read_text().split()[0]) if sys.platform == "linux" else 0
    if pages:
        now = pages * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (now + int(gigabytes * 1e9), resource.RLIM_INFINITY))
