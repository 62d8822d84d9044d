"""Hypothesis tests of circuits: equivalence, independence and minimality (Shi et al., arXiv 2410.13032).

Each test has a null hypothesis that an ideal circuit fulfils, so a circuit passes a test if the hypothesis is *not*
rejected. A few prompts reject little: read a pass together with the number of prompts.

- *Equivalence*: the circuit does better than the whole model on about half of the prompts.
- *Independence*: the metric of all other gates says nothing about the metric of the whole model.
- *Minimality*: every gate of the circuit matters more than most gates that were added at random.

These functions know metrics only. `gatelens.measures.circuit_tests` measures them.
"""

from __future__ import annotations

import math
from itertools import permutations

import numpy as np
import torch
from jaxtyping import Float
from pydantic import Field
from scipy import stats
from torch import Tensor

from gatelens.runtime.settings import Settings

ALPHA = 0.05
"""A hypothesis is rejected if its p-value is below this."""
EPSILON = 0.1
"""How far the chance that the circuit does better may be from one half."""
QUANTILE = 0.9
"""A gate of a minimal circuit matters more than this share of random gates."""
_PERMUTATIONS = 1000
_ROUNDING = 1e-5  # differences below this share of a metric are rounding


class HypothesisTest(Settings):
    """The outcome of one test. ``str(test)`` is what tables print."""

    test: str = Field(description="equivalence or independence")
    statistic: float = Field(
        description="equivalence: the share of prompts on which the circuit does better; independence: HSIC"
    )
    p: float = Field(description="how likely such a statistic, or a more extreme one, is under the null hypothesis")
    rejected: bool = Field(description="whether p is below 0.05, so that the circuit fails the test")
    prompts: int

    def __str__(self) -> str:
        return f"{'fails' if self.rejected else 'passes'} (p = {self.p:.2g}; {self.prompts} prompts)"


def equivalence(
    circuit: Float[Tensor, " prompt"], model: Float[Tensor, " prompt"], epsilon: float = EPSILON
) -> HypothesisTest:
    """Whether circuit and model have about the same chance of doing better than the other one: a sign test.

    The null hypothesis is ``|P(circuit > model) - 1/2| <= epsilon``. The p-value is that of its least favourable case,
    a chance of ``1/2 + epsilon``: the probability that the number of prompts on which the circuit does better is at
    least as far from one half as it is here. Prompts on which both are equal, up to rounding, are
    left out.

    Arguments:
        circuit, model: the metric on the same prompts.
    """
    difference = circuit - model
    differs = difference.abs() > _ROUNDING * torch.maximum(circuit.abs(), model.abs())
    n, better = int(differs.sum()), int((differs & (difference > 0)).sum())
    counts = np.arange(n + 1)
    as_extreme = np.abs(2 * counts - n) >= abs(2 * better - n)
    p = min(1.0, float(stats.binom.pmf(counts[as_extreme], n, 0.5 + epsilon).sum()))
    share = better / n if n else 0.5
    return HypothesisTest(test="equivalence", statistic=share, p=p, rejected=p < ALPHA, prompts=len(circuit))


def independence(rest: Float[Tensor, " prompt"], model: Float[Tensor, " prompt"], seed: int = 0) -> HypothesisTest:
    """Whether the metric of all gates but the circuit is independent of the metric of the whole model.

    The statistic is the Hilbert-Schmidt independence criterion with Gaussian kernels, whose width is the median
    distance between prompts. Its distribution under independence comes from permutations of the prompts: all of them if
    there are at most 1,000, otherwise 1,000 random ones.

    Arguments:
        rest, model: the metric on the same prompts.
        seed: decides the permutations.
    """
    n = len(rest)
    a, b = (_centred_kernel(values.double()) for values in (rest, model))
    if math.factorial(min(n, 20)) <= _PERMUTATIONS:
        orders = [torch.tensor(order) for order in permutations(range(n))]
        surely = 0
    else:
        generator = torch.Generator().manual_seed(seed)
        orders = [torch.randperm(n, generator=generator) for _ in range(_PERMUTATIONS)]
        surely = 1  # the order that was observed
    observed = float((a * b).sum())
    permuted = torch.stack([(a * b[order][:, order]).sum() for order in orders])
    as_large = int((permuted >= observed - 1e-9 * max(1.0, abs(observed))).sum())
    p = (as_large + surely) / (len(orders) + surely)
    hsic = observed / max(1, n - 1) ** 2
    return HypothesisTest(test="independence", statistic=hsic, p=p, rejected=p < ALPHA, prompts=n)


def minimality(
    lost: Float[Tensor, " gate"], random: Float[Tensor, " added"], quantile: float = QUANTILE
) -> Float[Tensor, " gate"]:
    """The p-value of each gate of a circuit under the hypothesis that it matters more than most random gates.

    The null hypothesis of a gate is that it matters more than a random gate in at least the share ``quantile`` of all
    cases. The p-value is a binomial probability: that of at most as many cases as there are here. The circuit is not
    minimal if any p-value is below 0.05 divided by the number of gates (Bonferroni).

    Arguments:
        lost: how much each gate matters: by how much the metric changes if the circuit loses it.
        random: how much gates matter that were added to the circuit at random.
    """
    beaten = (lost[:, None] > random[None]).sum(1).numpy()
    return torch.from_numpy(np.atleast_1d(stats.binom.cdf(beaten, len(random), quantile)))


def _centred_kernel(values: Float[Tensor, " prompt"]) -> Float[Tensor, "prompt prompt"]:
    """The Gaussian kernel of all pairs of prompts, without its row and column means."""
    distances = (values[:, None] - values[None]).abs()
    apart = distances[distances > 0]
    # numpy's median is the mean of the two middle numbers; torch's is the lower one.
    width = float(np.median(distances[~torch.eye(len(values), dtype=torch.bool)])) if len(values) > 1 else 0.0
    if width == 0:
        width = float(apart.mean()) if len(apart) else 1.0
    kernel = torch.exp(-(distances**2) / (2 * width**2))
    return kernel - kernel.mean(0) - kernel.mean(1, keepdim=True) + kernel.mean()
