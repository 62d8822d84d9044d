"""Word pairs: a relation between words, asked for by an instruction or shown by examples in context.

Both ways have the same queries and responses, so that gates can be fitted that keep one way and lose the other
(contrastive gating: Nam et al., arXiv 2505.13737). With `source`, the pairs are function-vector pairs (Todd et al.,
arXiv 2310.15213), read from a file or from the hub.
"""

from pathlib import Path
from random import Random
from typing import Any

from gatelens.errors import GatelensError
from gatelens.tasks import Entry
from gatelens.tasks._prompts import Item, check_shots, prompt, take
from gatelens.tasks._readers import read, word_pair
from gatelens.tasks._words import NOUNS, VERBS, pairs
from gatelens.tasks.base import ResponseTask
from gatelens.tasks.build import response_task
from gatelens.tasks.draw import generator
from gatelens.tasks.tokens import Tokenizer

SHOTS = {"instruction": 0, "examples": 10}  # worked examples, for each way of asking
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
FRENCH = pairs(
    """
    dog/chien cat/chat house/maison water/eau bread/pain book/livre table/table chair/chaise door/porte window/fenêtre
    sun/soleil moon/lune star/étoile sea/mer mountain/montagne river/rivière tree/arbre flower/fleur bird/oiseau
    fish/poisson horse/cheval cow/vache milk/lait cheese/fromage apple/pomme egg/œuf meat/viande salt/sel sugar/sucre
    wine/vin man/homme woman/femme child/enfant boy/garçon girl/fille father/père mother/mère brother/frère sister/sœur
    friend/ami king/roi queen/reine day/jour night/nuit week/semaine month/mois year/année hour/heure morning/matin
    evening/soir red/rouge blue/bleu green/vert white/blanc black/noir big/grand small/petit new/nouveau old/vieux
    good/bon bad/mauvais hot/chaud cold/froid one/un two/deux three/trois four/quatre five/cinq ten/dix hundred/cent
    school/école street/rue city/ville church/église garden/jardin kitchen/cuisine bed/lit car/voiture train/train
    head/tête hand/main eye/œil heart/cœur word/mot letter/lettre music/musique war/guerre peace/paix love/amour
    """
)
CAPITALIZED = {word: word.capitalize() for word in (*NOUNS, *ANTONYMS)}
RELATIONS = {
    "antonym": ANTONYMS,
    "capitalize": CAPITALIZED,
    "country-capital": CAPITALS,
    "english-french": FRENCH,
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
    shots: int | None = None,
    source: str | None = None,
    instruction: str | None = None,
) -> ResponseTask:
    """The word that stands in a relation to the query word.

    Arguments:
        relation: a built-in relation, the name of one of `RELATIONS`.
        ask: "instruction" asks by a sentence, "examples" asks by worked examples.
        shots: how many worked examples; by default none after a sentence, and ten without one.
        source: a file or hub id of word pairs. The default is the built-in relation.
        instruction: the sentence that asks. The built-in relations and the published files have one.
    """
    if source is None:
        word_pairs, name = [Item(*pair) for pair in RELATIONS[relation].items()], relation
    else:
        word_pairs, name = read(source, word_pair), Path(source).stem
    sentence = instruction or INSTRUCTIONS.get(name)
    if ask == "instruction" and sentence is None:
        raise GatelensError(
            f"no instruction is known for {name}: pass one, such as instruction='Give the plural of the noun.'"
        )
    n_shots = SHOTS[ask] if shots is None else shots
    check_shots(n_shots)
    said = sentence if ask == "instruction" and sentence is not None else ""
    items = [Item(f"{pair.query} ->", f" {pair.response}", said) for pair in word_pairs]
    # The queries have a generator of their own, so that both ways of asking have the same queries.
    queries = take(generator("word-pairs", seed), items, n, name)
    random = generator("word-pairs examples", seed)
    prompts = [prompt(query, _others(random, items, query, n_shots, name)) for query in queries]
    options: dict[str, Any] = {"relation": relation} if source is None else {"source": source}
    options |= {} if instruction is None else {"instruction": instruction}
    options |= {} if shots is None else {"shots": shots}
    return response_task(tokenizer, "word-pairs", seed, prompts, ask=ask, **options)


def _others(random: Random, items: list[Item], query: Item, n: int, name: str) -> list[Item]:
    """Some pairs with other words than the query."""
    others = [item for item in items if item.query != query.query]
    if len(others) < n:
        raise GatelensError(f"{name} has {len(others)} other pairs for {n} worked examples: ask for fewer shots.")
    return random.sample(others, n)


TASK = Entry(
    build,
    "response",
    "Opposites, capitals, past tenses or plurals, after an instruction or after examples. Built-in pairs or a file.",
    ("Give the opposite of the word.\nhot ->", " cold"),
    choices={"relation": tuple(RELATIONS), "ask": WAYS},
)
