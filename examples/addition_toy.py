"""Two-digit addition, learned from scratch by a dense model and then made sparse: what its attention looks like.

    python examples/addition_toy.py          about two minutes on one core; writes runs/addition-toy/attention.png

The model has four layers and reads eleven positions, `^ a b + c d = x y z $`. Above are the attention weights of the
dense model, below the share of sums for which the sparse one has an edge open. In Draye, Lei et al., arXiv 2512.05865,
the first layer attends to the digits added alone; this short training does not get there: its first layer stays open.
"""

import json
import random
from pathlib import Path

import torch
import torch.nn.functional as F
from matplotlib.figure import Figure
from tokenizers import Regex, Tokenizer, models, pre_tokenizers
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from gatelens import Model
from gatelens.anatomy import describe
from gatelens.gates.sparse import record_open
from gatelens.methods.sparsify import SparsifySettings, evaluate, sparsify

OUT = Path("runs/addition-toy")
SYMBOLS = "0123456789+=^$"
ANSWER = slice(7, 10)  # where the digits of the sum stand
LAYERS, HEADS = 4, 2


def tokenizer() -> PreTrainedTokenizerFast:
    """One token for each character; `$` ends a text."""
    rust = Tokenizer(models.WordLevel({symbol: i for i, symbol in enumerate(SYMBOLS)}, unk_token="^"))
    rust.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    return PreTrainedTokenizerFast(tokenizer_object=rust, eos_token="$", pad_token="^")


def sums() -> list[str]:
    """All 10,000, in random order."""
    texts = [f"^{a:02}+{b:02}={a + b:03}" for a in range(100) for b in range(100)]
    random.Random(0).shuffle(texts)
    return texts


def train_dense(tokens: Tensor, steps: int = 900, batch: int = 128) -> LlamaForCausalLM:
    """A small Llama that adds."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(SYMBOLS),
        hidden_size=64,
        intermediate_size=256,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        max_position_embeddings=16,
    )
    hf = LlamaForCausalLM(config)
    optimizer = torch.optim.AdamW(hf.parameters(), lr=3e-3, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, total_steps=steps, pct_start=0.1)
    for step in range(steps):
        rows = tokens[torch.randint(len(tokens), (batch,))]
        losses = F.cross_entropy(hf(input_ids=rows, use_cache=False).logits[:, :-1].mT, rows[:, 1:], reduction="none")
        answer = losses[:, ANSWER.start - 1 : ANSWER.stop - 1].mean()
        loss = answer + 0.2 * losses.mean()  # the rest too, or its arbitrary predictions would have to be kept later
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        if (step + 1) % 100 == 0:
            print(f"dense: step {step + 1}, loss of the answer {answer.item():.4f}", flush=True)
    return hf.eval().requires_grad_(False)


@torch.no_grad()
def accuracy(hf: LlamaForCausalLM, tokens: Tensor) -> float:
    """Share of sums of which all three digits are right."""
    found = hf(input_ids=tokens, use_cache=False).logits[:, ANSWER.start - 1 : ANSWER.stop - 1].argmax(-1)
    return float((found == tokens[:, ANSWER]).all(-1).float().mean())


@torch.no_grad()
def attention_maps(dense: LlamaForCausalLM, sparse: LlamaForCausalLM, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """(layer, head, query, key), mean over sums: attention weights of the dense model, open edges of the sparse one."""
    dense.set_attn_implementation("eager")
    weights = torch.stack(dense(input_ids=tokens, output_attentions=True).attentions).mean(1)
    with record_open(sparse, edges=True) as record:
        sparse(input_ids=tokens, use_cache=False)
    return weights, record.edges.float().mean(1)


def draw(dense: Tensor, sparse: Tensor, path: Path) -> None:
    """One row of maps for the dense and one for the sparse model; a column is a head."""
    figure = Figure(figsize=(2.2 * LAYERS * HEADS, 5.2), layout="constrained")
    axes = figure.subplots(2, LAYERS * HEADS, sharex=True, sharey=True)
    marks = list("^ab+cd=xyz$")
    for row, (maps, name) in enumerate([(dense, "dense: weight"), (sparse, "sparse: share open")]):
        for column, axis in enumerate(axes[row]):
            layer, head = divmod(column, HEADS)
            image = axis.imshow(maps[layer, head], cmap="Blues", vmin=0, vmax=1)
            axis.set_title(f"{name}\nL{layer}H{head}", fontsize=9)
            axis.set_xticks(range(11), marks, fontsize=7)
            axis.set_yticks(range(11), marks, fontsize=7)
    axes[0][0].set_ylabel("query")
    axes[1][0].set_ylabel("query")
    figure.colorbar(image, ax=axes, shrink=0.6)
    figure.savefig(path, dpi=110)


def main() -> None:
    OUT.mkdir(parents=True, exist_ok=True)
    texts = sums()
    (OUT / "sums.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in texts))
    words = tokenizer()
    tokens = torch.tensor(words([text + "$" for text in texts])["input_ids"])
    # 1. A dense model that adds
    hf = train_dense(tokens)
    model = Model("addition", hf, words, describe(hf))
    # 2. The same with few edges
    settings = SparsifySettings(
        steps=300,
        batch=64,
        length=11,
        weights="full",
        learning_rate=3e-4,
        bias_learning_rate=0.1,
        multiplier=2.0,
        target=0.03,
        cooldown=0.2,
    )
    sparse = sparsify(model, OUT / "sums.jsonl", settings)
    # 3. Both beside each other
    some = tokens[:500]
    found = evaluate(sparse, OUT / "sums.jsonl", model, length=11, most=500, batch=250)["sums"]
    print(f"right answers: dense {accuracy(hf, some):.1%}, sparse {accuracy(sparse.hf, some):.1%}")
    print(f"open edges of the sparse model: {found.open_share:.1%}, KL from the dense one {found.kl:.4f} nats")
    draw(*attention_maps(hf, sparse.hf, some), OUT / "attention.png")
    print(f"attention maps in {OUT / 'attention.png'}")


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
