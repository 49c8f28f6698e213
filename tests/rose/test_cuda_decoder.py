"""The GPU's way through generation, in Triton's interpreter, against the CPU's way. With a GPU: test_gpu_decoder."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from msgspec.structs import replace

from ipc.step import KIND_PREFILL, STATUS_BAD_PARAMS, STATUS_NON_FINITE
from ipc.types import SamplingParams
from rose.config import RankConfig, SpeculationConfig
from rose.cuda_decoder import CudaDecoder
from rose.cuda_decoder_load import load_cuda_decoder
from rose.distributed.group import ALONE
from rose.kv_cache import KVShape, allocate
from rose.largest_steps import Trial, run_largest_prompts
from rose.model_runner import Loaded
from rose.models.config import ModelError, read_config
from rose.models.load import load_model
from rose.models.task import read_task
from rose.runner import OutOfMemory
from rose.shape_list import read_shapes
from rose.speculation.no_drafts import NoDraftsSource
from tests.rose.decoder_driving import GREEDY, Driver, Row, Seq
from tests.rose.host_stream import HostStream
from tests.rose.tiny_lm import EOS_TOKEN_ID, write_llama, write_qwen3

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="needs Triton's interpreter and a stream on the host")

DEVICE = torch.device("cpu")
SIZES: dict[str, Any] = {
    "max_num_seqs": 5, "max_num_batched_tokens": 48, "max_model_len": 80, "kv_cache_bytes": 1 << 20,
    "max_graph_tokens": 0,  # of prompts; the interpreter is slow, and padding is work
}  # fmt: skip


class StaticDriver(Driver):
    """A Driver whose runner goes the GPU's way."""

    def __init__(self, directory: Path, *, dtype: torch.dtype = torch.float32, **settings: Any) -> None:
        super().__init__(directory, **SIZES | settings)
        loader = self.runner.loader
        model = load_model(directory, loader._model_config, loader._task, DEVICE, dtype)
        shape = KVShape.of(loader._model_config, dtype)
        self.stream = HostStream()
        self.decoder = CudaDecoder(
            model,
            allocate(shape, self.facts.num_blocks, DEVICE),
            loader._model_config,
            self.facts,
            RankConfig(**{"capture": "lazy"} | SIZES | settings),
            device=DEVICE,
            tokenizer=directory / "tokenizer.json",
            stream=self.stream,
            shapes=directory / "shapes.json",
        )
        self.runner.close()
        self.runner.use(Loaded(self.decoder, self.decoder.generate))


@pytest.fixture(scope="module", params=["llama", "qwen3"])
def directory(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    write = {"llama": write_llama, "qwen3": write_qwen3}[request.param]
    return write(tmp_path_factory.mktemp(request.param))


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_llama(tmp_path_factory.mktemp("tiny"), num_hidden_layers=1)


def prompt(length: int, seed: int = 0) -> list[int]:
    return torch.randint(3, 320, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def generate(driver: Driver, lengths: list[int], num_tokens: int, params: SamplingParams = GREEDY) -> list[list[int]]:
    seqs = [Seq(prompt(length, seed), params) for seed, length in enumerate(lengths)]
    for seq in seqs:
        driver.prefill(seq, chunk=16)
    driver.decode(seqs, num_tokens)
    return [seq.tokens for seq in seqs]


def cpu_tokens(directory: Path, lengths: list[int], num_tokens: int) -> list[list[int]]:
    """Greedy, by the CPU's way."""
    driver = Driver(directory, **SIZES)
    tokens = generate(driver, lengths, num_tokens)
    driver.close()
    return tokens


def both_ways(directory: Path, lengths: list[int], num_tokens: int, **params: Any) -> tuple[list, list, StaticDriver]:
    """Tokens by the CPU's way, and by the GPU's."""
    cpu, gpu = Driver(directory, **SIZES), StaticDriver(directory)
    sampling = SamplingParams(**{"temperature": 0.0} | params)
    expected = generate(cpu, lengths, num_tokens, sampling)
    cpu.close()
    return expected, generate(gpu, lengths, num_tokens, sampling), gpu


def test_greedy_tokens_are_the_cpus(directory: Path) -> None:
    """Prompts in chunks and whole; first sight, capture and replays; a block fills up on the way."""
    expected, got, driver = both_ways(directory, [20, 4, 3], 3)
    assert got == expected
    figures = driver.decoder.figures()
    assert (figures["graph_captures_total"], figures["graph_replays_total"]) == (1, 2)
    assert (figures["decode_rows_total"], figures["padding_rows_total"]) == (9, 3)
    assert driver.stream.num_copies == [3, 3], "a decode step is one copy in and one out"


def test_drawn_tokens_are_the_cpus(tiny: Path) -> None:
    expected, got, driver = both_ways(tiny, [5, 4], 3, temperature=0.9, top_p=0.8, seed=11, presence_penalty=0.5)
    assert got == expected
    assert [key.backend for key in driver.decoder.graphs.keys] == ["triton+random+truncation+penalties"]


def test_logprobs(tiny: Path) -> None:
    found = []
    for make in (Driver, StaticDriver):
        driver = make(tiny, **SIZES)
        seqs = [Seq(prompt(6), SamplingParams(temperature=0.0, logprobs=3)), Seq(prompt(4, 1))]
        for seq in seqs:
            driver.prefill(seq)
        found += [driver.run([Row(seq) for seq in seqs]) for _ in range(3)][-1:]
        found[-1] = {name: found[-1][name][:1].copy() for name in ("logprobs", "top_ids", "top_logprobs")}
        driver.close()
    np.testing.assert_array_equal(found[1]["top_ids"], found[0]["top_ids"])
    for name in ("logprobs", "top_logprobs"):
        np.testing.assert_allclose(found[1][name], found[0][name], atol=1e-4)


def test_rows_with_a_grammar(tmp_path: Path) -> None:
    """Their masks come between the graph of the forward pass and sampling; other rows' steps are whole graphs."""
    write_llama(tmp_path, num_hidden_layers=1, tokenizer=True)
    params = SamplingParams(temperature=1.0, seed=3, grammar="start: /[xyz]{5}/")
    found = []
    for make in (Driver, StaticDriver):
        driver = make(tmp_path, **SIZES)
        other, seq = Seq(prompt(4, 1)), Seq(prompt(6), params)
        driver.prefill(other)
        driver.decode([other], 2)
        driver.prefill(seq)
        rows = [Row(seq), Row(other)]
        for _ in range(2):  # a mask follows from a token that the step before has not told yet
            steps = []
            for _ in range(2):
                steps.append(driver.launch(rows))
                seq.max_known += 1
                other.max_known += 1
            for lazy, arrays in steps:
                driver.wait(lazy)
                driver.apply(rows, arrays)
        driver.decode([seq, other], 1)
        third = Seq(prompt(6), params)  # the same slot, another matcher
        driver.run(release=[seq])
        driver.free_slots.sort()
        driver.run([Row(third, 6, KIND_PREFILL), Row(other)], admit=[third])
        driver.decode([other, third], 1)
        found.append((seq.tokens, other.tokens, third.tokens))
    assert found[1] == found[0]
    assert found[0][0][-1] == EOS_TOKEN_ID
    assert [key.backend for key in driver.decoder.graphs.keys] == ["triton", "triton+forward"]


def test_other_lengths_under_the_same_key(tiny: Path) -> None:
    """Sequences of all lengths come and go; a batch size has one graph."""
    cpu, gpu = Driver(tiny, **SIZES), StaticDriver(tiny)
    for lengths in ([30, 2], [3, 9], [1, 7]):
        found = []
        for driver in (cpu, gpu):
            seqs = [Seq(prompt(length, seed)) for seed, length in enumerate(lengths)]
            for seq in seqs:
                driver.prefill(seq)
            driver.decode(seqs, 2)
            driver.run(release=seqs)
            driver.free_blocks += [block for seq in seqs for block in seq.blocks]
            found.append([seq.tokens for seq in seqs])
        assert found[1] == found[0]
    assert gpu.stream.num_captures == 1
    cpu.close()


def test_prompts_beside_decoding_rows(tiny: Path) -> None:
    """A step of both kinds, a release in a decode step, and its slot taken again."""
    found = []
    for make in (Driver, StaticDriver):
        driver = make(tiny, **SIZES)
        first, second, third = (Seq(prompt(length, seed)) for seed, length in enumerate((12, 20, 3)))
        driver.prefill(first)
        rows = [Row(first), Row(second, 14, KIND_PREFILL)]
        driver.run(rows, admit=[second])
        driver.run([Row(second, 6, KIND_PREFILL), Row(first)])
        driver.run([Row(second)], release=[first])
        driver.free_slots.sort()
        driver.run([Row(third, 3, KIND_PREFILL), Row(second)], admit=[third])
        assert third.slot == first.slot
        driver.decode([third, second], 2)
        found.append([seq.tokens for seq in (first, second, third)])
        driver.close()
    assert found[1] == found[0]


def test_small_steps_with_prompts_are_graphs_too(tiny: Path) -> None:
    """Prompts alone, in chunks and beside decoding rows, all of one shape once padded."""
    (tiny / "shapes.json").unlink(missing_ok=True)
    found = []
    for make in (Driver, StaticDriver):
        driver = make(tiny, **SIZES | {"max_graph_tokens": 40})
        seqs = [Seq(prompt(length, seed)) for seed, length in enumerate((7, 12, 3, 41))]
        driver.run([Row(seqs[0], 7, KIND_PREFILL), Row(seqs[1], 9, KIND_PREFILL)], admit=seqs[:2])
        driver.run([Row(seqs[1], 3, KIND_PREFILL), Row(seqs[0])])
        driver.run([Row(seqs[0]), Row(seqs[2], 3, KIND_PREFILL)], admit=seqs[2:3])
        driver.run([Row(seqs[3], 41, KIND_PREFILL)], admit=seqs[3:])  # too large
        driver.decode(seqs, 1)
        found.append([seq.tokens for seq in seqs])
    assert found[1] == found[0]
    assert [(key.num_seqs, key.num_tokens, key.q) for key in driver.decoder.graphs.keys] == [(2, 64, 0)]
    assert driver.decoder.figures()["graph_replays_total"] == 2
    driver = StaticDriver(tiny, capture="list", max_graph_tokens=40)
    while driver.decoder.idle_work:
        driver.decoder.idle()
    assert driver.stream.num_captures == 1


def test_steps_launched_before_the_last_is_answered(tiny: Path) -> None:
    """The second step's tokens come of the first's, which the host has not seen."""
    driver, expected = StaticDriver(tiny), cpu_tokens(tiny, [6], 4)
    seqs = [Seq(prompt(length, seed)) for seed, length in enumerate([6])]
    for seq in seqs:
        driver.prefill(seq)
    rows = [Row(seq) for seq in seqs]
    for _ in range(2):
        steps = [driver.launch(rows)]
        for seq in seqs:
            seq.max_known += 1
        steps.append(driver.launch(rows))
        for lazy, arrays in steps:
            driver.wait(lazy)
            driver.apply(rows, arrays)
    assert [seq.tokens for seq in seqs] == expected


def test_graphs_change_nothing(tiny: Path) -> None:
    without = StaticDriver(tiny, capture="off")
    assert generate(without, [7, 2], 3) == cpu_tokens(tiny, [7, 2], 3)
    assert without.stream.num_captures == 0


def test_a_sequence_with_unusable_parameters_fails_alone(tiny: Path) -> None:
    driver = StaticDriver(tiny)
    good, bad = Seq(prompt(5)), Seq(prompt(4), SamplingParams(temperature=0.0, logit_bias={5000: 1.0}))
    driver.prefill(good)
    driver.launch([Row(bad, 4, KIND_PREFILL)], admit=[bad])
    bad.max_known += 1
    for _ in range(2):
        lazy, arrays = driver.launch([Row(bad), Row(good)])
        driver.wait(lazy)
        assert arrays["status"][:2].tolist() == [STATUS_BAD_PARAMS, 0]
        assert arrays["num_tokens"][:2].tolist() == [0, 1]


def test_a_row_that_is_not_finite_fails_alone(tmp_path: Path) -> None:
    directory = write_llama(tmp_path, num_hidden_layers=1)
    driver = StaticDriver(directory)
    embedding = driver.decoder._static._model.model.embed_tokens.weight
    embedding[77] = float("nan")
    good, bad = Seq(prompt(5)), Seq([5, 77, 6])
    driver.prefill(good)
    driver.launch([Row(bad, 3, KIND_PREFILL)], admit=[bad])
    bad.max_known += 1
    for _ in range(2):
        lazy, arrays = driver.launch([Row(good), Row(bad)])
        driver.wait(lazy)
        assert arrays["status"][:2].tolist() == [0, STATUS_NON_FINITE]
        assert arrays["num_tokens"][:2].tolist() == [1, 0]


def test_a_capture_without_memory_runs_eagerly(tiny: Path) -> None:
    driver = StaticDriver(tiny)
    driver.stream.out_of_memory = True
    assert generate(driver, [6], 4) == cpu_tokens(tiny, [6], 4)
    assert driver.decoder.figures()["eager_steps_total"] == 2
    assert driver.decoder.figures()["graphs"] == 1


def test_a_step_without_memory_did_nothing(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It fails small, as does the step planned on top of it; the same steps again give the tokens they should."""
    driver = StaticDriver(tiny)
    expected = cpu_tokens(tiny, [6], 2)[0]
    seq = Seq(prompt(6))
    driver.prefill(seq)

    def no_room(*_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    with monkeypatch.context() as patched:
        patched.setattr(driver.decoder.graphs, "_forward", no_room)
        with pytest.raises(OutOfMemory):
            driver.launch([Row(seq)])
    with pytest.raises(OutOfMemory, match="on top of"):
        driver.launch([Row(seq)])
    other = Seq(prompt(3))
    with pytest.raises(OutOfMemory, match="on top of"):
        driver.launch([Row(other, 3, KIND_PREFILL)], admit=[other])
    driver.last_applied = driver.num_steps
    driver.decode([seq], 2)
    assert seq.tokens == expected


def test_shapes_are_listed_and_captured_by_idle_steps_of_the_next_start(tiny: Path) -> None:
    (tiny / "shapes.json").unlink(missing_ok=True)
    expected = generate(StaticDriver(tiny), [4, 3], 2)
    listed = read_shapes(tiny / "shapes.json")
    assert [(key.kind, key.num_seqs, key.num_tokens, key.backend) for key in listed] == [("decode", 2, 2, "triton")]
    driver = StaticDriver(tiny, capture="list")
    assert driver.decoder.idle_work
    while driver.decoder.idle_work:
        assert driver.decoder.idle().ready()
    assert driver.stream.num_captures == 1
    assert generate(driver, [4, 3], 2) == expected
    assert driver.decoder.figures()["eager_steps_total"] == 0


def test_eager_capture_makes_the_common_graphs_before_the_first_step(tiny: Path) -> None:
    (tiny / "shapes.json").unlink(missing_ok=True)
    driver = StaticDriver(tiny, capture="eager", max_num_seqs=2)
    assert driver.stream.num_captures == 6  # 1 and 2 rows: greedy, drawn, and drawn with truncation


def test_an_attention_backend_that_cannot_run_is_refused(tiny: Path) -> None:
    with pytest.raises(ModelError, match="fa3"):
        StaticDriver(tiny, attention="fa3")


def test_the_largest_step_runs_before_there_is_a_cache(tiny: Path) -> None:
    """Its rows are as long as a sequence may be; what it computes is nobody's."""
    config = read_config(tiny)
    model = load_model(tiny, config, read_task(tiny, config, "generate"), DEVICE, torch.float32)
    facts = replace(StaticDriver(tiny).facts, max_num_batched_tokens=20, max_model_len=12)
    seen, kept = [], model.logits
    model.logits = lambda hidden: seen.append(hidden) or kept(hidden)
    shape = KVShape.of(config, torch.float32)
    run_largest_prompts(Trial(model, NoDraftsSource(), shape, facts, DEVICE, tiny / "tokenizer.json", ALONE))
    assert seen[0].shape == (facts.max_num_seqs, config.hidden_size)
    assert seen[0].isfinite().all()


def test_a_head_that_waits_is_refused_by_name(tiny: Path) -> None:
    config = read_config(tiny)
    model = load_model(tiny, config, read_task(tiny, config, "generate"), DEVICE, torch.float32)
    driver = Driver(tiny, **SIZES)
    driver.close()
    speculation = SpeculationConfig(proposer="mtp", model="head", head_tokens="accepted")
    with pytest.raises(ModelError, match=r'on a GPU set it to "all" or "auto"'):
        load_cuda_decoder(
            model, config, driver.facts, RankConfig(speculation=speculation, **SIZES), device=DEVICE,
            dtype=torch.float32, tokenizer=tiny / "tokenizer.json", shapes=None,
        )  # fmt: skip
