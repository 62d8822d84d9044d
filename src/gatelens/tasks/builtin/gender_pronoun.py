"""Gender agreement: a tag question takes the pronoun that fits the name.

"Everyone knows that Mary is a good friend, isn't" -> " she".
"""

from operator import attrgetter

from gatelens.tasks import Entry
from gatelens.tasks._words import MEN, WOMEN, words
from gatelens.tasks.base import CircuitTask
from gatelens.tasks.build import circuit_task
from gatelens.tasks.draw import distinct, generator
from gatelens.tasks.token_roles import mark
from gatelens.tasks.tokens import Pair, Tokenizer, marked_pair, preferably_single, single_tokens

TEMPLATES = (
    "Everyone knows that {name} is a good {person}, isn't",
    "I think that {name} is a really kind {person}, isn't",
    "We all agree that {name} is the best {person} here, isn't",
    "They say that {name} is a very careful {person}, isn't",
    "You told me that {name} was a great {person}, wasn't",
    "The {person} over there is called {name}, isn't",
)
PERSONS = words("friend teacher doctor student writer driver singer player lawyer worker reader dancer")


def build(tokenizer: Tokenizer, n: int, seed: int) -> CircuitTask:
    """A tag question about a woman or a man.

    Metric: the logit of the right pronoun minus the logit of the other one. The corrupt prompt has a name of the other
    gender.
    """
    random = generator("gender-pronoun", seed)
    women, men = (single_tokens(tokenizer, names, "names", least=1) for names in (WOMEN, MEN))
    persons = preferably_single(tokenizer, PERSONS)

    def draw() -> Pair:
        template, person = random.choice(TEMPLATES), random.choice(persons)
        woman, man = random.choice(women), random.choice(men)
        names, pronouns = [woman, man], [" she", " he"]
        if random.random() < 0.5:
            names, pronouns = names[::-1], pronouns[::-1]
        clean, corrupt = (template.format(name=mark(name, "name"), person=mark(person, "person")) for name in names)
        return marked_pair(clean, corrupt, (pronouns[0],), (pronouns[1],), template)

    return circuit_task(tokenizer, "gender-pronoun", seed, distinct(n, draw, key=attrgetter("clean")))


TASK = Entry(
    build,
    "circuit",
    "A tag question: give the pronoun that fits the name.",
    ("Everyone knows that Mary is a good friend, isn't", " she"),
)
