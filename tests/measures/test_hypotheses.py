"""The hypothesis tests against closed forms, plain sums and all permutations."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from gatelens.measures.hypotheses import equivalence, independence, minimality


def better_on(count: int, n: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A circuit that does better than the model on so many prompts, and worse on the others."""
    return torch.where(torch.arange(n) < count, 1.0, -1.0), torch.zeros(n)


class TestEquivalence:
    @pytest.mark.parametrize("n", [1, 5, 10, 33])
    def test_is_the_sum_of_binomial_probabilities(self, n: int) -> None:
        for count in range(n + 1):
            found = equivalence(*better_on(count, n))
            expected = sum(
                math.comb(n, j) * 0.6**j * 0.4 ** (n - j)
                for j in range(n + 1)
                if abs(j / n - 0.5) >= abs(count / n - 0.5) - 1e-12
            )
            assert found.p == pytest.approx(expected)
            assert found.statistic == pytest.approx(count / n)

    def test_all_of_ten(self) -> None:
        """0.6 ** 10 + 0.4 ** 10 = 0.00615."""
        found = equivalence(*better_on(10, 10))
        assert found.p == pytest.approx(0.6**10 + 0.4**10)
        assert found.rejected
        assert str(found) == "fails (p = 0.0062; 10 prompts)"
        assert not equivalence(*better_on(5, 10)).rejected

    def test_equal_prompts_are_left_out(self) -> None:
        circuit, model = better_on(3, 8)
        same = torch.zeros(5)
        more = equivalence(torch.cat([circuit, same]), torch.cat([model, same]))
        assert more.p == pytest.approx(equivalence(circuit, model).p)
        whole = equivalence(torch.arange(4.0), torch.arange(4.0))
        assert (whole.p, whole.rejected) == (1.0, False)


def plain_hsic(a: list[float], b: list[float]) -> float:
    """trace(K H L H) / (n - 1) ** 2, written out."""

    def kernel(values: list[float]) -> torch.Tensor:
        between = sorted(abs(x - y) for x, y in itertools.combinations(values, 2))
        middle = len(between) // 2
        width = between[middle] if len(between) % 2 else (between[middle - 1] + between[middle]) / 2
        return torch.tensor([[math.exp(-((x - y) ** 2) / (2 * width**2)) for y in values] for x in values]).double()

    n = len(a)
    centre = torch.eye(n).double() - 1 / n
    return float(torch.trace(kernel(a) @ centre @ kernel(b) @ centre)) / (n - 1) ** 2


class TestIndependence:
    def test_is_hsic_over_all_permutations(self) -> None:
        a, b = [0.1, 0.7, 1.5, 2.2, 4.0], [1.0, 1.3, 2.9, 3.1, 5.2]
        found = independence(torch.tensor(a), torch.tensor(b))
        assert found.statistic == pytest.approx(plain_hsic(a, b), rel=1e-5)
        permuted = [plain_hsic(a, list(order)) for order in itertools.permutations(b)]
        expected = sum(value >= plain_hsic(a, b) - 1e-9 for value in permuted) / 120
        assert found.p == pytest.approx(expected)

    def test_what_depends_is_rejected(self) -> None:
        a = torch.randn(60, generator=torch.Generator().manual_seed(0))
        assert independence(a, a).p == pytest.approx(1 / 1001)
        assert independence(a**2, a).rejected  # not even correlated

    def test_what_is_independent_is_rejected_as_often_as_it_may(self) -> None:
        rejected = 0
        for seed in range(60):
            a, b = torch.randn(2, 12, generator=torch.Generator().manual_seed(seed))
            rejected += independence(a, b, seed).rejected
        assert rejected <= 8  # 3 are expected; more than 8 of 60 have a chance of 0.2 %

    def test_a_constant_is_independent(self) -> None:
        assert independence(torch.ones(9), torch.randn(9)).p == 1


class TestMinimality:
    def test_is_a_binomial_probability(self) -> None:
        random = torch.arange(10.0)
        p = minimality(torch.tensor([-1.0, 4.5, 9.5]), random)
        of_five = sum(math.comb(10, j) * 0.9**j * 0.1 ** (10 - j) for j in range(6))
        assert p.tolist() == pytest.approx([0.1**10, of_five, 1.0])

    def test_equal_changes_do_not_count_as_larger(self) -> None:
        assert minimality(torch.zeros(1), torch.zeros(4)).item() == pytest.approx(0.1**4)
