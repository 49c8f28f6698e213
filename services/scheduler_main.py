"""One scheduler process (Tulip): the head of one replica."""

import asyncio
import sys
from pathlib import Path

from services.boot import arguments, run_program, settle_memory
from services.config import RunConfig
from services.log import Log
from services.programs import scheduler_program
from services.signals import stop_event


def main() -> int:
    given = arguments("One scheduler: batches a replica's work for its ranks.", "model", "replica")
    return run_program(
        scheduler_program(given.replica),
        given.run_dir,
        lambda run, log: serve(run, log, given.run_dir, given.model, given.replica),
    )


def serve(run: RunConfig, log: Log, run_dir: Path, model: str, replica: str) -> int:
    import uvloop

    from scheduler.loop import serve as serve_scheduler

    log("imported")
    settings = run.config.model(model)
    settle_memory()

    async def until_stopped() -> None:
        await serve_scheduler(
            config=settings.scheduler,
            replica=replica,
            model=model,
            tensor_parallel_size=settings.tensor_parallel_size,
            run_dir=run_dir,
            stop=stop_event(asyncio.get_running_loop()),
            log=log,
        )

    uvloop.run(until_stopped())
    return 0


if __name__ == "__main__":
    sys.exit(main())
