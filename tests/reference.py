"""What stock transformers says: greedy tokens, logits, and KV of a single-process run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

TIE = 1e-3
"""Where the reference's own two best logits are closer than this, either token is right."""


@dataclass(frozen=True)
class Answer:
    """Greedy continuation of one prompt, with the logits of each step, shape (steps, vocabulary)."""

    tokens: list[int]
    logits: torch.Tensor


class Reference:
    """The stock model of a folder, fp32, on CPU."""

    def __init__(self, folder: Path) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        self.model.eval()

    def generate(self, prompt: Sequence[int], new_tokens: int) -> Answer:
        """transformers' own greedy generate."""
        ids = torch.tensor([list(prompt)])
        out = self.model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=new_tokens,
            min_new_tokens=new_tokens,
            eos_token_id=None,
            pad_token_id=0,
            return_dict_in_generate=True,
            output_logits=True,
        )
        return Answer(out.sequences[0, len(prompt) :].tolist(), torch.cat(list(out.logits)).float())

    @torch.no_grad()
    def kv(self, prompt: Sequence[int]) -> torch.Tensor:
        """Keys and values of a prompt, shape (layers, 2, tokens, kv_heads, head_dim)."""
        cache = self.model(torch.tensor([list(prompt)]), use_cache=True).past_key_values
        layers = [torch.stack([layer.keys[0], layer.values[0]]) for layer in cache.layers]
        return torch.stack(layers).transpose(2, 3)


def compare(expected: Answer, got: Sequence[int]) -> str:
    """ "same", "tie" (they part where the reference itself is undecided), or what differs."""
    for step, (right, mine) in enumerate(zip(expected.tokens, got, strict=True)):
        if right != mine:
            best = expected.logits[step].topk(2).values
            if float(best[0] - best[1]) < TIE and mine in expected.logits[step].topk(2).indices.tolist():
                return "tie"
            return f"step {step}: expected {right}, got {mine}, margin {float(best[0] - best[1]):.4f}"
    return "same"
