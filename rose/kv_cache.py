"""The cache of keys and values: how many blocks the memory holds, and the blocks of every layer.

Which block belongs to whom is the scheduler's to say; see rose.attention.paged for the layout of one layer.
"""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from rose.attention.paged import PagedKV
from rose.models.config import ModelConfig, ModelError

BLOCK_SIZE = 16  # tokens
CPU_SHARE = 0.25  # of the memory that is free at the start
# what a container may have, by either version of the kernel's control groups
_LIMITS = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))


class KVShape(NamedTuple):
    """One model's cache, without its length."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype

    @classmethod
    def of(cls, model: ModelConfig, dtype: torch.dtype) -> "KVShape":
        return cls(model.num_hidden_layers, model.num_key_value_heads, model.head_dim, dtype)

    @property
    def block_bytes(self) -> int:
        """One block in every layer, keys and values."""
        return 2 * self.num_layers * BLOCK_SIZE * self.num_kv_heads * self.head_dim * self.dtype.itemsize


def num_blocks_for(
    shape: KVShape, budget_bytes: int, *, max_num_seqs: int, max_model_len: int, beside: KVShape | None = None
) -> int:
    """Blocks that `budget_bytes` hold besides the dummy, and no more than all sequences at full length can use.

    `beside`: what else has as many blocks, a draft's cache.
    Raises ModelError where not even one sequence of full length fits.
    """
    each = -(-max_model_len // BLOCK_SIZE)
    block_bytes = shape.block_bytes + (0 if beside is None else beside.block_bytes)
    num_blocks = budget_bytes // block_bytes - 1
    if num_blocks < each:
        fitting, needed = max(0, num_blocks) * BLOCK_SIZE, (each + 1) * block_bytes
        raise ModelError(
            f"the key-value cache may take {budget_bytes} bytes, enough for {fitting} tokens; one sequence of "
            f"max_model_len = {max_model_len} takes {needed}: raise rank.kv_cache_bytes or lower rank.max_model_len"
        )
    return min(num_blocks, each * max_num_seqs)


def cpu_budget_bytes(limits: Iterable[Path] = _LIMITS) -> int:
    """A share of the memory that the kernel says is free, or of all that a container may have where that is less.

    `limits`: files with a number of bytes, or "max". Pages are taken when they are first written.
    """
    with open("/proc/meminfo") as file:
        free_kb = next(int(line.split()[1]) for line in file if line.startswith("MemAvailable:"))
    said = [path.read_text().strip() for path in limits if path.is_file()]
    return int(min([free_kb * 1024, *(int(text) for text in said if text.isdecimal())]) * CPU_SHARE)


def cuda_budget_bytes(memory_fraction: float, device: torch.device) -> int:
    """What is left of this process's share of the device, once the largest step has run: its peak stays reserved.

    Call it with the weights loaded and no cache of its own but what the largest step needed, freed again.
    """
    free, total = torch.cuda.mem_get_info(device)
    used = total - free - torch.cuda.memory_reserved(device) + torch.cuda.max_memory_allocated(device)
    return max(0, int(total * memory_fraction) - used)


def allocate(shape: KVShape, num_blocks: int, device: torch.device) -> Sequence[PagedKV]:
    """The cache of every layer: `num_blocks` and the dummy."""
    size = (num_blocks + 1, BLOCK_SIZE, shape.num_kv_heads, shape.head_dim)
    return [
        PagedKV(
            torch.empty(size, dtype=shape.dtype, device=device), torch.empty(size, dtype=shape.dtype, device=device)
        )
        for _ in range(shape.num_layers)
    ]
