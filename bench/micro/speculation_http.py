"""The same over HTTP: streams of a model that always says one token, without drafts and with a head's, all right.

A part of bench.micro.speculation_step: it says what of the gain is left behind gateway, scheduler and sockets.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from bench.decode_loop import random_prompts
from bench.load import LoadResult, median
from bench.stack import real_stack
from bench.streams import stream_prompts
from rose.models.config import read_config

if TYPE_CHECKING:
    from bench.micro.speculation_step import Options

PROPOSER_LENGTHS = {"none": 0, "mtp": 3}
IN_FLIGHT = (1, 16)
NUM_TOKENS = 256
SPIN_US = 500  # as bench.peers.ours_generating


def measure(options: "Options", save: Callable[[dict[str, Any]], object], left: Callable[[], float]) -> None:
    """One stack after another, one record for each number of streams."""
    from msgspec.structs import replace

    from bench.micro.speculation_step import CONTEXT, speculation, target

    directory = target(options)
    vocab_size = read_config(directory).vocab_size
    prompt_tokens, num_tokens = (16, 24) if options.quick else (CONTEXT - NUM_TOKENS // 2, NUM_TOKENS)
    for proposer, length in PROPOSER_LENGTHS.items():
        if left() <= 0:
            break
        drafts = speculation(replace(options, part=proposer))
        overrides = [f"rank.device={options.device}", f"rank.max_model_len={CONTEXT + NUM_TOKENS}"]
        overrides += [f"rank.max_num_seqs={max(IN_FLIGHT)}", f"models[0].tensor_parallel_size={options.size}"]
        if options.device == "cuda":
            overrides.append(f"rank.spin_us={SPIN_US}")
        if length:
            settings = {"proposer": drafts.proposer, "num_draft_tokens": length, "model": drafts.model}
            overrides.append("rank.speculation.draft_lengths=[]")
            overrides += [f"rank.speculation.{name}={value}" for name, value in settings.items()]
        with real_stack(overrides, ("random", directory)) as stack:
            for in_flight in IN_FLIGHT[: 1 if options.quick else None]:
                prompts = random_prompts(2 * in_flight + 2, prompt_tokens, vocab_size, in_flight)
                found = stream_prompts(stack.url, "random", prompts, num_tokens, in_flight, in_flight)
                save({"what": "http", "proposer": proposer, "length": length, "batch": in_flight} | figures(found))


def figures(result: LoadResult) -> dict[str, float]:
    """itl_ms: time of a token behind the first, average of a stream, median over streams."""
    streams = zip(result.latencies_ms, result.first_ms, result.num_tokens, strict=True)
    return {
        "itl_ms": median([(last - first) / (count - 1) for last, first, count in streams]),
        "ttft_ms": median(result.first_ms),
        "tokens_per_s": sum(result.num_tokens) / result.seconds,
    }
