"""The GPU's own time for the batches of the tables: our runner's steps back to back, without any server.

    python -m bench.gpu_time --models DIR --output FILE.json

A batch is cut into steps as the gateway and the planner cut it. Steps follow each other without a pause, two in
flight, for a second and more: a rate that the card keeps up, not its first burst. Needs the card for itself.
"""

import argparse
import json
import sys
import time
from pathlib import Path

import numpy as np

from bench.peers.bouquet import TASKS
from bench.random_model import KINDS
from bench.tables import cases
from ipc.step import StepPlan
from ipc.step_ring import StepRing, encode_layout
from rose.batch import write_plain_rows
from rose.config import RankConfig
from rose.encoder_loader import EncoderLoader
from rose.model_runner import ModelRunner
from rose.runner import LazyTensor

CHUNK_TOKENS = 16_384  # gateway.max_chunk_tokens
WARM_UP = 4  # sights of a shape: eager, capture, replay


class Steps:
    """A loaded runner and a ring of slots, driven as fast as it goes."""

    def __init__(self, name: str, directory: Path, device: str) -> None:
        config = RankConfig(device=device, max_model_len=8192, task=TASKS[name])
        self.runner = ModelRunner(EncoderLoader(name, directory, config))
        self.facts = self.runner.load()
        self.ring = StepRing.create(encode_layout(self.facts))
        self.runner.attach(self.ring)
        self._num_slots = self.facts.num_steps_in_flight
        self._random = np.random.default_rng(1)
        self._step = 0
        self._in_flight: list[LazyTensor] = []

    def launch(self, lengths: list[int]) -> None:
        """The next step, once there is room for it."""
        while len(self._in_flight) >= self._num_slots:
            if self._in_flight[0].ready():
                self._in_flight.pop(0)
        self._step += 1
        slot = self._step % self._num_slots
        arrays = self.ring.slot(slot)
        write_plain_rows(arrays, lengths, self.facts.dimension)
        plan = StepPlan(
            epoch=1, step=self._step, slot=slot, kind="encode", num_seqs=len(lengths), num_tokens=sum(lengths)
        )
        self._in_flight.append(self.runner.step(plan, arrays))

    def finish(self) -> None:
        while self._in_flight:
            if self._in_flight[0].ready():
                self._in_flight.pop(0)

    def fill_ids(self) -> None:
        """Random ids in every slot: they stay, whatever the lengths."""
        for slot in range(self._num_slots):
            ids = self.ring.slot(slot)["input_ids"]
            ids[:] = self._random.integers(5, self.facts.vocab_size, len(ids))

    def batch_ms(self, parts: list[list[int]], seconds: float) -> float:
        """Milliseconds of one batch, its steps and those of the next ones back to back."""
        for _ in range(WARM_UP):
            for lengths in parts:
                self.launch(lengths)
        self.finish()
        count = 0
        began = time.perf_counter()
        while count < 3 or time.perf_counter() - began < seconds:
            for lengths in parts:
                self.launch(lengths)
            count += 1
        self.finish()
        return (time.perf_counter() - began) * 1000 / count


def parts_of(batch: int, length: int, step_tokens: int) -> list[list[int]]:
    """A batch's steps: as many sequences in each as fit into a chunk and a step."""
    most = max(1, min(CHUNK_TOKENS, step_tokens) // length)
    return [[length] * min(most, batch - at) for at in range(0, batch, most)]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.gpu_time", description=__doc__)
    parser.add_argument("--models", type=Path, required=True, help="the directory that bench.random_model wrote")
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--seconds", type=float, default=0.6, help="of each batch")
    parser.add_argument("--quick", action="store_true", help="the smallest batches alone")
    args = parser.parse_args()
    found: dict[str, float] = {}
    for kind in KINDS:
        steps = Steps(kind, args.models / kind, args.device)
        steps.fill_ids()
        batches = {case.gpu_key: (case.batch, case.length) for case in cases() if case.model == kind}
        for key, (batch, length) in sorted(batches.items(), key=lambda item: item[1][0] * item[1][1]):
            if args.quick and batch * length > 5 * 512:
                continue
            ms = steps.batch_ms(parts_of(batch, length, steps.facts.max_num_batched_tokens), args.seconds)
            found[key] = round(ms, 4)
            args.output.write_text(json.dumps({"ms": found}, indent=1))
            print(f"{key:20s} {ms:10.3f} ms  {batch * 1000 / ms:9.1f} inputs/s", file=sys.stderr, flush=True)
        steps.runner.drain()
        steps.runner.attach(None)
        steps.runner.close()


if __name__ == "__main__":
    main()
