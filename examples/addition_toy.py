"""Two-digit addition, learned from scratch by a dense model and then made sparse: what its attention looks like.

    python examples/addition_toy.py          about two minutes on one core; writes runs/addition-toy/attention.png

The model, a GPT-2 of four layers with one head each, reads eleven positions, `^ a b + c d = x y z $`, and writes each
digit of the sum at the position before it: x at `=`, y at x, z at y. It is the toy of Draye, Lei et al., arXiv
2512.05865: in the sparse model the first layer looks at the digits to be added, and a later one at the carry. The
picture shows attention weights of the dense model above, and below for how many sums the sparse one has an edge open.

What it found, kept in addition_toy.json: 4.8 % of edges open and all 10,000 sums right (there are no others: it was
trained on all). In layer 0, x and y look at a and c, z at b and d. In layer 2 x and y look at d, where b was added,
for the sums without a carry from the ones and for no other. Nothing is open in layers 1 and 3.
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
from gatelens.sparse.in_model import record_open
from gatelens.sparse.sparsify import SparsifySettings, sparsify

OUT = Path("runs/addition-toy")
SYMBOLS = "0123456789+=^$"
MARKS = "^ab+cd=xyz$"
ANSWER = slice(7, 10)  # where the digits of the sum stand
PLACES = {"x": "ac", "y": "ac", "z": "bd"}  # the digits added for each digit of the sum; x is what the tens carry


@dataclass(frozen=True)
class Size:
    """How large the toy is. A smaller base has fewer sums and is learned sooner."""

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
    """All of them, 10,000 in base 10, in random order."""
    texts = []
    for number in range(base**4):
        a, b, c, d = (number // base**i % base for i in (3, 2, 1, 0))
        total = base * (a + c) + b + d
        texts.append(f"^{a}{b}+{c}{d}={total // base**2}{total // base % base}{total % base}")
    random.Random(0).shuffle(texts)
    return texts


def train_dense(tokens: Tensor, size: Size, batch: int = 128) -> GPT2LMHeadModel:
    """A small GPT-2 that adds."""
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
        rows = tokens[torch.randint(len(tokens), (batch,))]
        losses = F.cross_entropy(hf(input_ids=rows, use_cache=False).logits[:, :-1].mT, rows[:, 1:], reduction="none")
        answer = losses[:, ANSWER.start - 1 : ANSWER.stop - 1].mean()
        optimizer.zero_grad()
        (answer + 0.2 * losses.mean()).backward()
        optimizer.step()
        schedule.step()
        if (step + 1) % 100 == 0:
            print(f"dense: step {step + 1}, loss of the answer {answer.item():.4f}", flush=True)
    return hf.eval().requires_grad_(False)


def sparse_settings(size: Size) -> SparsifySettings:
    """The four digits of the question cannot be foretold; beyond their entropy a token may cost 0.003 nats.

    Two things matter. `most_open` brings gates that are far open, and get no gradient, within reach. And the multiplier
    stays low: one that answers the loss at once keeps the edges of the dense solution, and no sparser one is found.
    """
    return SparsifySettings(
        steps=size.sparse_steps,
        batch=64,
        length=len(MARKS),
        seed=size.seed,
        constraint="cross-entropy",
        relative=False,
        target=0.4 * math.log(size.base) + 0.003,
        weights="full",
        learning_rate=2e-3,
        cooldown=0.4,
        most_open=0.5,
        multiplier=40.0,
        multiplier_high=120.0,
        multiplier_rate=0.003,
        multiplier_damping=0.0,
    )


@torch.no_grad()
def accuracy(hf: GPT2LMHeadModel, tokens: Tensor) -> float:
    """Share of sums of which all three digits are right."""
    found = hf(input_ids=tokens, use_cache=False).logits[:, ANSWER.start - 1 : ANSWER.stop - 1].argmax(-1)
    return float((found == tokens[:, ANSWER]).all(-1).float().mean())


@torch.no_grad()
def attention_weights(dense: GPT2LMHeadModel, tokens: Tensor) -> Tensor:
    """(layer, query, key), mean over sums."""
    dense.set_attn_implementation("eager")
    return torch.stack(dense(input_ids=tokens, output_attentions=True).attentions).mean((1, 2))


@torch.no_grad()
def open_edges(sparse: GPT2LMHeadModel, tokens: Tensor) -> Tensor:
    """Boolean (layer, sum, query, key)."""
    with record_open(sparse, edges=True) as record:
        sparse(input_ids=tokens, use_cache=False)
    return record.edges[:, :, 0]


def open_share(opened: Tensor) -> float:
    """Share of the visible pairs that are open, 0..1. opened: (layer, query, key), share of sums."""
    return float(opened.mean(0).sum() / (len(MARKS) * (len(MARKS) + 1) / 2))


def same_place(opened: Tensor) -> float:
    """Of the edges open in layer 0 where the sum is written, the share that go to digits of its place; 0 of none."""
    right = sum(float(opened[0, MARKS.index(x) - 1, MARKS.index(key)]) for x, keys in PLACES.items() for key in keys)
    return right / (float(opened[0, ANSWER.start - 1 : ANSWER.stop - 1].sum()) or 1.0)


def looks_at(opened: Tensor, least: float = 0.02) -> list[str]:
    """For each layer and digit of the sum, the positions it attends to and for how many sums."""
    lines = []
    for layer, shares in enumerate(opened):
        found = []
        for digit in MARKS[ANSWER]:
            row = shares[MARKS.index(digit) - 1]
            keys = [f"{mark} {share:.0%}" for mark, share in zip(MARKS, row.tolist(), strict=True) if share >= least]
            found.append(f"{digit} <- {', '.join(keys) or 'nothing'}")
        lines.append(f"layer {layer}:  " + ";  ".join(found))
    return lines


def follow_carry(edges: Tensor, tokens: Tensor, base: int, least: float = 0.5) -> list[str]:
    """The edges where x and y are written that a carry from the ones opens or closes: for how many sums are they open?

    edges: (layer, sum, query, key); least: how far the share open with a carry is from the one without.
    """
    carry = tokens[:, MARKS.index("b")] + tokens[:, MARKS.index("d")] >= base  # a digit's token is the digit
    with_it, without = edges[:, carry].float().mean(1), edges[:, ~carry].float().mean(1)
    lines = []
    for layer, query, key in ((with_it - without).abs() > least).nonzero().tolist():
        if query + 1 in (MARKS.index("x"), MARKS.index("y")):
            shares = f"{with_it[layer, query, key]:.0%} with, {without[layer, query, key]:.0%} without"
            lines.append(f"layer {layer} {MARKS[query + 1]} <- {MARKS[key]} {shares}")
    return lines


def draw(dense: Tensor, sparse: Tensor, path: Path) -> None:
    """One row of maps (layer, query, key) for the dense and one for the sparse model; a column is a layer."""
    figure = Figure(figsize=(2.6 * len(dense), 6), layout="constrained")
    axes = figure.subplots(2, len(dense), sharex=True, sharey=True)
    for row, (maps, name) in enumerate([(dense, "dense: weight"), (sparse, "sparse: share open")]):
        for layer, axis in enumerate(axes[row]):
            image = axis.imshow(maps[layer].numpy(), cmap="Blues", vmin=0, vmax=1)
            axis.set_title(f"{name}\nlayer {layer}", fontsize=9)
            axis.set_xticks(range(len(MARKS)), list(MARKS), fontsize=8)
            axis.set_yticks(range(len(MARKS)), list(MARKS), fontsize=8)
        axes[row][0].set_ylabel("query")
    figure.colorbar(image, ax=axes, shrink=0.6)
    figure.savefig(path, dpi=110)


def make(size: Size, out: Path) -> tuple[GPT2LMHeadModel, GPT2LMHeadModel, Tensor]:
    """A dense model that adds, the same with few edges open, and the tokens (sum, position) of all sums."""
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
    print(f"open edges of the sparse model: {open_share(opened):.2%}. Where the sum's digits are written:")
    print("\n".join(looks_at(opened)))
    print(f"edges open there in layer 0 that go to digits of the same place: {same_place(opened):.1%}")
    print("edges that tell a carry: " + (";  ".join(follow_carry(edges, tokens, size.base)) or "none"))
    found = {
        "settings": sparse_settings(size).as_dict(),
        "accuracy": right,
        "opened": [[[round(share, 3) for share in row] for row in layer] for layer in opened.tolist()],
    }
    (OUT / "found.json").write_text(json.dumps(found))
    draw(attention_weights(dense, tokens[:500]), opened, OUT / "attention.png")
    print(f"attention maps in {OUT / 'attention.png'}, numbers in {OUT / 'found.json'}")


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(Size())
