"""Agreement in gender and number: a pronoun with a name, a verb with a distant subject.

`gender-pronoun`: "Everyone knows that Mary is a good friend, isn't" -> " she".
`subject-verb`: "The keys near the cabinet" -> " are", though the nearest noun is singular (Linzen et al.,
arXiv 1611.01368).
"""

from operator import attrgetter

from gatelens.errors import GatelensError
from gatelens.tasks._words import MEN, WOMEN, pairs, words
from gatelens.tasks.base import CircuitTask, circuit_task
from gatelens.tasks.draw import distinct, generator
from gatelens.tasks.tokens import Pair, Tokenizer, preferably_single, single_tokens

PRONOUN_TEMPLATES = (
    "Everyone knows that {name} is a good {person}, isn't",
    "I think that {name} is a really kind {person}, isn't",
    "We all agree that {name} is the best {person} here, isn't",
    "They say that {name} is a very careful {person}, isn't",
    "You told me that {name} was a great {person}, wasn't",
    "The {person} over there is called {name}, isn't",
)
PERSONS = words("friend teacher doctor student writer driver singer player lawyer worker reader dancer")

# Singular and plural subject; no pair is used where the tokenizer splits either.
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


def gender_pronoun(tokenizer: Tokenizer, n: int, seed: int) -> CircuitTask:
    """A tag question about a woman or a man. Metric: logit of the right pronoun minus that of the other.

    The corrupt prompt has a name of the other gender.
    """
    random = generator("gender-pronoun", seed)
    women, men = (single_tokens(tokenizer, names, "names", least=1) for names in (WOMEN, MEN))
    persons = preferably_single(tokenizer, PERSONS)

    def draw() -> Pair:
        template, person = random.choice(PRONOUN_TEMPLATES), random.choice(persons)
        woman, man = random.choice(women), random.choice(men)
        names, pronouns = [woman, man], [" she", " he"]
        if random.random() < 0.5:
            names, pronouns = names[::-1], pronouns[::-1]
        clean, corrupt = (template.format(name=name, person=person) for name in names)
        return Pair(clean, corrupt, (pronouns[0],), (pronouns[1],))

    return circuit_task(tokenizer, "gender-pronoun", seed, distinct(n, draw, key=attrgetter("clean")))


def subject_verb(tokenizer: Tokenizer, n: int, seed: int) -> CircuitTask:
    """A subject and, nearer to the verb, a noun of the other number.

    Metric: probability of the verbs (is, was, has against are, were, have) that agree minus that of the others.
    The corrupt prompt has the subject in the other number.
    """
    random = generator("subject-verb", seed)
    single = set(single_tokens(tokenizer, [word for pair in NOUNS.items() for word in pair], "nouns", least=0))
    nouns = [(one, many) for one, many in NOUNS.items() if one in single and many in single]
    if len(nouns) < 2:
        raise GatelensError(
            f"subject-verb needs two nouns whose singular and plural are one token each, and this tokenizer has "
            f"{len(nouns)} of {len(NOUNS)}; take a model with a larger vocabulary."
        )
    prepositions = preferably_single(tokenizer, PREPOSITIONS)

    def draw() -> Pair:
        subject, nearest = random.sample(nouns, 2)
        number = random.choice((0, 1))
        middle = f"{random.choice(prepositions)} the {nearest[1 - number]}"
        verbs = (SINGULAR_VERBS, PLURAL_VERBS)
        clean, corrupt = (f"The {subject[k]} {middle}" for k in (number, 1 - number))
        return Pair(clean, corrupt, verbs[number], verbs[1 - number])

    return circuit_task(
        tokenizer, "subject-verb", seed, distinct(n, draw, key=attrgetter("clean")), difference="probability"
    )
