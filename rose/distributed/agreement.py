"""What keeps the ranks of a group in step: a check that all hold the same, and the leader's decisions for everybody.

Every rank works out its own state from the same plans and decisions. Should one ever differ, it must not compute on. On
CPU ranks compare before a step computes anything. On a GPU, which nothing waits for, checksums go with the leader's
decision, and every rank finds out when the step has landed, before it is answered.
"""

import zlib
from collections.abc import Callable

import torch
from torch import Tensor

from ipc.codec import encode
from ipc.step import StepPlan
from ipc.step_ring import Arrays
from rose.distributed.group import LEADER, Group
from rose.generate_outputs import Decision
from rose.slots import Slots

_TABLES = {
    "rows": "num_seqs",
    "admissions": "num_admissions",
    "releases": "num_releases",
    "new_blocks": "num_new_blocks",
    "input_ids": "num_tokens",
}  # of a slot, and the plan's word for how many lines each has


class Diverged(RuntimeError):
    """The ranks of a group do not hold the same: none of them can be trusted."""


class Agreement:
    """Of one rank: `slots` are its own, if its model generates."""

    def __init__(self, group: Group, slots: Slots | None = None) -> None:
        self.group = group
        self._slots = slots
        if slots is None or group.size == 1:
            return
        num_slots, device = len(slots.num_tokens) - 1, slots.num_tokens.device
        odd = torch.arange(1, 4 * num_slots, 2, dtype=torch.int32, device=device)
        self._weights = odd.view(2, num_slots)  # of a slot's two lengths: which one differs shall matter
        self._differs = torch.zeros(1, dtype=torch.int32, device=device)
        self._seen = torch.zeros(1, dtype=torch.int32, pin_memory=device.type == "cuda")

    def check(self, plan: StepPlan, arrays: Arrays) -> None:
        """Compares every rank's plan and the lengths in its slots. Raises Diverged, on every rank alike.

        Returns once all ranks have come to this step, so no slot of the ring can be used again before each has read it.
        On a GPU a step with rows does that by its own collectives; of one without only the lengths are compared.
        """
        if self.group.size == 1:
            return
        if self._slots is None or self._slots.num_tokens.is_cpu:
            self._compare(plan, arrays)
        elif not plan.num_seqs:
            self._note(self.group.all_gather(self._mark()))

    def decision(self, decide: Callable[[], Decision], *, num_rows: int, width: int) -> Decision:
        """What the leader decides of R rows, `width` tokens each, for every rank; log probabilities stay with it.

        Launches only, on a GPU: it can be captured.
        """
        if self.group.size == 1:
            return decide()
        mark = self._mark()
        parts: tuple[Tensor, ...]
        if self.group.leads:
            decision = decide()
            parts = (decision.tokens.flatten(), decision.status, decision.num_new, decision.num_drafts)
        else:
            parts = (mark.new_zeros(num_rows * (width + 3)),)
        said = self.group.all_gather(torch.cat([part.int() for part in (*parts, mark)]))
        self._note(said[:, -1])
        if self.group.leads:
            return decision
        tokens, status, num_new, num_drafts, _ = said[LEADER].split([num_rows * width, *3 * (num_rows,), 1])
        return Decision(status, tokens.view(num_rows, width), num_new, num_drafts, None)

    def landed(self) -> None:
        """A step has come to its end. Raises Diverged if it, or one after it, has found a difference."""
        if self.group.size > 1 and self._slots is not None and int(self._seen):
            raise Diverged(f"rank {self.group.rank}: the ranks' slots' lengths are not the same")

    def _compare(self, plan: StepPlan, arrays: Arrays) -> None:
        lengths = 0 if self._slots is None else int(self._mark())
        marks = self.group.all_gather(torch.tensor([plan_mark(plan, arrays), lengths]))
        if (marks != marks[self.group.rank]).any():
            plans, slots = marks.t().tolist()
            raise Diverged(
                f"rank {self.group.rank} at step {plan.step}: marks of the plan by rank {plans}, "
                f"of the slots' lengths {slots}"
            )

    def _mark(self) -> Tensor:
        """A checksum of how many tokens every slot holds, known and computed; int32 [1]. Wraps around."""
        assert self._slots is not None
        lengths = torch.stack((self._slots.num_tokens[:-1], self._slots.num_computed[:-1]))
        return (lengths * self._weights).sum(dtype=torch.int32)[None]

    def _note(self, marks: Tensor) -> None:
        """marks int32 [size], of every rank. Once they have differed it is known for good."""
        self._seen.copy_(self._differs.bitwise_or_((marks != marks[LEADER]).any().int()), non_blocking=True)
        if self._differs.is_cpu:
            self.landed()


def plan_mark(plan: StepPlan, arrays: Arrays) -> int:
    """A checksum of a plan and of its tables."""
    mark = zlib.crc32(encode(plan))
    for name, count in _TABLES.items():
        if name in arrays:
            mark = zlib.crc32(arrays[name][: getattr(plan, count)].tobytes(), mark)
    return mark
