"""Information-flow routes, against the formula on a plain model in float64."""

from __future__ import annotations

import pytest
import torch
from families import tiny_float64
from torch import Tensor
from toys import PLAIN, off, plain_run, random_task

from gatelens.gates.selection import selected
from gatelens.methods.information_flow import flow_routes, importances
from gatelens.model.graph import Graph


@pytest.mark.parametrize("family", PLAIN)
def test_is_the_formula(family: str) -> None:
    model, task = tiny_float64(family, num_hidden_layers=2), random_task(n=3, lengths=(4, 3))
    graph = Graph.of(model.anatomy)
    expected = torch.zeros(graph.edges.shape, dtype=torch.float64)
    for bucket in task.buckets:

        def read(name: str, sources: dict[str, Tensor], biases: Tensor) -> Tensor:
            stream = sum(sources.values()) + biases
            for prompt in range(len(stream)):
                places = range(stream.shape[1]) if name != "logits" else [stream.shape[1] - 1]
                for t in places:
                    y = stream[prompt, t]
                    near = [max(0.0, float(y.norm(1) - (y - x[prompt, t]).norm(1))) for x in sources.values()]
                    share = torch.tensor(near, dtype=torch.float64) / sum(near) / len(places) / len(task)
                    expected[: len(near), graph.destination_names.index(name)] += share
            return stream

        # A shared key-value head is read once for each of its query heads, so those columns are counted several times.
        plain_run(model, bucket.clean, read)
    expected /= graph.n_sharing
    scores = flow_routes(model, task)
    assert off(scores.scores, expected) < 1e-5
    torch.testing.assert_close(scores.scores.sum(0), torch.ones(graph.n_destinations, dtype=torch.float64))
    [order] = selected(scores, "absolute", "path")
    assert len(order) == graph.n_edges


def test_a_source_that_points_away_has_no_importance() -> None:
    """The stream (3, 0) is the sum of (4, 0) and (-1, 0)."""
    sources = torch.tensor([[4.0, 0.0], [-1.0, 0.0]])[:, None, None]
    assert importances(sources, sources.sum(0))[:, 0, 0].tolist() == [1.0, 0.0]
    assert importances(-sources, sources.sum(0))[:, 0, 0].tolist() == [0.0, 1.0]
    assert importances(torch.zeros(2, 1, 1, 2), torch.ones(1, 1, 2)).sum() == 0
