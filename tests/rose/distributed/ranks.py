"""Two ranks in processes of their own, over gloo, driven by a test as one runner: what a scheduler does, in small.

The test's process owns a real step ring; every plan goes to both ranks over pipes, the leader's answer is the result.
"""

import math
import multiprocessing
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import msgspec
import torch

from ipc.control import Join
from ipc.step import StepPlan
from ipc.step_ring import Arrays, StepRing, encode_layout, generate_layout
from ipc.types import ModelFacts
from rose import decoder_loader, encoder_loader
from rose.config import RankConfig
from rose.cuda_decoder import CudaDecoder
from rose.cuda_decoder_load import load_cuda_decoder, load_source
from rose.cuda_stream import CudaStream
from rose.decoder_loader import DecoderLoader
from rose.distributed.group import Group, form_group, leaders
from rose.distributed.shard import local_heads
from rose.kv_cache import KVShape
from rose.largest_steps import Trial, run_largest_prompts, run_largest_verify
from rose.layers.kernel_layers import use_kernels
from rose.model_runner import Loaded
from rose.models.load import load_model
from rose.runners import make_runner
from services.render import GROUP_ENVIRONMENT
from tests.rose.host_stream import HostStream

SIZE = 2
ANSWER_SECONDS = 60
SHARED_SUMS = "BOUQUET_NO_SHARED_SUMS" not in os.environ  # bench/device/two_gpus.sh sets it where they do not work
GPU_ANSWER_SECONDS = 80  # the first to need a kernel waits for its compiler


class Ranks:
    """The processes. One group and one model at a time; `load` makes others. `gpus`: each has one of its own."""

    def __init__(self, *, gpus: bool = False) -> None:
        context = multiprocessing.get_context("spawn")
        self._directory = Path(tempfile.mkdtemp(prefix="bq-"))
        pairs = [context.Pipe() for _ in range(SIZE)]
        self._pipes = [ours for ours, _ in pairs]
        self.processes = [
            context.Process(target=_serve, args=(theirs, rank, gpus), daemon=True)
            for rank, (_, theirs) in enumerate(pairs)
        ]
        for process in self.processes:
            process.start()
        self._answer_seconds = GPU_ANSWER_SECONDS if gpus else ANSWER_SECONDS
        self._num_groups = 0
        self.ring: StepRing | None = None
        self._silent = False

    def all_answer(self) -> bool:
        """Whether each lives, and has answered whatever it was asked."""
        return not self._silent and all(process.is_alive() for process in self.processes)

    def load(self, model: Path, *, static: bool = False, **settings: Any) -> "RemoteRunner":
        """A model on both. `static`: the GPU's way, in Triton's interpreter."""
        defaults = {"device": "cpu", "num_threads": 1, "shared_sums": SHARED_SUMS}
        load = "load_static" if static else "load"
        facts: list[ModelFacts] = self.call(load, self._rendezvous(), model, RankConfig(**defaults | settings))
        if self.ring is not None:
            self.ring.close()
        is_generation = facts[0].task == "generate"
        layout = generate_layout(facts[0]) if is_generation else encode_layout(facts[0])
        self.ring = StepRing.create(layout)
        self.call("attach", f"/proc/{os.getpid()}/fd/{self.ring.fd}", layout)
        return RemoteRunner(self, facts)

    def group(self) -> None:
        self.call("group", self._rendezvous())

    def call(self, name: str, *arguments: Any) -> list[Any]:
        """What both ranks answer, in rank order. Raises AssertionError with what one of them raised."""
        self.send(name, *arguments)
        return self.receive()

    def send(self, name: str, *arguments: Any) -> None:
        for pipe in self._pipes:
            pipe.send((name, arguments))

    def tell(self, rank: int, name: str, *arguments: Any) -> Any:
        """To one rank alone."""
        self._pipes[rank].send((name, arguments))
        return _checked(self._answer(self._pipes[rank]))

    def receive(self) -> list[Any]:
        answers = [self._answer(pipe) for pipe in self._pipes]
        return [_checked(answer) for answer in answers]

    def close(self) -> None:
        for process in self.processes:
            process.kill()
            process.join()
        if self.ring is not None:
            self.ring.close()

    def _answer(self, pipe: Connection) -> tuple[str, Any]:
        self._silent = True
        assert pipe.poll(self._answer_seconds), "a rank does not answer"
        answer: tuple[str, Any] = pipe.recv()  # raises EOFError if it has died
        self._silent = False
        return answer

    def _rendezvous(self) -> str:
        self._num_groups += 1
        return str(self._directory / f"rendezvous-{self._num_groups}")


class RemoteRunner:
    """Both ranks behind the interface of a runner."""

    def __init__(self, ranks: Ranks, facts: list[ModelFacts]) -> None:
        self.ranks, self.facts, self.facts_of_ranks = ranks, facts[0], facts
        assert ranks.ring is not None
        self.slots: list[Arrays] = [ranks.ring.slot(index) for index in range(ranks.ring.layout.num_slots)]
        self._num_pending = 0

    def step(self, plan: StepPlan, arrays: Arrays) -> "RemoteRunner":
        assert arrays is self.slots[plan.slot]
        self.ranks.send("step", plan)
        self._num_pending += 1
        return self

    def ready(self) -> bool:
        self.drain()
        return True

    def drain(self) -> None:
        while self._num_pending:
            self._num_pending -= 1
            self.ranks.receive()

    def close(self) -> None:
        self.drain()


@contextmanager
def two_ranks(*, gpus: bool = False) -> Iterator[Ranks]:
    ranks = Ranks(gpus=gpus)
    try:
        yield ranks
    finally:
        ranks.close()


def _checked(answer: tuple[str, Any]) -> Any:
    kind, value = answer
    assert kind == "done", value
    return value


def _serve(pipe: Connection, rank: int, gpus: bool) -> None:
    """A rank's process: does what the pipe says until that ends."""
    torch.set_num_threads(1)
    if gpus:
        os.environ |= GROUP_ENVIRONMENT | {"CUDA_VISIBLE_DEVICES": str(rank)}  # nothing has asked for a device yet
        _form_one_group()
    state = _Rank(rank, torch.device("cuda" if gpus else "cpu"))
    while True:
        try:
            name, arguments = pipe.recv()
        except EOFError:
            return
        try:
            answer = ("done", getattr(state, name)(*arguments))
        except Exception as error:  # noqa: BLE001 - the test sees it
            answer = ("raised", f"{type(error).__name__}: {error}")
        pipe.send(answer)
        if answer[0] == "raised" and "CUDA error" in answer[1]:
            os._exit(1)  # nothing works in this process any more


def _form_one_group() -> None:
    """A process with a GPU forms one group in its life: all models of this one are loaded into that."""
    formed: list[Group] = []

    def form(join: Join | None, device: torch.device, *, shared_sums: bool = True) -> Group:
        if not formed:
            formed.append(form_group(join, device, shared_sums=shared_sums))
        return formed[0]

    encoder_loader.form_group = decoder_loader.form_group = form  # type: ignore[attr-defined]


class _Rank:
    def __init__(self, rank: int, device: torch.device) -> None:
        self._rank, self._device = rank, device
        self._runner: Any = None
        self._group: Any = None
        self._changes: dict[str, int] = {}
        self._drafts: list[list[list[int]]] = []

    def load(self, rendezvous: str, model: Path, config: RankConfig) -> ModelFacts:
        if self._runner is not None:
            self._runner.attach(None)  # the ring is page-locked as long as it is attached
            self._runner.close()
        self._runner = make_runner("test", model, config, tensor_parallel_size=SIZE)
        return self._runner.load(self._join(rendezvous))

    def load_static(self, rendezvous: str, model: Path, config: RankConfig) -> ModelFacts:
        self.load(rendezvous, model, config)
        self._runner.close()
        self._runner.loader.group = Roomy(self._runner.loader.group)
        decoder = static_decoder(self._runner.loader, model, config)
        self._runner.use(Loaded(decoder, decoder.generate))
        facts: ModelFacts = self._runner.loader.facts
        return facts

    def attach(self, path: str, layout: Any) -> None:
        self._ring = StepRing.attach(os.open(path, os.O_RDWR), layout)
        self._runner.attach(self._ring)

    def step(self, plan: StepPlan) -> None:
        plan, self._changes = msgspec.structs.replace(plan, **self._changes), {}
        lazy = self._runner.step(plan, self._ring.slot(plan.slot))
        self._runner.drain()
        assert lazy.ready()

    def take_for(self, name: str, value: int) -> None:
        """Makes this rank read something else in the next plan."""
        self._changes = {name: value}

    def figures(self) -> dict[str, float]:
        return self._runner.figures()

    def forget_token(self, slot: int) -> None:
        """Makes this rank believe that a sequence is a token shorter."""
        self._runner.device._decoder._residents.slots.num_tokens[slot] -= 1

    def keep_drafts(self) -> None:
        """From now on what this rank drafts is kept, whatever the leader says: see `drafts`."""
        proposer = self._runner.device._decoder._proposer
        propose, self._drafts = proposer.propose, []

        def keep(rows: Any) -> Any:
            drafts = propose(rows)
            self._drafts.append(drafts.tokens.tolist())
            return drafts

        proposer.propose = keep

    def drafts(self) -> list[list[list[int]]]:
        """Of every step since, row by row."""
        return self._drafts

    def group(self, rendezvous: str) -> None:
        form = encoder_loader.form_group  # type: ignore[attr-defined]
        self._group = form(self._join(rendezvous), self._device, shared_sums=SHARED_SUMS)

    def collective(self, name: str, values: list[torch.Tensor]) -> torch.Tensor:
        """Of this rank's tensor of `values`."""
        found: torch.Tensor = getattr(self._group, name)(values[self._rank].to(self._device, copy=True))
        return found.cpu()

    def leaders(self, numbers: list[int]) -> int:
        return leaders(self._group, numbers[self._rank], self._device)

    def captured(self, name: str, values: list[torch.Tensor], num_replays: int) -> tuple[bool, torch.Tensor]:
        """The collective as a graph [num_replays, ...]: of this rank's tensor, of twice that, and so on. And whether
        there was a place for that tensor where the sum reads it."""
        given = values[self._rank].to(self._device)
        x, room = torch.empty_like(given), self._group.room(tuple(given.shape), given.dtype)
        outcome: list[torch.Tensor] = []

        def work() -> None:
            made = x if name != "all_reduce" or room is None else torch.mul(x, 1, out=room)
            outcome[:] = [getattr(self._group, name)(made)]

        stream = CudaStream(1, (64, 64))
        x.copy_(given)
        work()
        graph = stream.capture(work)
        found = []
        for number in range(1, num_replays + 1):
            x.copy_(given * number)
            graph.replay()
            found.append(outcome[0].cpu())
        return room is not None, torch.stack(found)

    def _join(self, rendezvous: str) -> Join:
        return Join(1, 7, self._rank, [11, 12], f"file://{rendezvous}", encode_layout(_NO_FACTS))


class Roomy:
    """A group over gloo with a room for sums, as shared memory has one: the same for all, and spoilt by every sum."""

    def __init__(self, group: Group) -> None:
        self.rank, self.size, self.leads = group.rank, group.size, group.leads
        self.all_gather, self.broadcast = group.all_gather, group.broadcast
        self._group, self._memory = group, torch.zeros(1 << 16, dtype=torch.uint8)

    def room(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return self._memory[: math.prod(shape) * dtype.itemsize].view(dtype).view(shape)

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        total = self._group.all_reduce(x.clone())
        self._memory.fill_(255)  # NaN
        return total


def static_decoder(loader: DecoderLoader, directory: Path, config: RankConfig) -> CudaDecoder:
    """The GPU's way, in the loader's group, over weights of its own; the largest steps first, as where there is memory
    to measure."""
    device, group = torch.device("cpu"), loader.group
    run_largest_steps(loader, directory, config)
    model = load_model(directory, loader._model_config, loader._task, device, torch.float32, group)
    decoder, loader.facts = load_cuda_decoder(
        model, local_heads(loader._model_config, group.size), loader.facts, config, device=device, dtype=torch.float32,
        tokenizer=directory / "tokenizer.json", shapes=directory / "shapes.json", group=group, stream=HostStream(),
    )  # fmt: skip
    return decoder


def run_largest_steps(loader: DecoderLoader, directory: Path, config: RankConfig) -> None:
    device, dtype, facts, group = torch.device("cpu"), torch.float32, loader.facts, loader.group
    heads = local_heads(loader._model_config, group.size)
    model: Any = load_model(directory, loader._model_config, loader._task, device, dtype, group)
    source = load_source(model, heads, facts, config, directory, device, dtype, group)
    use_kernels(model)
    trial = Trial(model, source, KVShape.of(heads, dtype), facts, device, directory / "tokenizer.json", group)
    if facts.max_draft_tokens:
        run_largest_verify(trial)
    run_largest_prompts(trial)


_NO_FACTS = ModelFacts("none", "none", "embed", 1, 1, 1, 1, 1)
