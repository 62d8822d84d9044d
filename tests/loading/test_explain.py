"""Errors of the hub and of transformers become one sentence: found by their type, against a hub on this machine."""

from __future__ import annotations

import errno
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
import torch
import transformers
from families import tiny
from huggingface_hub import constants
from refusals import refusal

from gatelens import GatelensError
from gatelens.loading import _pretrained
from gatelens.loading._explain import explained


class Answer(BaseHTTPRequestHandler):
    """A hub that has no files and says so as the real one does."""

    status, code = 404, ""

    def do_HEAD(self) -> None:
        self.send_response(self.status)
        self.send_header("X-Error-Code", self.code)
        self.send_header("Content-Length", "0")
        self.end_headers()

    do_GET = do_HEAD

    def log_message(self, *args: object) -> None:
        pass


def use_hub(monkeypatch: pytest.MonkeyPatch, address: str) -> None:
    monkeypatch.setattr(constants, "ENDPOINT", address)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", address + "/{repo_id}/resolve/{revision}/{filename}")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[Answer]]:
    """Its answer to every request can be set."""
    answer = type("AnyAnswer", (Answer,), {})
    server = ThreadingHTTPServer(("127.0.0.1", 0), answer)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    use_hub(monkeypatch, f"http://127.0.0.1:{server.server_port}")
    yield answer
    server.shutdown()
    server.server_close()


@pytest.fixture
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    """A hub that nobody answers for, whatever the network of this machine: its port is closed."""
    use_hub(monkeypatch, "http://127.0.0.1:9")


@pytest.mark.parametrize(
    ("status", "code", "message"),
    [
        (404, "RepoNotFound", "the hub has no public model of this name"),
        (401, "RepoNotFound", "if the model is private, log in with `hf auth login`"),
        (403, "GatedRepo", "restricts access to 'someone/some-model': ask for access at https://huggingface.co/some"),
        (404, "EntryNotFound", "is not a transformers model"),
        (400, "", "could not be downloaded from the hub"),
    ],
)
def test_answers_of_the_hub(hub: type[Answer], status: int, code: str, message: str) -> None:
    hub.status, hub.code = status, code
    assert message in refusal("someone/some-model")


def test_a_typing_error_in_a_built_in_name(hub: type[Answer]) -> None:
    hub.code = "RepoNotFound"
    assert "Did you mean 'smollm2'?" in refusal("smolm2")


def test_a_text_that_cannot_be_a_hub_id() -> None:
    assert "it cannot be a hub id such as openai-community/gpt2. Check the name" in refusal("not a hub id")


def test_no_network(no_network: None, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    def fail(*args: object, **options: object) -> None:
        raise AssertionError("transformers was asked, which repeats its requests for half a minute")

    monkeypatch.setattr(transformers.AutoConfig, "from_pretrained", fail)
    monkeypatch.setattr(transformers.PreTrainedConfig, "get_config_dict", fail)
    message = refusal("someone/some-model")
    assert "could not be downloaded from the hub" in message
    assert "or give the path of a downloaded folder" in message
    assert "Did you mean 'smollm2'?" in refusal("smolm2")
    assert capfd.readouterr() == ("", "")


def test_offline_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert "could not be downloaded from the hub" in refusal("someone/some-model")


def test_pickled_weights_on_the_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers has no error type for it; this is its text."""

    def give_nothing(*args: object, **options: object) -> None:
        raise OSError("x/y does not have model.safetensors and thus cannot be loaded with `safetensors`.")

    config = tiny("llama").hf.config
    monkeypatch.setattr(_pretrained, "_ask_hub", lambda source: None)
    monkeypatch.setattr(transformers.PreTrainedConfig, "get_config_dict", lambda *_: (config.to_dict(), {}))
    monkeypatch.setattr(transformers.AutoConfig, "from_pretrained", lambda *_, **__: config)
    monkeypatch.setattr(transformers.AutoModelForCausalLM, "from_pretrained", give_nothing)
    assert "has only pickled weights" in refusal("x/y")


def test_an_error_inside_another_is_found() -> None:
    """transformers wraps the errors of others in plain OSErrors."""
    full_disk = OSError(errno.ENOSPC, "No space left on device")
    with pytest.raises(GatelensError, match="no space is left on the device for x/y"), explained("x/y"):
        raise OSError("cannot download") from full_disk


def test_a_missing_package() -> None:
    with pytest.raises(GatelensError, match="needs a package that is not installed: no tiktoken"), explained("x/y"):
        raise ImportError("no tiktoken")


@pytest.mark.parametrize("error", [MemoryError, torch.OutOfMemoryError, KeyboardInterrupt])
def test_errors_that_are_not_about_the_model_pass(error: type[BaseException]) -> None:
    with pytest.raises(error), explained("x/y"):
        raise error
