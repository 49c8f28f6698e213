"""How many blocks a budget holds, and what is laid out for them."""

from pathlib import Path

import pytest
import torch

from rose.kv_cache import BLOCK_SIZE, KVShape, allocate, cpu_budget_bytes, num_blocks_for
from rose.models.config import ModelError

SHAPE = KVShape(num_layers=30, num_kv_heads=3, head_dim=64, dtype=torch.float32)
TOKEN_BYTES = 2 * 30 * 3 * 64 * 4


def test_a_budget_holds_its_blocks_and_the_dummy() -> None:
    assert SHAPE.block_bytes == BLOCK_SIZE * TOKEN_BYTES
    budget = 1001 * SHAPE.block_bytes
    assert num_blocks_for(SHAPE, budget, max_num_seqs=256, max_model_len=8192) == 1000
    assert num_blocks_for(SHAPE, budget - 1, max_num_seqs=256, max_model_len=8192) == 999


def test_no_more_than_all_sequences_can_use() -> None:
    assert num_blocks_for(SHAPE, 1 << 40, max_num_seqs=3, max_model_len=17) == 6


def test_one_sequence_of_full_length_must_fit() -> None:
    budget = 5 * SHAPE.block_bytes
    assert num_blocks_for(SHAPE, budget, max_num_seqs=8, max_model_len=64) == 4
    with pytest.raises(ModelError, match=r"enough for 64 tokens.*max_model_len = 65.*kv_cache_bytes"):
        num_blocks_for(SHAPE, budget, max_num_seqs=8, max_model_len=65)
    with pytest.raises(ModelError, match="enough for 0 tokens"):
        num_blocks_for(SHAPE, 0, max_num_seqs=8, max_model_len=1)


def test_the_cache_has_one_block_more_for_the_dummy() -> None:
    shape = KVShape(num_layers=2, num_kv_heads=3, head_dim=8, dtype=torch.bfloat16)
    caches = allocate(shape, 5, torch.device("cpu"))
    assert len(caches) == 2
    for cache in caches:
        assert cache.k.shape == cache.v.shape == (6, BLOCK_SIZE, 3, 8)
        assert cache.k.dtype == torch.bfloat16
        assert cache.block_size == BLOCK_SIZE


def test_the_budget_on_cpu_is_a_share_of_what_is_free() -> None:
    with open("/proc/meminfo") as file:
        total_kb = next(int(line.split()[1]) for line in file if line.startswith("MemTotal:"))
    assert 0 < cpu_budget_bytes() < total_kb * 1024 / 2


def test_a_container_has_less_than_its_host(tmp_path: Path) -> None:
    limit, none = tmp_path / "memory.max", tmp_path / "memory.high"
    limit.write_text(f"{64 << 20}\n")
    none.write_text("max\n")
    assert cpu_budget_bytes([none, tmp_path / "missing", limit]) == 16 << 20
    assert cpu_budget_bytes([none]) > 16 << 20
