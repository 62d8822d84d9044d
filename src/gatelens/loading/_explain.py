"""Turn the errors of transformers and of the hub about a model into one sentence that says what to do."""

from __future__ import annotations

import difflib
import errno
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from gatelens.errors import GatelensError, shortened
from gatelens.loading.builtin import BUILT_IN


@contextmanager
def explained(source: str, verb: str = "read") -> Iterator[None]:
    """Convert errors about a model into a `GatelensError`.

    Arguments:
        verb: what is done with the model, for the error.

    Errors about memory pass unchanged: they say nothing about the model.
    """
    try:
        yield
    except (GatelensError, MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # transformers raises errors of many types, some of them its own
        raise _explanation(source, error, verb) from error


def only_pickled(source: str) -> GatelensError:
    """The error about a model that has only pickled weights."""
    return GatelensError(
        f"{source} has only pickled weights (.bin), which can run code when they are read: convert them to "
        "safetensors, or pass allow_pickle=True (--allow-pickle) if you trust their author."
    )


def _explanation(source: str, error: Exception, verb: str) -> GatelensError:
    causes = list(_causes(error))
    text = shortened(" ".join(str(error).split()).rstrip(".")) or type(error).__name__
    if any(isinstance(cause, OSError) and cause.errno == errno.ENOSPC for cause in causes):
        return GatelensError(f"no space is left on the device for {source} ({text}): free some space and try again.")
    if any(isinstance(cause, ImportError) for cause in causes):
        return GatelensError(f"{source} needs a package that is not installed: {text}.")
    # transformers raises a plain OSError here, so that only the text tells it from other errors.
    if "cannot be loaded with `safetensors`" in text:
        return only_pickled(source)
    if verb != "read" or Path(source).exists():
        return GatelensError(f"cannot {verb} the model in {source} ({text}): copy or download it again.")
    return _hub_explanation(source, causes)


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    """An error and the errors that it was raised from: transformers wraps the hub's errors in plain OSErrors."""
    while error is not None:
        yield error
        error = error.__cause__


def _hub_explanation(source: str, causes: list[BaseException]) -> GatelensError:
    """The error about a source that is not on this machine and that the hub did not give."""
    from huggingface_hub import errors

    def among(*types: type[BaseException]) -> bool:
        return any(isinstance(cause, types) for cause in causes)

    close = difflib.get_close_matches(source, BUILT_IN, n=1)
    hint = f" Did you mean '{close[0]}'?" if close else ""
    here = f"'{source}' is not a built-in name ({', '.join(BUILT_IN)}) and not a file or folder here"
    if among(errors.HFValidationError):
        return GatelensError(f"{here}, and it cannot be a hub id such as openai-community/gpt2.{hint} Check the name.")
    if among(errors.GatedRepoError):
        return GatelensError(
            f"the hub restricts access to '{source}': ask for access at https://huggingface.co/{source}, then log in "
            "with `hf auth login`."
        )
    if among(errors.RepositoryNotFoundError):
        return GatelensError(
            f"{here}, and the hub has no public model of this name.{hint} Check the name; if the model is private, log "
            "in with `hf auth login`."
        )
    if among(errors.RemoteEntryNotFoundError):
        return GatelensError(
            f"'{source}' on the hub is not a transformers model, because a file is missing: check the name. If it has "
            "a checkpoint of nanoGPT, download this file and convert it with `gatelens convert FILE --out FOLDER`."
        )
    # Only connection errors are left. They have the types of the HTTP library that huggingface_hub uses, which differs
    # between its major versions.
    return GatelensError(
        f"{here}, and it could not be downloaded from the hub.{hint} Check the name and the network connection, or "
        "give the path of a downloaded folder."
    )
