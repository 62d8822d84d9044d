"""Methods are registered values: a new one is used everywhere without another change."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from families import tiny
from pydantic import Field
from toys import random_task

from gatelens import CircuitSettings, Context, GatelensError, HeadScores
from gatelens.gates import LEVELS
from gatelens.jobs.circuit import find_circuit, score
from gatelens.methods import registry
from gatelens.methods.registry import Method, MethodSettings, Price, method_named, methods, register


class _Settings(MethodSettings):
    steps: int = Field(default=3, ge=1)
    offset: float = 0.0


def _by_number(level: Any, model: Any, task: Any, settings: _Settings, context: Context) -> HeadScores:
    """Every head's score is its number times the steps, plus the offset."""
    n_heads = model.n_layers * model.n_heads
    return HeadScores(
        torch.arange(float(n_heads)).view(model.n_layers, -1) * settings.steps + settings.offset, "by number"
    )


@pytest.fixture
def by_number() -> Iterator[Method]:
    method = Method(
        name="by-number",
        score=_by_number,
        levels=("heads",),
        price=lambda level, settings: Price(),
        paper="none",
        help="for this test",
        settings=_Settings,
        exact=True,
    )
    yield register(method)
    del registry._METHODS["by-number"]


def test_a_registered_method_is_used_by_its_name(by_number: Method) -> None:
    settings = CircuitSettings(method="by-number", steps=7, points=4, random_points=0, allow_noise=True)
    model, task = tiny("llama"), random_task(n=2, lengths=(5,))
    scores = score(model, task, settings)
    assert [gate.name for gate in scores.top(2)] == ["L2H3", "L2H2"]
    assert scores.top(1)[0].score == 11 * 7
    result = find_circuit(model, task, settings)
    assert {0, 4, 8, 12} <= set(result.curve.asked)  # and points around the count
    assert result.validity.correlation is None  # an exact method is not checked


def test_a_method_has_settings_of_its_own(by_number: Method) -> None:
    model, task = tiny("llama"), random_task(n=2, lengths=(5,))
    settings = CircuitSettings(method="by-number", steps=1, method_options=("offset=0.5",))
    assert score(model, task, settings).top(1)[0].score == 11.5
    with pytest.raises(GatelensError, match=r"the method by-number: no setting 'ofset': did you mean 'offset'\?"):
        CircuitSettings(method="by-number", method_options=("ofset=1",))
    with pytest.raises(GatelensError, match="the method by-number: offset is 'much': it must be a number"):
        CircuitSettings(method="by-number", method_options=("offset=much",))
    with pytest.raises(GatelensError, match="'offset' is not an option of the method: write it as KEY=VALUE"):
        CircuitSettings(method="by-number", method_options=("offset",))


def test_a_method_works_on_its_levels_only(by_number: Method) -> None:
    with pytest.raises(GatelensError, match="the method by-number does not score edges: it scores heads"):
        CircuitSettings(method="by-number", level="edges")


def test_a_name_that_does_not_exist() -> None:
    with pytest.raises(GatelensError, match=r"no method 'eap-ip': did you mean 'eap-ig'\?"):
        method_named("eap-ip")


def test_two_methods_of_one_name_are_refused(by_number: Method) -> None:
    with pytest.raises(ValueError, match="registered twice"):
        register(by_number)


def test_all_methods_have_levels_a_cost_and_a_paper() -> None:
    assert {"eap", "eap-ig", "patching"} <= methods().keys()
    for name, method in methods().items():
        assert method.name == name
        assert re.search(r"arXiv \d{4}\.\d{5}", method.paper)
        levels = [level for name, level in LEVELS.items() if method.works_on(name)]
        assert levels
        for level in levels:
            assert method.price(level, method.settings()).forwards(10, 4, 100) > 0


def test_a_price_says_what_it_depends_on() -> None:
    price = Price(each=2, per_layer=5, per_gate=0.5, per_gate_squared=0.25, in_all=1000)
    assert price.forwards(10, 4, 100) == 10 * (2 + 5 * 4 + 0.5 * 100 + 0.25 * 100**2) + 1000
    assert str(price) == "2 F + 5 F per layer + 0.5 F per gate + 0.25 F per gate² + 1,000 F in all"
