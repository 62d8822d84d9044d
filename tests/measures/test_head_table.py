"""The kinds of a head follow from its line in the table; a threshold itself is enough."""

from __future__ import annotations

from typing import Any

import pytest

from gatelens.measures.head_table import (
    DIRECT_LEAST,
    MOVER,
    MOVER_LEAST,
    NEGATIVE_MOVER,
    PROBE_LEAST,
    REST,
    REST_LEAST,
    SUPPRESSOR,
    HeadLine,
)
from gatelens.tasks.token_roles import FIRST

LESS = 1e-6


def line(**values: Any) -> HeadLine:
    plain = {"looks": {}, "at_answer": 0.0, "at_wrong": 0.0, "answer": 0.0, "wrong": 0.0}
    return HeadLine(head="L0H0", score=0.0, low=0.0, high=0.0, share=0.0, writes=(), **plain | values)


@pytest.mark.parametrize(
    ("values", "kinds"),
    [
        ({"at_answer": MOVER_LEAST, "answer": DIRECT_LEAST}, (MOVER,)),
        ({"at_answer": MOVER_LEAST, "wrong": DIRECT_LEAST}, (NEGATIVE_MOVER,)),
        ({"at_answer": MOVER_LEAST - LESS, "answer": DIRECT_LEAST}, ()),
        ({"at_answer": MOVER_LEAST, "answer": DIRECT_LEAST - LESS}, ()),
        ({"at_wrong": MOVER_LEAST, "answer": DIRECT_LEAST}, (SUPPRESSOR,)),
        ({"at_wrong": MOVER_LEAST, "wrong": DIRECT_LEAST}, ()),  # it helps the wrong answer
        ({"at_wrong": MOVER_LEAST - LESS, "answer": DIRECT_LEAST}, ()),
        ({"probes": {"induction": PROBE_LEAST, "previous token": PROBE_LEAST - LESS}}, ("induction",)),
        ({"probes": {"induction": 0.5, "previous token": 0.9}}, ("previous token", "induction")),
        ({"looks": {FIRST: REST_LEAST}}, (REST,)),
        ({"looks": {FIRST: REST_LEAST - LESS}}, ()),
    ],
)
def test_kinds(values: dict[str, Any], kinds: tuple[str, ...]) -> None:
    assert line(**values).kinds == kinds
