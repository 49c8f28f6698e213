"""Which runner serves a model: what its files and settings say it is for."""

from pathlib import Path

from rose.config import RankConfig
from rose.decoder_loader import DecoderLoader
from rose.encoder_loader import EncoderLoader
from rose.model_runner import ModelRunner
from rose.models.config import ModelError, read_config
from rose.models.registry import find_class
from rose.models.task import GenerateTask, read_task


def make_runner(
    name: str, directory: Path, config: RankConfig, *, shapes: Path | None = None, tensor_parallel_size: int = 1
) -> ModelRunner:
    """Not yet loaded: that needs the other ranks, if there are any. `shapes` is a file for the list of shapes that have
    graphs. Raises ModelError, ValueError."""
    model_config = read_config(directory)
    task = read_task(directory, model_config, config.task)
    find_class(model_config, task)
    generates = isinstance(task, GenerateTask)
    if config.speculation.proposer != "none" and not generates:
        raise ModelError(f"speculation.proposer is for language models, and {name} is none: remove it for this model")
    loader = DecoderLoader if generates else EncoderLoader
    return ModelRunner(loader(name, directory, config, shapes=shapes, tensor_parallel_size=tensor_parallel_size))
