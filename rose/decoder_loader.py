"""Language models on their way to a device: facts from files, weights and cache at load, and their first steps.

See rose.model_runner.
"""

import os
from pathlib import Path
from typing import Literal

import torch
from msgspec.structs import replace

from ipc.control import Join
from rose.config import RankConfig
from rose.cpu_decoder import load_cpu_decoder
from rose.decoder_facts import decoder_facts
from rose.decoder_warm_up import warm_up
from rose.device import resolve_device, resolve_dtype
from rose.distributed.group import ALONE, Group, form_group
from rose.distributed.shard import check_sizes, local_heads
from rose.model_runner import Loaded, ModelRunner
from rose.models.config import ModelError, read_config
from rose.models.load import load_model
from rose.models.task import GenerateTask, read_task


class DecoderLoader:
    """A model that generates. `facts` lack `num_blocks` until `load`; everything else waits for it, too."""

    kind: Literal["generate"] = "generate"

    def __init__(
        self,
        name: str,
        directory: Path,
        config: RankConfig,
        *,
        shapes: Path | None = None,
        tensor_parallel_size: int = 1,
    ) -> None:
        self._directory = directory
        self._config = config
        self._shapes = shapes
        self._model_config = read_config(directory)
        task = read_task(directory, self._model_config, config.task)
        if not isinstance(task, GenerateTask):
            raise ModelError(f'{directory} is not served as a language model: set task = "generate" if it is one')
        self._task = task
        self._device = torch.device(resolve_device(config.device))
        self._dtype = resolve_dtype(config.dtype, self._device.type)
        self._num_threads = config.num_threads or len(os.sched_getaffinity(0))
        check_sizes(self._model_config, tensor_parallel_size)
        facts = decoder_facts(
            name=name,
            model=self._model_config,
            task=task,
            config=config,
            device=self._device.type,
            dtype=str(self._dtype).removeprefix("torch."),
            num_threads=self._num_threads,
        )
        self.facts = replace(facts, tensor_parallel_size=tensor_parallel_size)
        self.group: Group = ALONE

    def load(self, join: Join | None) -> Loaded:
        """Forms the group, reads the weights and sizes the cache: `facts` are final then.

        Raises ModelError, torch.OutOfMemoryError.
        """
        self.group = form_group(join, self._device, shared_sums=self._config.shared_sums)
        if self._device.type == "cuda":
            torch.cuda.set_per_process_memory_fraction(self._config.memory_fraction)
        model = load_model(self._directory, self._model_config, self._task, self._device, self._dtype, self.group)
        heads = local_heads(self._model_config, self.group.size)
        tokenizer = self._directory / "tokenizer.json"
        if self._device.type == "cpu":
            decoder, self.facts = load_cpu_decoder(
                model,
                heads,
                self.facts,
                self._config,
                tokenizer=tokenizer,
                num_threads=self._num_threads,
                group=self.group,
            )
            return Loaded(decoder, decoder.generate)
        from rose.cuda_decoder_load import load_cuda_decoder  # needs Triton

        cuda_decoder, self.facts = load_cuda_decoder(
            model,
            heads,
            self.facts,
            self._config,
            device=self._device,
            dtype=self._dtype,
            tokenizer=tokenizer,
            shapes=self._shapes,
            group=self.group,
        )
        return Loaded(cuda_decoder, cuda_decoder.generate)

    def warm_up(self, runner: ModelRunner) -> None:
        """See rose.decoder_warm_up; nobody is left in a slot."""
        warm_up(runner)
        runner.attach(None)
