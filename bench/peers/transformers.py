"""transformers in this process: no HTTP, no `generate` around the forward pass, its cache and attention as they are.

Several in flight means one batch of prompts of equal length, so that nothing is padded. In float32, as ours is, or in
bfloat16, which processors with matrix units multiply several times as fast.
"""

import inspect
import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import transformers
from tokenizers import Tokenizer

from bench.load import LoadResult
from bench.peers import GeneratingSetup
from bench.peers.batches import in_batches

WARM_TOKENS = 16


def float32() -> "Transformers":
    return Transformers("transformers", torch.float32)


def bfloat16() -> "Transformers":
    return Transformers("transformers-bf16", torch.bfloat16)


class Transformers:
    def __init__(self, name: str, dtype: torch.dtype) -> None:
        self.name, self._dtype = name, dtype
        self.label = f"transformers {transformers.__version__} ({str(dtype).removeprefix('torch.')})"

    @contextmanager
    def launch(self, setup: GeneratingSetup) -> Iterator[None]:
        torch.set_num_threads(setup.num_threads)
        self._tokenizer = Tokenizer.from_file(str(setup.model_dir / "tokenizer.json"))
        gguf = {"gguf_file": "model.gguf"} if (setup.model_dir / "model.gguf").exists() else {}
        transformers.utils.logging.disable_progress_bar()
        model = transformers.AutoModelForCausalLM.from_pretrained(
            setup.model_dir, dtype=torch.float32, attn_implementation="sdpa", **gguf
        )
        self._model = model.to(self._dtype).eval()
        yield
        del self._model

    def generate(self, prompts: list[list[int]], num_tokens: int, in_flight: int, num_warmup: int) -> LoadResult:
        if num_warmup:
            self._batch(prompts[:in_flight], min(num_tokens, WARM_TOKENS))
        return in_batches(
            prompts[num_warmup:], in_flight, lambda batch: [self._batch(batch, num_tokens)[1]] * len(batch)
        )

    def complete(self, prompt: list[int], num_tokens: int) -> str:
        tokens, _ = self._batch([prompt], num_tokens)
        return str(self._tokenizer.decode(tokens[0].tolist()))

    @torch.inference_mode()
    def _batch(self, prompts: list[list[int]], num_tokens: int) -> tuple[torch.Tensor, list[float]]:
        """The tokens [prompts, num_tokens], and when each column was known, in ms from the start."""
        began = time.perf_counter()
        parameters = inspect.signature(self._model.forward).parameters
        cache = {"cache" if "cache" in parameters else "past_key_values": transformers.DynamicCache()}  # newer, older
        ids = torch.tensor(prompts)
        columns, times_ms = [], []
        for _ in range(num_tokens):
            logits = self._model(input_ids=ids, use_cache=True, logits_to_keep=1, **cache).logits
            ids = logits[:, -1].argmax(-1, keepdim=True)
            columns.append(ids)
            times_ms.append((time.perf_counter() - began) * 1000)
        return torch.cat(columns, 1), times_ms
