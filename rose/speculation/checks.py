"""What a proposer would refuse, asked before any weights are loaded. Reads config.json and the names of tensors."""

from pathlib import Path

from ipc.types import ModelFacts
from rose.config import SpeculationConfig
from rose.models.config import ModelConfig
from rose.speculation.draft_model import check_draft_model
from rose.speculation.draft_vocab import read_draft_ids
from rose.speculation.mtp import check_mtp


def check_proposer(config: SpeculationConfig, target: ModelConfig, facts: ModelFacts, directory: Path) -> None:
    """Whether it can draft for the target in `directory`. Raises ModelError."""
    num_ranks = facts.tensor_parallel_size
    if config.proposer == "mtp" and config.model is not None:
        check_mtp(config, target, facts, directory, num_ranks)
    if config.proposer == "draft_model":
        alone = check_draft_model(config, target, facts, directory) is not None  # on the leading rank
        where = Path(str(config.model)) if alone else directory
        read_draft_ids(config, facts.vocab_size, 1 if alone else num_ranks, where)
