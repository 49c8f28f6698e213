"""Drafting and verifying by kernels against torch, and that neither waits for the device; with a GPU, as graphs."""

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from ipc.types import SamplingParams
from rose.speculation.protocol import Drafts
from tests.rose.speculation.no_waits import Wait, no_waits
from tests.rose.speculation.whole_steps import (
    GREEDY,
    MIXED,
    PROPOSERS,
    World,
    check_same,
    going,
    write_models,
)

# the interpreter says aloud what infinities do
pytestmark = pytest.mark.filterwarnings("ignore:(overflow|invalid value|divide by zero) encountered:RuntimeWarning")

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
STEPS = ((1, True), (3, True), (0, True))  # drafts, and whether the draft is kept
LAPSING = ((0, False), (2, True))
SAMPLED = {"draft_sampling": "sampled"}


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("models")
    write_models(directory)
    return directory


def run(world: World, steps: tuple[tuple[int, bool], ...]) -> list[tuple[Tensor, ...]]:
    """Of the sequences in each step: tokens, how many counted, drafts that counted."""
    found = []
    for k, keep in steps:
        drafts, tokens, num_new = world.step(k, keep_draft=keep)
        each = [tokens[:-1], num_new[:-1]]
        if drafts is not None:
            counts = drafts.counts[:-1]
            each += [counts, drafts.tokens[:-1] * (torch.arange(k, device=DEVICE) < counts[:, None])]
        found.append(tuple(each))
    return found


@pytest.mark.skipif(DEVICE.type == "cuda", reason="what torch does on a CPU")
@pytest.mark.parametrize(
    ("kind", "params", "settings"),
    [
        *((kind, GREEDY, {}) for kind in PROPOSERS),
        *((kind, MIXED, {}) for kind in PROPOSERS[:2]),
        ("another model", MIXED, SAMPLED),
        pytest.param("mtp", MIXED, SAMPLED | {"draft_vocab": 200}, marks=pytest.mark.long),
    ],
    ids=[*PROPOSERS, "n_gram mixed", "another model mixed", "another model sampled", "mtp sampled of 200 tokens"],
)
def test_kernels_do_what_torch_does_and_wait_for_nothing(
    directory: Path, kind: str, params: tuple[SamplingParams, ...], settings: dict[str, str]
) -> None:
    """Tokens and everything that steps leave behind: also of steps without drafts, and of sequences that lapse."""
    steps = STEPS if params is GREEDY else STEPS[1:2]
    with going("torch"):
        plain = World(directory, kind, way="torch", device=DEVICE, params=params, **settings)
        expected, state = run(plain, steps), plain.state
        expected += run(plain, LAPSING)
    with going("kernels"):
        world = World(directory, kind, way="kernels", device=DEVICE, params=params, **settings)
        with torch.inference_mode(), no_waits():
            found = run(world, steps)
        check_same(world.state, state)
        with torch.inference_mode(), no_waits():
            found += run(world, LAPSING)
    for step, (ours, theirs) in enumerate(zip(found, expected, strict=True)):
        for one, other in zip(ours, theirs, strict=True):
            assert torch.equal(one, other), f"step {step}"
    for name in ("ids", "whole"):
        if name in state:
            assert torch.equal(world.state[name], plain.state[name])


def refused(work: Callable[[], object]) -> None:
    with no_waits():
        work()
    pytest.fail(f"not noticed: {inspect.getsource(work)}")


def test_waits_are_noticed() -> None:
    """Each kind of them."""
    x = torch.arange(4)
    for wait in (
        lambda: x.any().item(),
        lambda: bool(x.any()),
        lambda: x[x > 2],
        lambda: x.nonzero(),
        lambda: torch.tensor([1, 2]),
        lambda: x.tolist(),
        lambda: x.unique(),
        lambda: x[[0, 1]],
    ):
        with pytest.raises(Wait):
            refused(wait)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("params", "settings"),
    [(GREEDY, {}), (MIXED, {}), (MIXED, SAMPLED), (GREEDY, {"draft_vocab": 200})],
    ids=["greedy", "mixed", "sampled", "of 200 tokens"],
)
@pytest.mark.parametrize("kind", PROPOSERS)
@pytest.mark.parametrize("k", [1, 3])
def test_a_graph_of_a_step_does_what_the_step_does(
    directory: Path, kind: str, params: tuple[SamplingParams, ...], settings: dict[str, Any], k: int
) -> None:
    """The whole step captured once, replayed from state to state; and nothing in a step waits."""
    if kind == "n_gram" and settings:
        pytest.skip("it draws nothing, and has no head")
    settings = {"way": "kernels", "device": DEVICE, "params": params, "dtype": torch.bfloat16} | settings
    plain, world = (World(directory, kind, **settings) for _ in range(2))
    with torch.inference_mode(), torch.cuda.stream(torch.cuda.Stream()):
        for each in (plain, world):
            each.step(k)  # kernels are compiled, libraries find their memory
        torch.cuda.synchronize()
        with waits_are_errors():
            expected = [kept(plain.step(k)) for _ in range(4)]
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=torch.cuda.current_stream()):
            outputs = world.step(k)
        found = []
        with waits_are_errors():
            for _ in range(4):
                graph.replay()
                found.append(kept(outputs))
        torch.cuda.synchronize()
    for ours, theirs in zip(found, expected, strict=True):
        for one, other in zip(ours, theirs, strict=True):
            assert torch.equal(one[:-1], other[:-1])
    check_same(world.state, plain.state)


@contextmanager
def waits_are_errors() -> Iterator[None]:
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def kept(outputs: tuple[Drafts | None, Tensor, Tensor]) -> list[Tensor]:
    drafts, tokens, num_new = outputs
    assert drafts is not None
    return [each.clone() for each in (drafts.tokens, drafts.counts, tokens, num_new)]
