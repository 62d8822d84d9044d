"""What heads do: against plain Hugging Face, and on a model whose circuit is known."""

from __future__ import annotations

import copy
import io
import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from families import prompts, sparse_model, tiny
from rich.console import Console
from torch import Tensor
from toys import INDUCTION, PREVIOUS, planted, planted_task, random_task

from gatelens import GatelensError, Head, Model
from gatelens.cli.head_table import head_table
from gatelens.gates.direct import direct_writes
from gatelens.gates.edges import EdgeScores
from gatelens.gates.heads import HeadScores
from gatelens.gates.probes import probe_heads, repeated_tokens
from gatelens.measures.describe import best_heads, describe
from gatelens.measures.head_table import bootstrap_mean, load_head_table, save_head_table
from gatelens.model.graph import Graph
from gatelens.runtime.context import Context
from gatelens.tasks.base import CircuitTask

CLOSE = {"rtol": 1e-4, "atol": 1e-5}
ALL = [Head(layer, index) for layer in range(3) for index in range(4)]


def metric(model: Model, task: CircuitTask, head: Head | None = None) -> Tensor:
    """The metric of each prompt; with a head, it reads the corrupt run."""
    values = torch.empty(len(task))
    with torch.no_grad():
        for bucket in task.buckets:
            run = model.capture(bucket.corrupt)
            with model.patch([] if head is None else head, run):
                values[bucket.which] = task.metric(model.hf(bucket.clean).logits[:, -1], bucket)
    return values


def test_scores_are_those_of_patching_each_head_by_hand() -> None:
    model, task = tiny("llama"), random_task(n=4, lengths=(9, 7))
    table = describe(model, task, ALL)
    clean = metric(model, task)
    with torch.no_grad():
        none = torch.cat([task.metric(_all_heads_patched(model, b.clean, b.corrupt), b) for b in task.buckets]).mean()
    assert table.effect == pytest.approx(float(clean.mean() - none), rel=1e-4)
    assert [abs(line.score) for line in table.lines] == sorted((abs(line.score) for line in table.lines), reverse=True)
    for head in ALL:
        line = table[head]
        drops = clean - metric(model, task, head)
        assert line.score == pytest.approx(float(drops.mean()), abs=1e-4)
        assert line.share == pytest.approx(line.score / table.effect)
        assert float(drops.min()) - 1e-4 <= line.low <= line.score <= line.high <= float(drops.max()) + 1e-4


def _all_heads_patched(model: Model, clean: Tensor, corrupt: Tensor) -> Tensor:
    with model.patch(ALL, model.capture(corrupt)):
        return model.hf(clean).logits[:, -1]


def test_looks_are_the_attention_of_plain_hugging_face() -> None:
    model, task = tiny("qwen2"), random_task(n=3)
    table = describe(model, task, ALL)
    [bucket] = task.buckets
    model.hf.set_attn_implementation("eager")
    with torch.no_grad():
        weights = torch.stack(model.hf(bucket.clean, output_attentions=True).attentions, 1)[..., -1, :]
    roles = task.roles(bucket)
    for head in ALL:
        seen = weights[:, head.layer, head.index]
        for number, role in enumerate(task.role_names):
            wanted = (seen * (roles == number)).sum(1).mean()
            assert table[head].looks[role] == pytest.approx(float(wanted), abs=1e-5)
        assert sum(table[head].looks.values()) == pytest.approx(1, abs=1e-5)
        on_answer = (seen * (bucket.clean == task.answer_ids)).sum(1).mean()
        assert table[head].at_answer == pytest.approx(float(on_answer), abs=1e-5)


@pytest.mark.parametrize("name", ["llama", "gpt2"])
@torch.no_grad()
def test_direct_logits_by_hand(name: str) -> None:
    model, tokens = tiny(name), prompts()
    run = model.capture(tokens)
    hidden = model.hf(tokens, output_hidden_states=True).hidden_states[-1][:, -1]  # after the final norm
    streams = _final_stream(model, tokens)
    head, dim = Head(1, 2), model.anatomy.head_dim
    place = slice(head.index * dim, (head.index + 1) * dim)
    z = run.heads[1][:, -1, head.index]
    if name == "llama":
        norm, unembed = model.hf.model.norm, model.hf.lm_head.weight
        written = z @ model.hf.model.layers[1].self_attn.o_proj.weight[:, place].T
        scale = norm.weight / (streams.pow(2).mean(-1, keepdim=True) + norm.variance_epsilon).sqrt()
        torch.testing.assert_close(streams * scale, hidden, **CLOSE)
    else:
        norm, unembed = model.hf.transformer.ln_f, model.hf.lm_head.weight
        written = z @ model.hf.transformer.h[1].attn.c_proj.weight[place]
        written = written - written.mean(-1, keepdim=True)
        scale = norm.weight / (streams.var(-1, correction=0, keepdim=True) + norm.eps).sqrt()
    logits = (written * scale) @ unembed.T  # (prompt, vocab)
    direct = direct_writes(model, tokens, [Head(0, 0), head])
    ids = torch.tensor([[5, 6], [7, 8], [9, -1]])
    wanted = (logits - logits.mean(-1, keepdim=True)).gather(1, ids.clamp(min=0))
    found = direct.of_tokens(ids)[:, 1]
    torch.testing.assert_close(found[:2], wanted[:2], **CLOSE)
    assert found[2, 1].isnan()
    assert direct.top(3)[:, 1].tolist() == logits.topk(3).indices.tolist()


def _final_stream(model: Model, tokens: Tensor) -> Tensor:
    seen: list[Tensor] = []
    handle = model.anatomy.final_norm.part.register_forward_pre_hook(lambda _, args: seen.append(args[0][:, -1]))
    model.hf(tokens)
    handle.remove()
    return seen[0]


def test_the_planted_heads_have_their_kinds() -> None:
    model, task = planted(), planted_task()
    table = describe(model, task, [Head(*PREVIOUS), Head(*INDUCTION), Head(0, 0)])
    assert table["L0H2"].kinds == ("previous token",)
    assert table["L1H1"].kinds == ("answer mover", "induction")
    assert table["L0H0"].kinds == ()
    assert table["L1H1"].at_answer > 0.9
    assert table["L1H1"].answer > table["L1H1"].wrong + 1
    assert table["L1H1"].share == pytest.approx(1, abs=0.1)
    answer = int(task.answer_ids[0, 0])
    assert table["L1H1"].writes[0] == model.tokenizer.decode([answer])


def test_probes_of_attention_that_is_known() -> None:
    """Heads without queries attend evenly: each of the i + 1 visible keys gets 1 / (i + 1)."""
    model = tiny("llama")
    for block in model.anatomy.blocks:
        model.anatomy.projections(block)[0].weight.zero_()
    _, start, length = repeated_tokens(model, 0)
    positions = torch.arange(start + 1, start + 2 * length)
    probes = probe_heads(model)
    torch.testing.assert_close(probes["previous token"], (1 / (positions + 1)).mean().expand(3, 4), **CLOSE)
    second = positions[length - 1 :]
    torch.testing.assert_close(probes["duplicate token"], (1 / (second + 1)).mean().expand(3, 4), **CLOSE)
    torch.testing.assert_close(probes["induction"], (1 / (second[:-1] + 1)).mean().expand(3, 4), **CLOSE)


def test_a_sparse_model_counts_open_keys_only() -> None:
    model, _ = sparse_model("llama")
    task = random_task(n=2)
    table = describe(model, task, ALL, dense=tiny("llama"))
    assert table.dense is not None
    for line in table.lines:
        assert line.open_keys is not None
        assert sum(line.looks.values()) <= 1 + 1e-5
        assert table.dense[line.head].open_keys is None
    assert any(sum(line.looks.values()) < 0.9 for line in table.lines)
    records = table.records()
    assert [record["model"] for record in records[:2]] == ["tiny-llama", "sparse-llama"]
    assert records[0]["head"] == records[1]["head"]


def test_heads_are_chosen_by_scores_at_any_level() -> None:
    model, task = planted(), planted_task()
    graph = Graph.of(model.anatomy)
    scores = torch.zeros(2, 4)
    scores[1, 1], scores[0, 3] = -5.0, 2.0
    assert best_heads(HeadScores(scores, "any"), 2) == [Head(1, 1), Head(0, 3)]
    edges = torch.zeros(graph.n_sources, graph.n_destinations)
    edges[graph.edge("L0H2 -> L1H1.k")], edges[graph.edge("L0H2 -> logits")] = 1.0, -1.0
    edges[graph.edge("L0H1 -> logits")] = 1.5
    assert best_heads(EdgeScores(edges, graph, "any"), 2) == [Head(0, 2), Head(0, 1)]
    assert {line.head for line in describe(model, task, 2).lines} == {"L0H2", "L1H1"}


def test_saved_and_read_again(tmp_path: Path) -> None:
    table = describe(planted(), planted_task(), 3)
    save_head_table(table, tmp_path)
    assert load_head_table(tmp_path) == table
    assert json.loads((tmp_path / "heads.json").read_text())["lines"][0]["head"] == table.lines[0].head
    assert load_head_table(tmp_path / "nowhere") is None


def test_small_batches_give_the_same() -> None:
    model, task = tiny("gpt2"), random_task(n=5, lengths=(9, 7))
    whole, cut = describe(model, task, ALL[:3]), describe(model, task, ALL[:3], context=Context(memory_gb=1e-6))
    for one, other in zip(whole.lines, cut.lines, strict=True):
        assert one.head == other.head
        assert one.score == pytest.approx(other.score, abs=1e-5)
        assert one.looks == pytest.approx(other.looks, abs=1e-5)


def test_the_interval_of_a_mean() -> None:
    assert bootstrap_mean(torch.full((20,), 3.0)) == (3.0, 3.0)
    values = torch.randn(400, generator=torch.Generator().manual_seed(0))
    low, high = bootstrap_mean(values)
    error = float(values.std()) / 20
    assert low == pytest.approx(float(values.mean()) - 1.96 * error, abs=0.15 * error)
    assert high == pytest.approx(float(values.mean()) + 1.96 * error, abs=0.15 * error)


@pytest.mark.parametrize(
    ("heads", "message"),
    [
        ([], "there is no head to describe"),
        (["L0H0 -> logits"], "only heads can be described"),
        (["L7H0"], "no head L7H0"),
    ],
)
def test_bad_heads(heads: list[str], message: str) -> None:
    with pytest.raises(GatelensError, match=message):
        describe(tiny("llama"), random_task(), heads)


def test_a_dense_model_of_another_shape() -> None:
    with pytest.raises(GatelensError, match="give the dense model that the sparse one was made from"):
        describe(tiny("llama"), random_task(), ALL[:1], dense=tiny("llama", num_hidden_layers=2))


def test_a_dense_model_with_other_tokens() -> None:
    other = tiny("llama")
    tokenizer = copy.deepcopy(other.tokenizer)
    tokenizer.convert_ids_to_tokens = lambda ids: [f"other {token}" for token in ids]
    with pytest.raises(GatelensError, match="tiny-llama and tiny-llama do not have the same tokens"):
        describe(tiny("llama"), random_task(), ALL[:1], dense=replace(other, tokenizer=tokenizer))


def test_heads_that_the_dense_table_lacks(tmp_path: Path) -> None:
    table = describe(planted(), planted_task(), ["L0H2", "L1H1"])
    beside = table.beside(describe(planted(), planted_task(), ["L1H1", "L0H0"]))
    save_head_table(beside, tmp_path)
    assert load_head_table(tmp_path) == beside
    assert [record["head"] for record in beside.records()] == [
        head for line in table.lines for head in [line.head] * (1 + (line.head == "L1H1"))
    ]
    shown = Console(width=120, record=True, file=io.StringIO())
    shown.print(head_table(beside))
    lines = [line.split() for line in shown.export_text().splitlines()]
    titles = [words[1] for words in lines if len(words) > 2 and words[1] in ("L0H2", "L1H1", "dense")]
    assert titles == [title for line in table.lines for title in (line.head, "dense")]
    [missing] = [words for words in lines if words[1:4] == ["dense", "│", "-"]]
    assert missing.count("-") == 6
