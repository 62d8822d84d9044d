"""One head on one prompt, against plain Hugging Face."""

from __future__ import annotations

import pytest
import torch
from families import prompts, sparse_model, tiny
from toys import random_task

from gatelens import GatelensError
from gatelens.measures.head_attention import attention
from gatelens.sparse.recording import record_open


@torch.no_grad()
def test_weights_and_values_of_plain_hugging_face() -> None:
    model, tokens = tiny("llama"), prompts(rows=1)
    seen = attention(model, tokens, "L1H3")
    model.hf.set_attn_implementation("eager")
    out = model.hf(tokens, output_attentions=True, output_hidden_states=True)
    torch.testing.assert_close(seen.weights, out.attentions[1][0, 3])
    layer = model.hf.model.layers[1]
    normed = layer.input_layernorm(out.hidden_states[1][0])
    values = layer.self_attn.v_proj(normed).unflatten(-1, (2, -1))[:, 1]  # head 3 shares the second KV head
    dim = model.anatomy.head_dim
    written = values @ layer.self_attn.o_proj.weight[:, 3 * dim :].T
    torch.testing.assert_close(seen.value_norms, written.norm(dim=-1))
    assert seen.open is None
    assert seen.roles is None
    best = int(seen.weights[-1].argmax())
    assert seen.looks_at(most=1) == [(best, f"t{int(tokens[0, best])}", pytest.approx(float(seen.weights[-1].max())))]


def test_a_prompt_of_a_task_has_roles() -> None:
    model, task = tiny("gpt2"), random_task(n=3, lengths=(9, 7))
    seen = attention(model, task, (0, 1), prompt=1)
    assert len(seen.tokens) == 7
    assert seen.roles is not None
    assert seen.roles[0] == "first token"
    assert seen.roles[-1] == "last token"
    records = seen.records()
    assert len(records) == 7 * 8 // 2
    assert records[-1]["query_role"] == "last token"
    assert sum(record["weight"] for record in records if record["query"] == 6) == pytest.approx(1)


@torch.no_grad()
def test_open_gates_of_a_sparse_model() -> None:
    model, _ = sparse_model("llama")
    tokens = prompts(rows=1)
    seen = attention(model, tokens, "L2H0")
    with record_open(model.hf, edges=True) as record:
        model.hf(tokens)
    assert torch.equal(seen.open, record.edges[2, 0, 0])
    torch.testing.assert_close(seen.weights.sum(1), torch.ones(tokens.shape[1]))
    assert all(seen.open[-1, key] for key, _, _ in seen.looks_at(most=9))


def test_bad_input() -> None:
    model, task = tiny("llama"), random_task(n=2)
    for head in (["L0H0", "L0H1"], "M0", []):
        with pytest.raises(GatelensError, match="is not one head"):
            attention(model, task, head)
    with pytest.raises(GatelensError, match="no prompt 5 in toy: it has 2 prompts"):
        attention(model, task, "L0H0", prompt=5)
    with pytest.raises(GatelensError, match="these are 3 prompts: give one"):
        attention(model, prompts(), "L0H0")
    with pytest.raises(GatelensError, match="no position 40"):
        attention(model, task, "L0H0").looks_at(40)
