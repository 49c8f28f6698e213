"""Sums over ranks on GPUs, each way, by size: what rose.distributed.shared_sums chooses by. Each rank has a process.

    python -m bench.micro.all_reduce [--ranks 2] [--out DIR]

One GPU for each rank, which sees no other, as in the service. Microseconds of one collective among many in a CUDA
graph, of bfloat16; every sum is compared first. `copied`: the tensor lay elsewhere and was copied first.
"""

import argparse
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from functools import partial
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from bench.micro.gpu_timing import save
from rose.cuda_stream import CudaStream
from rose.distributed.nccl import NcclGroup
from rose.distributed.shared_sums import WAYS, Ways
from services.render import GROUP_ENVIRONMENT

KIB = 1024
SIZES = (4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 16384)  # KiB
SHARED = 4096 * KIB  # bytes of the largest by shared memory
CALLS, REPLAYS = 20, 15
ANSWER_SECONDS = 60.0  # for a line; the first has the processes' start in it
COLUMNS = ("nccl", "one_shot", "one_shot copied", "two_shot", "two_shot copied", "broadcast", "all_gather")

Line = dict[str, Any]  # `kib`; by column microseconds, or what went wrong


class Case(NamedTuple):
    """`prepare` makes the input; `expected`: of `run` after it, where that is a sum."""

    prepare: Callable[[], object]
    run: Callable[[], Tensor]
    expected: Tensor | None


def cases(group: NcclGroup, x: Tensor, expected: Tensor) -> dict[str, Case]:
    """By column; x [N] is this rank's part, and stays what it is."""
    scratch = torch.empty_like(x)

    def fill() -> None:
        scratch.copy_(x)

    def nccl() -> Tensor:
        dist.all_reduce(scratch)
        return scratch

    found = {
        "nccl": Case(fill, nccl, expected),
        "broadcast": Case(fill, lambda: group.broadcast(scratch), None),
        "all_gather": Case(fill, lambda: group.all_gather(scratch), None),
    }
    sums = group.shared_sums
    if sums is not None and x.nbytes <= SHARED:
        room = sums.room(tuple(x.shape), x.dtype)
        assert room is not None
        for way in WAYS:
            found[way] = Case(partial(room.copy_, x), partial(sums.sum_by, way, room), expected)
            found[f"{way} copied"] = Case(fill, partial(sums.sum_by, way, scratch), expected)
    return found


def microseconds(stream: CudaStream, case: Case) -> float:
    """Of one run among many in a graph, the median. Raises AssertionError for a wrong sum."""
    case.prepare()
    found = case.run().float()
    assert case.expected is None or torch.equal(found, case.expected), "the sum is wrong"

    def runs() -> None:
        for _ in range(CALLS):
            case.run()

    graph = stream.capture(runs)
    marks = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(REPLAYS)]
    for begin, end in marks:
        begin.record()
        graph.replay()
        end.record()
    stream.drain()
    return statistics.median(begin.elapsed_time(end) for begin, end in marks[3:]) * 1e3 / CALLS


@torch.inference_mode()
def measure(group: NcclGroup, device: torch.device, tell: Callable[[Line], object]) -> None:
    """A line for each size."""
    stream = CudaStream(1, (64, 64))
    for kib in SIZES:
        torch.manual_seed(kib)
        parts = torch.randint(-4, 5, (group.size, kib * KIB // 2)).to(torch.bfloat16).to(device)
        line: Line = {"kib": kib}
        for name, case in cases(group, parts[group.rank].clone(), parts.float().sum(0)).items():
            try:
                line[name] = round(microseconds(stream, case), 2)
            except Exception as error:  # noqa: BLE001 - told in the table: the other ways are measured all the same
                line[name] = f"{type(error).__name__}: {str(error)[:200]}"
        tell(line)


def serve(pipe: Connection, path: str, rank: int, size: int, all_visible: bool) -> None:
    """One rank's process."""
    os.environ |= GROUP_ENVIRONMENT | ({} if all_visible else {"CUDA_VISIBLE_DEVICES": str(rank)})
    try:
        device = torch.device("cuda", rank if all_visible else 0)
        torch.cuda.set_device(device)
        limits = Ways(one_shot=SHARED, two_shot=SHARED)
        started = time.monotonic()
        group = NcclGroup(path, rank, size, device, limits)
        pipe.send({"start_s": round(time.monotonic() - started, 2), "shared": group.shared_sums is not None})
        measure(group, device, pipe.send)
        pipe.send(None)
    except Exception:  # noqa: BLE001 - told by the process that started this one
        pipe.send({"error": traceback.format_exc()})
    os._exit(0)  # a rank that has failed would wait for the others in its exit handlers


def run(size: int, all_visible: bool) -> list[Line]:
    """The leader's lines, printed as they come; the last says so if it ended early."""
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory(prefix="bq-") as directory:
        pipes = [context.Pipe() for _ in range(size)]
        processes = [
            context.Process(target=serve, args=(theirs, f"{directory}/rendezvous", rank, size, all_visible))
            for rank, (_, theirs) in enumerate(pipes)
        ]
        for process in processes:
            process.start()
        lines: list[Line] = []
        try:
            while (line := next_line([ours for ours, _ in pipes])) is not None:
                lines.append(line)
                print(text(line), flush=True)
        finally:
            for process in processes:
                process.kill()
                process.join()
    return lines


def next_line(pipes: list[Connection]) -> Line | None:
    """The leader's next; None after its last. Anybody's error, or silence, comes in its place and is the last."""
    told: list[Line | None] = []
    for rank, pipe in enumerate(pipes):
        if not pipe.poll(ANSWER_SECONDS):
            print(f"rank {rank} has said nothing for {ANSWER_SECONDS} s")
            return None
        try:
            told.append(pipe.recv())
        except EOFError:
            print(f"rank {rank} has died")
            return None
    for rank, line in enumerate(told):
        if line is not None and "error" in line:
            print(f"rank {rank}: {line['error'].splitlines()[-1]}\n{line['error']}")
            return None
    return told[0]


def text(line: Line) -> str:
    if "kib" not in line:
        return f"group: {line}\n| KiB | {' | '.join(COLUMNS)} |\n|{' --- |' * (len(COLUMNS) + 1)}"
    return f"| {line['kib']} | {' | '.join(str(line.get(name, '')) for name in COLUMNS)} |"


def best(lines: list[Line]) -> Ways:
    """Up to which size each way is the quickest, in bytes; 0: at none."""
    limits = dict.fromkeys(WAYS, 0)
    for line in lines:
        figures = {name: line.get(name) for name in ("nccl", *WAYS)}
        if not all(isinstance(figure, float) for figure in figures.values()):
            break
        quickest = min(figures, key=lambda name: figures[name])  # type: ignore[arg-type,return-value]
        if quickest == "nccl":
            break
        limits[quickest] = line["kib"] * KIB
    return Ways(one_shot=limits["one_shot"], two_shot=max(limits.values()))


def main() -> int:
    parser = argparse.ArgumentParser(description="Sums over ranks on GPUs, each way, by size.")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--all-visible", action="store_true", help="each rank sees all GPUs")
    parser.add_argument("--out", help="a directory for all_reduce.json")
    given = parser.parse_args()
    lines = run(given.ranks, given.all_visible)
    sizes = [line for line in lines if "kib" in line]
    print(f"MEASURED = {{{given.ranks}: {best(sizes)}}}")
    save(given.out, "all_reduce.json", {"ranks": given.ranks, "all_visible": given.all_visible, "lines": lines})
    return 0 if len(sizes) == len(SIZES) and all(isinstance(line.get("one_shot", 0.0), float) for line in sizes) else 1


if __name__ == "__main__":
    sys.exit(main())
