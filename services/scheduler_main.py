"""One scheduler process (Tulip): the head of one replica."""

import asyncio
import sys
from pathlib import Path

from services.boot import arguments, run_program, settle_memory
from services.config import RunConfig
from services.log import Log
from services.programs import rank_program, scheduler_program
from services.signals import stop_event
from services.supervisor_client import SupervisorClient, SupervisorGone, SupervisorRefused


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
        loop = asyncio.get_running_loop()
        late_ms = settings.scheduler.hello_deadline_ms
        await serve_scheduler(
            config=settings.scheduler,
            replica=replica,
            model=model,
            tensor_parallel_size=settings.tensor_parallel_size,
            run_dir=run_dir,
            stop=stop_event(loop),
            log=log,
            end_rank=lambda rank: loop.run_in_executor(None, end_late_rank, run_dir, replica, rank, late_ms, log),
        )

    uvloop.run(until_stopped())
    return 0


def end_late_rank(run_dir: Path, replica: str, rank: int, late_ms: int, log: Log) -> None:
    """Kills a rank that has not said Hello in time: it hangs in an import, say, or was halted by a signal.

    One that was started anew meanwhile, and has had less than half of the time, gets more of it.
    """
    program = rank_program(replica, rank)
    try:
        with SupervisorClient(run_dir) as client:
            for info in client.processes():
                if info.full_name == program.full_name and info.uptime_s * 1000 > late_ms / 2:
                    client.kill(program.full_name)
                    reason = (
                        f"no Hello from it for {late_ms} ms (scheduler.hello_deadline_ms): it hangs or is halted; "
                        "where imports take that long, raise the deadline"
                    )
                    log("rank_ended", level="error", program=program.name, pid=info.pid, reason=reason)
    except (SupervisorGone, SupervisorRefused) as error:
        log("rank_not_ended", level="warning", program=program.name, reason=str(error))


if __name__ == "__main__":
    sys.exit(main())
