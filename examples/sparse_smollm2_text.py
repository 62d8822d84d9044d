"""The text that `sparse_smollm2.py` trains on besides novels and Wikipedia.

Running text seldom requires a model to find a word in its context again, so the mean loss over running text hardly
changes if a model has forgotten how. The following passages require it:

- passages that are repeated;
- passages in which names or rare words are exchanged for others, each always for the same one, so that they cannot be
  guessed; some of these passages are functions with documented parameters;
- text that the dense model writes after function signatures and after first sentences of stories.

None of it contains prompts or templates of a task.
"""

import ast
import random
import re
import textwrap
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pip
import torch

from gatelens.model import Model

DATA = "../shared/data/text"
NOVELS = tuple(f"{DATA}/{name}.txt" for name in ("great-expectations", "pride-and-prejudice", "tale-of-two-cities"))
PROSE = (f"{DATA}/wikitext2-valid.txt", *NOVELS)
HELD_OUT = tuple(f"{DATA}/{name}.txt" for name in ("wikitext2-test", "sherlock-holmes"))

PACKAGES = ("requests", "urllib3", "rich", "packaging", "cachecontrol", "platformdirs")
DOCUMENTED = ("anyio", "babel", "click", "filelock", "werkzeug")

VENDORED, INSTALLED = Path(pip.__file__).parent / "_vendor", Path(torch.__file__).parents[1]

SEQUENCE = (1000, 1001)  # characters, of about 256 tokens
WORD = re.compile(r"[A-Za-z][a-z]+")
COMMON = 60  # how many of the most frequent words are never exchanged: the, and, self, return
SIGNATURE = re.compile(r"^ *(def \w+\((?:[^(),\n]+, ){2,}[^(),\n]+\)[^()\n]*:)$", re.MULTILINE)
STORIES = (
    "{A} had known {B} since they were children, but",
    '"You are late," said {A}. {B}',
    "{A}'s sister {B} lived in a small house by the river.",
    "It was raining when {A} knocked at {B}'s door.",
    "Dear {A},\n\nI hope that this letter finds you well. {B} and I",
    "{A}, {B} and {C} were planning a journey",
    "The trial of {A} began on a Tuesday. {B}, who",
    "{A}: Hello, {B}!\n{B}:",
    "In this story {A} is a teacher and {B} is her student.",
    "Once upon a time there lived a baker named {A} and his daughter {B}.",
    "{A} works with {B} in a hospital.",
    "Question: {A} has 5 apples and {B} has 7.",
    "{A} beat {B} in the final",
    "Every summer {A} visited her uncle {B}",
    "{A} wrote to {B} about the house, and",
    "There were three of them in the boat: {A}, {B} and {C}.",
)
PEOPLE = WORD.findall(
    """
    Emma Oliver Lucy George Alice Henry Clara Edward Rose Martin Julia Simon Helen Peter Nora Walter Hannah Louis Irene
    Victor Agnes Oscar Maria Carl Sophie Hugo Diana Felix Laura Bruno Anna Max Eva Leo Ruth Paul Ida Karl Amy Fred
    """
)


def write_code(code: str, more_code: str) -> None:
    """Write Python code: of packages that come with pip, and files of other packages that document parameters."""
    _join(_python(VENDORED, PACKAGES), code)
    _join([text for text in _python(INSTALLED, DOCUMENTED) if ":param " in text], more_code)


def write_twice(sources: tuple[str, ...], path: str) -> None:
    """Write short passages of all texts, each of them twice, so that the second can be copied from the context."""
    draw = random.Random(0)
    passages = [passage for source in sources for passage in _passages(draw, _read(source), 700, (60, 400))]
    draw.shuffle(passages)
    _join([passage for passage in passages for _ in range(2)], path)


@dataclass(frozen=True)
class Mixture:
    """How many passages of each kind a text has."""

    prose: tuple[int, int]  # of each prose text: unchanged, and with names exchanged
    code: tuple[int, int]  # of each code text: unchanged, and with words exchanged
    functions: int  # copies of each documented function, with different words exchanged
    twice: int  # repeated passages

    def write(self, prose: tuple[str, ...], code: tuple[str, ...], twice: str, written: str, path: str) -> None:
        """Write all of them, and what the model wrote, in random order."""
        draw = random.Random(1)
        passages = _read(written).split("\n\n\n")
        for source in (*prose, *code):
            text = _read(source)
            plain, exchanged = self.prose if source in prose else self.code
            passages += _passages(draw, text, plain, SEQUENCE)
            words, others, share = (_names(text), PEOPLE, 0.9) if source in prose else (_rare(text), _rare(text), 0.7)
            drawn = _passages(draw, text, exchanged, SEQUENCE)
            passages += [_exchange(draw, passage, words, others, share) for passage in drawn]
        functions = [function for text in _all_python() for function in _documented(text)]
        rare = _rare("\n".join(functions))
        for _ in range(self.functions):
            passages += [_exchange(draw, function[: SEQUENCE[0]], rare, rare, 0.7) for function in functions]
        passages += _passages(draw, _read(twice), self.twice, SEQUENCE)
        draw.shuffle(passages)
        _join(passages, path)


@torch.no_grad()
def write_own(dense: Model, code: tuple[str, ...], path: str, length: int = 256, at_once: int = 32) -> None:
    """Let the dense model continue function signatures and first sentences of stories, at temperature 1."""
    draw = random.Random(2)
    signatures = sorted({each for source in code for each in SIGNATURE.findall(_read(source)) if len(each) < 120})
    openings = [f'{signature}\n    """' for signature in draw.sample(signatures, 5 * at_once)]
    for _ in range(8):
        openings += [story.format_map(dict(zip("ABC", draw.sample(PEOPLE, 3), strict=True))) for story in STORIES]
    draw.shuffle(openings)
    tokenizer = dense.tokenizer
    texts: list[str] = []
    torch.manual_seed(0)
    for start in range(0, len(openings), at_once):
        batch = tokenizer(openings[start : start + at_once], return_tensors="pt", padding=True, padding_side="left")
        wanted = length - batch["input_ids"].shape[1]
        written = dense.hf.generate(
            **batch, max_new_tokens=wanted, do_sample=True, temperature=1.0, top_k=0, top_p=1.0, repetition_penalty=1.0
        )
        texts += tokenizer.batch_decode(written, skip_special_tokens=True)
        print(f"own text: {len(texts)} of {len(openings)}", flush=True)
    Path(path).write_text("\n\n\n".join(text.replace("\n\n\n", "\n\n") for text in texts), encoding="utf-8")


def _exchange(draw: random.Random, passage: str, words: list[str], others: Sequence[str], share: float) -> str:
    """A passage with a share of these words exchanged for others, each always for the same one."""
    present = sorted(set(WORD.findall(passage)).intersection(words))
    other = {word: draw.choice(others) for word in present if draw.random() < share}
    return WORD.sub(lambda match: other.get(match[0], match[0]), passage)


def _rare(text: str) -> list[str]:
    """All words except the most frequent ones and those that occur less than three times."""
    counts = Counter(WORD.findall(text)).most_common()
    return sorted(word for word, n in counts[COMMON:] if n >= 3 and len(word) >= 3)


def _names(text: str) -> list[str]:
    """Words inside sentences that are always capitalized: mostly people and places."""
    within = Counter(re.findall(r"(?<=[a-z,] )[A-Z][a-z]+", text))
    small = set(re.findall(r"\b[a-z]+\b", text))
    return sorted(word for word, n in within.items() if n >= 5 and word.lower() not in small)


def _documented(text: str) -> list[str]:
    """Functions whose docstring documents at least two parameters, right after its first line."""
    lines, functions = text.splitlines(), []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef) and (ast.get_docstring(node) or "").count(":param ") >= 2:
            function = textwrap.dedent("\n".join(lines[node.lineno - 1 : node.end_lineno]))
            functions.append(re.sub(r'(""".*\n)[^\0]*?(?=\n *:param )', r"\1", function, count=1))
    return functions


def _passages(draw: random.Random, text: str, count: int, length: tuple[int, int]) -> list[str]:
    """Passages from anywhere in a text, with a random length in characters from this range."""
    starts = ((draw.randrange(len(text) - length[1]), draw.randrange(*length)) for _ in range(count))
    return [text[start : start + size].strip() for start, size in starts]


def _all_python() -> list[str]:
    return [*_python(VENDORED, PACKAGES), *_python(INSTALLED, DOCUMENTED)]


def _python(folder: Path, packages: tuple[str, ...]) -> list[str]:
    files = [file for package in packages for file in sorted((folder / package).rglob("*.py"))]
    return [text for file in files if len(text := file.read_text(encoding="utf-8")) < 60_000]  # longer ones are tables


def _read(path: str) -> str:
    return Path(path).read_text(encoding="utf-8")


def _join(texts: list[str], path: str) -> None:
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    Path(path).write_text("\n\n".join(texts), encoding="utf-8")
