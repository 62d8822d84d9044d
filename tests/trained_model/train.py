"""Train the small Llama of this folder, which the tests use wherever a model must have a behaviour.

    python tests/trained_model/train.py        # a few minutes on one core

It has learned three tasks of gatelens, each from prompts of other seeds than the tests draw: to copy what followed a
token before (induction), to name the other person (ioi), and to choose a pronoun (gender-pronoun). It has also read
sentences about the same people, places and things. All texts are drawn here from the project's own templates.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from gatelens.model.first_token import first_tokens
from gatelens.tasks import task
from gatelens.tasks._words import MEN, WOMEN
from gatelens.tasks.builtin import gender_pronoun, ioi
from gatelens.tasks.tokens import encode, word_tokens

FOLDER = Path(__file__).parent
NAMES = WOMEN[:12] + MEN[:12]  # all other names have several tokens
SENTENCES = (
    "{a} went to the {place} and bought a {object}.",
    "{a} gave the {object} to {b}, and {b} was happy.",
    "At the {place} there was a {person}, who had lost a {object}.",
    "{b} is a {person}. {b} works at the {place} with {a}.",
    "Then {a} looked for the {object}, but it was not at the {place}.",
    "The {person} asked {a} for a {object}.",
)
STEPS, LEARNING_RATE, LENGTH = 3000, 4e-3, 32
ROWS = {"induction": 24, "ioi": 10, "gender-pronoun": 2, "sentences": 4}  # of a batch
FIRST_SEED = 1000  # of the prompts to learn; the tests use small ones


def sentences(random: Random) -> str:
    """A few sentences about two people, a place and a thing."""
    a, b = random.sample(NAMES, 2)
    words = {
        "place": random.choice(ioi.PLACES),
        "object": random.choice(ioi.OBJECTS),
        "person": random.choice(gender_pronoun.PERSONS),
    }
    return " ".join(text.format(a=a, b=b, **words) for text in random.sample(SENTENCES, 4))


def make_tokenizer() -> Any:
    """A byte-level BPE in which every word of the texts is one token. A text begins with ``<s>``."""
    random = Random(0)
    templates = [
        template.format(A=a, B=b, S=a, name=a, place=place, object=thing, person=person)
        for template in (*ioi.TEMPLATES, *gender_pronoun.TEMPLATES)
        for a, b, place, thing, person in zip(
            NAMES * 2, NAMES[1:] * 2, ioi.PLACES * 6, ioi.OBJECTS * 6, gender_pronoun.PERSONS * 4, strict=False
        )
    ]
    texts = [f"{text} she he" for text in templates] + [sentences(random) for _ in range(500)]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=1024, special_tokens=["<pad>", "<s>", "</s>"], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<s>", eos_token="</s>", model_max_length=512
    )


def make_model(tokenizer: Any) -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=64, intermediate_size=64, num_hidden_layers=4, num_attention_heads=8,
        num_key_value_heads=4, max_position_embeddings=512, tie_word_embeddings=True, pad_token_id=0, bos_token_id=1,
        eos_token_id=2,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def answered(name: str, tokenizer: Any, seed: int, n: int = 4096) -> Iterator[tuple[list[int], int]]:
    """The prompts of a circuit task with their answers, and the position from which tokens are learned: without end."""
    while True:
        made = task(name, SimpleNamespace(name="", tokenizer=tokenizer), n=n, seed=seed)
        for bucket in made.buckets:
            for row, prompt in zip(bucket.which.tolist(), bucket.clean.tolist(), strict=True):
                yield [*prompt, int(made.answer_ids[row, 0])], 1
        seed += 1


def repeated(tokenizer: Any, random: Random) -> Iterator[tuple[list[int], int]]:
    """Blocks of random words, twice; only the second block can be predicted."""
    pool, first = word_tokens(tokenizer, spaced=True), first_tokens(tokenizer)
    while True:
        length = random.randint(3, 12)
        block = random.sample(pool, length)
        yield first + block + block, len(first) + length + 1


def running_text(tokenizer: Any, random: Random) -> Iterator[tuple[list[int], int]]:
    while True:
        yield from ((ids, 1) for ids in encode(tokenizer, [sentences(random) for _ in range(256)]))


def batches(tokenizer: Any) -> Iterator[tuple[Tensor, Tensor]]:
    """Tokens and labels (row, position); a label of -100 is not learned."""
    sources = {
        "induction": repeated(tokenizer, Random(1)),
        "ioi": answered("ioi", tokenizer, FIRST_SEED),
        "gender-pronoun": answered("gender-pronoun", tokenizer, FIRST_SEED, n=512),
        "sentences": running_text(tokenizer, Random(2)),
    }
    while True:
        drawn = [next(sources[name]) for name, rows in ROWS.items() for _ in range(rows)]
        tokens = torch.zeros(len(drawn), LENGTH, dtype=torch.long)
        labels = torch.full_like(tokens, -100)
        for row, (ids, start) in enumerate(drawn):
            kept = torch.tensor(ids[:LENGTH])
            tokens[row, : len(kept)] = kept
            labels[row, start : len(kept)] = kept[start:]
        yield tokens, labels


def train(hf: LlamaForCausalLM, tokenizer: Any) -> None:
    optimizer = torch.optim.AdamW(hf.parameters(), lr=LEARNING_RATE, weight_decay=0.01, betas=(0.9, 0.98))
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min(1.0, step / 100) * (0.02 + 0.98 * (1 + math.cos(math.pi * step / STEPS)) / 2)
    )
    for step, (tokens, labels) in zip(range(STEPS), batches(tokenizer), strict=False):
        loss = hf(input_ids=tokens, labels=labels).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(hf.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if step % 200 == 0:
            print(f"step {step}: loss {loss.item():.3f}", flush=True)


def main() -> None:
    torch.set_num_threads(1)
    tokenizer = make_tokenizer()
    hf = make_model(tokenizer)
    print(f"{len(tokenizer)} tokens, {hf.num_parameters():,} parameters")
    train(hf, tokenizer)
    hf.half().save_pretrained(FOLDER)
    tokenizer.save_pretrained(FOLDER)


if __name__ == "__main__":
    main()
