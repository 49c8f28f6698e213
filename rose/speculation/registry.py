"""The proposers that can be configured, by the name in `speculation.proposer`."""

from collections.abc import Mapping

from rose.config import SpeculationConfig
from rose.models.config import ModelError
from rose.speculation.draft_model import load_draft_model
from rose.speculation.mtp import load_mtp
from rose.speculation.n_gram import load_n_gram
from rose.speculation.no_drafts import load_no_drafts
from rose.speculation.protocol import LoadProposer, ProposerSource, Target

PROPOSERS: Mapping[str, LoadProposer] = {
    "none": load_no_drafts,
    "n_gram": load_n_gram,
    "draft_model": load_draft_model,
    "mtp": load_mtp,
}


def load_proposer(config: SpeculationConfig, target: Target) -> ProposerSource:
    """Raises ModelError: see LoadProposer; nobody is known under that name; or a head's setting is for another."""
    load = PROPOSERS.get(config.proposer)
    if load is None:
        raise ModelError(f"speculation.proposer {config.proposer!r} is not there; there are {', '.join(PROPOSERS)}")
    if config.proposer != "mtp" and config.head_ranks != "all":
        raise ModelError(
            f'speculation.head_ranks = "{config.head_ranks}" is for draft heads, proposer mtp, and the proposer is '
            f"{config.proposer}: remove it (a draft model of its own runs on the leading rank in any case)"
        )
    return load(config, target)
