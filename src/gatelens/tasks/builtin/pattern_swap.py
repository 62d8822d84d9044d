"""Letter patterns as a circuit task: which heads carry the pattern, A^B^A or A^B^B?

Clean and corrupt prompt have the same random words and the other pattern, so their answers are exchanged. This is the
causal mediation of abstract patterns that Nam et al., arXiv 2505.13737, compare head gating with. `aba-abb` has
the same prompts as a response task.
"""

from operator import attrgetter

from gatelens.tasks import Entry
from gatelens.tasks.base import CircuitTask
from gatelens.tasks.build import circuit_task
from gatelens.tasks.builtin.aba_abb import EXAMPLES, INSTRUCTION, pattern_words
from gatelens.tasks.draw import distinct, generator
from gatelens.tasks.token_roles import mark
from gatelens.tasks.tokens import Pair, Tokenizer, marked_pair


def build(tokenizer: Tokenizer, n: int, seed: int) -> CircuitTask:
    """The last word of a pattern. Each clean prompt has the pattern ABA or ABB, with equal probability.

    Metric: the logit of the word that the pattern asks for minus that of the other word of its line.
    """
    random = generator("pattern-swap", seed)
    words = pattern_words(tokenizer)

    def draw() -> Pair:
        drawn = random.sample(words, 2 * (EXAMPLES + 1))
        lines = list(zip(drawn[::2], drawn[1::2], strict=True))
        place = random.randrange(2)  # the place of the word that is repeated: 0 in ABA, 1 in ABB
        asked, (clean, corrupt) = lines[-1], (_prompt(lines, repeated) for repeated in (place, 1 - place))
        return marked_pair(clean, corrupt, (asked[place],), (asked[1 - place],))

    return circuit_task(tokenizer, "pattern-swap", seed, distinct(n, draw, key=attrgetter("clean")))


def _prompt(lines: list[tuple[str, str]], repeated: int) -> str:
    """Worked lines that repeat their first (0) or second word (1), and a last line without its third word."""
    *worked, (a, b) = lines
    shown = [f"{mark(x, 'A')}^{mark(y, 'B')}^{mark((x, y)[repeated], 'repeated')}" for x, y in worked]
    return "\n".join([INSTRUCTION, *shown, f"{mark(a, 'asked A')}^{mark(b, 'asked B')}^"])


TASK = Entry(
    build,
    "circuit",
    "Complete the pattern A^B^A or A^B^B of random words; the corrupt prompt has the other pattern.",
    ("lake^moon^lake\nsalt^door^salt\ncup^road^cup\nhill^bird^hill\ntree^ring^", "tree"),
)
