"""Settings of one rank. Composed into the service's configuration by services/config.py."""

from typing import Literal

from msgspec import Struct


class SpeculationConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    proposer: Literal["none", "n_gram", "draft_model", "mtp"] = "none"
    # at most, for each sequence and step. On a GPU 8 and more make long contexts slow: rows of over 8 tokens take an
    # attention that does not divide their keys among processors
    num_draft_tokens: int = 3
    # [largest batch, drafts] in rising order; a step of more sequences than the last has none, and the draft's state of
    # these lapses. Empty: num_draft_tokens always. None: as measured, see rose/speculation/length_table.py
    draft_lengths: list[tuple[int, int]] | None = None
    model: str | None = None  # directory of the draft model, or of the head (mtp)
    num_layers: int | None = None  # draft_model, instead of `model`: the target's own first layers
    # draft_model, mtp: only so many tokens are drafted, those of the lowest ids, or the first of a list's: ids, a file
    draft_vocab: int | None = None
    draft_vocab_ids: str | None = None
    draft_sampling: Literal["greedy", "sampled"] = "greedy"  # sampled: by the request's own parameters
    # mtp, after a step: the head runs over all of the step's tokens, rejected ones too, or waits to know the accepted.
    # auto: all on a GPU, the accepted on a CPU
    head_tokens: Literal["auto", "all", "accepted"] = "auto"
    # mtp, where tensor_parallel_size > 1: the head is divided like the target, or the leading rank has all of it, and
    # the target's embedding and head whole beside it
    head_ranks: Literal["all", "leader"] = "all"


class RankConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    device: str = "auto"  # auto | cpu | cuda
    dtype: Literal["auto", "float32", "float16", "bfloat16"] = "auto"  # auto: float32 on CPU, bfloat16 on CUDA
    task: Literal["auto", "embed", "score", "generate"] = "auto"  # auto: what the model's files say
    max_model_len: int | None = None  # None: what the model's files say
    max_num_batched_tokens: int | None = None  # tokens of one step; None: the model's measured default
    max_num_seqs: int | None = None
    attention: str = "auto"  # auto | sdpa | triton | fa2 | fa3 | flash4; auto: by measured table (CUDA)
    capture: Literal["lazy", "list", "eager", "off"] = "list"  # when CUDA graphs are made: see rose/graph_policy.py
    max_graphs: int = 192
    max_graph_tokens: int | None = None  # larger steps run without a graph; None: measured at start
    num_threads: int | None = None  # CPU threads of the forward pass; None: all cores
    num_steps_in_flight: int = 2
    memory_fraction: float = 0.9  # of the device's memory
    # ranks of one replica on GPUs add up small tensors where they lie, in each other's memory; false: NCCL adds up all,
    # for hosts where GPUs that read each other's memory hang or err (PCIe with access control services)
    shared_sums: bool = True
    kv_cache_bytes: int | None = None  # keys and values of language models; None: what the device has left
    speculation: SpeculationConfig = SpeculationConfig()
    spin_us: int = 0  # keep polling this long after the last step instead of sleeping
