"""The results of learned head gates: the role of every head in a task, and the contrast between two tasks.

``methods/head_gating.py`` and ``methods/contrast.py`` compute them, and reports read them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from jaxtyping import Bool, Float, Int
from torch import Tensor

from gatelens.errors import GatelensError
from gatelens.model.components import Head
from gatelens.runtime.shown import Shown

KINDS = ("facilitation", "irrelevance", "interference")
"""The roles that a head can have."""


@dataclass(frozen=True, eq=False, repr=False)
class HeadRoles(Shown):
    """The role of every head: three scores from 0 to 1 for each seed, derived from three fits of its gate.

    Example:
        roles = gatelens.fit_head_gates(model, task)
        roles.facilitation.mean(0)   # (layer, head), mean over seeds

    Arguments:
        gates: G, fitted without a penalty.
        plus: G+, fitted with a reward for open gates.
        minus: G-, fitted with a reward for closed gates.
        losses: mean NLL of the target tokens in every update; the fits are G, G+ and G-. It is nan in updates that
            were not made because no gate moved any more.
    """

    gates: Float[Tensor, "seed layer head"]
    plus: Float[Tensor, "seed layer head"]
    minus: Float[Tensor, "seed layer head"]
    losses: Float[Tensor, "fit update seed"]

    drawn_by = "gatelens.report.plots:plot_roles"

    def records(self) -> list[dict[str, Any]]:
        """The three scores of every head, mean over seeds; heads that facilitate most come first."""
        means = {name: self.kind(name).mean(0).flatten() for name in KINDS}
        n_heads = self.plus.shape[2]
        order = means[KINDS[0]].argsort(descending=True, stable=True).tolist()
        return [
            {"head": str(Head(*divmod(i, n_heads))), **{name: float(values[i]) for name, values in means.items()}}
            for i in order
        ]

    def headline(self) -> str:
        return f"roles of {self.plus[0].numel()} heads, mean over {len(self.plus)} seeds"

    @property
    def updates(self) -> Int[Tensor, "fit seed"]:
        """How many updates each fit had: all, or fewer if its gates stood still before (`FitSettings.patience`)."""
        return (~self.losses.isnan()).sum(1)

    @property
    def facilitation(self) -> Float[Tensor, "seed layer head"]:
        """G-: high if the gate stays open although closed gates are rewarded. The task needs the head."""
        return self.minus

    @property
    def irrelevance(self) -> Float[Tensor, "seed layer head"]:
        """G+ (1 - G-): high if the gate follows the reward. The head does not matter to the task."""
        return self.plus * (1 - self.minus)

    @property
    def interference(self) -> Float[Tensor, "seed layer head"]:
        """1 - G+: high if the gate closes although open gates are rewarded. The head hinders the task."""
        return 1 - self.plus

    def kind(self, name: str) -> Float[Tensor, "seed layer head"]:
        """The scores of one kind: facilitation, irrelevance or interference."""
        if name not in KINDS:
            raise GatelensError(f"no kind of head '{name}': there are {', '.join(KINDS)}.")
        scores: Tensor = getattr(self, name)
        return scores

    def is_kind(self, name: str) -> Bool[Tensor, "seed layer head"]:
        """Whether each head is of a kind: its score is 0.5 or more."""
        return self.kind(name) >= 0.5

    def summary(self) -> dict[str, dict[str, float]]:
        """For each kind the share of heads that are of this kind in all seeds, and in any seed."""
        shares = {}
        for name in KINDS:
            is_kind = self.is_kind(name)
            shares[name] = {
                "all seeds": float(is_kind.all(0).float().mean()),
                "any seed": float(is_kind.any(0).float().mean()),
            }
        return shares


@dataclass(frozen=True, eq=False)
class ContrastAccuracy:
    """The share of response tokens that are the model's first choice, mean over held-out examples; from 0 to 1.

    Arguments:
        keep, lose: of the responses to keep and to lose, under the gates.
        keep_open, lose_open: the same with all gates open.

    Example:
        accuracy = gatelens.load_contrast("runs/contrast").contrast.accuracy
        accuracy.keep, accuracy.lose, accuracy.keep_open, accuracy.lose_open
    """

    keep: Float[Tensor, " seed"]
    lose: Float[Tensor, " seed"]
    keep_open: float
    lose_open: float


@dataclass(frozen=True, eq=False)
class Contrast:
    """Gates that keep the responses of one task and lose those of another, and their effect on held-out examples.

    A log-probability is that of a response, summed over its tokens, mean over the held-out examples of a task.

    Arguments:
        gates: from 0 to 1.
        losses: the loss of every update.
        keep: log-probability of the responses to keep, under the gates.
        lose: log-probability of the responses to lose, under the gates.
        keep_open: log-probability of the responses to keep, with all gates open.
        lose_open: log-probability of the responses to lose, with all gates open.
        accuracy: how often the responses are predicted; None in runs of early versions.

    Example:
        contrast = gatelens.load_contrast("runs/contrast").contrast
        contrast.gates.mean(0)  # (layer, head): open where the head is needed for the task that is kept
    """

    gates: Float[Tensor, "seed layer head"]
    losses: Float[Tensor, "update seed"]
    keep: Float[Tensor, " seed"]
    lose: Float[Tensor, " seed"]
    keep_open: float
    lose_open: float
    accuracy: ContrastAccuracy | None = None
