"""Configuration → supervisord's configuration in the run directory: one file for the gateways, one per replica."""

import math
import os
import re
import shlex
import sys
from collections.abc import Mapping
from pathlib import Path
from string import Template

from services.config import ModelConfig, ServiceConfig, visible_gpus
from services.cores import crowded, on_cpu
from services.placement import place
from services.programs import (
    GATEWAY_GROUP,
    Program,
    gateway_program,
    rank_program,
    replica_group,
    scheduler_program,
)

TEMPLATES = Path(__file__).parent.parent / "supervisord"
GATEWAY_PRIORITY = 200  # stopped before the replicas
REPLICA_PRIORITY = 100
RANK_STOP_WAIT_S = 10
STOP_MARGIN_S = 10

_ENVIRONMENT = {"PYTHONUNBUFFERED": "1", "PYTHONSAFEPATH": "1"}
# A waiting OpenMP thread that spins for long takes the core from the process it waits for; one that sleeps at once
# doubles the time of a short query. So it spins for some tens of microseconds. A rank's main thread computes nothing:
# the threads of the forward pass ask for their cores themselves (rose.cpu_stream).
_RANK = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
_SPINNING = {"GOMP_SPINCOUNT": "20000"}
_SLEEPING = {"OMP_WAIT_POLICY": "PASSIVE"}  # there are more threads than cores: another rank's has something to do
# Ranks of one replica: each sees its own GPU alone, as device 0, and torch's shared memory would take them all for one.
# Groups are ended by killing, and a multicast object that is killed can put a host's GPUs out of service.
GROUP_ENVIRONMENT = {
    "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES": "1",
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
    "NCCL_NVLS_ENABLE": "0",
}
_ONE_THREAD = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}


def main_config(run_dir: Path) -> str:
    """supervisord.conf; the programs are in the files it includes."""
    return _template("supervisord").substitute(run_dir=_escape(str(run_dir)))


def gateway_config(config: ServiceConfig, run_dir: Path) -> str:
    """The program file of all gateways."""
    programs = [gateway_program(index) for index in range(config.gateway.num_gateways)]
    threads = {"RAYON_NUM_THREADS": str(config.gateway.num_tokenizer_threads), "TOKENIZERS_PARALLELISM": "true"}
    stop_wait_s = _stop_wait_s(config.gateway.drain_timeout_ms)
    sections = [
        _program(program, run_dir, _main("gateway_main", run_dir, index=index), _ONE_THREAD | threads, stop_wait_s)
        for index, program in enumerate(programs)
    ]
    return "\n".join([_group(GATEWAY_GROUP, programs, GATEWAY_PRIORITY), *sections])


def replica_config(config: ServiceConfig, model: ModelConfig, replica: str, run_dir: Path) -> str:
    """The program file of one replica. Raises PlacementError if its ranks do not fit on the GPUs there are."""
    ranks = [rank_program(replica, rank) for rank in range(model.tensor_parallel_size)]
    scheduler = scheduler_program(replica)
    gpus = _choose_gpus(model, replica, run_dir)
    sections = []
    for rank, program in enumerate(ranks):
        environment = _RANK | (_SLEEPING if crowded(config, num_cores()) else _SPINNING)
        if gpus:
            environment["CUDA_VISIBLE_DEVICES"] = gpus[rank]
            environment |= GROUP_ENVIRONMENT if len(ranks) > 1 else {}
        command = _main("rose_main", run_dir, model=model.name, replica=replica, rank=rank)
        sections.append(_program(program, run_dir, command, environment, RANK_STOP_WAIT_S))
    command = _main("scheduler_main", run_dir, model=model.name, replica=replica)
    wait = _stop_wait_s(model.scheduler.drain_timeout_ms)
    sections.append(_program(scheduler, run_dir, command, _ONE_THREAD, wait))
    share = f"; memory_fraction {model.rank.memory_fraction}\n"  # read back when the next replica is placed
    return "\n".join([share + _group(replica_group(replica), [*ranks, scheduler], REPLICA_PRIORITY), *sections])


def num_cores() -> int:
    """How many cores this process, and so every one that it starts, may use."""
    return len(os.sched_getaffinity(0))


def programs_dir(run_dir: Path) -> Path:
    return run_dir / "programs"


def replica_file(run_dir: Path, replica: str) -> Path:
    return programs_dir(run_dir) / f"{replica_group(replica)}.conf"


def _choose_gpus(model: ModelConfig, replica: str, run_dir: Path) -> list[str]:
    """The ranks' GPUs, given what the replicas rendered so far have; none on CPU."""
    if on_cpu(model) or not (gpus := visible_gpus()):
        return []
    used = dict.fromkeys(gpus, 0.0)
    for file in programs_dir(run_dir).glob("*.conf"):
        if file == replica_file(run_dir, replica):
            continue
        text = file.read_text()
        fraction = float(found[1]) if (found := re.search(r"^; memory_fraction ([\d.]+)$", text, re.M)) else 0.0
        for gpu in re.findall(r'CUDA_VISIBLE_DEVICES="([^"]+)"', text):
            used[gpu] = used.get(gpu, 0.0) + fraction
    return place(used, model.rank.memory_fraction, model.tensor_parallel_size, replica)


def _main(module: str, run_dir: Path, **options: str | int) -> list[str]:
    flags = [f"--{name}={value}" for name, value in options.items()]
    return [sys.executable, "-m", f"services.{module}", f"--run-dir={run_dir}", *flags]


def _program(
    program: Program, run_dir: Path, command: list[str], environment: Mapping[str, str], stop_wait_s: int
) -> str:
    variables = _ENVIRONMENT | dict(environment)
    return _template("program").substitute(
        name=program.name,
        process=program.process,
        command=_escape(shlex.join(command)),
        run_dir=_escape(str(run_dir)),
        environment=_escape(",".join(f'{name}="{value}"' for name, value in variables.items())),
        stop_wait_s=stop_wait_s,
    )


def _group(group: str, programs: list[Program], priority: int) -> str:
    names = ",".join(program.name for program in programs)
    return _template("group").substitute(group=group, programs=names, priority=priority)


def _template(name: str) -> Template:
    return Template((TEMPLATES / f"{name}.conf.in").read_text())


def _escape(text: str) -> str:
    """supervisord expands %(…)s in values."""
    return text.replace("%", "%%")


def _stop_wait_s(drain_timeout_ms: int) -> int:
    """Longer than the program's own drain, so that supervisord kills only what hangs."""
    return math.ceil(drain_timeout_ms / 1000) + STOP_MARGIN_S
