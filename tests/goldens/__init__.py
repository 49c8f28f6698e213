"""Greedy continuations by transformers in float32, kept with the project; `make.py` made them.

`smollm2` needs the model's files; `tiny_llama` and `tiny_qwen3` are the models of tests.rose.tiny_lm as they stand.
No prompt ends at an end token: 64 tokens follow each.
"""

from pathlib import Path
from typing import Literal

import msgspec
from msgspec import Struct

NUM_TOKENS = 64


class GoldenPrompt(Struct, frozen=True):
    """One prompt and what follows. For each of its tokens: log probability, and by how much its logit led."""

    name: str
    text: str  # empty where the prompt is random ids
    prompt_ids: list[int]
    tokens: list[int]
    logprobs: list[float]
    margins: list[float]

    def check(self, tokens: list[int], *, near_tie: float = 1e-3) -> None:
        """Asserts that `tokens` are these, as many as there are; after a near tie, in logits, they may part."""
        for step, (got, expected) in enumerate(zip(tokens, self.tokens, strict=False)):
            if got != expected:
                margin = self.margins[step]
                assert margin < near_tie, f"{self.name}: token {step} is {got}, not {expected} with a lead of {margin}"
                return


class Goldens(Struct, frozen=True):
    made_with: dict[str, str]
    prompts: list[GoldenPrompt]


def read_goldens(name: Literal["smollm2", "tiny_llama", "tiny_qwen3"]) -> list[GoldenPrompt]:
    raw = (Path(__file__).parent / f"{name}.json").read_bytes()
    return msgspec.json.decode(raw, type=Goldens).prompts
