"""TransformerLens 4: `TransformerBridge` around the Hugging Face model."""

import tempfile

import torch
from hooked import hooked_jobs
from serve import random_gpt2, serve
from transformer_lens.model_bridge import TransformerBridge

hf = random_gpt2()
with tempfile.TemporaryDirectory() as folder:
    hf.config.save_pretrained(folder)
    model = TransformerBridge.boot_transformers(folder, hf_model=hf, device="cpu")
for parameter in model.parameters():
    parameter.requires_grad_(False)
torch.set_num_threads(1)
serve(hooked_jobs(model))
