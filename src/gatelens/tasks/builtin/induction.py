"""Induction: random tokens are repeated; the answer is the token that followed the last token the first time.

The behaviour is that of Olsson et al., arXiv 2209.11895. Prompts are drawn as token ids and not as text, so that the
task works with every tokenizer.
"""

from gatelens.errors import GatelensError
from gatelens.model.first_token import first_tokens
from gatelens.tasks import Entry
from gatelens.tasks.base import CircuitTask
from gatelens.tasks.build import from_tokens
from gatelens.tasks.draw import distinct, generator
from gatelens.tasks.tokens import Pair, PairTokens, Tokenizer, word_tokens


def build(tokenizer: Tokenizer, n: int, seed: int, *, length: int = 10) -> CircuitTask:
    """A block of random tokens, and then the beginning of the same block: at least half of it.

    The answer is the next token of the block. Metric: the logit of the answer minus the largest logit of the block's
    other tokens. The corrupt prompt has other tokens in its first block, so that there is nothing to copy; its second
    part is the same.

    Arguments:
        length: the number of tokens of the block.
    """
    pool = word_tokens(tokenizer, spaced=True)
    if not 2 <= length <= len(pool) // 2:
        raise GatelensError(
            f"induction has no length {length}: with this tokenizer the length is from 2 to {len(pool) // 2}."
        )
    random = generator("induction", seed)
    first = first_tokens(tokenizer)

    def draw() -> PairTokens:
        drawn = random.sample(pool, 2 * length)
        block, other_block = drawn[:length], drawn[length:]
        again = random.randrange(length // 2, length)
        wrong = [token for token in block if token != block[again]]
        # Token roles: the last token was seen before the answer, which is the token to copy.
        in_block = [
            "seen before" if i == again - 1 else "answer in block" if i == again else "block" for i in range(length)
        ]
        roles = [""] * len(first) + in_block + ["repetition"] * again
        return PairTokens(
            first + block + block[:again], first + other_block + block[:again], [block[again]], wrong, roles
        )

    tokens = distinct(n, draw, key=lambda pair: str(pair.clean))
    pairs = [
        Pair(
            tokenizer.decode(pair.clean),
            tokenizer.decode(pair.corrupt),
            tuple(tokenizer.decode([token]) for token in pair.answers),
            tuple(tokenizer.decode([token]) for token in pair.wrong),
        )
        for pair in tokens
    ]
    return from_tokens("induction", seed, pairs, tokens, length=length)


TASK = Entry(
    build,
    "circuit",
    "Random tokens are repeated: give the token that came next the first time. Works with every tokenizer.",
    (" lake moon tree salt lake moon tree", " salt"),
)
