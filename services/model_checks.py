"""What a stack's processes would refuse to start with, asked of their own code before any of them is started.

Reads models' files, no weights. Importing the rank's code takes seconds, so it is imported when it is asked.
"""

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path

from gateway.models import load_model
from ipc.addresses import replica_id
from services.config import ModelConfig, ServiceConfig, visible_gpus
from services.cores import on_cpu, share_cores
from services.placement import PlacementError, place
from services.render import num_cores

Look = Callable[[], object]  # raises what is to be told


def find_refusals(config: ServiceConfig, directories: Mapping[str, Path]) -> list[str]:
    """What is wrong with models, their settings and this machine together, one line each, by key.

    `directories`: where each model's files are. What only shows with the weights loaded is not found: tensors that are
    missing, memory that is too small.
    """
    shared = share_cores(config, num_cores())
    own = config.gateway.generation_defaults
    problems = []
    for index, model in enumerate(shared.models):
        directory = directories[model.name]
        looks: tuple[Look, ...] = (
            partial(load_model, model.name, directory, generation_defaults=own),
            partial(_check_rank, model, directory),
        )
        problems += [f"models[{index}] ({model.name}): {problem}" for look in looks for problem in _refusal(look)]
    return [*problems, *_refusal(partial(check_placement, config, visible_gpus()))]


def check_placement(config: ServiceConfig, gpus: list[str]) -> None:
    """Raises PlacementError if the ranks of all replicas do not fit on `gpus`; without any they compute on CPU."""
    used = dict.fromkeys(gpus, 0.0)
    for model in config.models:
        if on_cpu(model) or not gpus:
            continue
        for index in range(model.replicas):
            fraction = model.rank.memory_fraction
            for gpu in place(used, fraction, model.tensor_parallel_size, replica_id(model.name, index)):
                used[gpu] += fraction


def _check_rank(model: ModelConfig, directory: Path) -> None:
    """What a rank does before it loads weights, and its cache if its size is given. Raises ValueError."""
    from rose.device import resolve_dtype
    from rose.distributed.shard import local_heads
    from rose.kv_cache import KVShape, num_blocks_for
    from rose.models.config import read_config
    from rose.runners import make_runner
    from rose.speculation.checks import check_proposer
    from rose.speculation.heads import is_head

    size, budget = model.tensor_parallel_size, model.rank.kv_cache_bytes
    facts = make_runner(model.name, directory, model.rank, tensor_parallel_size=size).facts
    if facts.task != "generate":
        return
    if is_head(directory):
        raise ValueError(f"{directory} is a draft head: speculation.model of another model names it, no source")
    config = read_config(directory)
    try:
        beside = check_proposer(model.rank.speculation, config, facts, directory)
    except ValueError as error:
        raise ValueError(f"rank.speculation: {error}") from None
    if budget is not None:
        shape = KVShape.of(local_heads(config, size), resolve_dtype(facts.dtype, facts.device))
        seqs, length = facts.max_num_seqs, facts.max_model_len
        num_blocks_for(shape, budget, max_num_seqs=seqs, max_model_len=length, beside=beside)


def _refusal(look: Look) -> Iterator[str]:
    try:
        look()
    except (ValueError, PlacementError) as error:
        yield str(error)
