"""Gates on edges by role, against plain edges, a transformer written out head by head, and a plain graph search."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import networkx
import pytest
import torch
from families import tiny
from torch import Tensor
from toys import PLAIN, off, plain_run, random_task

from gatelens import Context, GatelensError, Model
from gatelens.gates import EDGES, ROLE_EDGES
from gatelens.gates.component_runs import capture_components
from gatelens.gates.edge_runs import run_edges
from gatelens.gates.role_edges import RoleEdges, RoleEdgeScores
from gatelens.measures.top_k import Circuits
from gatelens.methods.attribution import attribute
from gatelens.methods.patching import patch
from gatelens.methods.relp import relevance_patching
from gatelens.model.graph import Graph
from gatelens.runtime.context import UNLIMITED
from gatelens.tasks.base import Bucket, CircuitTask
from gatelens.tasks.token_roles import LAST, TokenRoles

TASK = random_task(n=4, lengths=(6, 4))
some_families = pytest.mark.parametrize("name", ["gpt2", "llama", "gpt_neox", "gemma2"])


def double(name: str, **sizes: int) -> Model:
    model = tiny(name, **sizes)
    model.hf.double()
    return model


def random_gates(level: RoleEdges, model: Model, rows: int = 2, seed: int = 0) -> Tensor:
    return torch.rand(rows, *level.shape(model, 0), generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@torch.no_grad()
def oracle(model: Model, level: RoleEdges, batch: Bucket, gates: Tensor) -> Tensor:
    """Logits under one row of gates, every input mixed position by position with a plain sum."""
    graph, roles = Graph.of(model.anatomy), level.roles.of_positions(batch.clean)
    reference = plain_run(model, batch.corrupt)[0]

    def read(name: str, sources: dict[str, Tensor], biases: Tensor) -> Tensor:
        total = biases
        for s, (source, values) in enumerate(sources.items()):
            gate = gates[:, s, graph.destination_names.index(name)][roles][..., None]  # (prompt, position, 1)
            total = total + gate * values + (1 - gate) * reference[source]
        return total

    return plain_run(model, batch.clean, read)[1]


class TestRuns:
    @pytest.mark.parametrize("name", PLAIN)
    def test_random_gates_mix_every_position_by_its_role(self, name: str) -> None:
        model = double(name)
        for batch in TASK.buckets:
            level = ROLE_EDGES.on(TASK, batch)
            gates = random_gates(level, model)
            closed = capture_components(model, batch.corrupt)
            logits = level.run(model, batch.clean, gates, closed, context=UNLIMITED)
            for row, ours in zip(gates, logits, strict=True):
                assert off(ours, oracle(model, level, batch, row)) < (
                    1e-10 if name == "gpt2" else 1e-6
                )  # float32 norms

    @some_families
    @pytest.mark.parametrize("start", [False, True])
    def test_gates_that_do_not_depend_on_the_role_are_plain_edges(self, name: str, start: bool) -> None:
        family = tiny(name)
        batch = TASK.buckets[0]
        level = ROLE_EDGES.on(TASK, batch)
        n_roles, *shape = level.shape(family, 0)
        gates = torch.rand(2, *shape, generator=torch.Generator().manual_seed(0))
        gates[:, :, : Graph.of(family.anatomy).mlp_input(0)] = 1  # so that a start saves something
        clean, corrupt = (capture_components(family, tokens) for tokens in (batch.clean, batch.corrupt))
        begin = clean if start else None
        by_role = gates[:, None].expand(-1, n_roles, -1, -1)
        ours = level.run(family, batch.clean, by_role, corrupt, start=begin, context=UNLIMITED)
        plain = run_edges(family, batch.clean, gates, corrupt, start=begin)
        torch.testing.assert_close(ours, plain, rtol=1e-4, atol=2e-5)

    def test_open_gates_are_the_model_to_the_last_bit_and_closed_gates_the_corrupt_run(self, family: Model) -> None:
        batch = TASK.buckets[1]
        level = ROLE_EDGES.on(TASK, batch)
        clean, corrupt = (capture_components(family, tokens) for tokens in (batch.clean, batch.corrupt))
        gates = torch.zeros(2, torch.Size(level.shape(family, 0)).numel())
        gates[0, level.positions(family)[0]] = 1  # the gates that exist
        gates = gates.unflatten(1, level.shape(family, 0))
        opened = level.run(family, batch.clean, gates[:1], corrupt, context=UNLIMITED)
        assert torch.equal(opened[0], clean.logits)
        closed = level.run(family, batch.clean, gates[1:], corrupt, context=UNLIMITED)
        torch.testing.assert_close(closed[0], corrupt.logits, rtol=1e-4, atol=2e-5)

    def test_rows_in_small_memory_are_the_same(self) -> None:
        model, batch = tiny("llama"), TASK.buckets[0]
        level = ROLE_EDGES.on(TASK, batch)
        gates, corrupt = random_gates(level, model, 5).float(), capture_components(model, batch.corrupt)
        whole, parts = (
            level.run(model, batch.clean, gates, corrupt, context=context) for context in (UNLIMITED, Context(1e-9))
        )
        torch.testing.assert_close(whole, parts, rtol=1e-4, atol=2e-5)


class TestScores:
    @pytest.mark.parametrize("steps", [1, 3])
    @some_families
    def test_the_sum_over_roles_is_the_score_of_the_edge(self, name: str, steps: int) -> None:
        by_role, plain = (attribute(level, double(name), TASK, steps) for level in (ROLE_EDGES, EDGES))
        assert off(by_role.scores.sum(0), plain.scores) < 1e-10

    def test_relevance_too(self) -> None:
        model = double("llama")
        by_role, plain = (relevance_patching(level, model, TASK) for level in (ROLE_EDGES, EDGES))
        assert off(by_role.scores.sum(0), plain.scores) < 1e-10

    def test_a_score_is_the_derivative_of_the_metric_with_respect_to_the_gate(self) -> None:
        """Finite differences: EAP's score is what the metric loses, to first order, when a gate begins to close."""
        model, step = double("gpt2", n_layer=2), 1e-5
        scores = attribute(ROLE_EDGES, model, TASK)
        [positions] = scores.level.positions(model)
        chosen = positions[torch.randperm(len(positions), generator=torch.Generator().manual_seed(0))[:40]]
        lost = torch.zeros(len(chosen), dtype=torch.float64)
        for batch in TASK.buckets:
            level, corrupt = scores.level.on(TASK, batch), capture_components(model, batch.corrupt)
            gates = torch.ones(len(chosen), scores.scores.numel(), dtype=torch.float64)
            ends = []
            for sign in (1, -1):
                rows = gates.scatter(1, chosen[:, None], 1 + sign * step).unflatten(1, scores.scores.shape)
                logits = level.run(model, batch.clean, rows, corrupt, context=UNLIMITED)
                ends.append(_metric(TASK, logits, batch))
            up, down = ends
            lost += ((up - down) / (2 * step)).sum(1)
        assert off(scores.scores.flatten()[chosen], lost / len(TASK)) < 1e-6

    def test_patching_one_gate_is_closing_it_in_the_oracle(self) -> None:
        model = double("llama", num_hidden_layers=2)
        scores = patch(ROLE_EDGES, model, TASK, sample=12)
        places = scores.gate_sets()[0].exists.flatten().nonzero()[:, 0]
        assert len(places) == 12
        for place in places.tolist():
            total = 0.0
            for batch in TASK.buckets:
                level = ROLE_EDGES.on(TASK, batch)
                gates = torch.ones(scores.scores.numel(), dtype=torch.float64)
                whole = _metric(TASK, oracle(model, level, batch, gates.view(scores.scores.shape)), batch)
                gates[place] = 0
                total += float(
                    (whole - _metric(TASK, oracle(model, level, batch, gates.view_as(scores.scores)), batch)).sum()
                )
            assert float(scores.scores.flatten()[place]) == pytest.approx(
                total / len(TASK), rel=1e-4, abs=1e-5
            )  # a float32 metric

    def test_a_role_without_positions_has_scores_of_0(self) -> None:
        model = tiny("gpt2")
        names = (*TASK.role_names, "verb phrase")
        task = replace(TASK, token_roles=TASK.token_roles.renamed(names))
        scores = attribute(ROLE_EDGES, model, task)
        absent = scores.roles.names.index("verb phrase")
        assert bool((scores.scores[absent] == 0).all())
        assert bool((scores.scores[scores.roles.names.index("verb")] != 0).any())

    def test_scores_do_not_depend_on_batches(self) -> None:
        model = double("gpt2")
        whole, alone = (attribute(ROLE_EDGES, model, TASK, context=context) for context in (None, Context(1e-9)))
        assert off(alone.scores, whole.scores) < 1e-12

    def test_names_say_the_role(self) -> None:
        scores = attribute(ROLE_EDGES, tiny("llama"), TASK)
        [gate] = scores.top(1)
        source, destination = scores.ends(gate.gate)
        assert gate.name == f"{source} -> {destination} at {gate.gate.role}"
        assert gate.gate.role in TASK.role_names


def _metric(task: CircuitTask, logits: Tensor, batch: Bucket) -> Tensor:
    """The metric in float64: the task's own is rounded to float32, too coarse for finite differences."""
    answers, wrong = (ids[batch.which, 0] for ids in (task.answer_ids, task.wrong_ids))
    prompts = torch.arange(len(batch))
    return logits[..., prompts, answers] - logits[..., prompts, wrong]


class TestCircuits:
    @some_families
    def test_a_circuit_with_edges_at_all_roles_is_the_plain_circuit(self, name: str) -> None:
        """The circuits have the same metric, also after edges on no path were removed."""
        family = tiny(name)
        plain = attribute(EDGES, family, TASK)
        by_role = attribute(ROLE_EDGES, family, TASK)
        n_roles = len(by_role.scores)
        everywhere = replace(by_role, scores=plain.scores.expand(n_roles, -1, -1))
        [order] = plain.orders()
        masks = EDGES.masks(family, order, [30])
        ours, theirs = Circuits.of(family, TASK, everywhere), Circuits.of(family, TASK, plain)
        for number, _ in enumerate(ours.batches):
            gates = masks[:, None].expand(-1, n_roles, -1, -1)
            pruned = ours.level.prune(family, gates)
            for kept in (gates, pruned):
                found = ours.metric_of(number, kept)
                torch.testing.assert_close(found, theirs.metric_of(number, masks), rtol=1e-4, atol=2e-5)

    @some_families
    @pytest.mark.parametrize("k", [40, 150])
    def test_removed_gates_have_no_effect(self, name: str, k: int) -> None:
        model = double(name)
        scores = attribute(ROLE_EDGES, model, TASK)
        circuits = Circuits.of(model, TASK, scores).shuffled(3)
        [order] = circuits.orders
        mask = circuits.level.masks(model, order, [40 * k])
        kept = circuits.level.prune(model, mask)
        assert 0 < int(kept.sum()) < int(mask.sum())
        assert circuits.level.count(model, order, 40 * k) == int(kept.sum())
        for number, _ in enumerate(circuits.batches):
            torch.testing.assert_close(circuits.metric_of(number, mask), circuits.metric_of(number, kept))

    def test_random_additions_are_paths(self) -> None:
        model = tiny("llama")
        level = ROLE_EDGES.on(TASK)
        graph, none = Graph.of(model.anatomy), torch.zeros(0, dtype=torch.int64)
        generator = torch.Generator().manual_seed(0)
        roles = set()
        for _ in range(20):
            added = level.random_addition(model, none, none, generator)
            mask = torch.zeros(torch.Size(level.shape(model, 0)).numel(), dtype=torch.bool)
            mask[added] = True
            assert int(level.prune(model, mask.view(1, *level.shape(model, 0))).sum()) == len(added.unique())
            roles |= set((added // (graph.n_sources * graph.n_destinations)).tolist())
        assert len(roles) > 1

    def test_a_killed_run_resumes_with_the_same_numbers(self, tmp_path: Path) -> None:
        """One prompt at a time, killed after two of them."""

        class Killed(Exception):
            pass

        def kill(title: str, done: int, total: int) -> None:
            if done == 2:
                raise Killed

        model = tiny("llama", num_hidden_layers=1)
        whole = attribute(ROLE_EDGES, model, TASK, 3, context=Context.in_folder(tmp_path / "whole", memory_gb=1e-9))
        context = Context.in_folder(tmp_path / "killed", memory_gb=1e-9, progress=kill)
        with pytest.raises(Killed):
            attribute(ROLE_EDGES, model, TASK, 3, context=context)
        pieces = {path: path.stat().st_mtime_ns for path in (tmp_path / "killed").iterdir()}
        assert pieces
        context = Context.in_folder(tmp_path / "killed", memory_gb=1e-9)
        assert torch.equal(attribute(ROLE_EDGES, model, TASK, 3, context=context).scores, whole.scores)
        assert {path: path.stat().st_mtime_ns for path in pieces} == pieces


class TestPaths:
    SHAPES = (Graph(2, 2, 2), Graph(2, 4, 2), Graph(2, 2, 2, parallel=True), Graph(2, 4, 2, coupled=True))

    @pytest.mark.parametrize("graph", SHAPES, ids=["plain", "shared keys", "parallel", "coupled"])
    @pytest.mark.parametrize("share", [0.1, 0.3])
    def test_is_what_a_graph_search_finds(self, graph: Graph, share: float) -> None:
        """Nodes are components at roles; a k or v input at a role enters the head at every role that sees it."""
        generator = torch.Generator().manual_seed(1)
        n_roles = 3
        sees = torch.tensor([[1, 0, 0], [1, 1, 0], [0, 1, 1]]).bool()  # not transitive: the last does not see the first
        rows = torch.rand(6, n_roles, graph.n_sources, graph.n_destinations, generator=generator) < share
        found = graph.on_a_path(rows, sees)
        n_removed = 0
        for mask, ours in zip(rows & graph.edges, found, strict=True):
            search = _search_graph(graph, mask, sees)
            below = networkx.descendants(search, "start") | {"start"}
            above = networkx.ancestors(search, ("in", n_roles - 1, graph.logits)) | {("in", n_roles - 1, graph.logits)}
            for role, source, destination in mask.nonzero().tolist():
                wanted = ("out", role, source) in below and ("in", role, destination) in above
                assert bool(ours[role, source, destination]) == wanted
                n_removed += not wanted
            assert not bool((ours & ~mask).any())
        assert n_removed

    def test_no_edge_on_a_path_between_positions_is_removed(self) -> None:
        """Paths between the positions of single prompts, as attention makes them, are a part of those between roles."""
        graph, generator = Graph(2, 2, 1), torch.Generator().manual_seed(0)
        level = ROLE_EDGES.on(TASK)
        shape = (len(level.roles.names), graph.n_sources, graph.n_destinations)
        kept = removed = 0
        for _ in range(10):
            mask = (torch.rand(shape, generator=generator) < 0.3) & graph.edges
            ours = graph.on_a_path(mask[None], level.roles.sees)[0]
            used = torch.zeros_like(mask)
            for batch in TASK.buckets:
                for roles in ROLE_EDGES.on(TASK, batch).roles.of_positions(batch.clean):
                    n = len(roles)
                    causal = torch.ones(n, n).tril().bool()
                    at_positions = graph.on_a_path(mask[roles][None], causal)[0]  # a role of its own for every position
                    for position, role in enumerate(roles.tolist()):
                        used[role] |= at_positions[position]
            assert not bool((used & ~ours).any())
            kept, removed = kept + int(used.sum()), removed + int((mask & ~ours).sum())
        assert kept
        assert removed


def _search_graph(graph: Graph, mask: Tensor, sees: Tensor) -> networkx.DiGraph:
    search = networkx.DiGraph()
    n_roles = len(mask)
    for role in range(n_roles):
        search.add_edge("start", ("out", role, 0))
        for source in range(1, graph.n_sources):
            for destination in graph.inputs_of(source):
                moves = graph.is_key_or_value(destination)
                for other in range(n_roles):
                    if (moves and sees[role, other]) or (other == role and not moves):
                        search.add_edge(("in", other, destination), ("out", role, source))
    search.add_nodes_from(("in", role, graph.logits) for role in range(n_roles))
    search.add_edges_from((("out", r, s), ("in", r, d)) for r, s, d in mask.nonzero().tolist())
    return search


class TestRoles:
    def test_what_roles_see(self) -> None:
        """By hand: name before verb in the first prompt, verb only in the second one."""
        roles = TokenRoles(("a", "b", LAST), torch.tensor([[0, 1, 1, 2], [1, 1, 2, -1]]))
        assert roles.sees().tolist() == [[True, False, False], [True, True, False], [True, True, True]]

    def test_a_task_without_roles(self) -> None:
        task = replace(TASK, token_roles=TokenRoles(("first token", LAST), torch.zeros_like(TASK.token_roles.ids)))
        with pytest.raises(GatelensError, match="the task toy names no roles of tokens"):
            attribute(ROLE_EDGES, tiny("llama"), task)

    def test_a_task_with_other_roles(self) -> None:
        scores = attribute(ROLE_EDGES, tiny("llama"), TASK)
        roles = TokenRoles(tuple("noun" if name == "name" else name for name in TASK.role_names), TASK.token_roles.ids)
        with pytest.raises(GatelensError, match="has tokens of the role 'noun', and these gates have the roles"):
            Circuits.of(tiny("llama"), replace(TASK, token_roles=roles), scores)

    def test_a_task_with_the_same_roles_in_another_order(self) -> None:
        """Roles are matched by their names: circuits do not change if a task numbers its roles in another way."""
        model = tiny("llama")
        scores = attribute(ROLE_EDGES, model, TASK)
        other = replace(TASK, token_roles=TASK.token_roles.renamed(TASK.role_names[::-1]))
        for number, _ in enumerate(TASK.buckets):
            ours, theirs = (Circuits.of(model, task, scores).metric(number, [50, 500]) for task in (TASK, other))
            assert torch.equal(ours, theirs)

    def test_without_a_task_there_are_no_gates(self) -> None:
        with pytest.raises(GatelensError, match="depend on the task"):
            ROLE_EDGES.shape(tiny("llama"), 4)
        level = ROLE_EDGES.on(TASK)
        with pytest.raises(GatelensError, match="the roles of these tokens are not known"):
            level.attribution(tiny("llama"), TASK.buckets[0], torch.sum)

    def test_scores_that_were_saved_make_the_same_circuits(self) -> None:
        model = tiny("llama")
        scores = attribute(ROLE_EDGES, model, TASK)
        again = ROLE_EDGES.read_scores(scores.tensors(), scores.graph, scores.method)
        assert isinstance(again, RoleEdgeScores)
        assert again.roles.names == scores.roles.names
        assert torch.equal(again.circuit(300).mask, scores.circuit(300).mask)
        ours, theirs = (Circuits.of(model, TASK, own).metric(0, [300]) for own in (scores, again))
        assert torch.equal(ours, theirs)
