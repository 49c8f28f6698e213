"""Settings of one gateway process. Composed into the service's configuration by services/config.py."""

from msgspec import Struct


class GatewayConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    host: str = "127.0.0.1"
    port: int = 8080
    num_gateways: int = 2
    max_body_bytes: int = 32 << 20
    max_items: int = 2048  # texts, documents or pairs in one request
    max_request_tokens: int = 300_000
    max_concurrent_requests: int = 1024  # of each model in this process, taken before tokenising; beyond: 429
    max_chunk_tokens: int = 16_384  # a larger request is split
    timeout_ms: int = 60_000  # deadline when the client names none (X-Timeout-Ms)
    replica_wait_ms: int = 60_000  # for a replica that is coming back: longer than a model takes to start
    header_timeout_ms: int = 10_000
    body_timeout_ms: int = 30_000
    drain_timeout_ms: int = 20_000
    num_tokenizer_threads: int = 2
    spin_us: int = 0  # stay awake so long after a message from a scheduler: needs a core of its own
    generation_timeout_ms: int = 600_000  # as timeout_ms, for completions and chat
    keep_alive_ms: int = 15_000  # a stream that has nothing to say for so long sends a comment
    generation_defaults: bool = True  # what a request leaves open is as the model's generation_config.json has it
    max_choices: int = 128  # generations in one request: its prompts times n
    max_stop_strings: int = 16
    max_unsent_tokens: int = 1_000_000  # generated for one request and not sent yet; each of their logprobs counts
    cache_salt: str = ""  # prefix-cache hits only among requests of one salt; for those that name none
