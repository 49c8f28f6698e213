"""A round trip between two processes: arrays as frames behind the header, against arrays in the step ring.

    python -m bench.micro.ipc_roundtrip --out

Both ways carry the same bytes there and back: the sender has them in its own memory and ends with the answer in its
own memory; the receiver reads them in place and answers from its own memory. Both sides wait by polling the socket.
"""

import argparse
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np
import zmq
from numpy.typing import NDArray

from bench import report
from ipc.codec import FROM_RANK, TO_RANK, encode
from ipc.sockets import PeerFull, Socket, dealer, router
from ipc.step import Shutdown, StepPlan, StepResult
from ipc.step_ring import ArrayField, RingLayout, StepRing
from ipc.types import new_incarnation

SIZES = {"2 KB": 2_000, "200 KB": 200_000, "1.6 MB": 1_600_000}
LAYOUT = RingLayout(
    num_slots=4,
    inputs=(ArrayField("inputs", "uint8", (max(SIZES.values()),)),),
    outputs=(ArrayField("outputs", "uint8", (max(SIZES.values()),)),),
)
RANK = b"rank"
Bytes = NDArray[np.uint8]


# --- the receiving process ------------------------------------------------------------------------------------


def serve(endpoint: str, ring_fd: int) -> None:
    """Answers every plan until Shutdown: inline when bytes came with it, through the ring when not."""
    ring = StepRing.attach(ring_fd, LAYOUT)
    socket = dealer(zmq.Context(), endpoint, RANK)
    answer = np.arange(max(SIZES.values()), dtype=np.uint8)
    say_hello(socket)
    while True:
        socket.poll()
        frames = socket.receive()
        if frames is None:
            continue
        plan = TO_RANK.decode(frames[0])
        if isinstance(plan, Shutdown):
            return
        result = encode(StepResult(plan.epoch, plan.step))
        if len(frames) > 1:
            inputs = np.frombuffer(frames[1], np.uint8)
            socket.send([result, answer[: len(inputs)].data])
        else:
            ring.check_header(plan.slot, plan.epoch, plan.step)
            arrays = ring.slot(plan.slot)
            inputs = arrays["inputs"][: plan.num_tokens].view(np.uint8)
            arrays["outputs"][: len(inputs)] = answer[: len(inputs)]
            socket.send([result])


def say_hello(socket: Socket) -> None:
    while True:
        try:
            socket.send([b"hello"])
            return
        except PeerFull:
            time.sleep(0.01)


# --- the sending process --------------------------------------------------------------------------------------


class Sender:
    """One way each: `inline` and `ring` send `inputs` and return the answer."""

    def __init__(self, socket: Socket, ring: StepRing) -> None:
        self._socket = socket
        self._ring = ring
        self._epoch = new_incarnation()
        self._step = 0

    def inline(self, inputs: Bytes) -> Bytes:
        frames = self._exchange([encode(self._plan(inputs)), inputs.data])
        return np.frombuffer(frames[2], np.uint8)

    def ring(self, inputs: Bytes) -> Bytes:
        plan = self._plan(inputs)
        arrays = self._ring.slot(plan.slot)
        arrays["inputs"][: len(inputs)] = inputs
        self._ring.write_header(plan.slot, plan.epoch, plan.step, 1, len(inputs))
        self._exchange([encode(plan)])
        return arrays["outputs"][: len(inputs)].view(np.uint8).copy()

    def _plan(self, inputs: Bytes) -> StepPlan:
        self._step += 1
        slot = self._step % LAYOUT.num_slots
        return StepPlan(self._epoch, self._step, slot, "encode", num_seqs=1, num_tokens=len(inputs))

    def _exchange(self, frames: list[bytes | memoryview]) -> list[bytes]:
        self._socket.send([RANK, *frames])
        while True:
            self._socket.poll()
            if (answer := self._socket.receive()) is not None:
                result = FROM_RANK.decode(answer[1])
                assert isinstance(result, StepResult)
                assert result.step == self._step
                return answer


def measure(way: Callable[[Bytes], Bytes], inputs: Bytes, count: int) -> list[float]:
    """Microseconds of each round trip; the answer is checked outside the timing."""
    expected = np.arange(len(inputs), dtype=np.uint8)
    times = []
    for _ in range(count):
        began = time.perf_counter()
        answer = way(inputs)
        times.append((time.perf_counter() - began) * 1e6)
        assert np.array_equal(answer, expected)
    return times


def run(sender: Sender, num_trips: int, num_turns: int) -> list[report.Row]:
    """The two ways take turns, so that what else the machine does meets both."""
    rows = []
    for case, size in SIZES.items():
        inputs = np.full(size, 7, np.uint8)
        times: dict[str, list[float]] = {"inline": [], "ring": []}
        count = max(50, num_trips // num_turns // (1 if size < 10_000 else 4))
        for turn in range(num_turns + 1):
            for name, way in (("inline", sender.inline), ("ring", sender.ring)):
                found = measure(way, inputs, count)
                times[name] += found if turn else []  # the first turn warms up
        for metric, share in (("p50_us", 50), ("p99_us", 99)):
            ring, inline = (float(np.percentile(times[name], share)) for name in ("ring", "inline"))
            rows.append(report.compare("round trip", case, metric, ring, inline, "inline frame"))
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.micro.ipc_roundtrip", description=__doc__)
    parser.add_argument("--trips", type=int, default=8000, help="round trips of the smallest size, each way")
    parser.add_argument("--turns", type=int, default=8)
    parser.add_argument("--out", action="store_true", help="write a result file; its path is the last line")
    parser.add_argument("--hardware", default="cpu", help="short name of the machine, part of the file's name")
    parser.add_argument("--results", type=Path, default=report.RESULTS, help="where the files go")
    parser.add_argument("--serve", nargs=2, metavar=("ENDPOINT", "FD"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        return serve(args.serve[0], int(args.serve[1]))
    into = report.new_report("ipc_roundtrip", args.hardware)
    with tempfile.TemporaryDirectory() as folder:
        endpoint = f"ipc://{folder}/ranks.sock"
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        ring, socket = StepRing.create(LAYOUT), router(context, endpoint)
        command = [sys.executable, "-m", "bench.micro.ipc_roundtrip", "--serve", endpoint, str(ring.fd)]
        child = subprocess.Popen(command, pass_fds=(ring.fd,))
        try:
            assert socket.poll(20_000), "the receiving process did not start"
            socket.receive()
            into.rows = run(Sender(socket, ring), args.trips, args.turns)
            socket.send([RANK, encode(Shutdown(0, "done"))])
            child.wait(10)
        finally:
            child.kill()
            child.wait()
            socket.close()
            context.term()
            ring.close()
    into.notes.append(
        "ours: header by Unix socket, arrays in the step ring; peer: header and arrays in one message; "
        f"{args.turns} turns each, one round trip in flight, payload both ways"
    )
    into.details["layout"] = msgspec.to_builtins(LAYOUT)
    print("\n".join(report.table_lines(into.rows)))
    if args.out:
        print(report.write(into, args.results))
    return None


if __name__ == "__main__":
    main()
