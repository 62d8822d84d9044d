"""TransformerLens 3: `HookedTransformer`, with the weights of the Hugging Face model and no folding."""

import torch
from hooked import hooked_jobs
from serve import random_gpt2, serve
from transformer_lens import HookedTransformer, HookedTransformerConfig
from transformer_lens.pretrained.weight_conversions import convert_gpt2_weights

hf = random_gpt2()
config = HookedTransformerConfig(
    n_layers=12,
    d_model=768,
    n_ctx=1024,
    d_head=64,
    n_heads=12,
    d_vocab=50_257,
    act_fn="gelu_new",
    normalization_type="LN",
    original_architecture="GPT2LMHeadModel",
    device="cpu",
)
model = HookedTransformer(config)
model.load_and_process_state_dict(
    convert_gpt2_weights(hf, config),
    fold_ln=False,
    center_writing_weights=False,
    center_unembed=False,
    fold_value_biases=False,
)
for parameter in model.parameters():
    parameter.requires_grad_(False)
torch.set_num_threads(1)
serve(hooked_jobs(model))
