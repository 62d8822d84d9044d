"""The model that is being made sparse: a gated copy of a dense model, of which all weights or adapters are trained."""

from __future__ import annotations

import copy
import dataclasses
import importlib.util
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from gatelens.errors import GatelensError
from gatelens.model import Model
from gatelens.model.families import family_of
from gatelens.sparse._head_gates import is_gate_parameter
from gatelens.sparse.adapters import GATE_TENSORS, adapter_name, read_adapter
from gatelens.sparse.in_model import BIAS, GateValues, gate_values, is_sparse, make_sparse
from gatelens.sparse.sparsify._sharding import shard_like
from gatelens.sparse.sparsify.settings import SparsifySettings

REST = ".gate_rest"
OPEN = 1e4  # a bias that opens every gate, whatever its score or its attention weight is
ALL_LINEAR = "all-linear"
SCALE = 2  # factor of what an adapter adds: peft's alpha divided by the rank


class Student:
    """`hf` is the gated Hugging Face model; `trained` is what is trained: `hf` itself, or the peft model around it.

    Arguments:
        model: the dense model, or a sparse one that is to become sparser.
        share: use the frozen weights of the given model itself, without a second copy in memory.
    """

    def __init__(self, model: Model, settings: SparsifySettings, share: bool) -> None:
        if is_sparse(model.hf) and (settings.bias != BIAS["score"] or settings.bias_end is not None):
            raise GatelensError(
                f"{model.name} is sparse already and keeps its biases: leave out bias and bias_end, or give the dense "
                "model that it was made from."
            )
        if settings.gate == "probability" and is_sparse(model.hf) and gate_values(model.hf).gate == "score":
            raise GatelensError(
                f"{model.name} is sparse already and its gates see scores: leave out gate, or give the dense model "
                "that it was made from."
            )
        if settings.hold == "open" and is_sparse(model.hf):
            raise GatelensError(
                f"{model.name} is sparse already, and a run that holds all gates open begins with a dense model: give "
                "the dense model that it was made from."
            )
        lora = settings.weights == "lora"
        shared = {id(p): p for p in model.hf.parameters()} if lora and share else {}
        self.hf: Any = copy.deepcopy(model.hf, shared)
        self.is_new = not is_sparse(model.hf)  # so that its gates have to be chosen
        if settings.hold == "open":
            make_sparse(self.hf, OPEN, gate=settings.gate)
        elif self.is_new and settings.gate == "probability":
            make_sparse(self.hf, learned=True, gate="probability")  # calibration gives them their values
        else:
            make_sparse(self.hf, settings.bias if self.is_new else None, learned=settings.learn_bias)
        self.trained: Any = _with_adapters(self.hf, settings) if lora else self.hf
        if not lora:
            self.hf.requires_grad_(True)
        learned = settings.learn_bias and settings.hold != "open"
        for name, parameter in self.hf.named_parameters():  # peft has frozen them
            if is_gate_parameter(name):
                parameter.requires_grad_(learned and (settings.rest or not name.endswith(REST)))
        if settings.gradient_checkpointing:
            self.hf.gradient_checkpointing_enable({"use_reentrant": False})

    def separate(self) -> None:
        """Give the model parameters of its own, and memory of their own to those that adapters are merged into.

        All other weights stay where the given model has them, so that a large model is in memory once. As parameters
        they are separate: the two models are moved and converted one by one.
        """
        adapted = {id(module.base_layer.weight) for module in self.hf.modules() if hasattr(module, "base_layer")}
        made: dict[int, nn.Parameter] = {}
        for module in self.hf.modules():
            for name, weight in module._parameters.items():
                if weight is None or weight.requires_grad:
                    continue  # what is trained belongs to this model
                if id(weight) not in made:
                    data = weight.detach().clone() if id(weight) in adapted else weight.detach()
                    made[id(weight)] = nn.Parameter(data, requires_grad=False)
                module._parameters[name] = made[id(weight)]

    def biases(self) -> list[nn.Parameter]:
        """The learned biases, one (head,) for each layer."""
        return self._trained_gates(".gate_bias")

    def offsets(self) -> list[tuple[nn.Parameter, ...]]:
        """The learned u and w of probability gates, two (head, width) for each layer."""
        return list(
            zip(self._trained_gates(".gate_query.weight"), self._trained_gates(".gate_key.weight"), strict=True)
        )

    def rest_values(self) -> list[nn.Parameter]:
        """The learned rest values of probability gates, one (head, dim) for each layer."""
        return self._trained_gates(REST)

    def weights(self) -> list[nn.Parameter]:
        """The trained parameters that do not belong to gates."""
        named = self.trained.named_parameters()
        return [p for name, p in named if p.requires_grad and not is_gate_parameter(name)]

    def _trained_gates(self, *endings: str) -> list[nn.Parameter]:
        return [p for name, p in self.hf.named_parameters() if p.requires_grad and name.endswith(endings)]

    def state(self) -> dict[str, Tensor]:
        """The trained parameters by name."""
        return {name: p.detach() for name, p in self.trained.named_parameters() if p.requires_grad}

    @torch.no_grad()
    def load_state(self, state: dict[str, Tensor]) -> None:
        """Copy what `state` returned into this model; raise an error if the names or shapes are different."""
        own = self.state()
        for name, parameter in own.items():
            if name not in state or state[name].shape != parameter.shape:
                raise GatelensError(
                    f"the weights to start from do not have {name} in the shape that is trained here: use the same "
                    "settings as the run that they come from."
                )
        lost = [name for name in state if name not in own]
        if lost:
            example = "learned biases" if lost[0].endswith("gate_bias") else lost[0]
            raise GatelensError(
                f"the weights to start from have {example}, which this run does not train: use the same settings as "
                "the run that they come from."
            )
        for name, parameter in own.items():
            parameter.copy_(shard_like(state[name], parameter))

    @torch.no_grad()
    def load_adapter(self, folder: Path) -> None:
        """Begin with the matrices and gates of an adapter; raise an error if this run trains others."""
        matrices, gates, scale = read_adapter(self.hf, folder)
        own = {adapter_name(name): parameter for name, parameter in self.state().items() if not is_gate_parameter(name)}
        shapes = {name: tuple(parameter.shape) for name, parameter in own.items()}
        trains_rest = bool(self.rest_values()) or not _has_rest(gates)
        same_gates = gate_values(self.hf).gate == gates.gate and bool(self.biases()) and trains_rest
        if scale != SCALE or not same_gates or shapes != {name: tuple(x.shape) for name, x in matrices.items()}:
            raise GatelensError(
                f"the adapter in {folder} has other modules, ranks or gates than are trained here: use the settings "
                "that it was made with, which its adapter.json has."
            )
        for name, parameter in own.items():
            parameter.copy_(matrices[str(name)])
        self.set_gates(gates)

    def set_bias(self, bias: float | Tensor) -> None:
        """Give all heads biases that are not learned."""
        make_sparse(self.hf, bias)

    @torch.no_grad()
    def set_gates(self, values: GateValues) -> None:
        """Give learned gates these values."""
        endings = {"bias": ".gate_bias", "query": ".gate_query.weight", "key": ".gate_key.weight", "rest": REST}
        for name in GATE_TENSORS[values.gate]:
            parameters = self._trained_gates(endings[name])
            if name == "rest" and not parameters:
                continue  # this run has none
            for parameter, of_layer in zip(parameters, getattr(values, name), strict=True):
                parameter.copy_(of_layer)

    def train(self) -> None:
        """Sample gates from now on. Dropout stays off: the noise of the gates takes its place."""
        self.trained.train()
        for module in self.trained.modules():
            if isinstance(module, nn.Dropout):
                module.eval()

    def eval(self) -> None:
        """Gates are steps from now on, as in use."""
        self.trained.eval()


def with_narrow_weights(model: Model) -> Model:
    """A copy of a model whose linear modules have weights in bfloat16; all other weights are shared.

    Under autocast this computes the same as the model itself, and weights are not converted again in each pass. The
    residual stream stays in the precision of the embeddings.
    """
    hf = copy.deepcopy(model.hf, {id(p): p for p in model.hf.parameters()})
    tied = hf.get_input_embeddings().weight
    for module in hf.modules():
        if isinstance(module, nn.Linear | Conv1D) and module.weight is not tied:
            module.weight = nn.Parameter(module.weight.to(torch.bfloat16), requires_grad=False)
    return dataclasses.replace(model, hf=hf)


def _has_rest(gates: GateValues) -> bool:
    return gates.rest is not None and bool(gates.rest.any())


def _with_adapters(hf: Any, settings: SparsifySettings) -> Any:
    if importlib.util.find_spec("peft") is None:
        raise GatelensError("LoRA needs peft: run `pip install 'gatelens[sparsify]'`, or choose weights='full'.")
    from peft import LoraConfig, get_peft_model

    family = family_of(hf.config)
    names = settings.projections or tuple(f"{family.attention}.{name}" for name in (*family.qkv, family.out))
    targets = ALL_LINEAR if names == (ALL_LINEAR,) else list(names)
    config = LoraConfig(r=settings.rank, lora_alpha=SCALE * settings.rank, target_modules=targets, lora_dropout=0.0)
    embeddings = (hf.get_input_embeddings(), hf.get_output_embeddings())
    tied = embeddings[1] is not None and embeddings[0].weight is embeddings[1].weight
    try:
        with torch.random.fork_rng():
            torch.manual_seed(settings.seed)
            trained = get_peft_model(hf, config)
    except ValueError as error:
        raise GatelensError(f"no module of this model is called {' or '.join(names)}: give other names.") from error
    trainable = [name for name, p in trained.named_parameters() if p.requires_grad]
    if any(adapter_name(name) is None and not is_gate_parameter(name) for name in trainable):
        raise GatelensError(
            f"{' or '.join(names)} names embeddings, which cannot have adapters here: give names of linear modules."
        )
    if tied and hf.get_output_embeddings() is not embeddings[1]:
        raise GatelensError(
            f"{' or '.join(names)} names the output embeddings, which are also the input embeddings: an adapter would "
            "change both. Give other names, or train all weights."
        )
    return trained
