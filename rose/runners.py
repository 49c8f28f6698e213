"""Which runner serves a model: what its files and settings say it is for."""

from pathlib import Path

from rose.config import RankConfig
from rose.decoder_runner import DecoderRunner
from rose.encoder_runner import EncoderRunner
from rose.models.config import ModelError, read_config
from rose.models.task import GenerateTask, read_task


def make_runner(
    name: str, directory: Path, config: RankConfig, *, shapes: Path | None = None, tensor_parallel_size: int = 1
) -> EncoderRunner | DecoderRunner:
    """Not yet loaded: that needs the other ranks, if there are any. `shapes` is a file for the list of shapes that have
    graphs. Raises ModelError, ValueError."""
    task = read_task(directory, read_config(directory), config.task)
    if isinstance(task, GenerateTask):
        return DecoderRunner(name, directory, config, shapes=shapes, tensor_parallel_size=tensor_parallel_size)
    if config.speculation.proposer != "none":
        raise ModelError(f"speculation.proposer is for language models, and {name} is none: remove it for this model")
    return EncoderRunner(name, directory, config, shapes=shapes, tensor_parallel_size=tensor_parallel_size)
