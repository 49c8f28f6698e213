"""A model's ranks for a benchmark that is its own scheduler: one in this process, or several in processes of their own.

Plans go to every rank; the leader's outputs come through a step ring. Ranks of a group see a GPU each, and wait for
plans without sleeping. Knows nothing of planners.
"""

import ctypes
import multiprocessing
import os
import signal
import tempfile
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from multiprocessing import connection
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Protocol

from msgspec import Struct

from ipc.control import Join
from ipc.step import StepPlan
from ipc.step_ring import Arrays, RingLayout, StepRing, encode_layout, generate_layout
from ipc.types import ModelFacts
from rose.config import RankConfig
from rose.decoder_loader import DecoderLoader
from rose.model_runner import ModelRunner
from services.render import GROUP_ENVIRONMENT

ANSWER_S = 120.0
LOAD_S = 400.0
STOP_S = 5.0
PR_SET_PDEATHSIG = 1


class RankSpec(Struct, frozen=True):
    """What a rank loads. `says`, `num_drafts`: see bench.steered_drafts; None: drafts are the proposer's own."""

    directory: Path
    config: RankConfig
    says: int | None = None
    num_drafts: int = 0
    size: int = 1


class Answer(Protocol):
    def ready(self) -> bool: ...

    def fileno(self) -> int:
        """Readable once it is ready; -1: only asking tells."""


class Ranks(Protocol):
    facts: ModelFacts
    slots: list[Arrays]

    def step(self, plan: StepPlan) -> Answer: ...

    def clear(self) -> None:
        """Nobody is in a slot any more. Nothing may be in flight."""

    def accept(self, acceptance: float) -> None:
        """How many drafts are right from now on. Nothing may be in flight."""

    def figures(self) -> dict[str, float]:
        """The leader's."""


class Rank:
    """One rank in this process, over a ring that is given to it."""

    def __init__(self, spec: RankSpec, join: Join | None = None) -> None:
        from bench.steered_drafts import Steering, steer

        self._steering = None if spec.says is None or not spec.num_drafts else Steering(spec.says, spec.num_drafts)
        if self._steering is not None:
            steer(self._steering)
        loader = DecoderLoader("bench", spec.directory, spec.config, tensor_parallel_size=spec.size)
        self.runner = ModelRunner(loader)
        self.facts = self.runner.load(join)
        self._ring: StepRing | None = None

    def attach(self, ring: StepRing) -> None:
        self._ring = ring
        self.runner.attach(ring)

    def step(self, plan: StepPlan) -> Answer:
        assert self._ring is not None
        return self.runner.step(plan, self._ring.slot(plan.slot))

    def clear(self) -> None:
        assert self._ring is not None
        self.runner.drain()
        self.runner.attach(None)
        self.runner.attach(self._ring)

    def accept(self, acceptance: float) -> None:
        self.runner.drain()
        if self._steering is not None:
            self._steering.accept(acceptance)

    def figures(self) -> dict[str, float]:
        return self.runner.figures()

    def close(self) -> None:
        self.runner.drain()
        self.runner.attach(None)
        self.runner.close()


@contextmanager
def ranks(spec: RankSpec) -> Iterator[Ranks]:
    """Loaded and ready, until the block ends. Raises what loading raises; RankFailed where that was elsewhere."""
    if spec.size > 1:
        group = _Group(spec)
        try:
            group.load()
            yield group
        finally:
            group.close()
        return
    rank = Rank(spec)
    with _ring(rank.facts) as ring:
        rank.attach(ring)
        try:
            yield _Alone(rank, ring)
        finally:
            rank.close()


@contextmanager
def _ring(facts: ModelFacts) -> Iterator[StepRing]:
    ring = StepRing.create(generate_layout(facts))
    try:
        yield ring
    finally:
        ring.close()


class _Alone:
    def __init__(self, rank: Rank, ring: StepRing) -> None:
        self.facts, self.slots = rank.facts, _slots(ring)
        self.step, self.clear, self.accept, self.figures = rank.step, rank.clear, rank.accept, rank.figures


class RankFailed(RuntimeError):
    """A rank's process has raised something, or does not answer."""


class _Group:
    """Processes, one a rank, each told over a pipe."""

    def __init__(self, spec: RankSpec) -> None:
        context = multiprocessing.get_context("spawn")
        self._directory = tempfile.TemporaryDirectory(prefix="bqb-")
        rendezvous = Path(self._directory.name) / "rendezvous"
        pairs = [context.Pipe() for _ in range(spec.size)]
        self._pipes = [ours for ours, _ in pairs]
        self._processes = [
            context.Process(target=_serve, args=(theirs, spec, rank, str(rendezvous)), daemon=True)
            for rank, (_, theirs) in enumerate(pairs)
        ]
        self._waiting: deque[int] = deque()  # steps that the leader has not answered
        self._ring: StepRing | None = None
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        gpus = visible.split(",") if visible else [str(rank) for rank in range(spec.size)]
        for process, gpu in zip(self._processes, gpus[: spec.size], strict=True):
            with _environment(GROUP_ENVIRONMENT | {"CUDA_VISIBLE_DEVICES": gpu}):  # before anything asks for a device
                process.start()

    def load(self) -> None:
        self.facts: ModelFacts = self._receive(LOAD_S)[0]
        layout = generate_layout(self.facts)
        self._ring = StepRing.create(layout)
        self.slots = _slots(self._ring)
        self._call("attach", f"/proc/{os.getpid()}/fd/{self._ring.fd}", layout)

    def step(self, plan: StepPlan) -> "_GroupAnswer":
        for pipe in self._pipes:
            pipe.send(("step", (plan,)))
        self._waiting.append(plan.step)
        return _GroupAnswer(self, plan.step)

    def is_answered(self, step: int) -> bool:
        for pipe in self._pipes[1:]:
            if pipe.poll(0):  # a failure: only the leader answers steps
                _checked(pipe.recv())
        while step in self._waiting and self._pipes[0].poll(0):
            answered = _checked(self._pipes[0].recv())
            assert answered == self._waiting.popleft(), "answers come in order"
        return step not in self._waiting

    def clear(self) -> None:
        self._call("clear")

    def accept(self, acceptance: float) -> None:
        self._call("accept", acceptance)

    def figures(self) -> dict[str, float]:
        return self._call("figures")[0]

    def close(self) -> None:
        for pipe in self._pipes:
            pipe.close()  # which ends a rank
        for process in self._processes:
            process.join(STOP_S)
            process.kill()
            process.join()
        if self._ring is not None:
            self._ring.close()
        self._directory.cleanup()

    def _call(self, name: str, *arguments: Any) -> list[Any]:
        assert not self._waiting, "steps are in flight"
        for pipe in self._pipes:
            pipe.send((name, arguments))
        return self._receive(ANSWER_S)

    def _receive(self, seconds: float) -> list[Any]:
        answers: dict[Any, Any] = {}
        while len(answers) < len(self._pipes):  # in any order: one that has failed leaves the others waiting
            ready = connection.wait([pipe for pipe in self._pipes if pipe not in answers], seconds)
            if not ready:
                raise RankFailed(f"a rank has not answered for {seconds:.0f} s")
            answers |= {pipe: _checked(pipe.recv()) for pipe in self._pipes if pipe in ready}
        return [answers[pipe] for pipe in self._pipes]


class _GroupAnswer:
    def __init__(self, group: _Group, step: int) -> None:
        self._group, self._step = group, step

    def ready(self) -> bool:
        return self._group.is_answered(self._step)

    def fileno(self) -> int:
        return -1


def _slots(ring: StepRing) -> list[Arrays]:
    return [ring.slot(index) for index in range(ring.layout.num_slots)]


def _checked(answer: tuple[str, Any]) -> Any:
    kind, value = answer
    if kind != "done":
        raise RankFailed(value)
    return value


@contextmanager
def _environment(changes: dict[str, str]) -> Iterator[None]:
    before = dict(os.environ)
    os.environ.update(changes)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def _serve(pipe: Connection, spec: RankSpec, rank: int, rendezvous: str) -> None:
    """A rank's process: loads, then does what the pipe says until that ends."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)  # a benchmark that is killed leaves nothing
    try:
        members: Sequence[int] = range(11, 11 + spec.size)
        layout = encode_layout(ModelFacts("none", "none", "embed", 1, 1, 1, 1, 1))
        one = Rank(spec, Join(1, 7, rank, list(members), f"file://{rendezvous}", layout))
        pipe.send(("done", one.facts))
        _Loop(pipe, one, leads=rank == 0).run()
    except EOFError:
        os._exit(0)  # whatever threads and connections libraries keep
    except Exception as error:  # noqa: BLE001 - the process's outermost frame: the benchmark says it
        pipe.send(("raised", f"rank {rank}: {type(error).__name__}: {error}"))


class _Loop:
    """Takes plans while steps run; the leader answers them in order."""

    def __init__(self, pipe: Connection, rank: Rank, *, leads: bool) -> None:
        self._pipe, self._rank, self._leads = pipe, rank, leads
        self._flying: deque[tuple[int, Answer]] = deque()

    def run(self) -> None:
        """Raises EOFError at the pipe's end."""
        while True:
            while self._flying and self._flying[0][1].ready():
                step, _ = self._flying.popleft()
                if self._leads:
                    self._pipe.send(("done", step))
            if self._flying and not self._pipe.poll(0):
                continue
            name, arguments = self._pipe.recv()
            if name == "step":
                self._flying.append((arguments[0].step, self._rank.step(arguments[0])))
            else:
                self._do(name, arguments)

    def _do(self, name: str, arguments: Any) -> None:
        while self._flying:  # the others' ends: the leader's are known
            if self._flying[0][1].ready():
                self._flying.popleft()
            else:
                time.sleep(0)  # the threads of a rank on a CPU need the interpreter, too
        if name == "attach":
            path, layout = arguments
            assert isinstance(layout, RingLayout)
            self._rank.attach(StepRing.attach(os.open(path, os.O_RDWR), layout))
            answer = None
        else:
            answer = getattr(self._rank, name)(*arguments)
        self._pipe.send(("done", answer))
