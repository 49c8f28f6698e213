"""One gateway process (Ivy)."""

import asyncio
import sys
from pathlib import Path

from services.boot import CannotBoot, arguments, run_program, settle_memory
from services.config import RunConfig
from services.log import Log
from services.programs import gateway_program
from services.signals import stop_event


def main() -> int:
    given = arguments("One gateway: HTTP in front of the schedulers.", "index")
    return run_program(
        gateway_program(given.index), given.run_dir, lambda run, log: serve(run, log, given.run_dir, given.index)
    )


def serve(run: RunConfig, log: Log, run_dir: Path, index: int) -> int:
    import uvloop

    from gateway.app import serve as serve_gateway
    from gateway.models import ModelFilesError

    log("imported")
    settle_memory()

    async def until_stopped() -> None:
        await serve_gateway(
            config=run.config.gateway,
            models=run.paths(),
            run_dir=run_dir,
            index=index,
            stop=stop_event(asyncio.get_running_loop()),
            log=log,
        )

    try:
        uvloop.run(until_stopped())
    except ModelFilesError as error:
        raise CannotBoot(str(error)) from error
    return 0


if __name__ == "__main__":
    sys.exit(main())
