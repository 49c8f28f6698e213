"""How many tokens are drafted, by the number of sequences in a step: from settings to facts.

Drafts pay while a step's time is that of reading weights; with many sequences each costs as much as a token. Free of
torch, so that a configuration can be checked.
"""

from ipc.types import ModelFacts
from rose.config import SpeculationConfig
from rose.speculation.length_table import MEASURED

MAX_BATCH = 2**31 - 1  # what facts can carry, see ipc.types.Count
MAX_DRAFT_TOKENS = 16  # drafts of a row; the chance that one is taken falls with every one before it


def max_draft_tokens(config: SpeculationConfig, device: str) -> int:
    """The longest draft there will be; 0 without a proposer. Raises ValueError for settings out of range."""
    if config.proposer == "none":
        return 0
    if not 1 <= config.num_draft_tokens <= MAX_DRAFT_TOKENS:
        raise ValueError(f"speculation.num_draft_tokens must be 1..{MAX_DRAFT_TOKENS}, got {config.num_draft_tokens}")
    lengths = [length for _, length in draft_lengths(config, device)]
    return max(lengths, default=config.num_draft_tokens)


def draft_lengths(config: SpeculationConfig, device: str) -> tuple[tuple[int, int], ...]:
    """ModelFacts.draft_lengths on a kind of device (cpu, cuda): as set, else as measured, num_draft_tokens at most.

    Raises ValueError for a table that is none.
    """
    if config.proposer == "none":
        return ()
    if config.draft_lengths is None:
        measured = MEASURED.get((config.proposer, device), ())
        return tuple((batch, min(length, config.num_draft_tokens)) for batch, length in measured)
    table = tuple((int(batch), int(length)) for batch, length in config.draft_lengths)
    problem = find_table_problem(table, config.num_draft_tokens)
    if problem:
        raise ValueError(f"speculation.draft_lengths: {problem}")
    return table


def drafts_of_step(facts: ModelFacts, num_rows: int) -> tuple[int, bool]:
    """(drafts of each row, whether the drafts' state is kept) of the largest step that the scheduler plans for so many
    decoding sequences."""
    table = facts.draft_lengths or ((facts.max_num_seqs, facts.max_draft_tokens),)
    length = next((length for most, length in table if num_rows <= most), 0)
    room = max(facts.max_num_batched_tokens // num_rows - 1, 0)
    return min(length, facts.max_draft_tokens, room), not facts.draft_lengths or num_rows <= table[-1][0]


def find_table_problem(table: tuple[tuple[int, int], ...], num_draft_tokens: int) -> str | None:
    """What is wrong with [largest batch, drafts] pairs, in a reader's words."""
    batches = [batch for batch, _ in table]
    if any(batch < 1 for batch in batches) or batches != sorted(set(batches)):
        return f"batch sizes must be at least 1 and rise from pair to pair, got {batches}"
    if batches and batches[-1] > MAX_BATCH:
        return f"batch sizes must be at most {MAX_BATCH}, got {batches[-1]}"
    beyond = [length for _, length in table if not 0 <= length <= num_draft_tokens]
    if beyond:
        return f"drafts must be 0..{num_draft_tokens} (num_draft_tokens), got {beyond[0]}"
    return None
