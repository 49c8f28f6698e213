"""How the ranks that compute on CPU divide its cores. Pure; knows the configuration, not the machine."""

import msgspec

from services.config import ModelConfig, ServiceConfig, visible_gpus


def share_cores(config: ServiceConfig, num_cores: int) -> ServiceConfig:
    """`config` with `rank.num_threads` filled in where several ranks compute on CPU and nobody has said.

    A rank that is alone keeps all cores (None). Two that each took all of them would wait for each other's threads at
    every layer.
    """
    num_ranks = sum(_num_ranks(model) for model in config.models if on_cpu(model))
    if num_ranks < 2:
        return config
    share = max(1, num_cores // num_ranks)
    models = [
        msgspec.structs.replace(model, rank=msgspec.structs.replace(model.rank, num_threads=share))
        if on_cpu(model) and model.rank.num_threads is None
        else model
        for model in config.models
    ]
    return msgspec.structs.replace(config, models=models)


def crowded(config: ServiceConfig, num_cores: int) -> bool:
    """Whether the ranks on CPU have more threads together than there are cores."""
    threads = [_num_ranks(model) * (model.rank.num_threads or num_cores) for model in config.models if on_cpu(model)]
    return sum(threads) > num_cores


def on_cpu(model: ModelConfig) -> bool:
    return model.rank.device == "cpu" or (model.rank.device == "auto" and not visible_gpus())


def _num_ranks(model: ModelConfig) -> int:
    return model.replicas * model.tensor_parallel_size
