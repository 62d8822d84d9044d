"""llama2.c checkpoints, against a plain numpy forward and a plain tokenizer that follow llama2.c's run.c."""

from __future__ import annotations

import shutil
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from llama2c_files import write_llama2c

import gatelens
from gatelens import GatelensError, Model
from gatelens.loading._llama2c import is_llama2c, read_llama2c

SENTENCES = [
    "Once upon a time, there was a little girl named Lily.",
    "",
    " ",
    "two  spaces,   three",
    " leading and trailing ",
    'He said: "No!"\nThen he left.\t',
    "naïve café, 日本語, 🙂",
    "zzzz hahahaha ...... aaaaaaa",
    "the the the",
]


def numpy_logits(file: Path, tokens: list[int]) -> Any:
    """The forward of run.c, one position after another, with neighbouring numbers turned by the rotary embedding."""
    data = file.read_bytes()
    dim, hidden, n_layers, n_heads, n_kv, vocab, length = struct.unpack_from("<7i", data)
    assert vocab > 0  # the unembedding is the embedding
    size = dim // n_heads
    numbers = np.frombuffer(data, "<f4", offset=28).astype(np.float64)
    at = 0

    def take(*shape: int) -> Any:
        nonlocal at
        part = numbers[at : at + int(np.prod(shape))].reshape(shape)
        at += part.size
        return part

    embedding = take(vocab, dim)
    rms_att = take(n_layers, dim)
    wq, wk = take(n_layers, dim, dim), take(n_layers, n_kv * size, dim)
    wv, wo = take(n_layers, n_kv * size, dim), take(n_layers, dim, dim)
    rms_ffn = take(n_layers, dim)
    w1, w2, w3 = take(n_layers, hidden, dim), take(n_layers, dim, hidden), take(n_layers, hidden, dim)
    rms_final = take(dim)
    take(length, size)
    assert at == len(numbers)

    def rms(x: Any, weight: Any) -> Any:
        return weight * x / np.sqrt((x * x).mean() + 1e-5)

    def rotate(x: Any, position: int) -> Any:
        angles = position * 10000.0 ** (-np.arange(0, size, 2) / size)
        turned = x.reshape(-1, size // 2, 2)[..., 0] + 1j * x.reshape(-1, size // 2, 2)[..., 1]
        turned = turned * np.exp(1j * angles)
        return np.stack([turned.real, turned.imag], -1).reshape(-1, size)

    keys: list[list[Any]] = [[] for _ in range(n_layers)]
    values: list[list[Any]] = [[] for _ in range(n_layers)]
    logits = []
    for position, token in enumerate(tokens):
        x = embedding[token].copy()
        for layer in range(n_layers):
            normed = rms(x, rms_att[layer])
            q = rotate(wq[layer] @ normed, position)
            keys[layer].append(rotate(wk[layer] @ normed, position))
            values[layer].append((wv[layer] @ normed).reshape(-1, size))
            out = []
            for head in range(n_heads):
                shared = head // (n_heads // n_kv)
                scores = np.array([q[head] @ key[shared] for key in keys[layer]]) / np.sqrt(size)
                weights = np.exp(scores - scores.max())
                weights /= weights.sum()
                out.append(sum(w * value[shared] for w, value in zip(weights, values[layer], strict=True)))
            x = x + wo[layer] @ np.concatenate(out)
            normed = rms(x, rms_ffn[layer])
            gate = w1[layer] @ normed
            x = x + w2[layer] @ (gate / (1 + np.exp(-gate)) * (w3[layer] @ normed))
        logits.append(embedding @ rms(x, rms_final))
    return np.stack(logits)


class PlainTokenizer:
    """Greedy merges by the highest score, the leftmost first, as run.c encodes."""

    def __init__(self, file: Path, vocab: int) -> None:
        data, at = file.read_bytes(), 4
        self.pieces: list[bytes] = []
        self.scores: list[float] = []
        for _ in range(vocab):
            score, size = struct.unpack_from("<fi", data, at)
            self.pieces.append(data[at + 8 : at + 8 + size])
            self.scores.append(score)
            at += 8 + size
        self.ids = {piece: index for index, piece in reversed(list(enumerate(self.pieces)))}

    def encode(self, text: str) -> list[int]:
        tokens = []
        for character in " " + text if text else "":
            raw = character.encode()
            tokens += [self.ids[raw]] if raw in self.ids else [byte + 3 for byte in raw]
        while True:
            pairs = [
                (-self.scores[self.ids[merged]], place, self.ids[merged])
                for place in range(len(tokens) - 1)
                if (merged := self.pieces[tokens[place]] + self.pieces[tokens[place + 1]]) in self.ids
            ]
            if not pairs:
                return [1, *tokens]
            _, place, token = min(pairs)
            tokens[place : place + 2] = [token]


@pytest.fixture(scope="module", params=["made", "stories"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint that is made here and, where it is on the machine, a real one."""
    if request.param == "stories":
        return Path(request.getfixturevalue("stories_folder"))
    made = tmp_path_factory.mktemp("llama2c") / "made"
    made.mkdir()
    write_llama2c(made, SENTENCES)
    return made


@pytest.fixture(scope="module")
def model(folder: Path) -> Model:
    return gatelens.load(folder)


def checkpoint(folder: Path) -> Path:
    (file,) = (path for path in folder.glob("*.bin") if not path.name.startswith("tok"))
    return file


def pieces(folder: Path) -> Path:
    return next(folder.glob("tok*.bin"))


@pytest.fixture(scope="module")
def plain_tokenizer(folder: Path) -> PlainTokenizer:
    vocab = struct.unpack_from("<7i", checkpoint(folder).read_bytes())[5]
    return PlainTokenizer(pieces(folder), vocab)


def test_logits_are_llama2cs(model: Model, folder: Path) -> None:
    tokens = model.tokenizer(SENTENCES[0]).input_ids
    with torch.no_grad():
        logits = model.hf(torch.tensor([tokens])).logits[0].numpy()
    expected = numpy_logits(checkpoint(folder), tokens)
    np.testing.assert_allclose(logits, expected, rtol=1e-4, atol=1e-4)


def test_a_saved_model_comes_back_the_same(model: Model, tmp_path: Path) -> None:
    model.hf.save_pretrained(tmp_path / "mine")
    model.tokenizer.save_pretrained(tmp_path / "mine")
    loaded = gatelens.load(tmp_path / "mine")
    assert loaded.fingerprint == model.fingerprint
    text = "Once upon a time,  naïve."
    assert loaded.tokenizer(text).input_ids == model.tokenizer(text).input_ids


def test_it_tells_a_story(stories: Model) -> None:
    tokens = stories.tokenizer("Once upon a time, there was a little", return_tensors="pt").input_ids
    out = stories.hf.generate(tokens, max_new_tokens=6, do_sample=False)
    assert (
        stories.tokenizer.decode(out[0], skip_special_tokens=True)
        == "Once upon a time, there was a little girl named Lily."
    )


@pytest.mark.parametrize("text", SENTENCES)
def test_tokens_are_llama2cs(model: Model, plain_tokenizer: PlainTokenizer, text: str) -> None:
    assert model.tokenizer(text).input_ids == plain_tokenizer.encode(text)


@settings(max_examples=200, deadline=None)
@given(text=st.text(st.sampled_from("aeot hnsl.,!\n'ABTé日"), max_size=30))
def test_tokens_of_any_text_are_llama2cs(model: Model, plain_tokenizer: PlainTokenizer, text: str) -> None:
    assert model.tokenizer(text).input_ids == plain_tokenizer.encode(text)


@pytest.mark.parametrize("text", SENTENCES)
def test_decoding_gives_the_text_back(model: Model, text: str) -> None:
    assert model.tokenizer.decode(model.tokenizer(text).input_ids, skip_special_tokens=True) == text


def test_an_untied_checkpoint_has_its_own_unembedding(folder: Path, tmp_path: Path) -> None:
    """A negative vocabulary size says so; the matrix stands at the end."""
    data = checkpoint(folder).read_bytes()
    head = list(struct.unpack_from("<7i", data))
    width, vocab = head[0], head[5]
    head[5] = -vocab
    own = np.random.default_rng(0).normal(size=(vocab, width)).astype("<f4")
    (tmp_path / "mine.bin").write_bytes(struct.pack("<7i", *head) + data[28:] + own.tobytes())
    shutil.copy(pieces(folder), tmp_path)
    hf, _ = read_llama2c(tmp_path / "mine.bin")
    assert np.array_equal(hf.lm_head.weight.detach().numpy(), own)
    assert not np.array_equal(hf.model.embed_tokens.weight.detach().numpy(), own)


def test_the_file_itself_can_be_loaded_in_another_dtype(folder: Path) -> None:
    loaded = gatelens.load(checkpoint(folder), dtype=torch.bfloat16)
    assert loaded.dtype == torch.bfloat16
    assert loaded.name == checkpoint(folder).name


def test_a_device_map_is_refused(folder: Path) -> None:
    for source in (folder, checkpoint(folder)):
        with pytest.raises(GatelensError, match="is loaded to one device: give no device_map"):
            gatelens.load(source, device_map="auto")


@pytest.mark.parametrize("size", [30, 1000, -4])
def test_a_truncated_checkpoint_is_refused(folder: Path, tmp_path: Path, size: int) -> None:
    (tmp_path / "cut.bin").write_bytes(checkpoint(folder).read_bytes()[:size])
    shutil.copy(pieces(folder), tmp_path)
    with pytest.raises(GatelensError, match=r"cut\.bin .*truncated; copy it again"):
        gatelens.load(tmp_path)


def test_a_missing_tokenizer_is_asked_for(folder: Path, tmp_path: Path) -> None:
    shutil.copy(checkpoint(folder), tmp_path)
    with pytest.raises(GatelensError, match=r"needs its llama2\.c tokenizer, one file tok\*\.bin in the same folder"):
        gatelens.load(tmp_path)


def test_a_truncated_tokenizer_is_refused(folder: Path, tmp_path: Path) -> None:
    shutil.copy(checkpoint(folder), tmp_path)
    (tmp_path / "tok.bin").write_bytes(pieces(folder).read_bytes()[:1000])
    with pytest.raises(GatelensError, match=r"tok\.bin is not a llama2\.c tokenizer of \d+ pieces"):
        gatelens.load(tmp_path)


def test_other_files_are_not_taken_for_checkpoints(folder: Path, tmp_path: Path) -> None:
    assert is_llama2c(checkpoint(folder))
    for name, data in {
        "empty": b"",
        "short": b"abc",
        "text": b"A text of some length." * 9,
        "zeros": bytes(99),
    }.items():
        (tmp_path / name).write_bytes(data)
        assert not is_llama2c(tmp_path / name)
    torch.save({"a": torch.zeros(9)}, tmp_path / "pickle.bin")
    assert not is_llama2c(tmp_path / "pickle.bin")
    assert not is_llama2c(tmp_path / "nowhere")
