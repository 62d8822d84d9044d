"""Settings for tests that look at one thing: score gates, KL held at its target, one length, constant rates."""

from __future__ import annotations

from typing import Any

SIMPLE: dict[str, Any] = {
    "gate": "score",
    "hold": "loss",
    "kl": 1.0,
    "penalty": "total",
    "temperature": 1.0,
    "lengths": (),
    "clip": None,
    "warmup": 0,
    "cooldown": 0.0,
}
