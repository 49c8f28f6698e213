"""What a language model's files and settings say of it, as other processes need it. No weights, no device work.

`num_blocks` is what the memory holds: settled when the model is loaded.
"""

from ipc.types import ModelFacts
from rose.config import RankConfig
from rose.encoder_facts import quadratic_tokens
from rose.kv_cache import BLOCK_SIZE
from rose.models.config import ModelConfig, ModelError
from rose.models.task import GenerateTask
from rose.speculation.lengths import draft_lengths, max_draft_tokens

CPU_TOKENS_PER_THREAD, CPU_TOKENS = 128, 256  # of a step; the latter at least: 128 are 9 % behind it, 512 no faster
CUDA_TOKENS = 8192
CPU_MODEL_LEN, CUDA_MODEL_LEN = 8192, 32768  # of a sequence, unless set: what few need costs all of them memory
CPU_SEQS, CUDA_SEQS = 32, 256


def decoder_facts(
    *,
    name: str,
    model: ModelConfig,
    task: GenerateTask,
    config: RankConfig,
    device: str,
    dtype: str,
    num_threads: int,
) -> ModelFacts:
    """The facts, final but for `num_blocks`. Raises ModelError for limits that contradict each other."""
    on_cpu = device == "cpu"
    try:
        drafts = max_draft_tokens(config.speculation, device)
        lengths = draft_lengths(config.speculation, device)
    except ValueError as error:
        raise ModelError(str(error)) from None
    max_num_seqs = config.max_num_seqs or (CPU_SEQS if on_cpu else CUDA_SEQS)
    default_tokens = max(CPU_TOKENS, CPU_TOKENS_PER_THREAD * num_threads) if on_cpu else CUDA_TOKENS
    max_num_batched_tokens = config.max_num_batched_tokens or default_tokens
    if max_num_batched_tokens < max_num_seqs:
        raise ModelError(
            f"max_num_batched_tokens {max_num_batched_tokens} is below max_num_seqs {max_num_seqs}: "
            "a step could not give every sequence its token; raise the one or lower the other"
        )
    return ModelFacts(
        name=name,
        architecture=model.architecture or model.model_type,
        task="generate",
        vocab_size=model.vocab_size,
        max_model_len=_max_model_len(model, config, CPU_MODEL_LEN if on_cpu else CUDA_MODEL_LEN),
        dimension=1,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        dtype=dtype,
        device=device,
        num_steps_in_flight=config.num_steps_in_flight,
        quadratic_tokens=quadratic_tokens(model),
        block_size=BLOCK_SIZE,
        max_draft_tokens=drafts,
        draft_lengths=lengths,
        eos_token_ids=task.eos_token_ids,
    )


def _max_model_len(model: ModelConfig, config: RankConfig, default: int) -> int:
    longest = model.max_model_len
    if config.max_model_len is None:
        return min(longest, default)
    if config.max_model_len > longest:
        raise ModelError(f"max_model_len {config.max_model_len} is over the model's {longest} positions: lower it")
    return config.max_model_len
