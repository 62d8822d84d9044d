"""The model that is being made sparse: a gated copy of a dense model, of which all weights or adapters are trained."""

from __future__ import annotations

import copy
import importlib.util
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor, nn

from gatelens.errors import GatelensError
from gatelens.model import Model
from gatelens.model.families import family_of
from gatelens.sparse._head_gates import is_gate_parameter
from gatelens.sparse.adapters import adapter_name
from gatelens.sparse.calibration import calibrate
from gatelens.sparse.in_model import BIAS, gate_values, is_sparse, make_sparse
from gatelens.sparse.recording import record_open
from gatelens.sparse.sparsify._sharding import shard_like
from gatelens.sparse.sparsify.settings import SparsifySettings

BIAS_STEP = 0.5  # how much `lower_biases` lowers a bias at a time
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
        lora = settings.weights == "lora"
        shared = {id(p): p for p in model.hf.parameters()} if lora and share else {}
        self.hf: Any = copy.deepcopy(model.hf, shared)
        self.is_new = not is_sparse(model.hf)  # so that its gates have to be chosen
        if self.is_new and settings.gate == "probability":
            make_sparse(self.hf, learned=True, gate="probability")  # `calibrate` gives them their values
        else:
            make_sparse(self.hf, settings.bias if self.is_new else None, learned=settings.learn_bias)
        self.trained: Any = _with_adapters(self.hf, settings) if lora else self.hf
        if not lora:
            self.hf.requires_grad_(True)
        if settings.learn_bias:  # peft has frozen them
            for name, parameter in self.hf.named_parameters():
                if is_gate_parameter(name):
                    parameter.requires_grad_(True)
        if settings.gradient_checkpointing:
            self.hf.gradient_checkpointing_enable({"use_reentrant": False})

    def biases(self) -> list[nn.Parameter]:
        """The learned biases, one (head,) for each layer."""
        return self._trained_gates(".gate_bias")

    def offsets(self) -> list[nn.Parameter]:
        """The learned u and w of probability gates, two (head, width) for each layer."""
        return self._trained_gates(".gate_query.weight", ".gate_key.weight")

    def rest_values(self) -> list[nn.Parameter]:
        """The learned rest values of probability gates, one (head, dim) for each layer."""
        return self._trained_gates(".gate_rest")

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

    def set_bias(self, bias: float | Tensor) -> None:
        """Give all heads biases that are not learned."""
        make_sparse(self.hf, bias)

    @torch.no_grad()
    def calibrate(self, tokens: Int[Tensor, "sequence token"], open_mass: float, close_first: bool) -> None:
        """Give probability gates their first values, which follow from the attention without gates on some sequences.

        Cost: two or three forward passes of the sequences.
        """
        values = calibrate(self.hf, tokens, open_mass, close_first=close_first)
        endings = {"bias": ".gate_bias", "query": ".gate_query.weight", "key": ".gate_key.weight", "rest": ".gate_rest"}
        for name, ending in endings.items():
            for parameter, of_layer in zip(self._trained_gates(ending), getattr(values, name), strict=True):
                parameter.copy_(of_layer)

    @torch.no_grad()
    def lower_biases(self, tokens: Int[Tensor, "sequence token"], most_open: float) -> None:
        """Lower the bias of every head until at most this share of its edges is open on some sequences.

        A gate logit far above 0 has hardly any gradient, so a head whose gates are all wide open would stay open at any
        cost. With a lower bias the head can learn, and opens again if it has to. Cost: one forward pass for each step
        of 0.5.
        """
        self.eval()
        while True:
            with record_open(self.hf) as record:
                self.hf(input_ids=tokens, use_cache=False)
            shares = (record.open_share * record.pairs).sum(1) / record.pairs.sum(1)  # (layer, head)
            if not (shares > most_open).any():
                return
            for bias, share in zip(self.biases(), shares, strict=True):
                bias.sub_(BIAS_STEP * (share > most_open))

    def train(self) -> None:
        """Sample gates from now on. Dropout stays off: the noise of the gates takes its place."""
        self.trained.train()
        for module in self.trained.modules():
            if isinstance(module, nn.Dropout):
                module.eval()

    def eval(self) -> None:
        """Gates are steps from now on, as in use."""
        self.trained.eval()


def _with_adapters(hf: Any, settings: SparsifySettings) -> Any:
    if importlib.util.find_spec("peft") is None:
        raise GatelensError("LoRA needs peft: run `pip install 'gatelens[sparsify]'`, or choose weights='full'.")
    from peft import LoraConfig, get_peft_model

    family = family_of(hf.config)
    names = settings.projections or tuple(f"{family.attention}.{name}" for name in (*family.qkv, family.out))
    config = LoraConfig(r=settings.rank, lora_alpha=SCALE * settings.rank, target_modules=list(names), lora_dropout=0.0)
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
