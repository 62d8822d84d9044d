"""Induction: random tokens, repeated; the answer is the token that followed the last one the first time.

Olsson et al., arXiv 2209.11895. Prompts are made of token ids, not of text, so that any model can be asked.
"""

from gatelens.errors import GatelensError
from gatelens.tasks.base import CircuitTask, from_tokens
from gatelens.tasks.draw import distinct, generator
from gatelens.tasks.tokens import Pair, PairTokens, Tokenizer, encode, word_tokens


def build(tokenizer: Tokenizer, n: int, seed: int, *, length: int = 10) -> CircuitTask:
    """`length` random tokens, then the first of them again (half or more) up to the one before the answer.

    Metric: logit of the answer minus the largest logit of the other tokens of the block. The corrupt prompt begins
    with another block, so that there is nothing to copy; its second part is the same.
    """
    pool = word_tokens(tokenizer, spaced=True)
    if not 2 <= length <= len(pool) // 2:
        raise GatelensError(f"induction takes a length from 2 to {len(pool) // 2} tokens, not {length}.")
    random = generator("induction", seed)
    start = encode(tokenizer, [""])[0]

    def draw() -> PairTokens:
        drawn = random.sample(pool, 2 * length)
        block, other = drawn[:length], drawn[length:]
        again = random.randrange(length // 2, length)
        wrong = [token for token in block if token != block[again]]
        return PairTokens(start + block + block[:again], start + other + block[:again], [block[again]], wrong)

    rows = distinct(n, draw, key=lambda row: str(row.clean))
    pairs = [
        Pair(
            tokenizer.decode(row.clean),
            tokenizer.decode(row.corrupt),
            tuple(tokenizer.decode([token]) for token in row.answers),
            tuple(tokenizer.decode([token]) for token in row.wrong),
        )
        for row in rows
    ]
    return from_tokens("induction", seed, pairs, rows, length=length)
