"""Word lists that several tasks draw from; each task keeps those its tokenizer writes as one token."""


def words(text: str) -> tuple[str, ...]:
    """The words of a list written as text."""
    return tuple(text.split())


def pairs(text: str) -> dict[str, str]:
    """The pairs of a list written as text: one/two three/four; an underscore stands for a space."""
    split = (pair.replace("_", " ").partition("/") for pair in text.split())
    return {one: two for one, _, two in split}


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

PLACES = ("library", "market", "museum", "park", "beach", "theater", "farm", "kitchen")

OBJECTS = ("book", "letter", "ticket", "camera", "coin", "sandwich", "map", "flower")

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
