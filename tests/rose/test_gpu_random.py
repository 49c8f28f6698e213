"""Weights made on a GPU, and drafts of a chosen acceptance within a graph."""

from pathlib import Path

import pytest
import torch
from torch import nn

from bench.steered_drafts import Steering
from ipc.types import ModelFacts
from rose.distributed.shard import Shard
from rose.models.config import read_config
from rose.speculation.protocol import Target
from rose.weights.random import RandomStored
from rose.weights.random_file import RandomTensor
from services.sources import resolve_source

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_part_is_the_slice_of_the_whole(dim: int, dtype: torch.dtype) -> None:
    stored = RandomStored("1 name", RandomTensor([2100, 2600], 0.0, 0.02, {2000: 1.0}))
    whole = torch.empty(2100, 2600, device="cuda", dtype=dtype)
    stored.fill(whole, None)
    total = whole.shape[dim]
    parts = []
    for begin, end in ((0, total // 2), (total // 2, total)):
        parts.append(torch.empty_like(whole.narrow(dim, begin, end - begin)))
        stored.fill(parts[-1], Shard(dim, total, begin, end))
    assert torch.equal(torch.cat(parts, dim), whole)
    assert whole[2000].float().mean().item() == pytest.approx(1.0, abs=0.01)
    assert whole[:2000].float().std().item() == pytest.approx(0.02, rel=0.02)


@torch.inference_mode()
def test_acceptance_changes_under_a_graph(tmp_path: Path) -> None:
    directory = resolve_source("random:tiny?says=9", tmp_path)
    facts = ModelFacts("tiny", "llama", "generate", 512, 4096, 1, 4, 64)
    steering = Steering(9, 3)
    device = torch.device("cuda")
    steering.open(Target(nn.Identity(), read_config(directory), directory, facts, torch.bfloat16, device))
    slots = torch.tensor([0, 2, 4], dtype=torch.int32, device=device)
    known = torch.tensor([7, 4096, 5000], dtype=torch.int32, device=device)
    steering.drafts(slots, known, 2)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        drafts = steering.drafts(slots, known, 2)
    for acceptance, expected in ((1.0, 9), (0.0, 8)):
        steering.accept(acceptance)
        graph.replay()
        assert drafts.tolist() == [[expected] * 2] * 3
