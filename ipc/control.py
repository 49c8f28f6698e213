"""Who is there, who belongs together, and how they are: registration, membership, liveness, figures."""

from typing import Literal

from msgspec import Struct

from ipc.step_ring import RingLayout
from ipc.types import PROTOCOL_VERSION, Count, Id, ModelFacts

Role = Literal["gateway", "scheduler", "rank"]
ReplicaState = Literal["starting", "ready", "draining"]

PROBE_INDEX = 1_000_000  # a gateway's number, as no real one has it: this Hello only asks for a Status


class Hello(Struct, frozen=True, tag=True, omit_defaults=True):
    """First word of a gateway or rank to its scheduler. A rank sends facts known from configuration alone."""

    incarnation: Id
    role: Role
    index: Count  # gateway number or rank
    pid: Count
    protocol: Count = PROTOCOL_VERSION
    facts: ModelFacts | None = None


class Join(Struct, frozen=True, tag=True):
    """Scheduler to every rank once all have said Hello; the ring's memfd rides beside it (SCM_RIGHTS).

    `members` are the incarnations of all ranks in rank order. The same set as before means: keep group,
    weights and graphs. Any other set means that a rank which had joined before must exit.
    """

    epoch: Id
    scheduler: Id
    rank: Count
    members: list[Id]
    rendezvous: str  # torch.distributed init_method, "" when alone
    layout: RingLayout


class ProcessStats(Struct, frozen=True):
    """One process's figures as Prometheus samples: name → value, labels already in the name.

    Counters end in `_total`; histograms are given as their `_bucket{le=…}`, `_sum` and `_count` samples.
    """

    process: str
    incarnation: Id
    values: dict[str, float]


class Heartbeat(Struct, frozen=True, tag=True, omit_defaults=True):
    """Proof that a process's own loop turns; sent by gateways (without epoch) and ranks to their scheduler."""

    incarnation: Id
    epoch: Id = 0
    last_step: Id = 0
    stats: ProcessStats | None = None


class Status(Struct, frozen=True, tag=True, omit_defaults=True):
    """Scheduler to gateways: answer to Hello and Heartbeat, and at every change of state.

    `forward_age_ms` is the time since a step last finished: readiness is a real and recent forward pass.
    `max_forward_age_ms` is the longest that this can be while all is well. `registration` changes when the gateway
    was dropped and taken again: what it had sent before is forgotten. `stats` is the union of what every process
    attached to this scheduler last said.
    """

    incarnation: Id
    state: ReplicaState
    facts: ModelFacts | None = None
    num_requests: Count = 0
    num_tokens: Count = 0
    forward_age_ms: int = -1  # none has finished yet
    max_forward_age_ms: Count = 15_000
    registration: Id = 0
    stats: list[ProcessStats] = []


class Drain(Struct, frozen=True, tag=True):
    """A rank to its scheduler: this is an ordered stop; plan nothing more for me. Counts as nobody's fault."""

    incarnation: Id
    epoch: Id


class Quarantine(Struct, frozen=True, tag=True):
    """Fingerprints of sequences that end ranks. Schedulers tell gateways, gateways tell the other schedulers."""

    fingerprints: list[bytes]
    ttl_ms: Count
