"""The check at load: is what the anatomy says about this model true?

Every number of gatelens rests on five facts. Each is tested on two short prompts of arbitrary tokens, in a few
short forwards, and a model for which one fails is not loaded.
"""

from __future__ import annotations

from contextlib import nullcontext

import torch
from torch import Tensor

from gatelens.errors import GatelensError
from gatelens.gates.heads import run_heads
from gatelens.gates.hooks import Hooks
from gatelens.gates.runs import capture, forward
from gatelens.model import Model
from gatelens.runtime.precision import widen
from gatelens.sparse.in_model import dense_attention, is_sparse

# Hugging Face's norms compute in float32 also where the weights are float64.
_TOLERANCE = {torch.float64: 1e-5, torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 8e-2}


@torch.no_grad()
def check_model(model: Model) -> None:
    """Raise an error that says which fact fails; return if all hold."""
    vocab = model.hf.config.vocab_size
    tokens = (torch.arange(14).reshape(2, 7) * 7919 + 11) % vocab
    _gates_at_one(model, tokens)
    _components_add_up(model, tokens)
    _mlps_read_the_stream(model, tokens)
    _projections_and_norms(model, tokens)
    _padding_is_harmless(model, tokens)


def _gates_at_one(model: Model, tokens: Tensor) -> None:
    plain = model.hf(input_ids=tokens.to(model.device), use_cache=False).logits
    ones = torch.ones(1, model.n_layers, model.n_heads)
    # Gates that require gradients are applied in every layer, also while they are 1.
    with torch.enable_grad():
        gated = run_heads(model, tokens, ones.requires_grad_(), logits_at="all")[0].detach()
    if not torch.equal(gated.reshape(plain.shape), plain):
        worst = (gated - plain).abs().max().item()
        _fail(
            model,
            f"with all head gates at 1 its logits differ from plain Hugging Face's by up to {worst:.2g}",
        )


def _components_add_up(model: Model, tokens: Tensor) -> None:
    anatomy = model.anatomy
    mlps: list[Tensor] = []
    finals: list[Tensor] = []
    with Hooks() as hooks:
        for block in anatomy.blocks:
            hooks.after(block.mlp_end, mlps.append)
        hooks.before(anatomy.final_norm.module, finals.append)  # type: ignore[arg-type]
        run = capture(model, tokens)
    stream = widen(run.streams[0])
    for block, z, mlp in zip(anatomy.blocks, run.heads, mlps, strict=True):
        stream = stream.to(z.device)
        bias = block.out(torch.zeros_like(z.flatten(-2)))
        if block.after_attention.module is not None:
            bias = bias * block.after_attention.scale(block.out(z.flatten(-2)))
        stream = stream + widen(anatomy.contributions(block, z)).sum(0) + bias + mlp
    _compare(model, stream, finals[0], "the outputs of its components do not add up to the residual stream")


def _mlps_read_the_stream(model: Model, tokens: Tensor) -> None:
    """An MLP reads its layer's input and, unless the block is parallel, what the attention added to it."""
    inputs: list[Tensor] = []
    with Hooks() as hooks:
        for block in model.anatomy.blocks:
            hooks.before(block.mlp, inputs.append)
        run = capture(model, tokens)
    for block, stream, z, wanted in zip(model.anatomy.blocks, run.streams, run.heads, inputs, strict=True):
        if not model.anatomy.parallel:
            stream = stream.to(z.device) + block.after_attention(block.out(z.flatten(-2)))
        _compare(model, block.before_mlp(stream), wanted, "its MLPs do not read the stream as described")


def _projections_and_norms(model: Model, tokens: Tensor) -> None:
    """Heads' weights cut out of the projections, and norms in closed form, give what the modules give."""
    anatomy, block = model.anatomy, model.anatomy.blocks[-1]
    outputs: list[Tensor] = []
    clipped: list[Tensor] = []  # some families clip the outputs in place
    with Hooks() as hooks:
        for module in block.qkv:
            hooks.after(module, clipped.append)
            hooks.after(module, lambda out: outputs.append(out.clone()))
        # With all edges open, also in a sparse model: what is checked is where the heads' weights are.
        with dense_attention(model.hf) if is_sparse(model.hf) else nullcontext():
            run = capture(model, tokens)
    stream = run.streams[-1]
    normed = block.before_attention(stream)
    parts = []
    for projection in anatomy.projections(block):
        part = torch.einsum("btw,hdw->bthd", normed, projection.weight)
        parts.append(part if projection.bias is None else part + projection.bias)
    what = "its query, key and value projections are not cut into heads as described"
    for found, wanted in zip(anatomy.fuse(*parts), outputs, strict=True):
        _compare(model, found, wanted, what)
    # The first position attends to itself alone, so each head's output there is its value.
    values = anatomy.unfuse(clipped)[2][:, 0].repeat_interleave(anatomy.n_heads // anatomy.n_kv_heads, dim=1)
    _compare(model, values, run.heads[-1][:, 0], what)

    norm = anatomy.final_norm
    x = stream.clone().requires_grad_()
    with torch.enable_grad():
        y = norm(x.to(next(iter([*norm.module.parameters(), x])).device))  # type: ignore[union-attr]
        u = widen(torch.linspace(-1, 1, y.shape[-1], device=y.device, dtype=y.dtype).expand_as(y))
        (wanted,) = torch.autograd.grad((widen(y) * u).sum(), x)
    found = norm.pull_back(u.clone().unsqueeze(0), x.detach().to(y.device))[0]
    _compare(model, found, wanted, "its norm is not of the kind described")


def _padding_is_harmless(model: Model, tokens: Tensor) -> None:
    with Hooks() as hooks:
        plain = forward(model, tokens, None, hooks, "last")
    pad = torch.full((2, 3), model.tokenizer.pad_token_id or 0)
    real, none = torch.ones(2, 7, dtype=torch.bool), torch.zeros(2, 3, dtype=torch.bool)
    for side, padded, mask in (
        ("left", torch.cat([pad, tokens], 1), torch.cat([none, real], 1)),
        ("right", torch.cat([tokens, pad], 1), torch.cat([real, none], 1)),
    ):
        with Hooks() as hooks:
            logits = forward(model, padded, mask, hooks, "last")
        _compare(model, logits, plain, f"padding on the {side} changes its numbers")


def _compare(model: Model, found: Tensor, wanted: Tensor, what: str) -> None:
    found, wanted = widen(found), widen(wanted).to(found.device)
    error = ((found - wanted).abs().max() / wanted.abs().max().clamp(min=1e-12)).item()
    if not error <= _TOLERANCE[model.dtype]:
        _fail(model, f"{what} (relative error {error:.2g})")


def _fail(model: Model, what: str) -> None:
    raise GatelensError(
        f"{model.name} ({model.anatomy.model_type}) fails the check at load: {what}. Its numbers would be wrong; "
        "mend its row in FAMILIES of gatelens/model/families.py, or pass check=False (--no-check) to look into it."
    )
