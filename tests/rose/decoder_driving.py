"""Drives a decoder's runner in this process with plans of its own: a scheduler that is told what to plan.

`Driver.step` takes the tables of one plan; `Driver.greedy` and the like are whole generations over it.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np

from ipc.step import KIND_DECODE, KIND_PREFILL, KIND_VERIFY, StepPlan
from ipc.step_ring import Arrays, generate_layout, local_slots
from ipc.types import SamplingParams
from rose.config import RankConfig
from rose.decoder_loader import DecoderLoader
from rose.model_runner import ModelRunner
from rose.runner import LazyTensor

GREEDY = SamplingParams(temperature=0.0)


@dataclass(eq=False)
class Seq:
    """One sequence as the test's scheduler knows it."""

    tokens: list[int]
    params: SamplingParams = GREEDY
    num_prompt: int = -1
    slot: int = -1
    generation: int = 0
    blocks: list[int] = field(default_factory=list)
    num_computed: int = 0
    max_known: int = 0  # tokens it may have, those of steps in flight included

    def __post_init__(self) -> None:
        self.num_prompt = len(self.tokens) if self.num_prompt < 0 else self.num_prompt
        self.max_known = len(self.tokens)


class Row(NamedTuple):
    seq: Seq
    num_tokens: int = 1
    kind: int = KIND_DECODE


class Driver:
    """One runner, its slots and a free list of blocks. Steps may overlap: `launch` twice, then `wait`."""

    def __init__(
        self, directory: Path, *, runner: Any = None, rings: list[Arrays] | None = None, **settings: Any
    ) -> None:
        """`runner`, with the slots it reads, in the place of one that is loaded here."""
        defaults = {"device": "cpu", "num_threads": 1, "max_num_seqs": 8, "max_num_batched_tokens": 64}
        if runner is None:
            runner = ModelRunner(DecoderLoader("test", directory, RankConfig(**defaults | settings)))
            runner.load()
            runner.attach(None)
        self.runner = runner
        self.facts = self.runner.facts
        self.rings = local_slots(generate_layout(self.facts)) if rings is None else rings
        self.free_slots = list(range(self.facts.max_num_seqs))
        self.free_blocks = list(range(self.facts.num_blocks))
        self.num_steps = self.generations = self.last_applied = 0

    # --- what a plan says -----------------------------------------------------------------------------------

    def launch(
        self, rows: Sequence[Row] = (), *, admit: Sequence[Seq] = (), release: Sequence[Seq] = (), **plan: Any
    ) -> tuple[LazyTensor, Arrays]:
        """Every sequence of `rows` has blocks for its tokens after the step, from the free ones."""
        self.num_steps += 1
        ring = self.num_steps % len(self.rings)
        arrays = self.rings[ring]
        for name in ("status", "num_tokens", "tokens", "lengths", "logprobs", "prompt_logprobs"):
            arrays[name][:] = -7
        ids: list[int] = []
        for line, seq in enumerate(release):
            arrays["releases"][line] = seq.slot, seq.generation
            self.free_slots.insert(0, seq.slot)
        self._write_admissions(arrays, admit, ids)
        blocks: list[tuple[int, int, int]] = [
            (seq.slot, i, block) for seq in admit for i, block in enumerate(seq.blocks)
        ]
        for line, row in enumerate(rows):
            self._write_row(arrays, line, row, ids, blocks)
        arrays["new_blocks"][: len(blocks)] = np.array(blocks, np.int32).reshape(-1, 3)
        arrays["input_ids"][: len(ids)] = ids
        settings = {"num_seqs": len(rows), "num_tokens": len(ids), "last_applied": self.last_applied} | plan
        step = StepPlan(
            epoch=1, step=self.num_steps, slot=ring, kind="generate", num_admissions=len(admit),
            num_releases=len(release), num_new_blocks=len(blocks), **settings,
        )  # fmt: skip
        return self.runner.step(step, arrays), arrays

    def run(self, rows: Sequence[Row] = (), **plan: Any) -> Arrays:
        """One step from beginning to end; tokens that it gave are the sequences' now."""
        lazy, arrays = self.launch(rows, **plan)
        self.wait(lazy)
        self.apply(rows, arrays)
        return arrays

    def wait(self, lazy: LazyTensor) -> None:
        self.runner.drain()
        assert lazy.ready()
        self.last_applied = self.num_steps

    def apply(self, rows: Sequence[Row], arrays: Arrays) -> None:
        for line, row in enumerate(rows):
            assert arrays["status"][line] == 0
            row.seq.tokens += arrays["tokens"][line, : arrays["num_tokens"][line]].tolist()

    def _write_admissions(self, arrays: Arrays, admit: Sequence[Seq], ids: list[int]) -> None:
        offset = 0
        for line, seq in enumerate(admit):
            self.generations += 1
            seq.slot, seq.generation = self.free_slots.pop(0), self.generations
            params = msgspec.msgpack.encode(seq.params)
            arrays["params"][offset : offset + len(params)] = np.frombuffer(params, np.uint8)
            arrays["admissions"][line, :7] = (
                seq.slot, seq.generation, seq.num_prompt, seq.num_computed, offset, len(params), len(ids),
            )  # fmt: skip
            offset += len(params)
            ids += seq.tokens[: seq.num_computed]

    def _write_row(
        self, arrays: Arrays, line: int, row: Row, ids: list[int], blocks: list[tuple[int, int, int]]
    ) -> None:
        seq, count = row.seq, row.num_tokens
        samples, offset = True, len(ids)
        if row.kind == KIND_PREFILL:
            samples = seq.num_computed + count == len(seq.tokens)
            ids += seq.tokens[seq.num_computed : seq.num_computed + count + (not samples)]
            seq.num_computed += count
            max_length = seq.num_computed
        else:
            max_length = seq.max_known + count - 1
        seq.max_known = max(seq.max_known, max_length) + samples
        while len(seq.blocks) * self.facts.block_size < max_length:
            seq.blocks.append(self.free_blocks.pop())
            blocks.append((seq.slot, len(seq.blocks) - 1, seq.blocks[-1]))
        drafts = count - 1 if row.kind == KIND_VERIFY else 0
        arrays["rows"][line] = seq.slot, seq.generation, count, row.kind, samples, offset, drafts, max_length

    # --- whole generations ----------------------------------------------------------------------------------

    def prefill(self, seq: Seq, chunk: int = 64) -> None:
        """Admits `seq` and computes its tokens in chunks; it has one token more then."""
        admit = [seq]
        end = len(seq.tokens)
        while seq.num_computed < end:
            self.run([Row(seq, min(chunk, end - seq.num_computed), KIND_PREFILL)], admit=admit)
            admit = []

    def decode(self, seqs: Sequence[Seq], num_tokens: int) -> None:
        for _ in range(num_tokens):
            self.run([Row(seq) for seq in seqs])

    def close(self) -> None:
        self.runner.close()
