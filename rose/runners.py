"""Which runner serves a model: what its files and settings say it is for."""

from pathlib import Path

from rose.config import RankConfig
from rose.decoder_loader import DecoderLoader
from rose.encoder_loader import EncoderLoader
from rose.model_runner import ModelRunner
from rose.models.config import read_config
from rose.models.task import GenerateTask, read_task


def make_runner(name: str, directory: Path, config: RankConfig, *, shapes: Path | None = None) -> ModelRunner:
    """Not yet loaded. `shapes` is a file for the list of shapes that have graphs. Raises ModelError, ValueError."""
    task = read_task(directory, read_config(directory), config.task)
    loader = DecoderLoader if isinstance(task, GenerateTask) else EncoderLoader
    return ModelRunner(loader(name, directory, config, shapes=shapes))
