"""Greater-than: "The war lasted from the year 1732 to the year 17" -> any year after 1732.

The behaviour is that of Hanna et al., arXiv 2305.00586. Tokenizers split years differently, so the tokenizer decides
which tokens can follow the prompt. A start year is XXYY, with XX from 11 to 17 and YY from 02 to 98:

- The prompt ends with the century XX or, if the tokenizer never splits a year there, with XX and the decade's digit.
  Every end year that begins like this is tokenised, and its first token after the prompt stands for it.
- A token is *above* if all the years that it stands for are after XXYY, and *not above* if none of them is.
- XXYY is used only if every token is either above or not above and both kinds exist (the next token then decides the
  comparison), if at least half of the end years are split at the end of the prompt, and if XXYY is split like the XX01
  of the corrupt prompt.

| split | example | prompt ends | decided by | years used |
|---|---|---|---|---|
| two digits (GPT-2, GPT-NeoX, OLMo) | 17 32 | the year 17 | 33..99 against 00..32 | all that are split like this |
| single digits (SmolLM2, Gemma, Mistral, Qwen) | 1 7 3 9 | the year 17 | 4..9 against 0..3 | YY = 09, 19, ..., 89 |
| three digits (Llama 3) | 173 2 | the year 173 | 3..9 against 0..2 | YY does not end in 9 |

With single digits, the next token is the digit of the decade. It decides the comparison only for years that end in 9,
because no later year is in the same decade. End years that a tokenizer splits in another way (GPT-2 has one token for
1700) cannot follow the prompt and are left out. The corrupt prompt has YY = 01: nearly every end year is later.
"""

from dataclasses import dataclass
from operator import attrgetter
from typing import Any

from gatelens.errors import GatelensError
from gatelens.tasks import Entry
from gatelens.tasks._words import words
from gatelens.tasks.base import CircuitTask
from gatelens.tasks.build import circuit_task
from gatelens.tasks.draw import distinct, generator
from gatelens.tasks.token_roles import mark
from gatelens.tasks.tokens import Pair, Tokenizer, encode, marked_pair, preferably_single

CENTURIES = range(11, 18)
YEARS = range(2, 99)
# The first template is that of the paper; the others are used if the option `templates` is "several".
TEMPLATES = (
    "The {noun} lasted from the year {start} to the year {end}",
    "The {noun} went on from the year {start} until the year {end}",
    "The {noun} that began in the year {start} came to an end in the year {end}",
    "They had documents of the {noun} from the year {start} up to the year {end}",
)
EVENTS = words(
    """
    war siege battle campaign revolt rebellion uprising conflict struggle dispute feud crisis famine plague
    drought epidemic outbreak flood winter reign rule dynasty empire kingdom republic regime occupation invasion
    conquest crusade mission expedition voyage journey tour exile truce peace treaty alliance union partnership
    agreement contract negotiation trial inquiry investigation debate strike protest boycott blockade ban embargo
    project construction excavation survey study experiment program trade boom recession depression expansion
    reform movement renaissance revolution era age period marriage engagement courtship friendship rivalry career
    festival celebration exhibition tournament season pilgrimage hunt chase raid mutiny conspiracy
    persecution captivity imprisonment apprenticeship migration settlement colony mandate regency
    operation search emergency controversy decline
    """
)


@dataclass(frozen=True)
class Start:
    """A start year that can be used: where its prompt ends, and which tokens can follow."""

    year: int
    end: str  # the digits of the end year that the prompt shows
    above: tuple[str, ...]  # the next tokens, as text, that stand for later years only
    not_above: tuple[str, ...]  # the next tokens that stand for the same or for earlier years only


def build(tokenizer: Tokenizer, n: int, seed: int, *, templates: str = "one") -> CircuitTask:
    """A later year. Metric: the probability of the later years minus that of the others, between -1 and 1.

    Arguments:
        templates: "one" has the sentence of the paper in all prompts; "several" draws one of four sentences.
    """
    random = generator("greater-than", seed)
    nouns = preferably_single(tokenizer, EVENTS)
    starts = decidable_years(tokenizer)
    if not starts:
        raise GatelensError(
            "greater-than needs a tokenizer that splits a year after the century or the decade (17 32, 1 7 3 2, 173 2)"
            ", and this tokenizer does not: choose another model."
        )

    def draw() -> Pair:
        noun, start = random.choice(nouns), random.choice(starts)
        template = random.choice(TEMPLATES) if templates == "several" else TEMPLATES[0]
        years = (start.year, start.year // 100 * 100 + 1)
        clean, corrupt = (_write(template, noun, year, start.end) for year in years)
        return marked_pair(clean, corrupt, start.above, start.not_above, template)

    options: dict[str, Any] = {} if templates == "one" else {"templates": templates}
    pairs = distinct(n, draw, key=attrgetter("clean"))
    return circuit_task(tokenizer, "greater-than", seed, pairs, difference="probability", **options)


def _write(template: str, noun: str, year: int, end: str) -> str:
    """The prompt. Token roles: the event, century and year of the start (17 and 32), and the century of the end."""
    start = mark(str(year)[:2], "start century") + mark(str(year)[2:], "start year")
    return template.format(noun=mark(noun, "event"), start=start, end=mark(end, "end century"))


def decidable_years(tokenizer: Tokenizer) -> list[Start]:
    """The start years that work with this tokenizer, in order. All prompts show as many digits of the end year."""
    years = [str(year) for year in range(100 * CENTURIES.start, 100 * CENTURIES.stop)]
    ids = dict(zip(years, encode(tokenizer, [f"to the year {year}" for year in years]), strict=True))
    for digits in (2, 3):
        following = _following(tokenizer, ids, digits)
        candidates = (
            _start(100 * century + yy, digits, following)
            for century in CENTURIES
            for yy in YEARS
            # The clean and the corrupt prompt differ in the start year, so it must be split like XX01.
            if _shape(tokenizer, ids[f"{century}{yy:02}"]) == _shape(tokenizer, ids[f"{century}01"])
        )
        if starts := [start for start in candidates if start]:
            return starts
    return []


def _shape(tokenizer: Tokenizer, ids: list[int]) -> list[int]:
    """The number of characters of each token."""
    return [len(tokenizer.decode([index])) for index in ids]


def _following(tokenizer: Tokenizer, ids: dict[str, list[int]], digits: int) -> dict[str, dict[str, list[int]]]:
    """For the first `digits` digits of a year: the next token, as text -> the years that it stands for.

    Beginnings after which the tokenizer splits fewer than half of their years are left out.
    """
    beginnings = sorted({year[:digits] for year in ids})
    prompt_ids = encode(tokenizer, [f"to the year {beginning}" for beginning in beginnings])
    following: dict[str, dict[str, list[int]]] = {}
    for beginning, prompt in zip(beginnings, prompt_ids, strict=True):
        years = [year for year in ids if year.startswith(beginning)]
        split = [year for year in years if len(ids[year]) > len(prompt) and ids[year][: len(prompt)] == prompt]
        if 2 * len(split) < len(years):
            continue
        following[beginning] = {}
        for year in split:
            token = tokenizer.decode(ids[year][len(prompt) : len(prompt) + 1]).strip()
            following[beginning].setdefault(token, []).append(int(year))
    return following


def _start(year: int, digits: int, following: dict[str, dict[str, list[int]]]) -> Start | None:
    """The start year and what can follow its prompt; None if the next token does not decide the comparison."""
    end = str(year)[:digits]
    tokens = following.get(end, {})
    above = tuple(token for token, years in tokens.items() if min(years) > year)
    not_above = tuple(token for token, years in tokens.items() if max(years) <= year)
    decidable = above and not_above and len(above) + len(not_above) == len(tokens)
    return Start(year, end, above, not_above) if decidable else None


TASK = Entry(
    build,
    "circuit",
    "An event ends after it has begun: give a later year.",
    ("The war lasted from the year 1739 to the year 17", "40 to 99"),
    choices={"templates": ("one", "several")},
)
