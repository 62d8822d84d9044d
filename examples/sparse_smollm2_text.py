"""Write the text that `sparse_smollm2.py` trains on, one file for each kind, and the mixture file that names them.

    python examples/sparse_smollm2_text.py runs/sparse-smollm2-text

Running text seldom requires a model to find a word in its context again, so the mean loss over running text hardly
changes if a model has forgotten how. Some kinds of text require it:

    names      passages of novels in which names are exchanged for others, each always for the same one
    functions  documented Python functions in which rare words are exchanged in the same way
    twice      passages that are repeated
    own        what the dense model writes after function signatures, after first sentences of stories, and after
               beginnings of sentences from books

The other kinds are running text: Wikipedia (`wiki`), books (`prose`) and Python code (`code`). None of it contains
prompts or templates of a task, and wikitext2-test and sherlock-holmes are not part of it.

A file that exists is not written again, so a run that was stopped continues with the same command.
"""

import ast
import json
import random
import re
import sys
import textwrap
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

import pip
import torch

import gatelens
from gatelens.model import Model
from gatelens.runtime.files import replace_file

DATA = Path("../shared/data/text")
WIKI = DATA / "wikitext2-valid.txt"
NOVELS = tuple(DATA / f"{name}.txt" for name in ("great-expectations", "pride-and-prejudice", "tale-of-two-cities"))
BOOKS = DATA / "books"
HELD_OUT = tuple(DATA / f"{name}.txt" for name in ("wikitext2-test", "sherlock-holmes"))

# Sources, share of the sequences, and share of the KL divergence in the loss (the rest is cross-entropy). Text that
# requires copying and the model's own text have mostly KL: they are there to keep what the model does, and the dense
# model could learn their words by heart.
MIXTURE: dict[str, tuple[float, float]] = {
    "wiki": (0.06, 0.5),
    "prose": (0.20, 0.5),
    "code": (0.05, 0.6),
    "names": (0.16, 1.0),
    "functions": (0.27, 0.9),
    "twice": (0.06, 0.9),
    "own": (0.20, 1.0),
}

PACKAGES = ("requests", "urllib3", "rich", "packaging", "cachecontrol", "platformdirs")  # inside pip
DOCUMENTED = ("anyio", "babel", "click", "filelock", "werkzeug")  # installed
VENDORED, INSTALLED = Path(pip.__file__).parent / "_vendor", Path(torch.__file__).parents[1]

PASSAGE = 1100  # characters of a passage, of about 256 tokens
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
    Grace Jack Ella Sam Lily Tom Jane Adam Mary Dan Sarah Ben Kate Mark Beth Luke Susan Tim Joan Jim
    """
)
OPENINGS = 1025  # of each kind, shuffled; the first ones are continued
OWN_BATCH, OWN_BATCHES, OWN_LENGTH = 64, 6, 224  # sequences that are written together, how often, and their tokens


def write_texts(folder: Path, load: Callable[[], Model]) -> Path:
    """Write all kinds of text that do not exist yet, and return the mixture file.

    Arguments:
        load: loads the dense model, if it has to write its own text.
    """
    folder.mkdir(parents=True, exist_ok=True)
    writers: dict[str, Callable[[], list[str]]] = {
        "names": names,
        "functions": functions,
        "twice": twice,
        "own": lambda: own(load(), folder),
    }
    for kind, documents in writers.items():
        path = folder / f"{kind}.jsonl"
        if not path.exists():
            replace_file(path, "".join(json.dumps({"text": text}) + "\n" for text in documents()))
    if not (folder / "code.txt").exists():
        replace_file(folder / "code.txt", "\n\n".join(_all_python()))
    sources = {"wiki": [WIKI], "prose": [*NOVELS, BOOKS], "code": [folder / "code.txt"]}
    sources |= {kind: [folder / f"{kind}.jsonl"] for kind in writers}
    entries = [_entry(kind, sources[kind], *shares) for kind, shares in MIXTURE.items()]
    mixture = folder / "mixture.toml"
    replace_file(mixture, "\n".join(entries))
    return mixture


def _entry(kind: str, sources: Sequence[Path], share: float, kl: float) -> str:
    paths = json.dumps([str(source.resolve()) for source in sources])
    return f'[[text]]\nname = "{kind}"\nsources = {paths}\nshare = {share}\nkl = {kl}\n'


def names() -> list[str]:
    """Passages that begin with a sentence, with 90 % of the names exchanged."""
    draw, passages = random.Random(1), []
    for text in _prose():
        in_text = _names(text)
        passages += [_exchange(draw, passage, in_text, PEOPLE, 0.9) for passage in _sentences(draw, text, 250)]
    return passages


def functions() -> list[str]:
    """Documented functions, each eight times, with 70 % of the rare words exchanged."""
    draw = random.Random(2)
    documented = [function for text in _all_python() for function in _documented(text)]
    rare = _rare("\n".join(documented))
    return [_exchange(draw, function[:PASSAGE], rare, rare, 0.7) for _ in range(8) for function in documented]


def twice() -> list[str]:
    """Short passages of prose and code, each of them repeated."""
    draw, texts = random.Random(3), []
    code = "\n\n".join(_all_python())
    for text in [*_prose(), code, code, code]:
        for _ in range(150):
            size = draw.randrange(60, 400)
            start = draw.randrange(len(text) - size)
            passage = text[start : start + size].strip()
            texts.append(f"{passage}\n\n{passage}")
    return texts


def own(dense: Model, folder: Path) -> list[str]:
    """What the dense model writes after a third each of signatures, stories and beginnings of sentences.

    Sampled at temperature 1. Each batch is written to a file of its own first.
    """
    openings = _openings(random.Random(4))
    dense.hf.to(torch.bfloat16)
    parts = []
    for number in range(OWN_BATCHES):
        path = folder / f"own-{number:02d}.json"
        if not path.exists():
            batch = openings[number * OWN_BATCH : (number + 1) * OWN_BATCH]
            replace_file(path, json.dumps(_continue(dense, batch, seed=number)))
            print(f"own text: {number + 1} of {OWN_BATCHES} batches", flush=True)
        parts.append(path)
    return [text for path in parts for text in json.loads(path.read_text(encoding="utf-8"))]


def _openings(draw: random.Random) -> list[str]:
    signatures = sorted({found for text in _all_python() for found in SIGNATURE.findall(text) if len(found) < 120})
    openings = [f'{draw.choice(signatures)}\n    """' for _ in range(OPENINGS)]
    for _ in range(OPENINGS):
        people = dict(zip("ABC", draw.sample(PEOPLE, 3), strict=True))
        openings.append(draw.choice(STORIES).format_map(people))
    prose = _prose()
    for _ in range(OPENINGS):
        text = draw.choice(prose)
        passage = _exchange(draw, _sentences(draw, text, 1)[0], _names(text[:200_000]), PEOPLE, 0.9)
        openings.append(" ".join(passage.split()[: draw.randrange(4, 25)]))
    draw.shuffle(openings)
    return openings


@torch.no_grad()
def _continue(dense: Model, openings: list[str], seed: int) -> list[str]:
    tokenizer = dense.tokenizer
    batch = tokenizer(openings, return_tensors="pt", padding=True, padding_side="left")
    torch.manual_seed(seed)
    written = dense.hf.generate(
        **batch,
        max_new_tokens=OWN_LENGTH,
        do_sample=True,
        temperature=1.0,
        top_k=0,
        top_p=1.0,
        repetition_penalty=1.0,
    )
    return [str(text) for text in tokenizer.batch_decode(written, skip_special_tokens=True)]


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
    lines, found = text.splitlines(), []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef) and (ast.get_docstring(node) or "").count(":param ") >= 2:
            function = textwrap.dedent("\n".join(lines[node.lineno - 1 : node.end_lineno]))
            found.append(re.sub(r'(""".*\n)[^\0]*?(?=\n *:param )', r"\1", function, count=1))
    return found


def _sentences(draw: random.Random, text: str, count: int) -> list[str]:
    """Passages from anywhere in a text that begin with a sentence."""
    passages: list[str] = []
    while len(passages) < count:
        start = draw.randrange(len(text) - PASSAGE - 400)
        end = text.find(". ", start, start + 400)
        if end > 0:
            passages.append(text[end + 2 : end + 2 + PASSAGE].strip())
    return passages


def _prose() -> list[str]:
    return [path.read_text(encoding="utf-8")[:2_000_000] for path in (*NOVELS, *sorted(BOOKS.glob("books-*.txt")))]


def _all_python() -> list[str]:
    return [*_python(VENDORED, PACKAGES), *_python(INSTALLED, DOCUMENTED)]


def _python(folder: Path, packages: tuple[str, ...]) -> list[str]:
    files = [file for package in packages for file in sorted((folder / package).rglob("*.py"))]
    return [text for file in files if len(text := file.read_text(encoding="utf-8")) < 60_000]  # longer ones are tables


if __name__ == "__main__":
    torch.set_num_threads(1)
    write_texts(Path(sys.argv[1]), lambda: gatelens.load("smollm2"))
