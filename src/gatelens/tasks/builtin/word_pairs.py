"""Word pairs: a relation between words, asked for by an instruction or shown by examples in context.

Both ways have the same queries and responses, so that gates can be fitted that keep one way and lose the other
(contrastive gating: Nam et al., arXiv 2505.13737). With `source`, the pairs are function-vector pairs (Todd et al.,
arXiv 2310.15213), read from a file or from the hub.
"""

from pathlib import Path
from random import Random

from gatelens.errors import GatelensError
from gatelens.tasks import Entry
from gatelens.tasks._readers import read, take, word_pair
from gatelens.tasks._words import NOUNS, VERBS, pairs
from gatelens.tasks.base import ResponseTask, response_task
from gatelens.tasks.draw import generator
from gatelens.tasks.tokens import Tokenizer

SHOTS = 5
WAYS = ("instruction", "examples")
ANTONYMS = pairs(
    """
    hot/cold big/small tall/short fast/slow happy/sad rich/poor old/young light/dark hard/soft full/empty open/closed
    high/low near/far early/late strong/weak clean/dirty wet/dry loud/quiet thick/thin wide/narrow deep/shallow
    heavy/light true/false right/wrong good/bad first/last up/down left/right inside/outside above/below
    before/after always/never many/few more/less win/lose buy/sell give/take push/pull begin/end love/hate
    remember/forget arrive/leave laugh/cry rise/fall build/destroy accept/reject attack/defend increase/decrease
    day/night summer/winter friend/enemy war/peace life/death question/answer success/failure victory/defeat
    north/south east/west front/back top/bottom entrance/exit beginning/ending cheap/expensive safe/dangerous
    brave/cowardly polite/rude smooth/rough sweet/sour sharp/dull tight/loose simple/complex ancient/modern
    public/private guilty/innocent visible/invisible possible/impossible honest/dishonest
    """
)
CAPITALS = pairs(
    """
    France/Paris Germany/Berlin Italy/Rome Spain/Madrid Portugal/Lisbon Austria/Vienna Hungary/Budapest Poland/Warsaw
    Greece/Athens Turkey/Ankara Russia/Moscow Ukraine/Kyiv Sweden/Stockholm Norway/Oslo Denmark/Copenhagen
    Finland/Helsinki Ireland/Dublin Belgium/Brussels Switzerland/Bern Romania/Bucharest Bulgaria/Sofia Serbia/Belgrade
    Croatia/Zagreb Slovenia/Ljubljana Slovakia/Bratislava Estonia/Tallinn Latvia/Riga Lithuania/Vilnius
    Iceland/Reykjavik Japan/Tokyo
    China/Beijing India/New_Delhi Thailand/Bangkok Vietnam/Hanoi Indonesia/Jakarta Philippines/Manila
    Nepal/Kathmandu Bangladesh/Dhaka Pakistan/Islamabad Afghanistan/Kabul Iran/Tehran Iraq/Baghdad Syria/Damascus
    Lebanon/Beirut Jordan/Amman Egypt/Cairo Libya/Tripoli Tunisia/Tunis Algeria/Algiers Morocco/Rabat Kenya/Nairobi
    Ethiopia/Addis_Ababa Uganda/Kampala Ghana/Accra Senegal/Dakar Nigeria/Abuja Angola/Luanda Zambia/Lusaka
    Zimbabwe/Harare Canada/Ottawa Cuba/Havana Peru/Lima Chile/Santiago Argentina/Buenos_Aires Uruguay/Montevideo
    Paraguay/Asuncion Ecuador/Quito Colombia/Bogota Venezuela/Caracas Australia/Canberra
    """
)
RELATIONS = {
    "antonym": ANTONYMS,
    "country-capital": CAPITALS,
    "present-past": VERBS,
    "singular-plural": NOUNS,
}
# The name of a published file of word pairs is the name of its relation, so these also serve for files.
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
    """The word that stands in a relation to the query word.

    Arguments:
        relation: a built-in relation, the name of one of `RELATIONS`.
        ask: "instruction" asks by a sentence, "examples" asks by five worked examples.
        source: a file or hub id of word pairs. The default is the built-in relation.
        instruction: the sentence that asks. The built-in relations and the published files have one.
    """
    if source is None:
        word_pairs, name = list(RELATIONS[relation].items()), relation
    else:
        word_pairs, name = read(source, word_pair), Path(source).stem
    sentence = instruction or INSTRUCTIONS.get(name)
    if ask == "instruction" and sentence is None:
        raise GatelensError(
            f"no instruction is known for {name}: pass one, such as instruction='Give the plural of the noun.'"
        )
    # The queries have a generator of their own, so that both ways of asking have the same queries.
    queries = take(generator("word-pairs", seed), word_pairs, n, name)
    shots = generator("word-pairs examples", seed)
    items = [
        (_prompt(shots, word_pairs, query, sentence if ask == "instruction" else None), f" {query[1]}")
        for query in queries
    ]
    options = {"relation": relation} if source is None else {"source": source}
    if instruction is not None:
        options["instruction"] = instruction
    return response_task(tokenizer, "word-pairs", seed, items, ask=ask, **options)


def _prompt(random: Random, word_pairs: list[tuple[str, str]], query: tuple[str, str], sentence: str | None) -> str:
    """The sentence and the query word; without a sentence, five other pairs and the query word."""
    if sentence is not None:
        return f"{sentence}\n{query[0]} ->"
    shots = random.sample([pair for pair in word_pairs if pair[0] != query[0]], SHOTS)
    return "\n".join([*(f"{word} -> {answer}" for word, answer in shots), f"{query[0]} ->"])


TASK = Entry(
    build,
    "response",
    "Opposites, capitals, past tenses or plurals, after an instruction or after examples. Built-in pairs or a file.",
    ("Give the opposite of the word.\nhot ->", " cold"),
    choices={"relation": tuple(RELATIONS), "ask": WAYS},
)
