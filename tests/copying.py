"""Models whose heads have known roles: two heads copy a word, one undoes this, and the others do nothing.

One model has weights set by hand, the other is trained.
"""

import random

import torch
from transformers import GPT2Config, GPT2LMHeadModel

from gatelens.model import Model
from gatelens.model.anatomy import describe
from gatelens.model.components import Head
from gatelens.tasks.base import Example, ResponseTask

WORDS, SEPARATOR, LENGTH = 11, 11, 8
WIDTH, N_HEADS, DIM = 64, 4, 16
COPIES, SPOILS = (Head(0, 0), Head(0, 1)), Head(0, 2)


@torch.no_grad()
def copying_model() -> Model:
    """Reads ``x y SEPARATOR`` and answers ``x y``. Head 0 copies x, head 1 copies y, and head 2 removes both again."""
    hf = _gpt2().requires_grad_(False)
    for name, weight in hf.named_parameters():
        weight.fill_(1.0 if "ln_" in name and name.endswith("weight") else 0.0)
    # Tokens and positions are unit vectors in separate dimensions, so that the norm scales all of them equally.
    hf.transformer.wte.weight[:, : WORDS + 1] = torch.eye(WORDS + 1)
    hf.transformer.wpe.weight[:, WORDS + 1 : WORDS + 1 + LENGTH] = torch.eye(LENGTH)
    for head, looks, strength in ((0, [(2, 0)], 0.35), (1, [(3, 1)], 0.35), (2, [(2, 0), (3, 1)], -0.35)):
        _copy_head(hf.transformer.h[0].attn, head, looks, strength)
    return Model("copying", hf, None, describe(hf))


def trained_model(steps: int = 250) -> Model:
    """A model that learns the same answers: head 0 learns to predict x and nothing of y, and head 1 the reverse.

    The outputs of all other heads and of the MLPs stay zero. Then head 2 is set to undo what head 0 learned.
    """
    torch.manual_seed(0)
    hf = _gpt2()
    idle = [hf.transformer.h[1].attn.c_proj.weight, *(block.mlp.c_proj.weight for block in hf.transformer.h)]
    for weight in idle:
        torch.nn.init.zeros_(weight).requires_grad_(False)
    out = hf.transformer.h[0].attn.c_proj.weight
    only = torch.zeros(2, WIDTH, 1)
    only[0, :DIM], only[1, DIM : 2 * DIM] = 1.0, 1.0  # the weights of one head each
    optimizer = torch.optim.Adam([weight for weight in hf.parameters() if weight.requires_grad], lr=3e-3)
    unknown = torch.full((WORDS + 1,), 1 / (WORDS + 1))
    for _ in range(steps):
        x, y = torch.rand(64, WORDS).topk(2).indices.unbind(1)
        tokens = torch.stack([x, y, torch.full_like(x, SEPARATOR), x], 1)
        loss = torch.zeros(())
        for weights, targets in ((only[0], (x, None)), (only[1], (None, y)), (only.sum(0), (x, y))):
            masked = {"transformer.h.0.attn.c_proj.weight": out * weights}
            logits = torch.func.functional_call(hf, masked, (tokens,)).logits[:, 2:4]
            for place, word in enumerate(targets):
                wanted = unknown.expand(64, -1) if word is None else word
                # Without smoothing the model becomes so certain of a word that a half-open gate is enough.
                smoothing = 0.0 if word is None else 0.5
                loss = loss + torch.nn.functional.cross_entropy(logits[:, place], wanted, label_smoothing=smoothing)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    hf.requires_grad_(False)
    qkv, first, spoils = hf.transformer.h[0].attn.c_attn, slice(0, DIM), slice(2 * DIM, 3 * DIM)
    for weight in (qkv.weight.view(WIDTH, 3, WIDTH), qkv.bias.view(1, 3, WIDTH)):
        weight[..., spoils] = weight[..., first]
    out[spoils], out[3 * DIM :] = -out[first], 0.0
    return Model("trained-copying", hf, None, describe(hf))


def _gpt2() -> GPT2LMHeadModel:
    config = GPT2Config(
        vocab_size=WORDS + 1,
        n_embd=WIDTH,
        n_head=N_HEADS,
        n_layer=2,
        n_positions=LENGTH,
        bos_token_id=0,
        eos_token_id=0,
    )
    return GPT2LMHeadModel(config).eval()


def _copy_head(attention: torch.nn.Module, head: int, looks: list[tuple[int, int]], strength: float) -> None:
    """Set a head that attends from each query position to one key position and writes that token times the strength."""
    qkv, out = attention.c_attn.weight, attention.c_proj.weight
    start = head * DIM
    for channel, (query, key) in enumerate(looks):
        qkv[WORDS + 1 + query, start + channel] = 1.5
        qkv[WORDS + 1 + key, WIDTH + start + channel] = 1.5
    # At all other positions it attends to the separator, which it does not write.
    attention.c_attn.bias[start + len(looks)] = 4.0
    qkv[WORDS + 1 + 2, WIDTH + start + len(looks)] = 1.5
    words = torch.arange(WORDS)
    qkv[words, 2 * WIDTH + start + words] = 1.0
    out[start + words, words] = strength


def copying_task(n: int = 24, seed: int = 0) -> ResponseTask:
    """Prompts ``x y SEPARATOR`` with the response ``x y``."""
    draw = random.Random(seed)
    pairs = [draw.sample(range(WORDS), 2) for _ in range(n)]
    return ResponseTask(
        "copying", seed, [Example(f"{x} {y} |", f" {x} {y}", (x, y, SEPARATOR), (x, y)) for x, y in pairs]
    )
