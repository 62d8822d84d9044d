"""What the scripts of all peers share: the model, the prompts, and a loop that runs the jobs that it is asked for.

A script runs in the environment of its library, without gatelens. The first line that it reads has the prompts; every
further line is the name of a job. It answers with one line of JSON: the processor time and the scores.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"  # all peers would ask the hub for a tokenizer or a config

import torch
from transformers import GPT2Config, GPT2LMHeadModel

_out = os.fdopen(os.dup(1), "w")  # the answers; what libraries print goes to stderr
os.dup2(2, 1)
torch.set_num_threads(1)
work = json.loads(sys.stdin.readline())
clean, corrupt, right, wrong = (torch.tensor(work[key]) for key in ("clean", "corrupt", "right", "wrong"))
heads: list[tuple[int, int]] = [tuple(head) for head in work["heads"]]  # those that are patched
places = torch.arange(len(clean))


def random_gpt2() -> Any:
    """GPT-2 small with the random weights that gatelens has in the same comparison."""
    torch.manual_seed(0)
    return GPT2LMHeadModel(GPT2Config()).eval().requires_grad_(False)


def metric(logits: torch.Tensor) -> torch.Tensor:
    """(prompt, position, vocab) or (prompt, vocab) -> (prompt,)"""
    last = logits[:, -1] if logits.ndim == 3 else logits
    return last[places, right] - last[places, wrong]


def serve(jobs: Mapping[str, Callable[[], Any]]) -> None:
    """Run the jobs that are asked for, until the input ends."""
    _say({"jobs": list(jobs)})
    for line in sys.stdin:
        start = time.process_time()
        result = jobs[line.strip()]()
        seconds = time.process_time() - start
        _say({"seconds": seconds, "scores": None if result is None else torch.as_tensor(result).flatten().tolist()})


def _say(answer: dict[str, Any]) -> None:
    _out.write(json.dumps(answer) + "\n")
    _out.flush()
