"""What the fake generation planner keeps: sequences, blocks with prefix hits, and the tables of one step."""

from collections import deque
from dataclasses import dataclass, field

from ipc.step import KIND_PREFILL, StepPlan
from ipc.step_ring import Arrays
from ipc.submit import Submit
from ipc.types import SamplingParams


@dataclass(slots=True, eq=False)
class Sequence:
    """One generation. `tokens` are the prompt and what has been sent to the client, nothing else."""

    submit: Submit
    arrival: int  # position in the order of arrival
    tokens: list[int]
    num_prompt: int
    limit: int  # tokens at which it ends by length
    attempt: int
    slot: int = -1
    generation: int = -1
    blocks: list[int] = field(default_factory=list)
    num_computed: int = 0  # prefill tokens in steps sent
    prefill_end: int = 0  # len(tokens) at admission
    num_in_flight: int = 0  # rows sent and not answered
    min_new: int = 0  # tokens those rows will give at least
    max_new: int = 0  # … and at most
    num_registered: int = 0  # blocks offered for prefix hits
    num_prompt_logprobs: int = 0  # sent
    num_drafts: int = 0
    num_accepted: int = 0
    num_cached: int = 0
    done: bool = False

    @property
    def params(self) -> SamplingParams:
        assert self.submit.sampling is not None
        return self.submit.sampling

    @property
    def prefilling(self) -> bool:
        return self.num_computed < self.prefill_end

    @property
    def wants_row(self) -> bool:
        """Whether a further decode row could give a token that is still needed."""
        return not self.prefilling and len(self.tokens) + self.min_new < self.limit

    def leave(self) -> None:
        """Out of its slot; rows already sent go on."""
        self.slot, self.blocks, self.num_computed, self.prefill_end, self.num_registered = -1, [], 0, 0, 0


@dataclass(slots=True)
class Row:
    """A line of `rows` and the sequence it stands for, kept until its step is answered."""

    sequence: Sequence
    generation: int
    kind: int
    num_tokens: int
    sample: bool
    input_offset: int
    draft_length: int
    max_length: int

    @property
    def start(self) -> int:
        """Position of a prefill row's first token."""
        return self.max_length - self.num_tokens

    @property
    def max_new(self) -> int:
        return self.draft_length + 1 if self.sample else 0

    @property
    def runs(self) -> bool:
        """Whether the sequence is still where this row was planned for it."""
        return self.sequence.slot >= 0 and self.sequence.generation == self.generation

    @property
    def asks_prompt_logprobs(self) -> bool:
        return self.kind == KIND_PREFILL and self.sequence.params.prompt_logprobs is not None

    def line(self) -> tuple[int, ...]:
        return (
            self.sequence.slot,
            self.generation,
            self.num_tokens,
            self.kind,
            int(self.sample),
            self.input_offset,
            self.draft_length,
            self.max_length,
        )


@dataclass(slots=True)
class Tables:
    """The inputs of one step while they are drawn up; `write` puts them into a slot."""

    step: int
    draft_length: int = 0
    input_ids: list[int] = field(default_factory=list)
    rows: list[Row] = field(default_factory=list)
    admissions: list[tuple[int, ...]] = field(default_factory=list)
    new_blocks: list[tuple[int, int, int]] = field(default_factory=list)
    releases: list[tuple[int, int]] = field(default_factory=list)
    params: bytearray = field(default_factory=bytearray)
    num_hit_tokens: int = 0

    def add_row(self, row: Row) -> None:
        self.rows.append(row)
        sequence = row.sequence
        sequence.num_in_flight += 1
        sequence.min_new += int(row.sample)
        sequence.max_new += row.max_new
        if row.kind == KIND_PREFILL:
            sequence.num_computed += row.num_tokens

    def write(self, arrays: Arrays, epoch: int, slot: int, last_applied: int) -> StepPlan:
        """Raises ValueError (numpy) for more than a table holds."""
        arrays["input_ids"][: len(self.input_ids)] = self.input_ids
        for name, lines in (
            ("rows", [row.line() for row in self.rows]),
            ("admissions", [line + (0,) for line in self.admissions]),
            ("new_blocks", self.new_blocks),
            ("releases", self.releases),
        ):
            if lines:
                arrays[name][: len(lines)] = lines
        arrays["params"][: len(self.params)] = memoryview(self.params)
        return StepPlan(
            epoch=epoch,
            step=self.step,
            slot=slot,
            kind="generate",
            num_seqs=len(self.rows),
            num_tokens=len(self.input_ids),
            draft_length=self.draft_length,
            num_admissions=len(self.admissions),
            num_new_blocks=len(self.new_blocks),
            num_releases=len(self.releases),
            last_applied=last_applied,
        )


class BlockPool:
    """Counts the holders of every block; full blocks that are held and computed can be shared by their content."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.block_size = block_size
        self.free = deque(range(num_blocks))
        self.num_holders = [0] * num_blocks
        self._by_content: dict[tuple[object, ...], int] = {}
        self._content: dict[int, tuple[object, ...]] = {}

    def take(self, count: int) -> list[int]:
        blocks = [self.free.popleft() for _ in range(count)]
        for block in blocks:
            self.num_holders[block] = 1
        return blocks

    def hits(self, sequence: Sequence) -> list[int]:
        """Takes a share in the blocks that hold the beginning of `sequence`, all but its last token at most."""
        blocks = []
        for index in range((len(sequence.tokens) - 1) // self.block_size):
            block = self._by_content.get(self._key(sequence, index))
            if block is None:
                break
            self.num_holders[block] += 1
            blocks.append(block)
        return blocks

    def register(self, sequence: Sequence, num_computed: int) -> None:
        """Offers the full blocks among the first `num_computed` tokens, whose step has been answered."""
        for index in range(sequence.num_registered, num_computed // self.block_size):
            key, block = self._key(sequence, index), sequence.blocks[index]
            if key not in self._by_content and block not in self._content:
                self._by_content[key], self._content[block] = block, key
            sequence.num_registered = index + 1

    def give_back(self, blocks: list[int]) -> None:
        for block in blocks:
            self.num_holders[block] -= 1
            assert self.num_holders[block] >= 0, f"block {block} given back twice"
            if self.num_holders[block] == 0:
                self.free.append(block)
                key = self._content.pop(block, None)
                if key is not None:
                    del self._by_content[key]

    def _key(self, sequence: Sequence, index: int) -> tuple[object, ...]:
        return (sequence.submit.cache_salt, *sequence.tokens[: (index + 1) * self.block_size])
