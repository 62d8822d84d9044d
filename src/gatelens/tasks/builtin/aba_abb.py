"""Letter patterns: four examples of A^B^A (or of A^B^B) in context, and a fifth one to complete.

"... lake^moon^lake ... tree^salt^" -> "tree" for ABA and "salt" for ABB. The words are random single tokens of the
vocabulary, so that only the pattern determines the answer. The task is that of Nam et al., arXiv 2505.13737.
"""

from itertools import cycle
from operator import itemgetter

from gatelens.errors import GatelensError
from gatelens.tasks import Entry
from gatelens.tasks.base import ResponseTask
from gatelens.tasks.build import response_task
from gatelens.tasks.draw import distinct, generator
from gatelens.tasks.tokens import Tokenizer, continuations, encode, word_tokens

EXAMPLES = 4
INSTRUCTION = "Continue the pattern."
PATTERNS = {"aba": "{0}^{1}^{0}", "abb": "{0}^{1}^{1}"}
# How many words of the vocabulary are tried: enough to draw from, and quick to tokenise.
CANDIDATES = 1000


def build(tokenizer: Tokenizer, n: int, seed: int, *, pattern: str = "both") -> ResponseTask:
    """The last word of a pattern.

    Arguments:
        pattern: "aba", "abb", or "both": then prompts with one and with the other pattern alternate.
    """
    random = generator("aba-abb", seed)
    words = pattern_words(tokenizer)
    shapes = cycle(PATTERNS.values() if pattern == "both" else [PATTERNS[pattern]])

    def draw() -> tuple[str, str]:
        shape, drawn = next(shapes), random.sample(words, 2 * (EXAMPLES + 1))
        lines = [shape.format(a, b) for a, b in zip(drawn[::2], drawn[1::2], strict=True)]
        prompt, caret, response = "\n".join([INSTRUCTION, *lines]).rpartition("^")
        return prompt + caret, response

    return response_task(tokenizer, "aba-abb", seed, distinct(n, draw, key=itemgetter(0)), pattern=pattern)


def pattern_words(tokenizer: Tokenizer) -> list[str]:
    """Words of the vocabulary that are one token at the start of a line and also after a caret."""
    ids = word_tokens(tokenizer, spaced=False)
    ids = generator("vocabulary", 0).sample(ids, min(len(ids), CANDIDATES))
    single = [word for index in ids if (word := tokenizer.decode([index])).isalpha()]
    for before in ("so\n", "so^"):
        prompt_ids = encode(tokenizer, [before])[0]
        added = continuations(tokenizer, [before] * len(single), [prompt_ids] * len(single), single)
        single = [word for word, tokens in zip(single, added, strict=True) if tokens and len(tokens) == 1]
    least = 2 * (EXAMPLES + 1)
    if len(single) < least:
        raise GatelensError(f"aba-abb needs {least} words of one token each, and this tokenizer has {len(single)}.")
    return single


TASK = Entry(
    build,
    "response",
    "Four examples show the pattern A^B^A or A^B^B of random words: complete the fifth.",
    ("lake^moon^lake\nsalt^door^salt\ncup^road^cup\nhill^bird^hill\ntree^ring^", "tree"),
    choices={"pattern": (*PATTERNS, "both")},
)
