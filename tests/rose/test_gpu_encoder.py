"""The encoder on a real GPU: every backend, dtype and bucket against float32, graphs, overlap, memory."""

import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file
from torch.profiler import ProfilerActivity, profile

from ipc.step import STATUS_NON_FINITE, STATUS_OK
from ipc.step_ring import StepRing, encode_layout
from rose.attention.sdpa import SdpaBackend
from rose.batch import Rows
from rose.encoder import Encoder, load_encoder
from rose.models.config import read_config
from rose.models.task import read_task
from rose.runner import OutOfMemory
from tests.rose import random_models
from tests.rose.driving import Driver, ragged_ids

pytestmark = pytest.mark.gpu

MODELS = {
    "bert-32": lambda directory: random_models.bert(directory, head_dim=32),
    "bert-64": lambda directory: random_models.bert(directory, head_dim=64),
    "qwen3": random_models.qwen3,
    "pplx": lambda directory: random_models.qwen3(directory, pplx=True),
}
BATCHES = [(1,), (33,), (64,), (65,), (512,), (1, 7, 300, 64, 2, 130), (100,) * 20, (500, 3, 512, 1, 77) * 8]
VOCABULARY = 4096
BAD = 77  # a token whose embedding is NaN, where a test makes it so


@pytest.fixture(scope="module", params=MODELS)
def directory(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return MODELS[request.param](tmp_path_factory.mktemp(request.param))


@pytest.fixture(scope="module")
def qwen3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return random_models.qwen3(tmp_path_factory.mktemp("qwen3"))


@pytest.fixture(autouse=True)
def _free_memory() -> Iterator[None]:
    yield
    torch.cuda.synchronize()


def gpu_driver(directory: Path, **settings: Any) -> Driver:
    defaults = {"device": "cuda", "max_num_batched_tokens": 16384, "max_model_len": 512, "capture": "lazy"}
    return Driver(directory, **(defaults | settings))


class Reference:
    """Float32, torch's own operators and attention, one sequence after the other."""

    def __init__(self, directory: Path) -> None:
        device, config = torch.device("cuda"), read_config(directory)
        task = read_task(directory, config)
        parts = load_encoder(directory, config, task, device, torch.float32)
        self._encoder = Encoder(parts, SdpaBackend(), device)
        self._dimension = parts.defaults.dimension

    def vectors(self, sequences: Sequence[Sequence[int]], **columns: int) -> NDArray[np.float32]:
        return np.stack([self._vector(sequence, columns) for sequence in sequences])

    def _vector(self, sequence: Sequence[int], columns: dict[str, int]) -> NDArray[np.float32]:
        table = np.full((1, 8), -1, np.int32)
        table[0, 2], table[0, 5] = 0, 0
        rows = Rows(
            input_ids=np.asarray(sequence, np.int32),
            cu_seqlens=np.asarray([0, len(sequence)], np.int32),
            table=table,
            bad_tokens=np.zeros(1, np.bool_),
            status=torch.zeros(1, dtype=torch.int32),
            values=torch.zeros(4 * self._dimension, dtype=torch.uint8),
        )
        with torch.inference_mode():
            self._encoder.run(rows)
        torch.cuda.synchronize()
        return rows.values.numpy().view(np.float32).copy()


def cosines(rows: NDArray[np.float32], expected: NDArray[np.float32]) -> NDArray[np.float32]:
    assert np.isfinite(rows).all()
    return (rows * expected).sum(1) / (np.linalg.norm(rows, axis=1) * np.linalg.norm(expected, axis=1))


@pytest.fixture(scope="module")
def reference(directory: Path) -> Reference:
    return Reference(directory)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("attention", ["auto", "triton", "fa2", "fa3", "sdpa"])
def test_close_to_float32(directory: Path, reference: Reference, attention: str, dtype: str) -> None:
    """First sight, capture and replay of every bucket; each run gives the same bits."""
    if attention.startswith("fa"):
        pytest.importorskip("flashinfer")
    driver = gpu_driver(directory, attention=attention, dtype=dtype, max_graph_tokens=4096)
    for seed, lengths in enumerate(BATCHES):
        sequences = ragged_ids(VOCABULARY, lengths, seed)
        expected = reference.vectors(sequences)
        runs = [driver.vectors(sequences) for _ in range(3)]
        worst = cosines(runs[0], expected).min()
        assert worst >= 0.999, f"{lengths}: {worst}"
        for run in runs[1:]:
            np.testing.assert_array_equal(run, runs[0], err_msg=f"{lengths}")
    figures = driver.runner.figures()
    captured = [lengths for lengths in BATCHES if sum(lengths) <= 4096]
    if attention == "sdpa":
        assert figures["graph_captures_total"] == 0
    else:
        assert figures["graph_replays_total"] >= 2 * len(captured) - 2  # some batches share a key
        assert figures["eager_steps_total"] > 0
    driver.close()


@pytest.mark.parametrize("attention", ["triton", "fa2", "fa3"])
def test_other_splits_under_the_same_key(directory: Path, reference: Reference, attention: str) -> None:
    if attention.startswith("fa"):
        pytest.importorskip("flashinfer")
    driver = gpu_driver(directory, attention=attention, max_graph_tokens=4096)
    splits = [(300, 100, 100, 12), (512, 1, 1), (1, 2, 3, 500), (128, 128, 128, 128), (200, 250, 20)]
    for seed, lengths in enumerate(splits):
        sequences = ragged_ids(VOCABULARY, lengths, seed)
        worst = cosines(driver.vectors(sequences), reference.vectors(sequences)).min()
        assert worst >= 0.999, f"{lengths}: {worst}"
    assert driver.runner.figures()["graph_captures_total"] == 1
    driver.close()


def test_alone_and_in_company(directory: Path, reference: Reference) -> None:
    driver = gpu_driver(directory)
    sequences = ragged_ids(VOCABULARY, (40, 512, 3, 200), 5)
    expected = reference.vectors(sequences)
    together = driver.vectors(sequences)
    for index, sequence in enumerate(sequences):
        alone = driver.vectors([sequence])
        assert cosines(alone, expected[index : index + 1]).min() >= 0.999
        assert cosines(alone, together[index : index + 1]).min() >= 0.999
    driver.close()


def test_int8_and_binary(tmp_path: Path) -> None:
    directory = random_models.qwen3(tmp_path, pplx=True)
    driver, reference = gpu_driver(directory), Reference(directory)
    sequences = ragged_ids(VOCABULARY, (40, 512, 3, 200, 77, 130), 3)
    exact = reference.vectors(sequences)
    assert np.abs(np.linalg.norm(exact, axis=1) - 1).min() > 0.1  # never normalised
    columns = {"dtype": 1, "offsets": np.arange(6) * 1024}
    got = driver.run(sequences, **columns)["values"][: 6 * 1024].view(np.int8).reshape(6, 1024).astype(int)
    off = np.abs(got - np.rint(127 * np.tanh(exact)).astype(int))
    assert (off <= 1).mean() >= 0.99
    columns = {"dtype": 2, "offsets": np.arange(6) * 128}
    bits = np.unpackbits(
        driver.run(sequences, **columns)["values"][: 6 * 128].reshape(6, 128), axis=1, bitorder="little"
    )
    assert (bits != (exact >= 0)).mean() <= 0.02
    driver.close()


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("attention", ["triton", "fa2", "fa3"])
@pytest.mark.parametrize("pplx", [True, False])
def test_a_row_that_is_not_finite_fails_alone(tmp_path: Path, pplx: bool, attention: str, dtype: str) -> None:
    """Eagerly, captured and replayed, wherever it stands; nor does what it leaves behind in the padding fail others."""
    if attention.startswith("fa"):
        pytest.importorskip("flashinfer")
    directory = random_models.qwen3(tmp_path, pplx=pplx)
    weights = load_file(directory / "model.safetensors")
    weights["embed_tokens.weight"][BAD] = float("nan")
    save_file(weights, directory / "model.safetensors")
    driver = gpu_driver(directory, attention=attention, dtype=dtype, max_graph_tokens=4096)
    for lengths in ((130, 77, 200, 40, 1, 33), (500, 3, 512, 1, 77) * 5):  # the second takes no graph
        sequences = [[token + (token == BAD) for token in ids] for ids in ragged_ids(VOCABULARY, lengths, 1)]
        expected = driver.vectors(sequences)
        for bad in range(min(len(lengths), 6)):
            spoilt = [list(ids) for ids in sequences]
            spoilt[bad][0] = spoilt[bad][-1] = BAD
            arrays = driver.run(spoilt)
            status = arrays["status"][: len(lengths)].tolist()
            assert status == [STATUS_NON_FINITE if row == bad else STATUS_OK for row in range(len(lengths))]
            others = [row for row in range(len(lengths)) if row != bad]
            np.testing.assert_array_equal(driver.read(arrays, len(lengths))[others], expected[others])
    short = sequences[0][:450]  # padded to 512
    expected = driver.vectors([short])
    for _ in range(3):
        assert driver.run([[BAD] * 512])["status"][0] == STATUS_NON_FINITE
        np.testing.assert_array_equal(driver.vectors([short]), expected)
    driver.close()


def test_nothing_waits_on_the_launch_path(qwen3: Path) -> None:
    """First sights, captures, replays, on a page-locked ring and on plain memory."""
    driver = gpu_driver(qwen3, max_graph_tokens=4096)
    ring = StepRing.create(encode_layout(driver.facts))
    plain = driver.slots
    for slots in (plain, [ring.slot(i) for i in range(ring.layout.num_slots)]):
        driver.slots = slots
        driver.runner.attach(ring if slots is not plain else None)
        torch.cuda.set_sync_debug_mode("error")
        try:
            for lengths in ((5,), (5,), (5,), (500,) * 12, (7, 90), (7, 90)):
                lazy, arrays = driver.launch(ragged_ids(VOCABULARY, lengths))
                while not lazy.ready():
                    pass
                assert arrays["status"][: len(lengths)].tolist() == [0] * len(lengths)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    driver.runner.attach(None)
    driver.slots = plain
    driver.close()


def test_no_library_waits_either(qwen3: Path) -> None:
    """What C++ libraries call is unseen by torch's debug mode, but not by a profile."""
    driver = gpu_driver(qwen3, max_graph_tokens=4096)
    ring = StepRing.create(encode_layout(driver.facts))
    driver.slots = [ring.slot(i) for i in range(ring.layout.num_slots)]
    driver.runner.attach(ring)
    shapes = [ragged_ids(VOCABULARY, lengths) for lengths in ((5,), (500,) * 12, (7, 90))]
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as trace:
        for _ in range(4):  # first sight, capture, replays
            for sequences in shapes:
                lazy, _ = driver.launch(sequences)
                while not lazy.ready():
                    pass
    calls = Counter(event.name for event in trace.events())
    assert calls["cudaGraphLaunch"] >= 4, calls  # the profile sees the runtime's calls
    waits = {name: count for name, count in calls.items() if "Synchronize" in name and "Device" not in name}
    assert waits == {}  # cudaDeviceSynchronize is the profiler's own, at its end
    driver.runner.attach(None)
    driver.close()


def test_two_steps_in_flight(qwen3: Path) -> None:
    driver = gpu_driver(qwen3)
    ring = StepRing.create(encode_layout(driver.facts))
    batches = [ragged_ids(VOCABULARY, (512,) * 30, 1), ragged_ids(VOCABULARY, (9, 30), 2)]
    expected = [driver.vectors(batch) for batch in batches for _ in range(3)][::3]
    for slots in (driver.slots, [ring.slot(i) for i in range(ring.layout.num_slots)]):
        driver.runner.attach(None if slots is driver.slots else ring)
        driver.slots = slots
        for _ in range(20):
            steps = [driver.launch(batch, slot) for slot, batch in enumerate(batches)]
            assert not steps[1][0].ready()  # behind a step of milliseconds
            for (lazy, arrays), batch, rows in zip(steps, batches, expected, strict=True):
                while not lazy.ready():
                    pass
                np.testing.assert_array_equal(driver.read(arrays, len(batch)), rows)
    driver.runner.attach(None)
    driver.close()


@pytest.mark.parametrize("check", ["out_of_memory_fails_the_step_alone", "graphs_leave_what_the_largest_step_needs"])
def test_without_memory(check: str, qwen3: Path) -> None:
    """In a process of its own: what other tests left in this one would serve as room, or take it."""
    code = f"from pathlib import Path; from {__name__} import {check} as check; check(Path({str(qwen3)!r}))"
    root = Path(__file__).resolve().parents[2]
    done = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr


def limit_memory(num_bytes: int) -> None:
    """To so much; what is cached and not in use is given back first."""
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction(num_bytes / torch.cuda.get_device_properties(0).total_memory)


def out_of_memory_fails_the_step_alone(directory: Path) -> None:
    driver = gpu_driver(directory)
    small, large = ragged_ids(VOCABULARY, (9, 30), 2), ragged_ids(VOCABULARY, (512,) * 32, 1)
    expected = driver.vectors(small)
    torch.cuda.empty_cache()
    limit_memory(torch.cuda.memory_reserved() + (32 << 20))
    try:
        with pytest.raises(OutOfMemory):
            driver.run(large)
        for _ in range(3):
            np.testing.assert_array_equal(driver.vectors(small), expected)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    driver.vectors(large)
    driver.close()


def graphs_leave_what_the_largest_step_needs(directory: Path) -> None:
    """Near the limit small shapes get graphs, large ones none, and the largest step runs whatever was tried before."""
    driver = gpu_driver(directory, max_graph_tokens=8192, attention="triton")
    large = ragged_ids(VOCABULARY, (512,) * 32, 1)  # never a graph
    expected = driver.vectors(large)
    step_bytes = driver.runner.device.graphs._memory._step_bytes
    assert step_bytes > 100 << 20  # of 16384 tokens
    torch.cuda.empty_cache()
    limit_memory(torch.cuda.memory_reserved() + step_bytes + (96 << 20))
    shapes = [(40,), (512,), *((512,) * num_seqs for num_seqs in (2, 4, 8, 16))]  # the last takes some 200 MiB
    for seed, lengths in enumerate(shapes):
        sequences = ragged_ids(VOCABULARY, lengths, seed)
        first = driver.vectors(sequences)
        for _ in range(3):
            np.testing.assert_array_equal(driver.vectors(sequences), first)
        np.testing.assert_array_equal(driver.vectors(large), expected)
    figures = driver.runner.figures()
    assert 1 <= figures["graphs"] < len(shapes), figures
    driver.close()


def test_the_whole_0_6b(tmp_path: Path) -> None:
    """28 layers and the real vocabulary: errors add up over depth."""
    directory = random_models.qwen3(tmp_path, num_layers=28, vocab_size=151936)
    driver = gpu_driver(directory, max_model_len=4096)
    reference = Reference(directory)
    for seed, lengths in enumerate([(32,), (128,), (100, 60, 7, 300), (512,) * 5, (4096, 9)]):
        sequences = ragged_ids(151936, lengths, seed)
        expected = reference.vectors(sequences)
        for _ in range(3):
            worst = cosines(driver.vectors(sequences), expected).min()
            assert worst >= 0.999, f"{lengths}: {worst}"
    print(driver.runner.figures())
    driver.close()
