"""Read a llama2.c checkpoint and its tokenizer as a Hugging Face Llama.

A checkpoint is a header of seven int32 numbers, followed by float32 weights in a fixed order. Its tokenizer is a list
of pieces with scores. The rotary embedding of llama2.c rotates pairs of neighbouring numbers, that of Hugging Face
pairs from the two halves of a head, so the rows of the query and key projections are reordered.
"""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gatelens.errors import GatelensError

_HEADER = struct.Struct("<7i")


def is_llama2c(path: Path) -> bool:
    """Whether a file begins with the header of a llama2.c checkpoint: seven sizes of a plausible magnitude."""
    try:
        with path.open("rb") as file:
            header = file.read(_HEADER.size)
    except OSError:
        return False
    if len(header) < _HEADER.size:
        return False
    *sizes, vocab, length = _HEADER.unpack(header)  # a negative vocabulary size says that the unembedding is separate
    return all(0 < size < 1 << 20 for size in (*sizes, abs(vocab), length))


def read_llama2c(path: Path) -> tuple[Any, Any]:
    """Read a model and its tokenizer.

    Arguments:
        path: the checkpoint. The tokenizer is the one file ``tok*.bin`` in the same folder.

    Returns:
        The Hugging Face model and tokenizer.
    """
    from transformers import LlamaConfig, LlamaForCausalLM

    data = path.read_bytes()
    dim, hidden, layers, heads, kv_heads, vocab, length = _HEADER.unpack_from(data)
    tied, vocab = vocab > 0, abs(vocab)  # a negative vocabulary size says that the unembedding has its own weight
    if dim % (2 * heads) or heads % kv_heads:
        raise GatelensError(
            f"{path} has a llama2.c header that does not fit together (width {dim}, {heads} heads, {kv_heads} KV "
            "heads): it is damaged; copy it again."
        )
    config = LlamaConfig(
        hidden_size=dim,
        intermediate_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        vocab_size=vocab,
        max_position_embeddings=length,
        rms_norm_eps=1e-5,
        tie_word_embeddings=tied,
        bos_token_id=1,
        eos_token_id=2,
    )
    count = (len(data) - _HEADER.size) // 4
    weights = _Weights(path, np.frombuffer(data, dtype="<f4", count=count, offset=_HEADER.size))
    kv_dim = kv_heads * (dim // heads)
    state: dict[str, Tensor] = {"model.embed_tokens.weight": weights.take(vocab, dim)}
    # The file has each kind of weight for all layers together, in this order. The last number says how many heads to
    # reorder for the rotary embedding.
    for name, shape, rotary_heads in (
        ("input_layernorm", (dim,), 0),
        ("self_attn.q_proj", (dim, dim), heads),
        ("self_attn.k_proj", (kv_dim, dim), kv_heads),
        ("self_attn.v_proj", (kv_dim, dim), 0),
        ("self_attn.o_proj", (dim, dim), 0),
        ("post_attention_layernorm", (dim,), 0),
        ("mlp.gate_proj", (hidden, dim), 0),
        ("mlp.down_proj", (dim, hidden), 0),
        ("mlp.up_proj", (hidden, dim), 0),
    ):
        for layer, weight in enumerate(weights.take(layers, *shape)):
            reordered = _pairs_to_halves(weight, rotary_heads) if rotary_heads else weight
            state[f"model.layers.{layer}.{name}.weight"] = reordered
    state["model.norm.weight"] = weights.take(dim)
    weights.take(length, dim // heads)  # tables of sines and cosines: Hugging Face computes them itself
    state["lm_head.weight"] = state["model.embed_tokens.weight"] if tied else weights.take(vocab, dim)
    hf = LlamaForCausalLM(config)
    hf.load_state_dict(state)
    return hf, _read_tokenizer(_tokenizer_path(path), vocab)


class _Weights:
    """The weights of a checkpoint, read in order."""

    def __init__(self, path: Path, numbers: Any) -> None:
        self.path, self.numbers, self.position = path, numbers, 0

    def take(self, *shape: int) -> Tensor:
        """The next tensor, of this shape."""
        end = self.position + int(np.prod(shape))
        if end > len(self.numbers):
            raise GatelensError(
                f"{self.path} is shorter than its llama2.c header says ({len(self.numbers)} of at least {end} "
                "numbers): it is truncated; copy it again."
            )
        tensor = torch.from_numpy(self.numbers[self.position : end].reshape(shape).copy())
        self.position = end
        return tensor


def _pairs_to_halves(weight: Tensor, heads: int) -> Tensor:
    """Reorder the rows of each head from (pair, 2) to (2, pair)."""
    return weight.unflatten(0, (heads, -1, 2)).transpose(1, 2).reshape(weight.shape).contiguous()


def _tokenizer_path(path: Path) -> Path:
    files = sorted(path.parent.glob("tok*.bin"))
    if len(files) != 1:
        raise GatelensError(
            f"{path} needs its llama2.c tokenizer, one file tok*.bin in the same folder; there are {len(files)}."
        )
    return files[0]


def _read_tokenizer(path: Path, vocab: int) -> Any:
    from tokenizers import Tokenizer, decoders, models, normalizers, processors
    from transformers import PreTrainedTokenizerFast

    # llama2.c merges the two neighbouring pieces whose joined piece has the highest score, the leftmost first. As a BPE
    # model this is a list of merges by falling score.
    pieces, scores = _read_pieces(path, vocab)
    ids = {piece: index for index, piece in enumerate(pieces)}
    merges = [
        (-scores[index], ids[piece[:cut]], (piece[:cut], piece[cut:]))
        for index, piece in enumerate(pieces)
        if index > 2 and not piece.startswith("<0x")
        for cut in range(1, len(piece))
        if piece[:cut] in ids and piece[cut:] in ids
    ]
    tokenizer = Tokenizer(
        models.BPE(ids, [pair for _, _, pair in sorted(merges)], unk_token="<unk>", byte_fallback=True)
    )
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A <s> $B", special_tokens=[("<s>", 1)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", unk_token="<unk>", pad_token="</s>"
    )


def _read_pieces(path: Path, vocab: int) -> tuple[list[str], list[float]]:
    """The pieces, with ``▁`` for a space as Hugging Face writes them, and their scores."""
    data, position = path.read_bytes(), 4  # the first number is the length of the longest piece
    pieces, scores = ["<unk>", "<s>", "</s>"], [0.0, 0.0, 0.0]
    try:
        for index in range(vocab):
            score, size = struct.unpack_from("<fi", data, position)
            if not 0 <= size <= len(data) - position - 8:
                raise struct.error("a piece is longer than the file")
            piece = data[position + 8 : position + 8 + size].decode()
            position += 8 + size
            if index > 2:  # the first three are special tokens, which Hugging Face writes differently
                pieces.append(piece.replace(" ", "▁"))
                scores.append(score)
    except (struct.error, UnicodeDecodeError) as error:
        raise GatelensError(
            f"{path} is not a llama2.c tokenizer of {vocab} pieces: it is truncated or has another format."
        ) from error
    return pieces, scores
