"""Train a small model on two-digit addition, make its attention sparse, and show what it attends to.

    python examples/addition_toy.py          about two minutes on one core; writes runs/addition-toy/attention.png

The model is a GPT-2 of four layers with one head each. It reads eleven positions, `^ a b + c d = x y z $`, and predicts
each digit of the sum at the position before it: x at `=`, y at x, z at y. This is the toy model of Draye, Lei et al.,
arXiv 2512.05865: in the sparse model the first layer attends to the digits to be added, and a later layer attends to
the carry. The figure shows the attention weights of the dense model, and below them the share of sums for which each
edge is open in the sparse model.

`addition_toy.json` is the result of a whole run: 4.6 % of the edges are open and all 10,000 sums are right (the model
was trained on all of them). In layer 0, x and y attend to a and c, and z attends to b and d. In later layers x and y
attend to d, where b was added: y always, and also in layer 1 for half of the sums with a carry and for no other; x for
28 % of the sums.
"""

import json
import math
import random
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from matplotlib.figure import Figure
from tokenizers import Regex, Tokenizer, models, pre_tokenizers
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

from gatelens import Model
from gatelens.model.anatomy import describe
from gatelens.sparse.recording import record_open
from gatelens.sparse.sparsify import SparsifySettings, sparsify

OUT = Path("runs/addition-toy")
SYMBOLS = "0123456789+=^$"
MARKS = "^ab+cd=xyz$"
ANSWER = slice(7, 10)  # the positions of the digits of the sum
PLACES = {"x": "ac", "y": "ac", "z": "bd"}  # the digits added for each digit of the sum; x is what the tens carry


@dataclass(frozen=True)
class Size:
    """The size of the model and of its training. A smaller base has fewer sums and is learned faster."""

    base: int = 10
    layers: int = 4
    width: int = 64
    dense_steps: int = 700
    sparse_steps: int = 1200
    seed: int = 0


def tokenizer() -> PreTrainedTokenizerFast:
    """One token for each character; `$` ends a text."""
    rust = Tokenizer(models.WordLevel({symbol: i for i, symbol in enumerate(SYMBOLS)}, unk_token="^"))
    rust.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    return PreTrainedTokenizerFast(tokenizer_object=rust, eos_token="$", pad_token="^")


def sums(base: int) -> list[str]:
    """All sums in random order; in base 10 there are 10,000."""
    texts = []
    for number in range(base**4):
        a, b, c, d = (number // base**i % base for i in (3, 2, 1, 0))
        total = base * (a + c) + b + d
        texts.append(f"^{a}{b}+{c}{d}={total // base**2}{total // base % base}{total % base}")
    random.Random(0).shuffle(texts)
    return texts


def train_dense(tokens: Tensor, size: Size, batch: int = 128) -> GPT2LMHeadModel:
    """Train a small GPT-2 to add."""
    torch.manual_seed(size.seed)
    config = GPT2Config(
        vocab_size=len(SYMBOLS),
        n_positions=len(MARKS),
        n_embd=size.width,
        n_layer=size.layers,
        n_head=1,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        bos_token_id=SYMBOLS.index("^"),
        eos_token_id=SYMBOLS.index("$"),
    )
    hf = GPT2LMHeadModel(config)
    optimizer = torch.optim.AdamW(hf.parameters(), lr=3e-3, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, total_steps=size.dense_steps, pct_start=0.1)
    for step in range(size.dense_steps):
        drawn = tokens[torch.randint(len(tokens), (batch,))]
        logits = hf(input_ids=drawn, use_cache=False).logits[:, :-1]
        losses = F.cross_entropy(logits.mT, drawn[:, 1:], reduction="none")
        answer = losses[:, ANSWER.start - 1 : ANSWER.stop - 1].mean()
        optimizer.zero_grad()
        (answer + 0.2 * losses.mean()).backward()
        optimizer.step()
        schedule.step()
        if (step + 1) % 100 == 0:
            print(f"dense: step {step + 1}, loss of the answer {answer.item():.4f}", flush=True)
    return hf.eval().requires_grad_(False)


def sparse_settings(size: Size) -> SparsifySettings:
    """The settings of sparsify. The target is the entropy of the four random digits of the question plus 0.003 nats.

    The multiplier stays low and changes slowly: a multiplier that reacts to the loss at once keeps the edges of the
    dense solution, and training does not find a sparser one.
    """
    return SparsifySettings(
        steps=size.sparse_steps,
        batch=64,
        length=len(MARKS),
        seed=size.seed,
        lengths=(),
        hold="loss",
        kl=0.0,
        relative=False,
        target=0.4 * math.log(size.base) + 0.003,
        weights="full",
        learning_rate=2e-3,
        clip=None,
        warmup=10,
        cooldown=0.4,
        penalty="total",
        temperature=1.0,
        open_mass=0.95,
        close_first=False,
        multiplier=40.0,
        multiplier_high=120.0,
        multiplier_rate=0.003,
        multiplier_damping=0.0,
    )


@torch.no_grad()
def accuracy(hf: GPT2LMHeadModel, tokens: Tensor) -> float:
    """The share of sums whose three digits are all right."""
    predicted = hf(input_ids=tokens, use_cache=False).logits[:, ANSWER.start - 1 : ANSWER.stop - 1].argmax(-1)
    return float((predicted == tokens[:, ANSWER]).all(-1).float().mean())


@torch.no_grad()
def attention_weights(dense: GPT2LMHeadModel, tokens: Tensor) -> Tensor:
    """Attention weights (layer, query, key), mean over sums."""
    dense.set_attn_implementation("eager")
    return torch.stack(dense(input_ids=tokens, output_attentions=True).attentions).mean((1, 2))


@torch.no_grad()
def open_edges(sparse: GPT2LMHeadModel, tokens: Tensor) -> Tensor:
    """Which edges are open: bool (layer, sum, query, key)."""
    with record_open(sparse, edges=True) as record:
        sparse(input_ids=tokens, use_cache=False)
    return record.edges[:, :, 0]


def open_share(opened: Tensor) -> float:
    """The share of visible pairs that are open, 0..1.

    Arguments:
        opened: (layer, query, key), the share of sums for which each edge is open.
    """
    return float(opened.mean(0).sum() / (len(MARKS) * (len(MARKS) + 1) / 2))


def same_place(opened: Tensor) -> float:
    """The share of the edges open in layer 0 that lead from a digit of the sum to the digits that are added for it."""
    right = sum(float(opened[0, MARKS.index(x) - 1, MARKS.index(key)]) for x, keys in PLACES.items() for key in keys)
    return right / (float(opened[0, ANSWER.start - 1 : ANSWER.stop - 1].sum()) or 1.0)


def looks_at(opened: Tensor, least: float = 0.02) -> list[str]:
    """For each layer and digit of the sum: the positions that it attends to, and for which share of sums."""
    lines = []
    for layer, shares in enumerate(opened):
        digits = []
        for digit in MARKS[ANSWER]:
            by_key = shares[MARKS.index(digit) - 1].tolist()
            keys = [f"{mark} {share:.0%}" for mark, share in zip(MARKS, by_key, strict=True) if share >= least]
            digits.append(f"{digit} <- {', '.join(keys) or 'nothing'}")
        lines.append(f"layer {layer}:  " + ";  ".join(digits))
    return lines


def follow_carry(edges: Tensor, tokens: Tensor, base: int, least: float = 0.5) -> list[str]:
    """The edges of x and y that depend on the carry from the ones, with the shares of sums for which they are open.

    Arguments:
        edges: (layer, sum, query, key), which edges are open.
        least: the smallest difference between the shares with and without a carry.
    """
    carry = tokens[:, MARKS.index("b")] + tokens[:, MARKS.index("d")] >= base  # a digit's token is the digit
    with_carry, without = edges[:, carry].float().mean(1), edges[:, ~carry].float().mean(1)
    lines = []
    for layer, query, key in ((with_carry - without).abs() > least).nonzero().tolist():
        if query + 1 in (MARKS.index("x"), MARKS.index("y")):
            shares = f"{with_carry[layer, query, key]:.0%} with, {without[layer, query, key]:.0%} without"
            lines.append(f"layer {layer} {MARKS[query + 1]} <- {MARKS[key]} {shares}")
    return lines


def draw(dense: Tensor, sparse: Tensor, path: Path) -> None:
    """Draw the maps (layer, query, key) of the dense model above those of the sparse model; a column is a layer."""
    figure = Figure(figsize=(2.6 * len(dense), 6), layout="constrained")
    axes = figure.subplots(2, len(dense), sharex=True, sharey=True)
    for panels, maps, name in ((axes[0], dense, "dense: weight"), (axes[1], sparse, "sparse: share open")):
        for layer, axis in enumerate(panels):
            image = axis.imshow(maps[layer].numpy(), cmap="Blues", vmin=0, vmax=1)
            axis.set_title(f"{name}\nlayer {layer}", fontsize=9)
            axis.set_xticks(range(len(MARKS)), list(MARKS), fontsize=8)
            axis.set_yticks(range(len(MARKS)), list(MARKS), fontsize=8)
        panels[0].set_ylabel("query")
    figure.colorbar(image, ax=axes, shrink=0.6)
    figure.savefig(path, dpi=110)


def make(size: Size, out: Path) -> tuple[GPT2LMHeadModel, GPT2LMHeadModel, Tensor]:
    """Train a dense model, make it sparse, and return both with the tokens (sum, position) of all sums."""
    out.mkdir(parents=True, exist_ok=True)
    texts = sums(size.base)
    path = out / "sums.jsonl"
    path.write_text("\n".join(json.dumps({"text": text}) for text in texts))
    words = tokenizer()
    tokens = torch.tensor(words([text + "$" for text in texts])["input_ids"])
    dense = train_dense(tokens, size)
    sparse = sparsify(Model("addition", dense, words, describe(dense)), path, sparse_settings(size))
    return dense, sparse.hf, tokens


def main(size: Size) -> None:
    dense, sparse, tokens = make(size, OUT)
    edges = open_edges(sparse, tokens)
    opened = edges.float().mean(1)
    right = accuracy(sparse, tokens)
    print(f"right answers, of all sums: dense {accuracy(dense, tokens):.2%}, sparse {right:.2%}")
    print(f"open edges of the sparse model: {open_share(opened):.2%}. The digits of the sum attend to:")
    print("\n".join(looks_at(opened)))
    print(f"edges open in layer 0 that lead to the digits that are added: {same_place(opened):.1%}")
    print("edges that depend on the carry: " + (";  ".join(follow_carry(edges, tokens, size.base)) or "none"))
    result = {
        "settings": sparse_settings(size).as_dict(),
        "accuracy": right,
        "opened": [[[round(share, 3) for share in by_key] for by_key in layer] for layer in opened.tolist()],
    }
    (OUT / "result.json").write_text(json.dumps(result))
    draw(attention_weights(dense, tokens[:500]), opened, OUT / "attention.png")
    print(f"attention maps in {OUT / 'attention.png'}, numbers in {OUT / 'result.json'}")


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(Size())
