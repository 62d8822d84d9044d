"""Number agreement: a verb agrees with its subject, though the nearest noun has the other number.

"The keys near the cabinet" -> " are". The behaviour is that of Linzen et al., arXiv 1611.01368.
"""

from operator import attrgetter

from gatelens.errors import GatelensError
from gatelens.tasks import Entry
from gatelens.tasks._words import pairs
from gatelens.tasks.base import CircuitTask
from gatelens.tasks.build import circuit_task
from gatelens.tasks.draw import distinct, generator
from gatelens.tasks.token_roles import mark
from gatelens.tasks.tokens import Pair, Tokenizer, marked_pair, preferably_single, single_tokens

# Singular and plural. A pair is used only if the tokenizer writes both as one token.
NOUNS = pairs(
    """
    key/keys book/books friend/friends child/children man/men woman/women teacher/teachers student/students
    doctor/doctors author/authors picture/pictures letter/letters house/houses car/cars tree/trees door/doors
    window/windows table/tables chair/chairs cup/cups bird/birds dog/dogs cat/cats horse/horses boat/boats
    ship/ships road/roads bridge/bridges river/rivers garden/gardens farmer/farmers driver/drivers player/players
    singer/singers worker/workers lawyer/lawyers guard/guards soldier/soldiers artist/artists painting/paintings
    """
)
PREPOSITIONS = ("near", "behind", "beside", "beyond")
SINGULAR_VERBS = (" is", " was", " has")
PLURAL_VERBS = (" are", " were", " have")


def build(tokenizer: Tokenizer, n: int, seed: int) -> CircuitTask:
    """A subject and, nearer to the verb, a noun of the other number.

    Metric: the probability of the verbs that agree (is, was, has or are, were, have) minus that of the others. The
    corrupt prompt has the subject in the other number.
    """
    random = generator("subject-verb", seed)
    single = set(single_tokens(tokenizer, [word for pair in NOUNS.items() for word in pair], "nouns", least=0))
    nouns = [(singular, plural) for singular, plural in NOUNS.items() if singular in single and plural in single]
    if len(nouns) < 2:
        raise GatelensError(
            f"subject-verb needs two nouns whose singular and plural are one token each, and this tokenizer has "
            f"{len(nouns)} of {len(NOUNS)}: choose a model with a larger vocabulary."
        )
    prepositions = preferably_single(tokenizer, PREPOSITIONS)

    def draw() -> Pair:
        subject, nearest = random.sample(nouns, 2)
        number = random.choice((0, 1))
        preposition = random.choice(prepositions)
        middle = f"{mark(preposition, 'preposition')} the {nearest[1 - number]}"
        verbs = (SINGULAR_VERBS, PLURAL_VERBS)
        clean, corrupt = (f"The {mark(subject[k], 'subject')} {middle}" for k in (number, 1 - number))
        return marked_pair(clean, corrupt, verbs[number], verbs[1 - number], preposition)

    return circuit_task(
        tokenizer, "subject-verb", seed, distinct(n, draw, key=attrgetter("clean")), difference="probability"
    )


TASK = Entry(
    build,
    "circuit",
    "Give a verb that agrees with its subject, not with the nearest noun.",
    ("The keys near the door", " are"),
)
