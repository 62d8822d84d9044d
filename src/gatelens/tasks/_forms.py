"""Word forms and word pairs that the language tasks are made of."""

from gatelens.tasks._words import pairs, words

IRREGULAR_VERBS = pairs(
    """
    go/went come/came see/saw take/took give/gave make/made know/knew think/thought find/found tell/told feel/felt
    leave/left keep/kept begin/began bring/brought write/wrote stand/stood hear/heard meet/met run/ran pay/paid
    sit/sat speak/spoke lead/led grow/grew lose/lost fall/fell send/sent build/built draw/drew break/broke
    spend/spent rise/rose drive/drove buy/bought wear/wore choose/chose eat/ate sing/sang drink/drank swim/swam
    fly/flew throw/threw catch/caught teach/taught fight/fought sleep/slept steal/stole ride/rode hide/hid
    forget/forgot win/won sell/sold hold/held feed/fed shake/shook ring/rang dig/dug sweep/swept freeze/froze
    """
)
REGULAR_VERBS = words(
    """
    walk play work help talk open close clean cook wash watch want need call ask answer start finish visit travel
    live love like hate move carry study try cry stop plan jump climb dance laugh smile paint push pull touch
    follow listen learn remember explain enjoy arrive wait share
    """
)
# Regular verbs with one vowel before a last consonant that is doubled.
DOUBLED = ("stop", "plan")

IRREGULAR_NOUNS = pairs(
    """
    child/children man/men woman/women foot/feet tooth/teeth mouse/mice goose/geese ox/oxen person/people
    sheep/sheep deer/deer fish/fish knife/knives wife/wives life/lives leaf/leaves wolf/wolves shelf/shelves
    half/halves loaf/loaves thief/thieves calf/calves potato/potatoes tomato/tomatoes hero/heroes echo/echoes
    cactus/cacti crisis/crises
    """
)
REGULAR_NOUNS = words(
    """
    book car house tree door window table chair cup bird dog cat horse boat road bridge river garden farmer driver
    city country story party baby lady family box bus class dress watch church brush dish fox glass day boy key
    toy monkey photo piano radio hat lamp pencil letter apple orange school teacher student doctor friend flower
    mountain island picture computer
    """
)

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


def third_person(verb: str) -> str:
    """The form after he, she or it: goes, watches, studies, plays."""
    return _with_s(verb) if verb != "go" else "goes"


def past(verb: str) -> str:
    """The past tense: went, stopped, studied, liked, walked."""
    if verb in IRREGULAR_VERBS:
        return IRREGULAR_VERBS[verb]
    if verb in DOUBLED:
        return f"{verb}{verb[-1]}ed"
    if verb.endswith("e"):
        return f"{verb}d"
    return f"{verb[:-1]}ied" if _consonant_y(verb) else f"{verb}ed"


def plural(noun: str) -> str:
    """More than one of it: children, cities, boxes, books."""
    return IRREGULAR_NOUNS.get(noun) or _with_s(noun)


def _with_s(word: str) -> str:
    if _consonant_y(word):
        return f"{word[:-1]}ies"
    return f"{word}es" if word.endswith(("s", "x", "ch", "sh")) else f"{word}s"


def _consonant_y(word: str) -> bool:
    return word.endswith("y") and word[-2] not in "aeiou"


VERBS = {verb: past(verb) for verb in (*IRREGULAR_VERBS, *REGULAR_VERBS)}
NOUNS = {noun: plural(noun) for noun in (*IRREGULAR_NOUNS, *REGULAR_NOUNS)}
