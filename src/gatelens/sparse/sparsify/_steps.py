"""The steps of a run of sparse post-training, from its last checkpoint on: logged, evaluated and saved on the way."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from gatelens.errors import GatelensError, GatelensWarning
from gatelens.runtime.checkpoints import Checkpoints
from gatelens.runtime.interrupts import Interrupted, finishing_steps
from gatelens.sparse.sparsify._display import displayed
from gatelens.sparse.sparsify._log import Log, Record
from gatelens.sparse.sparsify._training import Training
from gatelens.sparse.sparsify.judge import judge

JUDGED = ("dense loss", "above dense", "kl", "open", "keys per query", "idle heads")
"""The columns of `judged.csv` for each held-out text."""


def make_steps(
    training: Training,
    held_out: dict[str, Tensor],
    folder: Path | None,
    show: bool,
    check: Callable[[], None] = lambda: None,
) -> None:
    """Make all steps that are not made yet.

    Arguments:
        held_out: (sequence, token) of each text to evaluate on, by name.
        folder: the run folder; without it nothing is kept.
        show: print progress.
        check: is called before a step is logged or saved. It raises an error if the folder is not this run's any more.
    """
    settings, accelerator = training.settings, training.accelerator
    main = bool(accelerator.is_main_process)
    checkpoints, done = None, 0
    if folder is not None:
        checkpoints = Checkpoints(folder / "checkpoints", main, accelerator.wait_for_everyone)
        done = _restore(training, checkpoints)
    log_folder = folder if main else None
    log = Log(log_folder, done)
    judged = Log(log_folder, done, ("step", *(f"{name} {column}" for name in held_out for column in JUDGED)), "judged")
    at_once = settings.batch * settings.accumulate * accelerator.num_processes
    with displayed(show, done, settings.steps) as display, finishing_steps() as stop:
        for step in range(done, settings.steps):
            start = time.perf_counter()
            record: Record = {"step": step + 1, **training.step(step)}
            tokens = at_once * (settings.length - settings.length % training.length(step))
            record["tokens_per_second"] = tokens / (time.perf_counter() - start)
            if main:
                check()
            log.add(record)
            display.step(record)
            accelerator.log(record, step=step + 1)
            is_last = step + 1 == settings.steps
            if held_out and (is_last or (step + 1) % settings.judge_every == 0):
                numbers = _judge(training, held_out)
                judged.add({"step": step + 1, **numbers})
                accelerator.log(numbers, step=step + 1)
                display.say("  ".join(f"{key} {value:.4f}" for key, value in numbers.items()))
            stops = _any_process(accelerator, stop.received)
            if checkpoints is not None and (is_last or stops or (step + 1) % settings.checkpoint_every == 0):
                checkpoints.write(step + 1, partial(training.save, steps=step + 1))
            if stops:
                raise Interrupted(f"step {step + 1}", resumes=checkpoints is not None)
    log.write_json()
    judged.write_json()


def _any_process(accelerator: Any, here: bool) -> bool:
    """Whether something is true in any process: all of them must stop after the same step."""
    if here:
        accelerator.set_trigger()
    return bool(accelerator.check_trigger())


def _restore(training: Training, checkpoints: Checkpoints) -> int:
    """Continue from the newest checkpoint that can be read, if there is one, and return the number of steps done."""
    unreadable: list[str] = []
    for step in reversed(checkpoints.steps()):
        try:
            done = training.restore(checkpoints.path(step))
        except GatelensError as error:
            unreadable.append(str(error))
            continue
        if unreadable:
            warnings.warn(f"{unreadable[0]} The run resumes from step {done}.", GatelensWarning, stacklevel=2)
        return done
    if unreadable:
        run = checkpoints.folder.parent
        raise GatelensError(
            f"{unreadable[0]} There is no other checkpoint to resume from: give another folder (start='{run}' begins "
            "with the weights of this run, if they can be read)."
        )
    return 0


def _judge(training: Training, held_out: dict[str, Tensor]) -> Record:
    """The numbers on each held-out text, by column."""
    training.student.eval()
    numbers: Record = {}
    for name, tokens in held_out.items():
        with training.precision():
            judgement = judge(training.dense, training.student.hf, tokens)
        values = (
            judgement.dense_loss,
            judgement.above_dense,
            judgement.kl,
            judgement.open_share,
            judgement.keys_per_query,
            judgement.idle_share,
        )
        numbers |= {f"{name} {column}": value for column, value in zip(JUDGED, values, strict=True)}
    return numbers
