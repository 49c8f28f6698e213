"""One rank process (ROSE): one device, one thread, one model."""

import os
import sys
from pathlib import Path

from ipc.addresses import shapes_file
from services.boot import CannotBoot, arguments, run_program, settle_memory
from services.config import RunConfig
from services.log import Log
from services.programs import rank_program
from services.signals import stop_descriptor


def main() -> int:
    given = arguments("One rank: runs a model's forward pass on one device.", "model", "replica", "rank")
    return run_program(
        rank_program(given.replica, given.rank),
        given.run_dir,
        lambda run, log: serve(run, log, given.run_dir, given.model, given.replica, given.rank),
    )


def serve(run: RunConfig, log: Log, run_dir: Path, model: str, replica: str, rank: int) -> int:
    stop_fd = stop_descriptor()
    from rose.models.config import ModelError
    from rose.runner import OutOfMemory
    from rose.runners import make_runner
    from rose.worker import serve as serve_rank

    log("imported")
    settings = run.config.model(model)
    config = settings.rank
    try:
        runner = make_runner(
            model,
            run.paths()[model],
            config,
            shapes=shapes_file(run_dir, model),
            tensor_parallel_size=settings.tensor_parallel_size,
        )
    except ValueError as error:  # files or settings; nothing else has happened yet
        raise CannotBoot(f"{model}: {error}") from error
    settle_memory()
    try:
        return serve_rank(
            runner=runner, replica=replica, rank=rank, run_dir=run_dir, stop_fd=stop_fd, log=log, spin_us=config.spin_us
        )
    except ModelError as error:
        raise CannotBoot(f"{model}: {error}") from error
    except OutOfMemory as error:
        raise CannotBoot(
            f"{model}: a step of the largest size does not fit into memory ({error}); "
            "lower rank.max_num_batched_tokens or rank.max_model_len, or free memory"
        ) from error


if __name__ == "__main__":
    # a rank may hold a device whose driver hangs in its exit handlers: leave without them
    code = main()
    sys.stdout.flush()
    os._exit(code)
