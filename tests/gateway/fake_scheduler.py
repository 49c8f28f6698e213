"""A scheduler without planner or ranks: answers every Submit with vectors that follow from its token ids, or with
tokens (fake_generation.py).
"""

import asyncio
import hashlib
import itertools
from collections.abc import Callable
from pathlib import Path

import numpy as np
import zmq
from numpy.typing import NDArray

from ipc.codec import TO_SCHEDULER, encode
from ipc.control import Heartbeat, Hello, ProcessStats, Quarantine, Status
from ipc.sockets import EventSocket, router
from ipc.submit import Abort, RejectCode, Rejected, Result, Submit, TokenChunk
from ipc.types import ModelFacts, Timings, new_incarnation
from tests.gateway.fake_generation import Generations

DIMENSION = 16


def facts(**changes: object) -> ModelFacts:
    values: dict[str, object] = {
        "name": "tiny",
        "architecture": "BertModel",
        "task": "embed",
        "vocab_size": 1000,
        "max_model_len": 64,
        "dimension": DIMENSION,
        "max_num_seqs": 64,
        "max_num_batched_tokens": 4096,
    }
    return ModelFacts(**(values | changes))  # type: ignore[arg-type]


def chat_facts(**changes: object) -> ModelFacts:
    """Of the model that conftest.write_chat_model writes."""
    values = {
        "name": "chat", "architecture": "LlamaForCausalLM", "task": "generate", "vocab_size": 300,
        "max_model_len": 2048, "dimension": 1, "num_blocks": 64, "eos_token_ids": (0, 2),
    }  # fmt: skip
    return facts(**(values | changes))


def vector(ids: list[int], dimension: int = DIMENSION) -> NDArray[np.float32]:
    """The unit vector that a sequence of token ids has here."""
    seed = int.from_bytes(hashlib.sha256(np.array(ids, np.int32).tobytes()).digest()[:8], "big")
    values = np.random.default_rng(seed).standard_normal(dimension).astype(np.float32)
    result: NDArray[np.float32] = values / np.linalg.norm(values)
    return result


class FakeScheduler:
    """`held` keeps chunks unanswered while `hold` is set; `reject` answers with a refusal instead."""

    def __init__(self, endpoint: str, model_facts: ModelFacts | None = None) -> None:
        self.endpoint = endpoint
        self.facts = model_facts or facts()
        self.incarnation = new_incarnation()
        self.state = "ready"
        self.forward_age_ms = 5
        self.max_forward_age_ms = 15_000
        self.registration = 0
        self.silent = False
        self.hold = False
        self.reject: RejectCode | Callable[[Submit], Rejected | None] | None = None
        self.submits: list[Submit] = []
        self.sequences: list[list[int]] = []
        self.type_starts: list[int] = []
        self.aborts: list[Abort] = []
        self.quarantines: list[Quarantine] = []
        self.held: list[tuple[bytes, Submit, bytes]] = []
        self.stats: dict[str, ProcessStats] = {}
        self.gateways: set[bytes] = set()
        self.generations = Generations(self._send_tokens, self.facts.eos_token_ids)
        self._closed = False
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = EventSocket(router(self._context, endpoint), self._on_message, asyncio.get_running_loop())

    @classmethod
    def at(cls, path: Path, model_facts: ModelFacts | None = None) -> "FakeScheduler":
        return cls(f"ipc://{path}", model_facts)

    def close(self) -> None:
        self._closed = True
        self.generations.free = False
        self._socket.close()
        self._context.term()

    def answer(self, identity: bytes, submit: Submit, frame: bytes) -> None:
        ids = np.frombuffer(frame, np.int32)
        bounds = np.cumsum([0, *submit.lengths])
        rows = []
        for start, end in itertools.pairwise(bounds):
            values = vector(ids[start:end].tolist(), self.facts.dimension)[: submit.spec.dimensions]
            match submit.spec.dtype:
                case "float32":
                    rows.append(values.tobytes())
                case "int8":
                    rows.append(np.round(values * 127).astype(np.int8).tobytes())
                case "binary":
                    rows.append(np.packbits(values > 0, bitorder="little").tobytes())
        result = Result(submit.gateway, submit.chunk_id, len(rows), len(rows[0]), Timings(0.1, 0.2))
        self._socket.send([identity, encode(result), b"".join(rows)])

    def release(self) -> None:
        """Answers what is held."""
        held, self.held = self.held, []
        for item in held:
            self.answer(*item)

    def tell_status(self) -> None:
        for identity in self.gateways:
            self._socket.send([identity, encode(self._status())])

    def tell(self, message: Quarantine) -> None:
        for identity in self.gateways:
            self._socket.send([identity, encode(message)])

    def send_raw(self, frames: list[bytes]) -> None:
        self._socket.send(frames)

    def _send_tokens(self, identity: bytes, message: TokenChunk) -> None:
        if not self._closed:
            self._socket.send([identity, encode(message)])

    def _status(self) -> Status:
        return Status(
            incarnation=self.incarnation,
            state=self.state,  # type: ignore[arg-type]
            facts=self.facts,
            forward_age_ms=self.forward_age_ms,
            max_forward_age_ms=self.max_forward_age_ms,
            registration=self.registration,
            stats=list(self.stats.values()),
        )

    def _on_message(self, frames: list[bytes]) -> None:
        identity = frames[0]
        if self.silent:
            return
        match TO_SCHEDULER.decode(frames[1]):
            case Hello():
                self.gateways.add(identity)
                self._socket.send([identity, encode(self._status())])
            case Heartbeat(stats=stats):
                if stats is not None:
                    self.stats[stats.process] = stats
                self._socket.send([identity, encode(self._status())])
            case Abort() as abort:
                self.aborts.append(abort)
                self.generations.drop(abort.chunk_id)
                self.held = [item for item in self.held if item[1].chunk_id != abort.chunk_id]
            case Quarantine() as quarantine:
                self.quarantines.append(quarantine)
            case Submit() as submit:
                self._on_submit(identity, submit, frames[2])

    def _on_submit(self, identity: bytes, submit: Submit, frame: bytes) -> None:
        self.submits.append(submit)
        bounds = np.cumsum([0, *submit.lengths])
        ids = np.frombuffer(frame, np.int32)
        self.sequences += [ids[a:b].tolist() for a, b in itertools.pairwise(bounds)]
        self.type_starts += submit.type_starts
        refusal: Rejected | None = None
        if submit.scheduler != self.incarnation:
            refusal = Rejected(submit.gateway, submit.chunk_id, "stale", "another life")
        elif callable(self.reject):
            refusal = self.reject(submit)
        elif self.reject is not None:
            refusal = Rejected(submit.gateway, submit.chunk_id, self.reject, "as told", index=0, attempt=submit.attempt)
        if refusal is not None:
            self._socket.send([identity, encode(refusal)])
        elif submit.sampling is not None:
            self.generations.add(identity, submit, frame)
        elif self.hold:
            self.held.append((identity, submit, frame))
        else:
            self.answer(identity, submit, frame)
