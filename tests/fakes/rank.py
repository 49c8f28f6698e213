"""A rank without a model: the real worker loop around a runner that hashes token ids into vectors.

    python -m tests.fakes.rank --run-dir DIR --replica NAME/0 --rank 0 [--latency-ms 5] [--die-on 1001] …

The vector of a row depends on its ids alone, so every test can compute what it must be (`expected_vector`).
With --facts '{"task": "generate"}' it generates: tests.fakes.stateful_rank behind the same loop, whose tokens depend on
all before them and on nothing else (`stateful_rank.reference`). Chosen token ids make it die, hang, answer NaN or run
out of memory.
"""

import argparse
import json
import os
import signal
import sys
import threading
import time
import zlib
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ipc.control import Join
from ipc.step import (
    ROW_DIMENSIONS,
    ROW_OUTPUT_OFFSET,
    STATUS_BAD_TOKEN,
    STATUS_NON_FINITE,
    STATUS_OK,
    StepFailed,
    StepPlan,
)
from ipc.step_ring import Arrays, StepRing
from ipc.types import ModelFacts
from rose.runner import OutOfMemory
from rose.worker import serve
from tests.fakes.stateful_rank import StatefulRank


def expected_vector(input_ids: NDArray[np.int32] | list[int], dimension: int) -> NDArray[np.float32]:
    """The unit vector (float32 [dimension]) that the fake model gives for `input_ids`."""
    seed = zlib.crc32(np.asarray(input_ids, np.int32).tobytes())
    # Weyl sequence: cheap, and every seed gives another vector
    phases = np.arange(1, dimension + 1, dtype=np.float64) * 0.6180339887498949 + seed * 0.7548776662466927
    vector = (phases % 1.0 - 0.5).astype(np.float32)
    return np.asarray(vector / np.linalg.norm(vector), np.float32)


class FakeStep:
    """A result that lands after `latency` seconds (None: never)."""

    def __init__(self, event_fd: int, latency: float | None) -> None:
        self._event_fd = event_fd
        self._done_at = None if latency is None else time.monotonic() + latency
        self._signalled = latency == 0
        if latency:
            threading.Timer(latency, os.eventfd_write, (event_fd, 1)).start()

    def ready(self) -> bool:
        if self._done_at is None or time.monotonic() < self._done_at:
            return False
        if not self._signalled:
            os.eventfd_read(self._event_fd)
            self._signalled = True
        return True

    def fileno(self) -> int:
        return self._event_fd


class FakeRunner:
    """Hash vectors, with hooks for faults."""

    idle_work = False

    def __init__(self, facts: ModelFacts, options: argparse.Namespace) -> None:
        self.facts = facts
        self._options = options
        self._num_steps = 0
        self._event_fd = os.eventfd(0, os.EFD_SEMAPHORE | os.EFD_CLOEXEC)
        self._generation: StatefulRank | None = None  # of the present epoch

    def load(self, join: Join) -> ModelFacts:
        time.sleep(self._options.load_ms / 1000)
        return self.facts

    def attach(self, ring: StepRing | None) -> None:
        self._generation = None

    def drain(self) -> None:
        time.sleep(self._options.drain_ms / 1000)

    def figures(self) -> dict[str, float]:
        return {"fake_steps_total": self._num_steps}

    def step(self, plan: StepPlan, arrays: Arrays) -> FakeStep:
        ids = arrays["input_ids"][: plan.num_tokens]
        options = self._options
        self._num_steps += 1
        if options.die_on is not None and (ids == options.die_on).any():
            os.kill(os.getpid(), signal.SIGKILL)
        if options.fault_on is not None and (ids == options.fault_on).any():
            raise RuntimeError("injected device fault")
        if plan.kind == "generate":
            self._generate(plan, arrays)
        elif plan.num_tokens > options.oom_over:
            raise OutOfMemory(f"{plan.num_tokens} tokens")
        elif plan.kind == "encode":
            for row in range(plan.num_seqs):
                start, end = arrays["cu_seqlens"][row : row + 2].tolist()
                self._write_row(arrays, row, ids[start:end])
        hangs = options.hang_on is not None and (ids == options.hang_on).any()
        return FakeStep(self._event_fd, None if hangs else options.latency_ms / 1000)

    def _generate(self, plan: StepPlan, arrays: Arrays) -> None:
        options = self._options
        if self._generation is None:
            seed = plan.epoch
            self._generation = StatefulRank(self.facts, plan.epoch, seed, options.acceptance, 0.0, options.oom_over)
        outcome = self._generation.step(plan, arrays)
        if isinstance(outcome, StepFailed):
            raise OutOfMemory(outcome.message)

    def _write_row(self, arrays: Arrays, row: int, ids: NDArray[np.int32]) -> None:
        table = arrays["rows"][row]
        dimension = int(table[ROW_DIMENSIONS]) if table[ROW_DIMENSIONS] > 0 else self.facts.dimension
        offset = int(table[ROW_OUTPUT_OFFSET])
        status = STATUS_OK
        if (ids < 0).any() or (ids >= self.facts.vocab_size).any():
            status = STATUS_BAD_TOKEN
        elif self._options.nan_on is not None and (ids == self._options.nan_on).any():
            status = STATUS_NON_FINITE
        else:
            vector = expected_vector(ids, dimension)
            arrays["values"][offset : offset + vector.nbytes] = vector.view(np.uint8)
        arrays["status"][row] = status


def fake_facts(name: str = "fake", **changes: object) -> ModelFacts:
    """Facts of a small embedding model, or with task "generate" of a small language model."""
    facts = {
        "name": name,
        "architecture": "Fake",
        "task": "embed",
        "vocab_size": 30522,
        "max_model_len": 512,
        "dimension": 384,
        "max_num_seqs": 256,
        "max_num_batched_tokens": 4096,
    }
    if changes.get("task") == "generate":
        facts |= {"dimension": 1, "max_num_seqs": 32, "num_blocks": 256, "max_logprobs": 20, "eos_token_ids": (2,)}
    return ModelFacts(**(facts | changes))  # type: ignore[arg-type]


def parse_options(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--run-dir", type=Path, required=True)
    parser.add_argument("--replica", required=True)
    parser.add_argument("--rank", type=int, default=0)
    parser.add_argument("--facts", default="{}", help="JSON of ModelFacts fields to change")
    parser.add_argument("--latency-ms", type=float, default=0)
    parser.add_argument("--load-ms", type=float, default=0)
    parser.add_argument("--drain-ms", type=float, default=0)
    parser.add_argument("--oom-over", type=int, default=1 << 30, help="tokens of a step")
    parser.add_argument("--acceptance", type=float, default=1.0, help="chance that a draft is right")
    for fault in ("die", "fault", "hang", "nan"):
        parser.add_argument(f"--{fault}-on", type=int, default=None, help="token id")
    return parser.parse_args(arguments)


def main() -> int:
    options = parse_options(sys.argv[1:])
    stop_fd = os.eventfd(0, os.EFD_CLOEXEC)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: os.eventfd_write(stop_fd, 1))

    def log(event: str, **fields: object) -> None:
        print(json.dumps({"event": event, "time": time.time(), **fields}), file=sys.stderr, flush=True)

    name = options.replica.rpartition("/")[0] or options.replica
    runner = FakeRunner(fake_facts(name, **json.loads(options.facts)), options)
    return serve(
        runner=runner, replica=options.replica, rank=options.rank, run_dir=options.run_dir, stop_fd=stop_fd, log=log
    )


if __name__ == "__main__":
    sys.exit(main())
