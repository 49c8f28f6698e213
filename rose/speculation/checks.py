"""What a proposer would refuse, asked before any weights are loaded. Reads config.json and the names of tensors."""

from pathlib import Path

from ipc.types import ModelFacts
from rose.config import SpeculationConfig
from rose.device import resolve_dtype
from rose.kv_cache import KVShape
from rose.models.config import ModelConfig
from rose.speculation.draft_model import check_draft_model
from rose.speculation.draft_vocab import read_draft_ids
from rose.speculation.mtp import check_mtp, head_kv_shape


def check_proposer(
    config: SpeculationConfig, target: ModelConfig, facts: ModelFacts, directory: Path
) -> KVShape | None:
    """Whether it can draft for the target in `directory`. The cache of its own on the leading rank, where no other has
    more; None without one. Raises ModelError."""
    num_ranks, dtype = facts.tensor_parallel_size, resolve_dtype(facts.dtype, facts.device)
    if config.proposer == "mtp" and config.model is not None:
        return head_kv_shape(*check_mtp(config, target, facts, directory, num_ranks), dtype)
    if config.proposer == "draft_model":
        draft = check_draft_model(config, target, facts, directory)
        if draft is None:
            read_draft_ids(config, facts.vocab_size, num_ranks, directory)
            return None
        read_draft_ids(config, facts.vocab_size, 1, Path(str(config.model)))  # the leading rank has all of it
        return KVShape.of(draft, dtype)
    return None
