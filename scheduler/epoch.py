"""One epoch: a set of ranks that joined together, their ring, and the steps they have been sent.

Keeps slots and deadlines; knows nothing of sockets or of what a step is about.
"""

from msgspec.structs import replace

from ipc.control import Join
from ipc.step import StepPlan
from ipc.step_ring import Arrays, StepRing, layout_for
from ipc.types import ModelFacts, new_incarnation
from scheduler.membership import Member

_POSITIVE_FACTS = (
    "vocab_size",
    "max_model_len",
    "dimension",
    "max_num_seqs",
    "max_num_batched_tokens",
    "num_steps_in_flight",
    "quadratic_tokens",
)


class BadFacts(ValueError):
    """The ranks of one replica do not serve the same model in the same way, or in no way at all."""


class Epoch:
    """`members` are in rank order. Times are seconds on the monotonic clock."""

    def __init__(self, members: list[Member], now: float) -> None:
        """Raises BadFacts; OSError or OverflowError where the memory of the ring is not to be had."""
        self.id = new_incarnation()
        self.members = members
        self.facts = agreed_facts([member.facts for member in members])
        self.ring = StepRing.create(layout_for(self.facts))
        self.started_at = now
        self.ready: dict[int, tuple[bytes, ModelFacts]] = {}  # rank → (socket identity, final facts)
        self.heard_at: dict[int, float] = {}  # rank → when it last said anything
        self.draining = False  # a rank is being stopped in order: nothing more is planned
        self._free_slots = list(range(self.ring.layout.num_slots))
        self._steps: dict[int, int] = {}  # step → slot, oldest first
        self._oldest_since = now  # since when the oldest step has had the ranks to itself

    @property
    def is_ready(self) -> bool:
        return len(self.ready) == len(self.members)

    @property
    def num_steps(self) -> int:
        return len(self._steps)

    def join_for(self, member: Member, scheduler: int, rendezvous: str) -> Join:
        incarnations = [other.incarnation for other in self.members]
        return Join(self.id, scheduler, member.rank, incarnations, rendezvous, self.ring.layout)

    def final_facts(self) -> ModelFacts:
        """What all ranks said when they were ready, no larger than the ring. Raises BadFacts."""
        facts = agreed_facts([facts for _, facts in self.ready.values()])
        if facts.dimension != self.facts.dimension or facts.task != self.facts.task:
            raise BadFacts("the model loaded has another task or dimension than its configuration said")
        return replace(
            facts,
            max_num_seqs=min(facts.max_num_seqs, self.facts.max_num_seqs),
            max_num_batched_tokens=min(facts.max_num_batched_tokens, self.facts.max_num_batched_tokens),
            num_steps_in_flight=min(facts.num_steps_in_flight, self.facts.num_steps_in_flight),
        )

    def free_slot(self) -> int | None:
        """A slot for the next step; None while there is none or nothing may be planned."""
        if not self.is_ready or self.draining or not self._free_slots:
            return None
        return self._free_slots[-1]

    def arrays(self, slot: int) -> Arrays:
        return self.ring.slot(slot)

    def launch(self, plan: StepPlan, now: float) -> None:
        """The plan's slot belongs to the ranks until `finish`."""
        self._free_slots.remove(plan.slot)
        self.ring.write_header(plan.slot, self.id, plan.step, plan.num_seqs, plan.num_tokens)
        if not self._steps:
            self._oldest_since = now
        self._steps[plan.step] = plan.slot

    def finish(self, step: int, now: float) -> int | None:
        """The slot of an answered step, free again; None if no such step is in flight."""
        slot = self._steps.pop(step, None)
        if slot is not None:
            self._free_slots.append(slot)
            self._oldest_since = now
        return slot

    def overdue(self, now: float, step_deadline_ms: int, load_deadline_ms: int, heartbeat_ms: int) -> str:
        """Why these ranks must be killed, or ""."""
        if not self.is_ready:
            late = now - self.started_at > load_deadline_ms / 1000
            return f"not ready {load_deadline_ms} ms after Join (load_deadline_ms)" if late else ""
        if self._steps:
            late = now - self._oldest_since > step_deadline_ms / 1000
            return f"step {next(iter(self._steps))} took longer than {step_deadline_ms} ms" if late else ""
        for rank, heard_at in self.heard_at.items():
            if now - heard_at > heartbeat_ms / 1000 and now - self._oldest_since > heartbeat_ms / 1000:
                return f"rank {rank} was silent for {heartbeat_ms} ms"
        return ""


def agreed_facts(facts: list[ModelFacts]) -> ModelFacts:
    """The facts of all ranks as one: num_blocks is the minimum. Raises BadFacts."""
    for name in _POSITIVE_FACTS:
        if getattr(facts[0], name) < 1:
            raise BadFacts(f"rank 0 says {name} = {getattr(facts[0], name)}: it must be at least 1")
    alike = [replace(each, num_blocks=0) for each in facts]
    for rank, each in enumerate(alike):
        if each != alike[0]:
            fields = [name for name in each.__struct_fields__ if getattr(each, name) != getattr(alike[0], name)]
            raise BadFacts(f"ranks 0 and {rank} disagree on {', '.join(fields)}: give them one configuration")
    return replace(facts[0], num_blocks=min(each.num_blocks for each in facts))
