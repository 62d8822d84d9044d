"""Word lists that several tasks draw from, and rules for English word forms.

A circuit task uses only the words that the tokenizer writes as one token.
"""


def words(text: str) -> tuple[str, ...]:
    """Split a list of words that is written as text."""
    return tuple(text.split())


def pairs(text: str) -> dict[str, str]:
    """Split a list of pairs that is written as text, such as "hot/cold big/small". An underscore stands for a space."""
    split = (pair.replace("_", " ").partition("/") for pair in text.split())
    return {left: right for left, _, right in split}


WOMEN = words(
    """
    Mary Anna Emma Sarah Laura Julia Alice Emily Jane Helen Linda Susan Karen Nancy Lisa Ruth Maria Diana Amy
    Rachel Claire Lucy Grace Rose Sophie Kate Anne Julie Jessica Amanda Michelle Rebecca Angela Hannah Victoria
    Elizabeth Margaret Catherine Christine Jennifer Martha Barbara Carol Sandra Ashley Stephanie Heather Nicole
    Melissa Megan Lily Sara Mia Ella Sue
    """
)

MEN = words(
    """
    John Tom James Robert David Michael William Richard Thomas Charles Daniel Matthew Mark Paul Steven Andrew
    George Kevin Brian Edward Jason Ryan Jacob Gary Nicholas Eric Jonathan Stephen Larry Justin Scott Brandon
    Benjamin Samuel Frank Gregory Raymond Alexander Patrick Jack Dennis Peter Henry Adam Douglas Nathan Kyle
    Walter Jeremy Keith Roger Sean Christian Joe Simon Max Ben Tim Sam Bob Bill Jim Fred Luke Martin Philip
    Timmy
    """
)

NAMES = WOMEN + MEN

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
# Regular verbs that double their last consonant: stopped, planned.
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


def third_person(verb: str) -> str:
    """The third person singular: goes, watches, studies, plays."""
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
    """The plural: children, cities, boxes, books."""
    return IRREGULAR_NOUNS.get(noun) or _with_s(noun)


def _with_s(word: str) -> str:
    if _consonant_y(word):
        return f"{word[:-1]}ies"
    return f"{word}es" if word.endswith(("s", "x", "ch", "sh")) else f"{word}s"


def _consonant_y(word: str) -> bool:
    return word.endswith("y") and word[-2] not in "aeiou"


# Verb -> past tense, and singular -> plural.
VERBS = {verb: past(verb) for verb in (*IRREGULAR_VERBS, *REGULAR_VERBS)}
NOUNS = {noun: plural(noun) for noun in (*IRREGULAR_NOUNS, *REGULAR_NOUNS)}
