"""What an encoder's files and settings say of it, as other processes need it. No weights, no device work."""

from pathlib import Path
from typing import Any

from ipc.types import ModelFacts
from rose.config import RankConfig
from rose.models.config import ModelConfig, ModelError
from rose.models.task import EmbedTask, ScoreTask, trained_max_len

CPU_TOKENS_PER_THREAD = 512  # reach 98 % of the peak rate of a small model; 256 reach 94 %
CUDA_TOKENS = 8192  # of a step: 98 % of the peak rate on an H200 at hidden size 1024 (4096: 96.6 %)
CUDA_TOKENS_SMALL = 16384  # the same at hidden size 384 (8192: 91 %)
CUDA_SMALL_HIDDEN = 512
MAX_NUM_SEQS = 256
ATTENTION_RATE = 0.5  # of attention's arithmetic, against that of matrix products


def encoder_facts(
    *,
    name: str,
    directory: Path,
    model: ModelConfig,
    task: EmbedTask | ScoreTask,
    config: RankConfig,
    device: str,
    dtype: str,
    num_threads: int,
) -> ModelFacts:
    """The facts, final before anything is loaded. Raises ModelError for limits that contradict each other."""
    max_model_len = _max_model_len(directory, model, config)
    if device == "cpu":
        default_tokens = CPU_TOKENS_PER_THREAD * num_threads
    else:
        default_tokens = CUDA_TOKENS_SMALL if model.hidden_size <= CUDA_SMALL_HIDDEN else CUDA_TOKENS
    max_num_batched_tokens = config.max_num_batched_tokens or max(default_tokens, max_model_len)
    if max_num_batched_tokens < max_model_len:
        raise ModelError(
            f"max_num_batched_tokens {max_num_batched_tokens} is below max_model_len {max_model_len}: "
            "a sequence of full length would never fit a step; raise the one or lower the other"
        )
    return ModelFacts(
        **_task_facts(task),
        name=name,
        architecture=model.architecture or model.model_type,
        vocab_size=model.vocab_size,
        max_model_len=max_model_len,
        max_num_seqs=config.max_num_seqs or min(MAX_NUM_SEQS, max_num_batched_tokens),
        max_num_batched_tokens=max_num_batched_tokens,
        dtype=dtype,
        device=device,
        num_steps_in_flight=config.num_steps_in_flight,
        quadratic_tokens=quadratic_tokens(model),
    )


def _task_facts(task: EmbedTask | ScoreTask) -> dict[str, Any]:
    if isinstance(task, ScoreTask):
        return {"task": "score", "dimension": task.num_labels, "pooling": "cls", "normalize": False}
    return {"task": "embed", "dimension": task.dimension, "pooling": task.pooling, "normalize": task.normalize}


def _max_model_len(directory: Path, model: ModelConfig, config: RankConfig) -> int:
    longest = model.max_model_len
    if config.max_model_len is None:
        return min(longest, trained_max_len(directory) or longest)
    if config.max_model_len > longest:
        raise ModelError(
            f"max_model_len {config.max_model_len} is over the {longest} positions that {directory} has: lower it"
        )
    return config.max_model_len


def quadratic_tokens(model: ModelConfig) -> int:
    """The length at which attention takes as long as the matrix products of the same tokens."""
    heads = model.num_attention_heads * model.head_dim
    kv_heads = model.num_key_value_heads * model.head_dim
    matrices = 3 if model.gated else 2
    linear = 2 * model.hidden_size * (2 * heads + 2 * kv_heads + matrices * model.intermediate_size)
    attention = 4 * heads / ATTENTION_RATE  # a pair of tokens: one product for its score, one for its value
    return max(1, round(linear / (attention / 2 if model.causal else attention)))
