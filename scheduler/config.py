"""Settings of one scheduler process. Composed into the service's configuration by services/config.py."""

from msgspec import Struct


class SchedulerConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    listen: str | None = None  # for gateways of other hosts, beside the Unix socket: tcp://address:port
    max_pending_requests: int = 8192  # chunks in the pool; beyond: 429
    max_pending_tokens: int = 2_000_000
    bulk_share: float = 0.1  # of each step's tokens, kept for bulk work while there is some
    bulk_wait_ms: int = 2_000  # bulk that had nothing of any step for so long gets one of its own
    prefix_cache: bool = True  # generation: blocks of prompts seen before are not computed again
    quarantine_ttl_ms: int = 600_000
    step_deadline_ms: int = 30_000  # ranks that take longer for one step are killed
    hello_deadline_ms: int = 300_000  # a rank that does not come within it, imports and all, is ended and started anew
    load_deadline_ms: int = 600_000  # from Join to Ready
    rank_heartbeat_ms: int = 10_000  # an idle rank silent for longer is killed
    gateway_heartbeat_ms: int = 5_000  # a gateway silent for longer is gone, and its work with it
    canary_interval_ms: int = 5_000  # a forward pass at least this often, so that readiness is proved
    drain_timeout_ms: int = 20_000
    spin_us: int = 0  # stay awake so long after a message: needs a core of its own
