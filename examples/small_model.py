"""A small language model, trained from scratch on stories and on the built-in tasks' own templates.

    python examples/small_model.py runs/small            about half an hour on one core

It is a Llama of 4 layers with 8 heads each and 3.7 million weights. It reads novels, passages that are repeated, and
prompts of four circuit tasks with their answers. It learns IOI (64 of 64 prompts), IOI Long (98 %) and Greater Than
(88 %), but not Docstring (20 %). Its prompts have other task seeds than those that circuits are found on.
`dose_response.py` makes it sparse to several degrees. Shorter training is not enough: a model of 1.1 million weights
had learned none of the tasks after 1,000 steps (IOI: 50 % of 64 prompts right).

A step that was made is not made again: a run that was stopped resumes from its last checkpoint.
"""

import random
import sys
from pathlib import Path

import torch
from sparse_smollm2_text import NOVELS
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

import gatelens
from gatelens.runtime.files import replace_file
from gatelens.sparse.mixture import Text, read_training_texts
from gatelens.sparse.sparsify._sequences import TrainingSequences
from gatelens.tasks.base import CircuitTask

TASKS = ("ioi", "greater-than", "docstring", "ioi-long")
PROMPTS, TASK_SEED = 6000, 1000  # of each task; circuits are found on prompts of seed 0 and the following
PASSAGES = 6000
VOCABULARY = 2048
STEPS, SEQUENCES, LENGTH, RATE = 3000, 32, 128, 2e-3
CHECKPOINT = 250


def write_texts(folder: Path) -> list[Text]:
    """Write the prompts of each task with their answers, passages that are repeated, and the novels."""
    folder.mkdir(parents=True, exist_ok=True)
    shares = {**dict.fromkeys(TASKS, 0.16), "twice": 0.16, "novels": 0.2}
    texts = [Text(name=name, sources=(str(folder / f"{name}.txt"),), share=share) for name, share in shares.items()]
    if all(Path(source).exists() for text in texts for source in text.sources):
        return texts
    smollm2 = gatelens.load("smollm2")  # its tokenizer has all words that tasks draw as single tokens
    draw = random.Random(0)
    for name in TASKS:
        task = gatelens.task(name, smollm2, n=PROMPTS, seed=TASK_SEED)
        assert isinstance(task, CircuitTask)
        prompts = [f"{pair.clean}{draw.choice(pair.answers)}." for pair in task.pairs]
        replace_file(folder / f"{name}.txt", "\n".join(prompts))
    novels = "\n".join(path.read_text(encoding="utf-8") for path in NOVELS)
    passages = []
    for _ in range(PASSAGES):
        start, size = draw.randrange(len(novels) - 200), draw.randrange(30, 150)
        passages += [novels[start : start + size].strip()] * 2
    replace_file(folder / "twice.txt", "\n\n".join(passages))
    replace_file(folder / "novels.txt", novels)
    return texts


def train_tokenizer(folder: Path, texts: list[Text]) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer in which the words of the tasks are single tokens."""
    if not (folder / "tokenizer.json").exists():
        bpe = Tokenizer(models.BPE())
        bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        bpe.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            vocab_size=VOCABULARY,
            special_tokens=["<|end|>"],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        )
        bpe.train([source for text in texts for source in text.sources if text.name != "novels"], trainer)
        fast = PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token="<|end|>", pad_token="<|end|>")
        fast.save_pretrained(folder)
    return PreTrainedTokenizerFast.from_pretrained(folder)


def make_model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=256,
        intermediate_size=704,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=8,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=0,
        pad_token_id=0,
    )
    return LlamaForCausalLM(config)


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
        tokens = sequences.batch([(step, number) for number in range(SEQUENCES)], LENGTH).tokens
        with torch.autocast("cpu", torch.bfloat16):
            loss = hf(input_ids=tokens, labels=tokens).loss
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
    print(main(Path(sys.argv[1])))
