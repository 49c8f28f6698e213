"""The step ring between processes: seals, stale slots, killed owners and readers, descriptors, layouts."""

import fcntl
import mmap
import os
import tempfile
from pathlib import Path

import msgspec
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ipc.control import Join
from ipc.membership import MembershipClosed, MembershipSocket
from ipc.step_ring import (
    ALIGN,
    ArrayField,
    RingError,
    RingLayout,
    StepRing,
    encode_layout,
    generate_layout,
    layout_for,
    local_slots,
)
from ipc.types import ModelFacts
from tests.ipc.processes import Child, num_fds, num_ring_fds, num_ring_maps

CALM = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])  # the machine may be busy
LAYOUT = RingLayout(
    num_slots=4,
    inputs=(ArrayField("input_ids", "int32", (1000,)),),
    outputs=(ArrayField("values", "float32", (10, 7)),),
)
# a rank: maps the ring on the descriptor it was started with, then does as told
RANK = """
    import sys
    import numpy as np
    import msgspec
    from ipc.step_ring import RingLayout, StepRing, RingError
    layout = msgspec.json.decode(sys.argv[2], type=RingLayout)
    ring = StepRing.attach(int(sys.argv[1]), layout)
    print("ready", flush=True)
    for line in sys.stdin:
        word, index, epoch, step = line.split()
        index = int(index)
        if word == "loop":
            print("reading", flush=True)
            while True:
                ring.slot(index)["input_ids"].sum()
        try:
            num_seqs, num_tokens = ring.check_header(index, int(epoch), int(step))
        except RingError as error:
            print("refused", error, flush=True)
            continue
        arrays = ring.slot(index)
        arrays["values"][:num_seqs] = arrays["input_ids"][:num_tokens].sum()
        print("done", flush=True)
"""


def rank(ring: StepRing) -> Child:
    child = Child(RANK, ring.fd, msgspec.json.encode(ring.layout).decode(), pass_fds=(ring.fd,))
    assert child.line() == "ready"
    return child


def test_a_step_goes_there_and_back() -> None:
    ring = StepRing.create(LAYOUT)
    with rank(ring) as child:
        for step in range(8):
            slot = step % 4
            ring.slot(slot)["input_ids"][:100] = step
            ring.write_header(slot, epoch=7, step=step, num_seqs=3, num_tokens=100)
            child.order(f"step {slot} 7 {step}")
            assert child.line() == "done"
            assert (ring.slot(slot)["values"][:3] == 100 * step).all()
    ring.close()


def test_a_slot_of_another_epoch_or_step_is_refused() -> None:
    ring = StepRing.create(LAYOUT)
    ring.write_header(1, epoch=7, step=5, num_seqs=1, num_tokens=1)
    with rank(ring) as child:
        for order in ("step 1 8 5", "step 1 7 6", "step 2 7 5", "step 4 7 5", "step -1 7 5"):
            child.order(order)
            assert child.line().startswith("refused"), order
        child.order("step 1 7 5")
        assert child.line() == "done"
    ring.close()


def test_the_largest_epoch_fits() -> None:
    ring = StepRing.create(LAYOUT)
    ring.write_header(0, 2**63 - 1, 2**63 - 1, 2**31 - 1, 2**31 - 1)
    assert ring.check_header(0, 2**63 - 1, 2**63 - 1) == (2**31 - 1, 2**31 - 1)
    ring.close()


def test_a_killed_owner_leaves_the_reader_its_ring_and_nothing_else() -> None:
    owner_code = """
        import sys, os
        from pathlib import Path
        from ipc.membership import MembershipListener
        from ipc.control import Join
        from tests.ipc.test_step_ring import LAYOUT
        from ipc.step_ring import StepRing
        listener = MembershipListener(Path(sys.argv[1]))
        ring = StepRing.create(LAYOUT)
        ring.slot(2)["input_ids"][:] = 42
        ring.write_header(2, 9, 1, 0, 1000)
        print("listening", flush=True)
        while (peer := listener.accept()) is None:
            pass
        peer.send(Join(9, 1, 0, [5], "", LAYOUT), ring.fd)
        sys.stdin.readline()
    """
    before = num_fds(), num_ring_fds(), num_ring_maps()
    with tempfile.TemporaryDirectory(dir="/tmp") as folder, Child(owner_code, f"{folder}/join.sock") as owner:
        assert owner.line() == "listening"
        peer = MembershipSocket.connect(Path(f"{folder}/join.sock"))
        join, fd = peer.receive()
        assert isinstance(join, Join)
        assert fd is not None
        ring = StepRing.attach(fd, join.layout)
        owner.kill()
        with pytest.raises(MembershipClosed):
            peer.receive()
        ring.check_header(2, 9, 1)
        assert (ring.slot(2)["input_ids"] == 42).all()
        ring.slot(2)["values"][:] = 1.5  # a step in flight may still write
        ring.close()
        peer.close()
    assert (num_fds(), num_ring_fds(), num_ring_maps()) == before


def test_a_rank_killed_while_it_reads_leaves_the_owner_unharmed() -> None:
    before = num_fds(), num_ring_fds(), num_ring_maps()
    ring = StepRing.create(LAYOUT)
    held = num_fds(), num_ring_fds(), num_ring_maps()
    for attempt in range(3):
        with rank(ring) as child:
            child.order("loop 0 0 0")
            assert child.line() == "reading"
            assert num_ring_maps(child.pid) == 1
            ring.slot(0)["input_ids"][:] = attempt
            child.kill()
        ring.slot(0)["input_ids"][:] = attempt
        ring.write_header(0, 7, attempt, 1, 10)
        with rank(ring) as successor:
            successor.order(f"step 0 7 {attempt}")
            assert successor.line() == "done"
        assert (num_fds(), num_ring_fds(), num_ring_maps()) == held
    ring.close()
    assert (num_fds(), num_ring_fds(), num_ring_maps()) == before


def test_nobody_can_resize_a_ring_or_take_its_seals_off() -> None:
    ring = StepRing.create(LAYOUT)
    code = """
        import fcntl, os, sys
        fd = int(sys.argv[1])
        for size in (0, os.fstat(fd).st_size + 4096):
            try:
                os.ftruncate(fd, size)
                print("resized", flush=True)
            except PermissionError:
                print("refused", flush=True)
        try:
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)
            print("sealed", flush=True)
        except PermissionError:
            print("refused", flush=True)
    """
    with Child(code, ring.fd, pass_fds=(ring.fd,)) as child:
        assert [child.line() for _ in range(3)] == ["refused"] * 3
    ring.slot(0)["input_ids"][:] = 1
    ring.close()


@pytest.mark.parametrize("fault", ["unsealed", "short", "long", "not a memfd"])
def test_what_is_not_the_promised_ring_is_refused_and_closed(fault: str) -> None:
    before = num_fds()
    if fault == "not a memfd":
        fd, other = os.pipe()
    else:
        fd, other = os.memfd_create("other", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING), -1
        size = LAYOUT.num_bytes + {"unsealed": 0, "short": -64, "long": 64}[fault]
        os.ftruncate(fd, size)
        if fault != "unsealed":
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
    with pytest.raises((RingError, OSError)):
        StepRing.attach(fd, LAYOUT)
    if other >= 0:
        os.close(other)
    assert num_fds() == before


def test_closing_with_a_live_view_keeps_the_view_and_then_lets_go() -> None:
    before = num_fds(), num_ring_fds(), num_ring_maps()
    ring = StepRing.create(LAYOUT)
    view = ring.slot(3)["input_ids"]
    view[:] = 5
    ring.close()
    ring.close()
    assert (view == 5).all()
    with pytest.raises(RingError):
        ring.slot(3)
    with pytest.raises(RingError):
        ring.write_header(3, 1, 1, 1, 1)
    assert num_ring_maps() == before[2] + 1
    del view
    assert (num_fds(), num_ring_fds(), num_ring_maps()) == before


def test_memory_is_the_whole_mapping() -> None:
    ring = StepRing.create(LAYOUT)
    memory = ring.memory
    assert memory.nbytes == LAYOUT.num_bytes
    assert memory.ctypes.data % mmap.PAGESIZE == 0
    ring.slot(0)["input_ids"][0] = 0x01020304
    assert memory[64:68].tolist() == [4, 3, 2, 1]
    del memory
    ring.close()


facts = st.builds(
    ModelFacts,
    name=st.just("m"),
    architecture=st.just("a"),
    task=st.sampled_from(["embed", "score", "generate"]),
    vocab_size=st.just(10),
    max_model_len=st.integers(1, 4000),
    dimension=st.integers(1, 70),
    max_num_seqs=st.integers(1, 40),
    max_num_batched_tokens=st.integers(1, 3000),
    num_steps_in_flight=st.integers(1, 4),
    max_draft_tokens=st.integers(0, 40),
    max_logprobs=st.integers(0, 20),
)


@settings(CALM)
@given(facts)
def test_arrays_of_a_layout_do_not_overlap_and_are_aligned(facts: ModelFacts) -> None:
    layout = layout_for(facts)
    assert layout == (generate_layout(facts) if facts.task == "generate" else encode_layout(facts))
    assert layout.slot_bytes % ALIGN == 0
    slot = local_slots(layout)[0]
    for number, field in enumerate(layout.inputs + layout.outputs, 1):
        assert slot[field.name].shape == field.shape
        assert slot[field.name].nbytes == field.num_bytes
        slot[field.name][...] = number
    base = min(array.ctypes.data for array in slot.values())
    for number, field in enumerate(layout.inputs + layout.outputs, 1):
        array = slot[field.name]
        assert (array == np.asarray(number, array.dtype)).all(), f"{field.name} was overwritten"
        assert array.size == 0 or (array.ctypes.data - base) % ALIGN == 0
