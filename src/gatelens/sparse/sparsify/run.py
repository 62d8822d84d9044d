"""Sparse post-training: make a model's attention sparse at an unchanged loss.

Draye, Lei, Pan, Posner, Schölkopf: Sparse attention post-training for mechanistic interpretability, arXiv 2512.05865.

The main process writes the run folder:

    settings.json     what was asked for, and where the run started; only the same request resumes it
    own-text/         what the dense model wrote
    log.csv, .json    the numbers of every step
    judged.csv, .json the numbers on held-out text, every so many steps
    checkpoints/      the last two checkpoints
    README.md, config.json, model.safetensors, adapter.safetensors, ...: the sparse model
    result.json       the numbers on the texts of the model card; written last
"""

from __future__ import annotations

import copy
import importlib.util
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from gatelens.errors import GatelensError
from gatelens.model import Model
from gatelens.model.anatomy import describe
from gatelens.runtime.checkpoints import Checkpoints
from gatelens.runtime.files import writing
from gatelens.runtime.journal import Journal
from gatelens.runtime.precision import use_bfloat16
from gatelens.runtime.processes import Processes
from gatelens.sparse.adapters import is_adapter
from gatelens.sparse.calibration import calibrate, input_sizes
from gatelens.sparse.in_model import gate_biases
from gatelens.sparse.mixture import Text, TrainingText, read_training_texts, texts_of
from gatelens.sparse.sparsify._folder import SparsifyFolder
from gatelens.sparse.sparsify._own_text import write_text
from gatelens.sparse.sparsify._result import merged, write_card, write_result
from gatelens.sparse.sparsify._sequences import TrainingSequences
from gatelens.sparse.sparsify._sharding import is_sharded
from gatelens.sparse.sparsify._steps import make_steps
from gatelens.sparse.sparsify._student import Student, with_narrow_weights
from gatelens.sparse.sparsify._teacher_cache import TeacherCache
from gatelens.sparse.sparsify._training import WEIGHTS, Training
from gatelens.sparse.sparsify.judge import Judgement, check_length, judge, named
from gatelens.sparse.sparsify.settings import SparsifySettings
from gatelens.sparse.text import TextSource, keep_apart, sequences

TEACHER_TOP = 64  # tokens of each distribution in a teacher cache
CALIBRATION = 1024  # tokens of each length that probability gates are calibrated on
Tracker = Literal["tensorboard", "wandb"]


def sparsify(
    model: Model,
    text: TextSource | Text | Sequence[TextSource | Text],
    settings: SparsifySettings | None = None,
    out: str | Path | None = None,
    *,
    held_out: TextSource | Sequence[TextSource] = (),
    start: str | Path | None = None,
    teacher_cache: str | Path | None = None,
    track: Tracker | None = None,
    show: bool = False,
) -> Model:
    """Post-train a copy of a model so that few of its attention edges stay open, and return it.

    With LoRA, the returned model shares the memory of the weights that have no adapter with the given one, so that a
    large model is in memory once: do not change these weights in place.

    Cost of a step: one forward pass of the dense model, unless it is cached, and one forward and backward pass of the
    sparse model. Started by `accelerate launch`, every process reads its own `batch` sequences.

    Arguments:
        text: what to train on, one or several of: a text file, a folder, a JSON-lines file, a hub data set; all are
            mixed. Files are read whole, of each data set the first `streamed` sequences.
        out: the run folder, described above. The same call resumes a run that was stopped, with the same losses;
            without a folder nothing is kept.
        held_out: text to evaluate on every `judge_every` steps, with gates as in use; never trained on. Without it, the
            model card says how the model does on the beginning of each text that it was trained on.
        start: folder of an earlier run of the same model, whose last checkpoint gives the weights and gates to begin
            with, or of an adapter. A run that is resumed has its own.
        teacher_cache: a folder that holds the most probable next tokens of the dense model for all sequences that any
            run has read with it, 8 bytes for each of them (`teacher_top`; 64 by default). A step whose sequences are
            there needs no dense forward.
        track: also log to TensorBoard or W&B, through accelerate.
        show: print progress.

    Example:
        sparse = sparsify(gatelens.load("smollm2"), "text/", SparsifySettings(steps=2000), out="runs/sparse")
    """
    settings = settings or SparsifySettings()
    if teacher_cache is not None and settings.teacher_top is None:
        settings = settings.replace(teacher_top=TEACHER_TOP)
    folder = None if out is None else Path(out)
    accelerator = _accelerator(model, settings, folder, track)
    main = bool(accelerator.is_main_process)
    first_run = None if start is None else Path(start)
    with nullcontext() if folder is None else writing(folder):
        # 1. Everything that can be wrong with the request
        texts = _read_texts(model, text, held_out, settings)
        sharded = is_sharded(accelerator)
        cache = _teacher_cache(model, settings, teacher_cache, sharded)
        narrow = settings.weights == "lora" and not sharded and use_bfloat16(model.device, settings.bf16)
        base = with_narrow_weights(model) if narrow else model
        student = Student(base, settings, share=not sharded)
        resumes = bool(folder and Checkpoints(folder / "checkpoints").steps())
        if first_run is not None and not resumes:
            _begin_with(student, first_run)
        processes = Processes(model.device) if folder else None
        with SparsifyFolder(folder, model, settings, texts.training, first_run, processes) as run:
            # 2. Training, from the last checkpoint on
            with accelerator.main_process_first() if folder else nullcontext():
                own = _own_text(model, texts.training, settings, run, show and main)
            numbered = TrainingSequences([*texts.training, *own], settings.seed)
            sizes = None if resumes else _calibrate(model, student, numbered, settings, first_run)
            dense = copy.deepcopy(base.hf) if sharded else base.hf.to(accelerator.device)  # sharding is in place
            training = Training(student, dense, numbered, settings, accelerator, sizes, cache)
            make_steps(training, texts.held_out, folder, show and main, run.check_claim)
            for tracker in accelerator.trackers:
                tracker.finish()

            # 3. The result
            sparse, trained = _trained_model(model, training)
            judged: dict[str, Judgement] = {}
            if folder is not None and main:
                judged = {name: judge(model.hf, sparse, tokens) for name, tokens in texts.on_card.items()}
                card = write_card(model, texts.sources, settings, settings.steps, judged, first_run)
                write_result(sparse, trained, model, folder, settings, card)
            numbers = {name: judgement.as_dict() for name, judgement in judged.items()}
            run.finish({"kind": "sparsify", "steps": settings.steps, "texts": numbers})
    name, source = (f"sparse-{model.name}", "") if folder is None else (folder.resolve().name, str(folder.resolve()))
    return Model(name, sparse, model.tokenizer, describe(sparse), source)


@dataclass(frozen=True, eq=False)
class _Texts:
    """All text of a run as tokens."""

    sources: Sequence[TextSource]
    training: list[TrainingText]
    held_out: dict[str, Tensor]  # (sequence, token) of each held-out text
    on_card: dict[str, Tensor]  # what the model card shows: held-out text, or the beginning of the training text


def _read_texts(
    model: Model,
    text: TextSource | Text | Sequence[TextSource | Text],
    held_out: TextSource | Sequence[TextSource],
    settings: SparsifySettings,
) -> _Texts:
    check_length(model, settings.length)
    texts = texts_of(text)
    sources = [source for each in texts for source in each.sources]
    keep_apart(sources, named(held_out).values())
    training = read_training_texts(model.tokenizer, texts, settings.length, settings.streamed, settings.kl)

    length, count = settings.length, settings.judge_sequences
    held = {name: sequences(model.tokenizer, source, length, count) for name, source in named(held_out).items()}
    trained_on = {f"{each.name} (trained on)": each.beginning(length, count) for each in training}
    return _Texts(sources, training, held, held or trained_on)


def _begin_with(student: Student, start: Path) -> None:
    """Give a student the weights and gates of an adapter, or of the last checkpoint of a run."""
    if is_adapter(start) and not (start / "checkpoints").exists():
        student.load_adapter(start)
    else:
        student.load_state(_last_weights(start))


def _last_weights(run: Path) -> dict[str, Tensor]:
    last = Checkpoints(run / "checkpoints").last()
    if last is None or not (last / WEIGHTS).exists():
        raise GatelensError(f"{run} has no checkpoint to start from: give the folder of a run that wrote one.")
    try:
        return load_file(last / WEIGHTS)
    except SafetensorError as error:
        raise GatelensError(f"{last} is damaged ({error}): start from another run, or copy this one again.") from error


def calibration_batches(sequences: TrainingSequences, settings: SparsifySettings) -> list[Tensor]:
    """Sequences of all lengths that are trained on, for calibration: (sequence, token) for each length."""
    counts = {length: max(2, CALIBRATION // length) for length in sorted(set(settings.used_lengths))}
    # No step reads the sequences with these numbers: those have a number and a piece.
    return [sequences.batch([(i,) for i in range(count)], length).tokens for length, count in counts.items()]


def _calibrate(
    model: Model, student: Student, sequences: TrainingSequences, settings: SparsifySettings, start: Path | None
) -> list[float] | None:
    """Choose the gates of a student that does not begin with others, and return `Training.input_sizes`.

    Both are for probability gates only: without offsets nothing is done, and None is returned.
    """
    if not student.offsets():
        return None
    batches = calibration_batches(sequences, settings)
    if student.is_new and start is None:
        student.set_gates(calibrate(model.hf, batches, settings.open_mass, settings.close_first))
    sizes: list[float] = input_sizes(model.hf, batches).tolist()
    return sizes


def _teacher_cache(
    model: Model, settings: SparsifySettings, folder: str | Path | None, sharded: bool
) -> TeacherCache | None:
    if folder is None:
        return None
    if sharded:  # a forward pass needs all processes, and each of them may find its sequences in the cache
        raise GatelensError("a teacher cache needs the whole dense model in each process: leave it out with FSDP.")
    assert settings.teacher_top is not None
    about = {"model": model.fingerprint, "bf16": use_bfloat16(model.device, settings.bf16)}
    return TeacherCache(Path(folder), about, min(settings.teacher_top, model.hf.config.vocab_size))


def _own_text(
    model: Model, texts: Sequence[TrainingText], settings: SparsifySettings, run: SparsifyFolder, show: bool
) -> list[TrainingText]:
    """What the model writes itself, as one more text to train on."""
    if not settings.self_text or not settings.self_share:
        return []

    def progress(title: str, done: int, total: int) -> None:
        if show:
            print(f"{title}: {done} of {total} pieces", flush=True)

    journal = Journal(None if run.path is None else run.path / "own-text", progress, check=run.check_claim)
    tokens = torch.cat([text.tokens for text in texts]).long()
    # The seed is 0 for any seed of the run, because this text is data.
    written = write_text(model, tokens, settings.self_text, settings.length, 0, journal)
    share = settings.self_share / max(1e-9, 1 - settings.self_share) * sum(text.share for text in texts)
    starts = torch.arange(len(written)) * settings.length
    return [TrainingText("own", written.flatten().to(torch.int32), starts, share, kl=1.0)]


def _trained_model(model: Model, training: Training) -> tuple[Any, dict[str, Tensor]]:
    """The trained Hugging Face model, merged, and its trained parameters by name."""
    settings = training.settings
    student = Student(model, settings, share=True)
    student.load_state(training.weights(settings.steps))
    if not settings.learn_bias:
        student.set_bias(gate_biases(training.student.hf))
    trained = student.state()
    return merged(student), trained


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
