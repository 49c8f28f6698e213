"""Whole speculative steps of a few sequences on one device, of static shapes: propose, forward, verify, close, advance.

Every step of a `World` is launches alone, so it can be captured as a graph. `way`: in torch, or by kernels, which on a
CPU run in Triton's interpreter.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch
from torch import Tensor

from ipc.types import ModelFacts, SamplingParams
from rose.attention.interface import Attend, AttentionShape
from rose.attention.paged import PagedBackend, PagedKV, PagedRows
from rose.attention.paged_triton import TritonPagedBackend
from rose.config import SpeculationConfig
from rose.generate_batch import spans
from rose.kernels.sampling import TritonOps
from rose.kv_cache import KVShape, allocate
from rose.layers.device_layers import use_device_layers
from rose.models.config import read_config
from rose.models.load import load_model
from rose.models.task import GenerateTask
from rose.residents import Residents
from rose.sampling.reference import TorchOps
from rose.slots import RowInputs
from rose.speculation import kernels
from rose.speculation.accept import Places, count_output, verify
from rose.speculation.protocol import Closing, DraftRows, Drafts, Proposer, ProposerParts, Target
from rose.speculation.registry import load_proposer
from tests.rose.speculation.heads_random import write_random_head
from tests.rose.tiny_lm import VOCAB_SIZE, write_llama, write_relative

Way = Literal["torch", "kernels"]
PROPOSERS = ("n_gram", "another model", "first layer", "mtp", "eagle")
K = 3  # most drafts
LENGTHS = (20, 33, 5, 47)  # of the sequences at the beginning; a row of nobody's slot comes last
FACTS = ModelFacts(
    name="", architecture="", task="generate", vocab_size=VOCAB_SIZE, max_model_len=96, dimension=1,
    max_num_seqs=5, max_num_batched_tokens=512, num_blocks=32, max_draft_tokens=K, max_logprobs=2,
)  # fmt: skip
SLOTS = (3, 0, 4, 1, FACTS.max_num_seqs)
GREEDY = (SamplingParams(temperature=0.0),) * len(LENGTHS)
MIXED = (
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=0.9, top_p=0.8, seed=5, frequency_penalty=0.4),
    SamplingParams(temperature=1.2, seed=6, logit_bias={7: 2.0}),
    SamplingParams(temperature=0.7, top_k=12, seed=7, repetition_penalty=1.2),
)


def write_models(directory: Path) -> Path:
    """A target and what drafts for it."""
    target = write_llama(directory / "target")
    write_relative(directory / "another model", target, noise=0.1)
    write_random_head(directory / "mtp", target, "mtp")
    write_random_head(directory / "eagle", target, "eagle")
    return target


def configure(directory: Path, kind: str, **settings: Any) -> SpeculationConfig:
    if kind == "n_gram":
        return SpeculationConfig(proposer="n_gram", **settings)
    if kind == "first layer":
        return SpeculationConfig(proposer="draft_model", num_layers=1, **settings)
    if kind == "another model":
        return SpeculationConfig(proposer="draft_model", model=str(directory / kind), **settings)
    return SpeculationConfig(proposer="mtp", model=str(directory / kind), head_tokens="all", **settings)


@contextmanager
def going(way: Way) -> Iterator[None]:
    """Proposers and acceptance go that way, whatever the device."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernels, "has_kernels", lambda _: way == "kernels")
        yield


class MaskedAttention:
    """Of tokens over all places of their rows' block tables, in torch: waits for nothing, and needs no interpreter."""

    def paged(self, rows: PagedRows, caches: Sequence[PagedKV]) -> Attend:
        layers = iter(caches)
        token = torch.arange(len(rows.slot_mapping), device=rows.slot_mapping.device)
        row = torch.searchsorted(rows.cu_seqlens_q, token, right=True) - 1
        last = rows.kv_lengths[row] - rows.cu_seqlens_q[row + 1] + token  # the place of each token

        def attend(q: Tensor, k: Tensor, v: Tensor, shape: AttentionShape) -> Tensor:
            cache = next(layers)
            for part, new in zip(cache, (k, v), strict=True):
                part.view(-1, *part.shape[2:])[rows.slot_mapping] = new
            keys, values = (part[rows.block_table].flatten(1, 2)[row] for part in cache)  # [T, places, heads, size]
            keys, values = (x.repeat_interleave(q.shape[1] // x.shape[2], 2) for x in (keys, values))
            scores = torch.einsum("thd,tphd->thp", q, keys) * shape.scale
            behind = torch.arange(keys.shape[1], device=q.device) > last[:, None]
            weights = scores.masked_fill(behind[:, None], float("-inf")).softmax(2)
            return torch.einsum("thp,tphd->thd", weights, values)

        return attend


class World:
    """`LENGTHS` sequences behind their prompts, in blocks of their own, and a proposer. Entered with `going`."""

    def __init__(
        self,
        directory: Path,
        kind: str,
        *,
        way: Way,
        device: torch.device,
        params: tuple[SamplingParams, ...] = GREEDY,
        dtype: torch.dtype = torch.float32,
        **settings: Any,
    ) -> None:
        target = directory / "target"
        config = read_config(target)
        self.model: Any = load_model(target, config, GenerateTask(()), device, dtype)
        if device.type == "cuda":
            use_device_layers(self.model, device)
        self.caches = allocate(KVShape.of(config, dtype), FACTS.num_blocks, device)
        self.residents = Residents(FACTS, device, target / "tokenizer.json")
        self.residents.sampler._ops = TritonOps() if way == "kernels" else TorchOps()
        self.attention: PagedBackend = TritonPagedBackend() if device.type == "cuda" else MaskedAttention()
        self.device = device
        source = load_proposer(
            configure(directory, kind, **settings), Target(self.model, config, target, FACTS, dtype, device)
        )
        shape = source.kv_shape
        self.draft_caches = () if shape is None else allocate(shape, FACTS.num_blocks, device)
        for cache in (*self.caches, *self.draft_caches):
            cache.k.zero_()
            cache.v.zero_()
        self.proposer: Proposer = source.open(
            ProposerParts(self.residents, self.draft_caches, self.attention, self.caches)
        )
        for slot, each in zip(SLOTS, params, strict=False):
            self.residents.sampler.admit(slot, each)
        self.needs = self.residents.sampler.needs(list(SLOTS[:-1]))
        self._slots = torch.tensor(SLOTS, dtype=torch.int32, device=device)
        self._zeros = torch.zeros_like(self._slots)
        self._spans = {k: spans(np.full(len(SLOTS), k + 1), device) for k in range(K + 1)}
        self._limits = {k: torch.tensor([k, k, k - 1, k, k], dtype=torch.int32, device=device) for k in range(1, K + 1)}
        self._seat()

    @property
    def state(self) -> dict[str, Tensor]:
        """What steps leave behind that counts, by name."""
        slots, found = self.residents.slots, {}
        place = torch.arange(slots.block_table.shape[1] * slots.block_size, device=self.device)
        table, computed = slots.block_table[:-1], (place < slots.num_computed[:-1, None])[:, :, None, None]
        for index, cache in enumerate((*self.caches, *self.draft_caches)):
            for name, part in zip("kv", cache, strict=True):
                found[f"{name}{index}"] = part[table].flatten(1, 2) * computed
        if kept := getattr(self.proposer, "_kept", None):
            found["whole"] = kept._whole[: FACTS.num_blocks].clone()
        if (hidden := getattr(self.proposer, "_hidden", None)) is not None:
            found["hidden"] = hidden[: FACTS.max_num_seqs].clone()
        if self.residents.sampler.state.counts is not None:
            found["counts"] = self.residents.sampler.state.counts.clone()
        num_tokens = slots.num_tokens[:-1]
        known = torch.arange(slots.ids.shape[1], device=self.device) < num_tokens[:, None]
        return found | {"num_tokens": num_tokens.clone(), "ids": slots.ids[:-1] * known}

    def step(self, k: int, *, keep_draft: bool = True) -> tuple[Drafts | None, Tensor, Tensor]:
        """Drafts, new tokens int32 [R, k + 1], how many of them count int32 [R]."""
        drafts = self.propose(k) if k else None
        tokens, counts, probabilities = drafts or (self._slots.new_zeros(len(SLOTS), 0), self._zeros, None)
        slots, sampler, each = self.residents.slots, self.residents.sampler, self._spans[k]
        if drafts is not None:
            slots.put(self._slots, tokens)
        inputs = slots.inputs(self._slots, each, k + 1, slots.ids.shape[1])
        hidden = self.model(inputs, self.attention.paged(inputs.paged, self.caches))
        logits = self.model.logits(hidden)
        positions = slots.num_tokens[self._slots][each.rows] + each.offsets.int()
        num_output = positions - slots.num_prompt[self._slots][each.rows]
        places = Places(self._slots[each.rows], positions, num_output, each)
        new, num_new = verify(sampler, logits, places, tokens, counts, probabilities, needs=self.needs)
        self.proposer.accepted(self._closing(inputs, hidden, new, num_new, self._zeros, keep_draft))
        count_output(sampler, places, new, num_new, self.needs)
        slots.advance(self._slots, self._zeros, new, num_new)
        return drafts, new, num_new

    def propose(self, k: int) -> Drafts:
        width = self.residents.slots.ids.shape[1]
        return self.proposer.propose(DraftRows(self._slots, self._limits[k], k, width, self.needs))

    @staticmethod
    def _closing(inputs: RowInputs, hidden: Tensor, new: Tensor, num_new: Tensor, given: Tensor, keep: bool) -> Closing:
        return Closing(inputs, hidden, new, num_new, given, keep)

    def _seat(self) -> None:
        """Prompts, computed by the target and closed by the proposer, with the first token of each output known."""
        slots, draw = self.residents.slots, np.random.default_rng(0)
        each = -(-FACTS.max_model_len // slots.block_size)
        blocks = draw.permutation(FACTS.num_blocks).reshape(-1)
        for row, (slot, length) in enumerate(zip(SLOTS, LENGTHS, strict=False)):
            ids = np.tile(draw.integers(5, VOCAB_SIZE, 9), 8)[:length]
            slots.ids[slot, :length] = torch.from_numpy(ids).int()
            slots.num_tokens[slot], slots.num_prompt[slot] = 0, length - 1
            own = blocks[row * each : (row + 1) * each].astype(np.int32)
            slots.block_table[slot, : len(own)] = torch.from_numpy(own)
        given = np.array([*(length - 1 for length in LENGTHS), 0], np.int64)
        inputs = slots.inputs(self._slots, spans(given, self.device), int(given.max()), slots.ids.shape[1])
        hidden = self.model(inputs, self.attention.paged(inputs.paged, self.caches))
        last = slots.ids[self._slots[:-1], torch.tensor(LENGTHS, device=self.device) - 1]
        first = torch.cat((last, self._zeros[:1]))[:, None]
        given_rows = torch.from_numpy(given).int().to(self.device)
        self.proposer.prefill(self._closing(inputs, hidden, first, (given_rows > 0).int(), given_rows, True))
        slots.advance(self._slots, given_rows, first, (given_rows > 0).int())


def check_same(found: dict[str, Tensor], expected: dict[str, Tensor], *, tolerance: float = 1e-4) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(
            found[name], value, atol=tolerance, rtol=tolerance, msg=lambda m, n=name: f"{n}: {m}"
        )
