"""A circuit as an object: its gates, the components that they connect, and what it explains of one prompt."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool
from torch import Tensor

from gatelens.errors import GatelensError
from gatelens.gates.level import Level, Source
from gatelens.gates.scores import Ranking, ScoredGate, Scores
from gatelens.gates.selection import selected
from gatelens.model import Model
from gatelens.model.components import Component
from gatelens.runtime.context import Context
from gatelens.runtime.precision import widen
from gatelens.runtime.shown import Shown
from gatelens.tasks.base import Bucket, CircuitTask
from gatelens.tasks.tokens import continuations, encode

_TOP_TOKENS = 3


@dataclass(frozen=True, eq=False, repr=False)
class Circuit(Shown):
    """The top k gates of a ranking, without gates that have no effect.

    `Scores.circuit` and `CircuitResult.circuit` make it; ``model.keep(circuit)`` and ``model.ablate(circuit)`` run it.

    Example:
        circuit = scores.circuit(50)
        circuit.nodes, circuit.edges
        circuit.explain(model, task, number=3)

    Arguments:
        scores: the scores of all gates.
        k: how many gates were asked for.
        ranking: how the gates were ranked.
        masks: the gates of the circuit: one mask if all prompts share their gates, otherwise one for each prompt.
    """

    scores: Scores
    k: int
    ranking: Ranking
    masks: Sequence[Bool[Tensor, ...]]

    drawn_by = "gatelens.report.plots:plot_circuit"

    @property
    def level(self) -> Level[Any]:
        """What the gates act on."""
        return self.scores.level

    @property
    def mask(self) -> Bool[Tensor, ...]:
        """The gates of the circuit: (layer, head), or (source, destination)."""
        if not self.level.shared:
            raise GatelensError(
                f"{self.level.noun} belong to single prompts, so there is no circuit for all texts: keep or ablate a "
                "circuit of heads or edges, or use circuit.explain on a prompt of the task."
            )
        return self.masks[0]

    @property
    def gates(self) -> list[ScoredGate]:
        """The gates of the circuit with their names and scores; the highest absolute score first, by prompt."""
        found = []
        for number, (mask, gate_set) in enumerate(zip(self.masks, self.scores.gate_sets(), strict=True)):
            values = gate_set.scores.flatten()
            places = mask.flatten().nonzero()[:, 0]
            for place in places[values[places].abs().argsort(descending=True, stable=True)].tolist():
                found.append(ScoredGate(*self.scores.gate(number, place), float(values[place])))
        return found

    @property
    def nodes(self) -> list[str]:
        """The names of the components that the gates touch, from the embedding to the logits."""
        ends = {end.partition(".")[0] for gate in self.gates for end in self.scores.ends(gate.gate)}
        return sorted(ends, key=_height)

    @property
    def edges(self) -> list[tuple[str, str]]:
        """Source and destination of every edge, such as ("L3H7", "L5H2.q"). A circuit of heads has none."""
        ends = [self.scores.ends(gate.gate) for gate in self.gates]
        return [(pair[0], pair[1]) for pair in ends if len(pair) == 2]

    def __len__(self) -> int:
        return int(sum(int(mask.sum()) for mask in self.masks))

    def __contains__(self, name: object) -> bool:
        return name in self.nodes or any(gate.name == name for gate in self.gates)

    def to_networkx(self) -> Any:
        """The circuit as a networkx graph.

        Nodes have a ``kind`` (embed, head, KV head, MLP, logits) and a ``layer``. Edges have a ``score`` and the
        ``input`` that they enter (q, k, v or nothing); two inputs of a head make two parallel edges. Edges by role also
        have a ``role``, and make an edge for each of their roles.
        """
        try:
            import networkx
        except ImportError as error:
            raise GatelensError("to_networkx needs networkx, which is not installed: pip install networkx.") from error
        graph = networkx.MultiDiGraph(level=self.level.name)
        for name in self.nodes:
            component = Component.find(name)
            kind = name if component is None else {"H": "head", "KV": "KV head", "M": "MLP"}[component.kind]
            graph.add_node(name, kind=kind, layer=None if component is None else component.layer)
        for gate in self.gates:
            ends = self.scores.ends(gate.gate)
            if len(ends) == 2:
                destination, _, into = ends[1].partition(".")
                role = {"role": gate.gate.role} if hasattr(gate.gate, "role") else {}
                graph.add_edge(ends[0], destination, input=into, score=gate.score, **role)
        return graph

    def explain(
        self,
        model: Model,
        prompt: CircuitTask | str,
        number: int = 0,
        *,
        corrupt: str | None = None,
        answer: str | None = None,
        source: Source = "corrupt",
        context: Context | None = None,
    ) -> Explanation:
        """What the circuit does with one prompt: the answer's probability and rank.

        They are given with all gates open, with the circuit alone, and without the circuit.

        Arguments:
            prompt: a task, or a clean prompt as text.
            number: which prompt of the task.
            corrupt, answer: the corrupt prompt and the right answer (one token), if the prompt is a text.
            source: what closed gates read.

        Returns:
            Probabilities and ranks. Cost: 3 circuits on one prompt.
        """
        if source == "optimal":
            raise GatelensError("no optimal constants are fitted for one prompt: use the source corrupt, mean or zero.")
        batch, answers, wrong, gate_set = self._prompt(model, prompt, number, corrupt, answer)
        level = self.level.on(prompt, batch) if isinstance(prompt, CircuitTask) else self.level
        shape = level.shape(model, batch.clean.shape[1])
        mask = self.masks[0 if self.level.shared else gate_set]
        exists = self.scores.gate_sets()[0 if self.level.shared else gate_set].exists
        if tuple(mask.shape) != tuple(shape):
            raise GatelensError(f"this circuit was not found in {model.name}: its gates have the shape {mask.shape}.")
        gates = torch.stack([torch.ones(shape), mask.float(), (exists & ~mask).float()])
        gates = gates if self.level.shared else gates[:, None]
        closed = level.closed(model, batch.corrupt, source, lambda: level.mean(model, [batch.corrupt]))
        logits = widen(level.run(model, batch.clean, gates, closed, context=context or Context()))[:, 0].cpu()
        lines = tuple(_line(model, part, row, answers, wrong) for part, row in zip(_PARTS, logits, strict=True))
        return Explanation(
            model.tokenizer.decode(batch.clean[0]), _names(model, answers), _names(model, wrong), len(self), lines
        )

    def records(self) -> list[dict[str, Any]]:
        return [{"gate": gate.name, "score": gate.score} for gate in self.gates]

    def headline(self) -> str:
        return f"{len(self):,} {self.level.noun} (top {self.k:,} by {self.ranking} score of {self.scores.method})"

    def _prompt(
        self, model: Model, prompt: CircuitTask | str, number: int, corrupt: str | None, answer: str | None
    ) -> tuple[Bucket, list[int], list[int], int]:
        """A batch of the prompt alone, right and wrong answers, and the number of the prompt's gate set."""
        if isinstance(prompt, CircuitTask):
            place = 0
            for bucket in prompt.buckets:
                for at, which in enumerate(bucket.which.tolist()):
                    if which == number:
                        answers, wrong = (
                            [index for index in ids[which].tolist() if index >= 0]
                            for ids in (prompt.answer_ids, prompt.wrong_ids)
                        )
                        return bucket.parts(1)[at], answers, wrong, place
                    place += 1
            raise GatelensError(f"no prompt {number} in {prompt.name}: it has {len(prompt)} prompts, counted from 0.")
        if corrupt is None or answer is None or not self.level.shared:
            raise GatelensError(
                "to explain a text, give corrupt= (an aligned prompt) and answer= (one token), and a circuit of heads "
                "or edges; or give a task and the number of a prompt."
            )
        clean_ids, corrupt_ids = encode(model.tokenizer, [prompt, corrupt])
        [ids] = continuations(model.tokenizer, [prompt], [clean_ids], [answer])
        if len(clean_ids) != len(corrupt_ids) or not clean_ids or ids is None or len(ids) != 1:
            raise GatelensError(
                f"the prompts have {len(clean_ids)} and {len(corrupt_ids)} tokens and the answer {answer!r} has "
                f"{'other' if ids is None else len(ids)}: the prompts need the same number, and the answer must be one."
            )
        return Bucket(torch.tensor([clean_ids]), torch.tensor([corrupt_ids]), torch.tensor([0])), ids, [], 0


_PARTS = ("everything", "circuit alone", "without the circuit")


@dataclass(frozen=True)
class ExplainedPart:
    """What the model predicts with some of its gates open.

    Arguments:
        part: which gates are open.
        probability: of the right answers together.
        rank: of the best right answer among all tokens, from 1.
        wrong: probability of the wrong answers together; None if there are none.
        top: the most probable tokens.
    """

    part: str
    probability: float
    rank: int
    wrong: float | None
    top: tuple[str, ...]


@dataclass(frozen=True, repr=False)
class Explanation(Shown):
    """The answer to one prompt with everything, with the circuit alone, and without it.

    Example:
        explained = scores.circuit(20).explain(model, task)
        explained.parts  # probability and rank of the answer, with everything, the circuit alone, and without it
        explained.plot()
    """

    prompt: str  # the clean prompt
    answers: tuple[str, ...]  # the right answers
    wrong: tuple[str, ...]  # the wrong answers
    size: int  # the number of gates of the circuit
    parts: tuple[ExplainedPart, ...]  # with everything, with the circuit alone, without the circuit

    drawn_by = "gatelens.report.plots:plot_explanation"

    def records(self) -> list[dict[str, Any]]:
        return [
            {
                "open gates": part.part,
                "probability of the answer": part.probability,
                "rank": part.rank,
                "probability of wrong answers": part.wrong,
                "most probable": " ".join(repr(token) for token in part.top),
            }
            for part in self.parts
        ]

    def headline(self) -> str:
        return f"{self.prompt} -> {' or '.join(map(repr, self.answers[:3]))}"


def make_circuit(scores: Scores, k: int, by: Ranking, selection: str) -> Circuit:
    """The circuit of the top k gates; `Scores.circuit` describes it."""
    if k < 0:
        raise GatelensError(f"k is {k}: a circuit keeps 0 or more gates.")
    masks = []
    for order, gate_set in zip(selected(scores, by, selection), scores.gate_sets(), strict=True):
        mask = torch.zeros(gate_set.scores.numel(), dtype=torch.bool)
        mask[order[:k]] = True
        masks.append(scores.effective(mask.view(gate_set.scores.shape)))
    return Circuit(scores, k, by, masks)


def _line(model: Model, part: str, logits: Tensor, answers: list[int], wrong: list[int]) -> ExplainedPart:
    probabilities = logits.softmax(-1)
    rank = int((logits > logits[answers].max()).sum()) + 1
    top = tuple(_names(model, logits.topk(_TOP_TOKENS).indices.tolist()))
    against = float(probabilities[wrong].sum()) if wrong else None
    return ExplainedPart(part, float(probabilities[answers].sum()), rank, against, top)


def _names(model: Model, ids: Sequence[int]) -> tuple[str, ...]:
    return tuple(str(model.tokenizer.decode([index])) for index in ids)


def _height(name: str) -> tuple[float, int, int]:
    """Where a component is computed: the embedding first, the logits last, heads of a layer before its MLP."""
    component = Component.find(name)
    if component is None:
        return (-1 if name == "embed" else float("inf")), 0, 0
    return component.layer, ("KV", "H", "M").index(component.kind), component.index
