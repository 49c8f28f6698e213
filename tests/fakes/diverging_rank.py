"""A real rank whose sequence in slot 0 loses a token, on this rank alone, when a prompt brings a chosen id: once.

    python -m tests.fakes.diverging_rank --forget-on 301 --once FILE --run-dir=DIR --model=NAME …

Takes the other options of services.rose_main. FILE is there when it has happened.
"""

import os
import sys
from pathlib import Path
from typing import Any

import rose.runners
from ipc.step import StepPlan
from ipc.step_ring import Arrays
from rose.config import RankConfig
from rose.runner import LazyTensor


def forgetful(runner: Any, token_id: int, once: Path) -> Any:
    step = runner.step

    def step_and_forget(plan: StepPlan, arrays: Arrays) -> LazyTensor:
        forgets = plan.kind == "generate" and (arrays["input_ids"][: plan.num_tokens] == token_id).any()
        lazy: LazyTensor = step(plan, arrays)
        if forgets and not once.exists():
            once.touch()
            runner.drain()
            runner.device._decoder._residents.slots.num_tokens[0] -= 1
        return lazy

    runner.step = step_and_forget
    return runner


def main() -> int:
    token_id, once = int(sys.argv[2]), Path(sys.argv[4])
    del sys.argv[1:5]
    make_runner = rose.runners.make_runner

    def make(name: str, directory: Path, config: RankConfig, **options: Any) -> Any:
        return forgetful(make_runner(name, directory, config, **options), token_id, once)

    rose.runners.make_runner = make  # type: ignore[assignment]
    from services.rose_main import main as serve

    return serve()


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    os._exit(code)
