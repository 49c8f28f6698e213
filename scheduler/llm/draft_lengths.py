"""How many tokens a step drafts, by its number of sequences: what a model's facts say. See ipc.types."""

from ipc.types import ModelFacts


def draft_length(facts: ModelFacts, num_seqs: int) -> int:
    """Of a step of so many decoding sequences and nothing else."""
    if not facts.draft_lengths:
        return facts.max_draft_tokens
    return next((length for batch, length in facts.draft_lengths if num_seqs <= batch), 0)


def keeps_draft(facts: ModelFacts, num_seqs: int) -> bool:
    """Whether a step of so many sequences keeps their draft's state, although it may draft nothing."""
    return not facts.draft_lengths or num_seqs <= facts.draft_lengths[-1][0]
