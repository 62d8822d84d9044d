"""A small language model, trained from scratch on stories and on the built-in tasks' own templates.

    python examples/small_model.py runs/small            about half an hour on one core

It is a Llama of 4 layers with 8 heads each and 2.2 million weights. It reads prompts of four circuit tasks with their
answers, lists of words and passages that are repeated, and novels. `dose_response.py` makes it sparse to several
degrees. The prompts that circuits are found on have other task seeds. It learns IOI, Docstring and IOI Long, and hardly
learns Greater Than: `gatelens tasks ioi --model runs/small/dense` says how many prompts it answers right.

Most tokens of these texts are words that nobody can predict. Two kinds of tokens can be looked up in the context, and
weigh ten times as much in the loss: the answer of a prompt, which is the last token of its document, and a token that
followed the same token before. A model that has learned to repeat lists learns to look up answers soon after.

A step that was made is not made again: a run that was stopped resumes from its last checkpoint.
"""

import json
import random
import sys
from collections.abc import Iterable
from pathlib import Path

import torch
from sparse_smollm2_text import NOVELS
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

import gatelens
from gatelens.runtime.files import replace_file
from gatelens.sparse.mixture import Text, read_training_texts
from gatelens.sparse.sparsify._sequences import TrainingSequences
from gatelens.sparse.text import documents
from gatelens.tasks._words import NAMES
from gatelens.tasks.base import CircuitTask
from gatelens.tasks.builtin.docstring import ARGUMENTS, WORDS

TASKS = ("ioi", "greater-than", "docstring", "ioi-long")
# How often each text is read. A prompt of Docstring or IOI Long is three times as long as one of the other tasks.
SHARES = {
    "ioi": 0.26,
    "greater-than": 0.06,
    "docstring": 0.11,
    "ioi-long": 0.28,
    "lists": 0.19,
    "twice": 0.05,
    "novels": 0.05,
}
PROMPTS, TASK_SEED = 20_000, 1000  # of each task; circuits are found on prompts of seed 0 and the following
LISTS, PASSAGES, PASSAGE = 20_000, 6000, 400  # documents that repeat; characters in a passage of a novel
VOCABULARY, END = 2048, 0
STEPS, SEQUENCES, LENGTH, RATE = 2600, 32, 64, 2e-3
OTHER = 0.1  # weight of a token that cannot be looked up, where others have 1
CHECKPOINT = 250


def write_texts(folder: Path) -> list[Text]:
    """Write the prompts of each task with their answers, passages that are repeated, and the novels."""
    folder.mkdir(parents=True, exist_ok=True)
    texts = [Text(name=name, sources=(str(folder / f"{name}.jsonl"),), share=share) for name, share in SHARES.items()]
    if all(Path(source).exists() for text in texts for source in text.sources):
        return texts
    smollm2 = gatelens.load("smollm2")  # its tokenizer has all words that tasks draw as single tokens
    draw = random.Random(0)
    for name in TASKS:
        task = gatelens.task(name, smollm2, n=PROMPTS, seed=TASK_SEED)
        assert isinstance(task, CircuitTask)
        _write(folder / f"{name}.jsonl", (f"{pair.clean}{draw.choice(pair.answers)}" for pair in task.pairs))
    novels = [path.read_text(encoding="utf-8") for path in NOVELS]
    _write(folder / "lists.jsonl", (_list(draw) for _ in range(LISTS)))
    _write(folder / "twice.jsonl", (_repeated(draw, draw.choice(novels)) for _ in range(PASSAGES)))
    passages = (novel[start : start + PASSAGE] for novel in novels for start in range(0, len(novel), PASSAGE))
    _write(folder / "novels.jsonl", passages)
    return texts


def _list(draw: random.Random) -> str:
    words = [draw.choice((*ARGUMENTS, *WORDS, *NAMES)) for _ in range(draw.randrange(4, 24))]
    return " ".join(words + words)


def _repeated(draw: random.Random, novel: str) -> str:
    start, size = draw.randrange(len(novel) - 200), draw.randrange(30, 150)
    passage = novel[start : start + size].strip()
    return f"{passage}\n\n{passage}"


def _write(path: Path, texts: Iterable[str]) -> None:
    replace_file(path, "".join(json.dumps({"text": text}) + "\n" for text in texts))


def train_tokenizer(folder: Path, texts: list[Text]) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer in which nearly all words of the tasks are single tokens."""
    if not (folder / "tokenizer.json").exists():
        bpe = Tokenizer(models.BPE())
        bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        bpe.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            vocab_size=VOCABULARY,
            special_tokens=["<|end|>"],  # END
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        )
        some = (list(documents(source))[:6000] for text in texts for source in text.sources)
        bpe.train_from_iterator((document for of_text in some for document in of_text), trainer)
        fast = PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token="<|end|>", pad_token="<|end|>")
        fast.save_pretrained(folder)
    return PreTrainedTokenizerFast.from_pretrained(folder)


def make_model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=192,
        intermediate_size=528,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=8,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=END,
        pad_token_id=END,
    )
    return LlamaForCausalLM(config)


def weighted_loss(hf: LlamaForCausalLM, tokens: Tensor) -> Tensor:
    """The cross-entropy of the next token; the first token of a document does not count."""
    logits, before, labels = hf(input_ids=tokens).logits[:, :-1], tokens[:, :-1], tokens[:, 1:]
    is_answer = torch.zeros_like(labels, dtype=torch.bool)
    is_answer[:, :-1] = labels[:, 1:] == END
    same_pair = (before[:, :, None] == before[:, None]) & (labels[:, :, None] == labels[:, None])
    weights = torch.where(is_answer | same_pair.tril(-1).any(-1), 1.0, OTHER) * (before != END)
    losses = cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none").view_as(labels)
    return (losses * weights).sum() / weights.sum()


def train(folder: Path, tokenizer: PreTrainedTokenizerFast, texts: list[Text]) -> LlamaForCausalLM:
    """Train with AdamW. Checkpoints hold the weights and the optimizer; the schedule follows from the step."""
    sequences = TrainingSequences(read_training_texts(tokenizer, texts, LENGTH, 1, 0.0), seed=0)
    hf = make_model()
    optimizer = torch.optim.AdamW(hf.parameters(), lr=RATE, betas=(0.9, 0.99), weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, RATE, total_steps=STEPS, pct_start=0.1)
    checkpoint, done = folder / "training.pt", 0
    if checkpoint.exists():
        saved = torch.load(checkpoint, weights_only=True)
        hf.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        schedule.load_state_dict(saved["schedule"])
        done = saved["steps"]
    for step in range(done, STEPS):
        loss = weighted_loss(hf, sequences.batch([(step, number) for number in range(SEQUENCES)], LENGTH).tokens.long())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(hf.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if (step + 1) % 50 == 0:
            print(f"small model: step {step + 1} of {STEPS}, loss {loss.item():.3f}", flush=True)
        if (step + 1) % CHECKPOINT == 0:
            states = {"model": hf.state_dict(), "optimizer": optimizer.state_dict(), "schedule": schedule.state_dict()}
            torch.save({**states, "steps": step + 1}, checkpoint.with_suffix(".part"))
            checkpoint.with_suffix(".part").replace(checkpoint)
    return hf.eval()


def main(folder: Path) -> Path:
    """Train the model and return its folder, which `gatelens.load` opens."""
    texts = write_texts(folder / "text")
    model = folder / "dense"
    if not (model / "config.json").exists():
        tokenizer = train_tokenizer(folder / "tokenizer", texts)
        hf = train(folder, tokenizer, texts)
        tokenizer.save_pretrained(model)
        hf.save_pretrained(model)
    return model


if __name__ == "__main__":
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)
    print(main(Path(sys.argv[1])))
