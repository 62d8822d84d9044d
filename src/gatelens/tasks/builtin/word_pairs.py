"""Word pairs: one relation, asked for by an instruction or shown by examples in context.

The two ways give the same queries and responses, so that gates can be fitted to keep the one and lose the other
(contrastive gating: Nam et al., arXiv 2505.13737). `source` reads pairs as published by Todd et al., see `readers`.
"""

from pathlib import Path
from random import Random

from gatelens.errors import GatelensError
from gatelens.tasks._forms import ANTONYMS, CAPITALS, NOUNS, VERBS
from gatelens.tasks._readers import read, take, word_pair
from gatelens.tasks.base import ResponseTask, response_task
from gatelens.tasks.draw import choose, generator
from gatelens.tasks.tokens import Tokenizer

SHOTS = 5
RELATIONS = {
    "antonym": ANTONYMS,
    "country-capital": CAPITALS,
    "present-past": VERBS,
    "singular-plural": NOUNS,
}
# Also for the files of the published sets, which have these names.
INSTRUCTIONS = {
    "antonym": "Give the opposite of the word.",
    "capitalize": "Write the word with a capital letter.",
    "country-capital": "Name the capital of the country.",
    "english-french": "Translate the word into French.",
    "present-past": "Give the past tense of the verb.",
    "singular-plural": "Give the plural of the noun.",
}


def build(
    tokenizer: Tokenizer,
    n: int,
    seed: int,
    *,
    relation: str = "antonym",
    ask: str = "instruction",
    source: str | None = None,
    instruction: str | None = None,
) -> ResponseTask:
    """Word pairs of a built-in `relation` or of `source`, asked for by "instruction" or by "examples" (five of them).

    `instruction` is the sentence that asks; the built-in relations and the published files have one.
    """
    choose("ask", ask, ("instruction", "examples"))
    if source is None:
        choose("relation", relation, tuple(RELATIONS))
        pairs, name = list(RELATIONS[relation].items()), relation
    else:
        pairs, name = read(source, word_pair), Path(source).stem
    sentence = instruction or INSTRUCTIONS.get(name)
    if ask == "instruction" and sentence is None:
        raise GatelensError(f"no instruction is known for {name}: pass one, such as instruction='Give the plural.'")
    # Queries have a generator of their own, so that both ways of asking have the same.
    queries = take(generator("word-pairs", seed), pairs, n, name)
    shots = generator("word-pairs examples", seed)
    asked = sentence if ask == "instruction" else None
    items = [(_prompt(shots, pairs, query, asked), f" {query[1]}") for query in queries]
    options = {"relation": relation} if source is None else {"source": source}
    if instruction is not None:
        options["instruction"] = instruction
    return response_task(tokenizer, "word-pairs", seed, items, ask=ask, **options)


def _prompt(random: Random, pairs: list[tuple[str, str]], query: tuple[str, str], sentence: str | None) -> str:
    if sentence is not None:
        return f"{sentence}\n{query[0]} ->"
    shots = random.sample([pair for pair in pairs if pair[0] != query[0]], SHOTS)
    return "\n".join([*(f"{word} -> {answer}" for word, answer in shots), f"{query[0]} ->"])
