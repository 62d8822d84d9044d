"""The checks at load: is the description of a model's family right for this model?

Every result of gatelens depends on five facts about the model:

1. with all gates at 1, the logits are exactly those of plain Hugging Face;
2. the outputs of the components add up to the residual stream;
3. MLPs read the residual stream where the description says;
4. the projections are split into heads, and the norms compute, as described;
5. padding does not change the numbers.

Each is tested on two short prompts of arbitrary tokens. A model for which one of them is false is not loaded. The cost
is a few short forward passes.

Whether texts begin with a special token is not checked but compared: `check_model` warns if the model predicts a
sentence much better with the other choice than with the tokenizer's.
"""

from __future__ import annotations

import math
import warnings
from contextlib import nullcontext

import torch
from torch import Tensor

from gatelens.errors import GatelensError, GatelensWarning
from gatelens.gates.head_runs import run_heads
from gatelens.gates.hooks import Hooks
from gatelens.gates.runs import capture, forward
from gatelens.model import Model
from gatelens.model.first_token import first_tokens
from gatelens.runtime.precision import widen
from gatelens.sparse.in_model import dense_attention, is_sparse

# The largest relative error for each dtype. Hugging Face's norms compute in float32 even if the weights are float64.
_TOLERANCE = {torch.float64: 1e-5, torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 8e-2}

_SENTENCE = "The little girl went to the park with her mother, and they played with a red ball until it was dark."
_MUCH_WORSE = 1.0  # nats per token; it is below 0.5 for models that were trained without a first token


@torch.no_grad()
def check_model(model: Model) -> None:
    """Raise a `GatelensError` that says which fact is false for this model; return if all are true."""
    vocab = model.hf.config.vocab_size
    tokens = (torch.arange(14).reshape(2, 7) * 7919 + 11) % vocab
    _check_gates_at_one(model, tokens)
    _check_components_add_up(model, tokens)
    _check_mlp_inputs(model, tokens)
    _check_projections_and_norm(model, tokens)
    _check_padding(model, tokens)
    _compare_first_tokens(model)


def _compare_first_tokens(model: Model) -> None:
    """Warn if the loss of a sentence is much lower without the first token that the tokenizer adds, or with one."""
    tokenizer = model.tokenizer
    chosen = first_tokens(tokenizer)
    special = tokenizer.bos_token_id
    if not chosen and special is None:
        return
    other = [] if chosen else [special]
    ids = tokenizer(_SENTENCE, add_special_tokens=False)["input_ids"]
    if len(ids) < 2 or max(*chosen, *other, *ids) >= model.hf.get_input_embeddings().num_embeddings:
        return
    loss, other_loss = (_sentence_loss(model, first, ids) for first in (chosen, other))
    # A loss near log(vocab) says that the model does not know the language: then neither choice means anything.
    if loss - other_loss > _MUCH_WORSE and other_loss < math.log(model.hf.config.vocab_size) / 2:
        token = repr(tokenizer.decode(chosen or other))
        adds, better, advice = "does not add", "with", "set add_bos_token to true in tokenizer_config.json"
        if chosen:
            adds, better, advice = "adds", "without", "remove the token from the post_processor in tokenizer.json"
        warnings.warn(
            f"the tokenizer of {model.name} {adds} {token} at the beginning of a text, but {better} it the model "
            f"predicts a sentence much better (loss {other_loss:.1f} instead of {loss:.1f} nats per token): {advice}, "
            "or do not trust its results.",
            GatelensWarning,
            stacklevel=2,
        )


def _sentence_loss(model: Model, first: list[int], ids: list[int]) -> float:
    """The mean negative log-probability of the tokens of a text after its first one, in nats per token."""
    tokens = torch.tensor([first + ids], device=model.device)
    log_probs = widen(model.hf(input_ids=tokens, use_cache=False).logits[0, len(first) : -1]).log_softmax(-1)
    targets = tokens[0, len(first) + 1 :].to(log_probs.device)
    return -log_probs.gather(-1, targets[:, None]).mean().item()


def _check_gates_at_one(model: Model, tokens: Tensor) -> None:
    plain = model.hf(input_ids=tokens.to(model.device), use_cache=False).logits
    ones = torch.ones(1, model.n_layers, model.n_heads)
    # Gates that require gradients are applied in every layer, even if all are 1.
    with torch.enable_grad():
        gated = run_heads(model, tokens, ones.requires_grad_(), logits_at="all")[0].detach()
    if not torch.equal(gated.reshape(plain.shape), plain):
        largest = (gated - plain).abs().max().item()
        _fail(
            model,
            f"with all head gates at 1 its logits differ from those of plain Hugging Face by up to {largest:.2g}",
        )


def _check_components_add_up(model: Model, tokens: Tensor) -> None:
    anatomy = model.anatomy
    mlps: list[Tensor] = []
    finals: list[Tensor] = []
    with Hooks() as hooks:
        for block in anatomy.blocks:
            hooks.after(block.mlp_end, mlps.append)
        hooks.before(anatomy.final_norm.part, finals.append)
        run = capture(model, tokens)
    stream = widen(run.streams[0])
    for block, z, mlp in zip(anatomy.blocks, run.heads, mlps, strict=True):
        stream = stream.to(z.device)
        bias = block.out(torch.zeros_like(z.flatten(-2)))
        if block.after_attention.module is not None:
            bias = bias * block.after_attention.scale(block.out(z.flatten(-2)))
        stream = stream + widen(anatomy.contributions(block, z)).sum(0) + bias + mlp
    _compare(model, stream, finals[0], "the outputs of its components do not add up to the residual stream")


def _check_mlp_inputs(model: Model, tokens: Tensor) -> None:
    """An MLP reads the input of its layer and, unless the block is parallel, what the attention added to it."""
    inputs: list[Tensor] = []
    with Hooks() as hooks:
        for block in model.anatomy.blocks:
            hooks.before(block.mlp, inputs.append)
        run = capture(model, tokens)
    for block, stream, z, mlp_input in zip(model.anatomy.blocks, run.streams, run.heads, inputs, strict=True):
        if not model.anatomy.parallel:
            stream = stream.to(z.device) + block.after_attention(block.out(z.flatten(-2)))
        _compare(model, block.before_mlp(stream), mlp_input, "its MLPs do not read the residual stream as described")


def _check_projections_and_norm(model: Model, tokens: Tensor) -> None:
    """The heads' weights, split out of the projections of the last layer, give what the modules give."""
    anatomy, block = model.anatomy, model.anatomy.blocks[-1]
    outputs: list[Tensor] = []
    clipped: list[Tensor] = []  # some families clip the outputs in place
    with Hooks() as hooks:
        for module in block.qkv:
            hooks.after(module, clipped.append)
            hooks.after(module, lambda output: outputs.append(output.clone()))
        # A sparse model is run with all edges open, because the last comparison below needs plain attention.
        with dense_attention(model.hf) if is_sparse(model.hf) else nullcontext():
            run = capture(model, tokens)
    normed = block.before_attention(run.streams[-1])
    parts = []
    for projection in anatomy.projections(block):
        part = torch.einsum("btw,hdw->bthd", normed, projection.weight)
        parts.append(part if projection.bias is None else part + projection.bias)
    claim = "its query, key and value projections are not split into heads as described"
    for computed, output in zip(anatomy.fuse(*parts), outputs, strict=True):
        _compare(model, computed, output, claim)
    # The first position attends to itself alone, so each head's output there is its value.
    values = anatomy.unfuse(clipped)[2][:, 0].repeat_interleave(anatomy.n_heads // anatomy.n_kv_heads, dim=1)
    _compare(model, values, run.heads[-1][:, 0], claim)
    _check_final_norm(model, run.streams[-1])


def _check_final_norm(model: Model, stream: Tensor) -> None:
    """The closed form of the norm's backward pass gives the gradient that autograd gives."""
    norm = model.anatomy.final_norm
    x = stream.clone().requires_grad_()
    with torch.enable_grad():
        y = norm(x.to(next(iter([*norm.part.parameters(), x])).device))
        grad = widen(torch.linspace(-1, 1, y.shape[-1], device=y.device, dtype=y.dtype).expand_as(y))
        (by_autograd,) = torch.autograd.grad((widen(y) * grad).sum(), x)
    by_closed_form = norm.pull_back(grad.clone().unsqueeze(0), x.detach().to(y.device))[0]
    _compare(model, by_closed_form, by_autograd, "its norm is not of the kind described")


def _check_padding(model: Model, tokens: Tensor) -> None:
    with Hooks() as hooks:
        plain = forward(model, tokens, None, hooks, "last")
    pad_id = model.tokenizer.pad_token_id or 0
    # Padding is masked: any token will do if the model does not have the tokenizer's.
    pad = torch.full((2, 3), pad_id if pad_id < model.hf.get_input_embeddings().num_embeddings else 0)
    real, padding = torch.ones(2, 7, dtype=torch.bool), torch.zeros(2, 3, dtype=torch.bool)
    for side, padded, mask in (
        ("left", torch.cat([pad, tokens], 1), torch.cat([padding, real], 1)),
        ("right", torch.cat([tokens, pad], 1), torch.cat([real, padding], 1)),
    ):
        with Hooks() as hooks:
            logits = forward(model, padded, mask, hooks, "last")
        _compare(model, logits, plain, f"padding on the {side} changes its numbers")


def _compare(model: Model, computed: Tensor, expected: Tensor, claim: str) -> None:
    """Raise an error with this claim if two tensors differ by more than rounding."""
    computed, expected = widen(computed), widen(expected).to(computed.device)
    error = ((computed - expected).abs().max() / expected.abs().max().clamp(min=1e-12)).item()
    if not error <= _TOLERANCE[model.dtype]:  # an error of nan fails too
        _fail(model, f"{claim} (relative error {error:.2g})")


def _fail(model: Model, claim: str) -> None:
    raise GatelensError(
        f"{model.name} ({model.anatomy.model_type}) fails the check at load: {claim}. Its numbers would be wrong; "
        "correct its entry in FAMILIES of gatelens/model/families.py, or pass check=False (--no-check) to examine it."
    )
