"""What keeps the ranks of a group in step: a check that all hold the same, and the leader's decisions for everybody.

Every rank works out its own state from the same plans and decisions. Should one ever differ, it must not compute on.
"""

import zlib
from collections.abc import Callable

import torch
from torch import Tensor

from ipc.codec import encode
from ipc.step import StepPlan
from ipc.step_ring import Arrays
from rose.distributed.group import Group
from rose.generate_outputs import Decision
from rose.slots import Slots

_NUM_COLUMNS = 3  # of a decision besides its tokens


class Diverged(RuntimeError):
    """The ranks of a group do not hold the same: none of them can be trusted."""


def check_agreement(group: Group, plan: StepPlan, arrays: Arrays, slots: Slots | None = None) -> None:
    """Every rank's plan and the lengths in its slots, compared. Raises Diverged, on every rank alike.

    Returns once all ranks have come to this step. So no slot of the ring can be used again before each has read it.
    """
    if group.size == 1:
        return
    marks = group.all_gather(torch.tensor([plan_mark(plan, arrays), 0 if slots is None else slot_mark(slots)]))
    if (marks != marks[group.rank]).any():
        plans, lengths = marks.t().tolist()
        raise Diverged(
            f"rank {group.rank} at step {plan.step}: marks of the plan by rank {plans}, of the slots' lengths {lengths}"
        )


def plan_mark(plan: StepPlan, arrays: Arrays) -> int:
    """A checksum of a plan and of its tables."""
    mark = zlib.crc32(encode(plan))
    counts = {
        "rows": plan.num_seqs,
        "admissions": plan.num_admissions,
        "releases": plan.num_releases,
        "new_blocks": plan.num_new_blocks,
        "input_ids": plan.num_tokens,
    }
    for name, count in counts.items():
        if count and name in arrays:
            mark = zlib.crc32(arrays[name][:count].tobytes(), mark)
    return mark


def slot_mark(slots: Slots) -> int:
    """A checksum of how many tokens every slot holds, known and computed."""
    return zlib.crc32(torch.stack((slots.num_tokens[:-1], slots.num_computed[:-1])).numpy().tobytes())


def shared_decision(
    group: Group, decide: Callable[[], Decision], *, num_rows: int, width: int, device: torch.device
) -> Decision:
    """What the leader decides of R rows, up to `width` tokens each, for every rank; log probabilities stay with it."""
    if group.size == 1:
        return decide()
    if group.leads:
        decision = decide()
        group.broadcast(_packed(decision))
        return decision
    packed = group.broadcast(torch.empty(num_rows, _NUM_COLUMNS + width, dtype=torch.int32, device=device))
    status, num_new, num_drafts = packed[:, :_NUM_COLUMNS].unbind(1)
    return Decision(status, packed[:, _NUM_COLUMNS:], num_new, num_drafts, None)


def _packed(decision: Decision) -> Tensor:
    columns = torch.stack((decision.status, decision.num_new, decision.num_drafts), 1)
    return torch.cat((columns, decision.tokens), 1).int()
