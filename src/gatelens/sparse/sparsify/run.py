"""Sparse post-training: make a model's attention sparse at an unchanged loss.

Draye, Lei, Pan, Posner, Schölkopf: Sparse attention post-training for mechanistic interpretability, arXiv 2512.05865.

The folder of a run, all of it written by the main process:

    settings.json     what was asked for, and where it started; a run that continues must ask for the same
    own-text/         what the dense model wrote
    log.csv, .json    every step; judged.csv, .json: held-out text every so often
    checkpoints/      the last two
    README.md, config.json, model.safetensors, adapter.safetensors, ...: the result
"""

from __future__ import annotations

import copy
import importlib.util
import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from gatelens.errors import GatelensError, GatelensWarning
from gatelens.model import Model
from gatelens.model.anatomy import describe
from gatelens.runtime.checkpoints import Checkpoints
from gatelens.runtime.files import is_about_files
from gatelens.runtime.journal import Journal
from gatelens.sparse.in_model import gate_biases
from gatelens.sparse.sparsify.claim import claim
from gatelens.sparse.sparsify.display import displayed
from gatelens.sparse.sparsify.judge import Judgement, check_length, judge, named
from gatelens.sparse.sparsify.log import Log, Row
from gatelens.sparse.sparsify.result import merged, write_card, write_result
from gatelens.sparse.sparsify.rows import Rows
from gatelens.sparse.sparsify.self_text import write_text
from gatelens.sparse.sparsify.settings import SparsifySettings
from gatelens.sparse.sparsify.spread import is_spread
from gatelens.sparse.sparsify.student import Student
from gatelens.sparse.sparsify.training import WEIGHTS, Training
from gatelens.sparse.text import Source, files, keep_apart, sequences

Tracker = Literal["tensorboard", "wandb"]


def sparsify(
    model: Model,
    text: Source | Sequence[Source],
    settings: SparsifySettings | None = None,
    out: str | Path | None = None,
    *,
    held_out: Source | Sequence[Source] = (),
    start: str | Path | None = None,
    track: Tracker | None = None,
    show: bool = False,
) -> Model:
    """Post-train a copy of a model so that few of its attention edges stay open, and return it.

    text: what to train on, one or several of: a text file, a folder, a JSON-lines file, a hub data set; all are mixed.
    Files are read whole, of each data set the first `streamed` sequences.
    out: folder of the run, described above. The same call continues a run that was stopped, at the step and with the
    losses that it would have had; without a folder nothing is kept.
    start: folder of an earlier run of the same model, whose last checkpoint gives the weights and learned biases to
    begin with. A run that continues has its own.
    held_out: text to look at every `judge_every` steps, with gates as in use; never trained on. Without it the card
    says how the model does on the beginning of each text that it was trained on.
    track: also log to TensorBoard or W&B, through accelerate. show: print progress.

    Cost of a step: one forward of the dense and one forward and backward of the sparse model. Started by `accelerate
    launch`, every process reads its own `batch` rows.
    """
    settings = settings or SparsifySettings()
    folder = None if out is None else Path(out)
    accelerator = _accelerator(model, settings, folder, track)
    main = bool(accelerator.is_main_process)
    with _one_sentence(folder):
        # 1. Text: read, and written by the model itself
        sources = [text] if isinstance(text, str | Path) else list(text)
        check_length(model, settings.length)
        keep_apart(sources, named(held_out).values())
        texts = [_read(model, source, settings) for source in sources]
        read = torch.cat(texts)
        held = _held_out(model, held_out, settings)
        looked_at = held or _trained_on(sources, texts, settings)  # for the card, which says which it is
        spread = is_spread(accelerator)
        student = Student(model, settings, share=not spread)
        begin = None if start is None else Path(start)
        if begin is not None and not (folder and Checkpoints(folder / "checkpoints").steps()):
            student.load_state(_last_weights(begin))
        if folder is not None and main:  # now that nothing else can be refused
            claim(folder, model, settings, read, begin)
        accelerator.wait_for_everyone()
        with accelerator.main_process_first() if folder else nullcontext():
            own = _own_text(model, read, settings, folder, show and main)

        # 2. Steps, from the last checkpoint on
        rows = Rows(read, own, settings.self_share, settings.seed)
        if settings.most_open < 1:
            student.lower_biases(rows.batch(range(4)).to(model.device), settings.most_open)
        dense = copy.deepcopy(model.hf) if spread else model.hf.to(accelerator.device)  # FSDP cuts it up in place
        training = Training(student, dense, rows, settings, accelerator)
        _train(training, held, folder, show and main)

        # 3. The result
        done = Student(model, settings, share=False)
        done.load_state(training.weights(settings.steps))
        if not settings.learn_bias:
            done.set_bias(gate_biases(student.hf))
        for tracker in accelerator.trackers:
            tracker.finish()
        trained = done.state()
        sparse = merged(done)
        judged = {name: judge(model.hf, sparse, tokens) for name, tokens in looked_at.items()} if main else {}
        if folder is not None and main:
            card = write_card(model, sources, settings, settings.steps, judged, begin)
            write_result(sparse, trained, model, folder, settings, card)
        accelerator.wait_for_everyone()
        if folder is None:
            return Model(f"sparse-{model.name}", sparse, model.tokenizer, describe(sparse))
        return Model(folder.resolve().name, sparse, model.tokenizer, describe(sparse), str(folder.resolve()))


def _train(training: Training, held: dict[str, Tensor], folder: Path | None, show: bool) -> None:
    settings, accelerator = training.settings, training.accelerator
    main = bool(accelerator.is_main_process)
    checkpoints = None
    done = 0
    if folder is not None:
        checkpoints = Checkpoints(folder / "checkpoints", main, accelerator.wait_for_everyone)
        done = _restore(training, checkpoints)
    kept = folder if main else None
    log = Log(kept, done)
    judged = Log(kept, done, ("step", *(f"{name} {what}" for name in held for what in JUDGED)), "judged")
    tokens = settings.batch * settings.accumulate * settings.length * accelerator.num_processes
    with displayed(show, done, settings.steps) as display:
        for step in range(done, settings.steps):
            start = time.perf_counter()
            row: Row = {"step": step + 1, **training.step(step)}
            row["tokens_per_second"] = tokens / (time.perf_counter() - start)
            log.add(row)
            display.step(row)
            accelerator.log(row, step=step + 1)
            ends = step + 1 == settings.steps
            if held and (ends or (step + 1) % settings.judge_every == 0):
                found = _judge(training, held)
                judged.add({"step": step + 1, **found})
                accelerator.log(found, step=step + 1)
                display.say("  ".join(f"{key} {value:.4f}" for key, value in found.items()))
            if checkpoints is not None and (ends or (step + 1) % settings.checkpoint_every == 0):
                checkpoints.write(step + 1, partial(training.save, steps=step + 1))
    log.write_json()
    judged.write_json()


def _restore(training: Training, checkpoints: Checkpoints) -> int:
    """Take up the last checkpoint that can be read, if there are any, and return the number of steps done."""
    damaged: list[str] = []
    for step in reversed(checkpoints.steps()):
        try:
            done = training.restore(checkpoints.path(step))
        except GatelensError as error:
            damaged.append(str(error))
            continue
        if damaged:
            warnings.warn(f"{damaged[0]} The run goes on from step {done}.", GatelensWarning, stacklevel=2)
        return done
    if damaged:
        raise GatelensError(f"{damaged[0]} There is no other to go on from: write to another folder.")
    return 0


JUDGED = ("dense loss", "above dense", "kl", "open")


def _judge(training: Training, held: dict[str, Tensor]) -> Row:
    training.student.eval()
    found: dict[str, Judgement] = {n: judge(training.dense, training.student.hf, t) for n, t in held.items()}
    return {
        f"{name} {what}": value
        for name, j in found.items()
        for what, value in zip(JUDGED, (j.dense_loss, j.above_dense, j.kl, j.open_share), strict=True)
    }


def _last_weights(run: Path) -> dict[str, Tensor]:
    last = Checkpoints(run / "checkpoints").last()
    if last is None or not (last / WEIGHTS).exists():
        raise GatelensError(f"{run} has no checkpoint to start from: give the folder of a run that wrote one.")
    try:
        return load_file(last / WEIGHTS)
    except SafetensorError as error:
        raise GatelensError(f"{last} is damaged ({error}): start from another run, or copy this one again.") from error


def _read(model: Model, source: Source, settings: SparsifySettings) -> Tensor:
    """Files whole; of a data set as much whatever the number of steps, so that a longer run reads the same text."""
    most = settings.streamed if files(source) is None else None
    return sequences(model.tokenizer, source, settings.length, most)


def _held_out(model: Model, sources: Source | Sequence[Source], settings: SparsifySettings) -> dict[str, Tensor]:
    most = settings.judge_sequences
    return {name: sequences(model.tokenizer, source, settings.length, most) for name, source in named(sources).items()}


def _trained_on(sources: Sequence[Source], texts: Sequence[Tensor], settings: SparsifySettings) -> dict[str, Tensor]:
    read = dict(zip(sources, texts, strict=True))
    return {f"{name} (trained on)": read[source][: settings.judge_sequences] for name, source in named(sources).items()}


def _own_text(model: Model, read: Tensor, settings: SparsifySettings, folder: Path | None, show: bool) -> Tensor:
    if not settings.self_text:
        return read[:0]

    def progress(what: str, done: int, total: int) -> None:
        if show:
            print(f"{what}: {done} of {total} pieces", flush=True)

    journal = Journal(None if folder is None else folder / "own-text", progress)
    # Seed 0, whatever the seed of the run: this text is data.
    return write_text(model, read, settings.self_text, settings.length, 0, journal)


def _accelerator(model: Model, settings: SparsifySettings, folder: Path | None, track: Tracker | None) -> Any:
    if importlib.util.find_spec("accelerate") is None:
        raise GatelensError("training needs accelerate: run `pip install 'gatelens[sparsify]'`.")
    from accelerate import Accelerator

    if track is not None and importlib.util.find_spec(track) is None:
        raise GatelensError(f"logging to {track} needs {track}: run `pip install {track}`.")
    if track == "tensorboard" and folder is None:
        raise GatelensError("logging to tensorboard needs a folder: give out.")
    accelerator = Accelerator(
        cpu=model.device.type == "cpu",
        log_with=track,
        project_dir=None if folder is None else str(folder),
    )
    if track is not None:
        flat = {k: v if isinstance(v, int | float | str) else str(v) for k, v in settings.as_dict().items()}
        accelerator.init_trackers("sparsify", config=flat)
    return accelerator


@contextmanager
def _one_sentence(folder: Path | None) -> Iterator[None]:
    try:
        yield
    except (OSError, RuntimeError, SafetensorError) as error:
        if not is_about_files(error):
            raise
        reason = error.strerror if isinstance(error, OSError) and error.strerror else error
        raise GatelensError(
            f"cannot write to {folder} ({reason}); what was written before is whole: make room, or give another "
            "folder, and start the same command again."
        ) from error
