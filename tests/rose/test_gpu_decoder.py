"""Generation on a real GPU: logits against float32, graphs against none, two steps in flight against one."""

from pathlib import Path
from typing import Any

import pytest
import torch

from bench.micro.random_decoders import GREEDY, Pass, Seated, llama_8b, random_model
from ipc.step import KIND_PREFILL
from ipc.types import SamplingParams
from rose.attention.interface import AttentionShape
from rose.attention.paged import PagedKV, PagedRows
from rose.attention.paged_flashinfer import FlashInferPagedBackend
from rose.attention.paged_reference import ReferencePagedBackend
from rose.attention.paged_triton import TritonPagedBackend
from rose.layers.kernel_layers import use_kernels
from rose.models.config import ModelConfig
from tests.rose.decoder_driving import Driver, Row, Seq
from tests.rose.test_cuda_decoder import prompt
from tests.rose.tiny_lm import write_llama

pytestmark = pytest.mark.gpu

CONFIGS = {
    "8b": lambda: llama_8b(2),
    "smol": lambda: llama_8b(
        2, hidden_size=576, intermediate_size=1536, num_attention_heads=9, num_key_value_heads=3, head_dim=64,
        vocab_size=49152, tie_word_embeddings=True,
    ),
    "qwen3": lambda: llama_8b(
        2, model_type="qwen3", hidden_size=1024, intermediate_size=3072, num_attention_heads=16, vocab_size=8192
    ),
}  # fmt: skip
DRAWN = SamplingParams(temperature=0.8, top_p=0.9, seed=5, presence_penalty=0.2)


@pytest.fixture(scope="module", params=CONFIGS)
def config(request: pytest.FixtureRequest) -> ModelConfig:
    return CONFIGS[request.param]()


def seated(config: ModelConfig, **settings: Any) -> Seated:
    return Seated(config, random_model(config), num_seqs=12, context=300, room=200, **settings)


def test_logits_are_close_to_float32(config: ModelConfig) -> None:
    """Prompts whole and in chunks, then single tokens and five at a time behind them."""
    model = random_model(config)
    exact = random_model(config).float()
    use_kernels(model)
    torch.manual_seed(0)
    ids = [torch.randint(0, config.vocab_size, (600,)) for _ in range(5)]
    passes = (
        Pass(config, model, TritonPagedBackend(), torch.bfloat16),
        Pass(config, exact, ReferencePagedBackend(), torch.float32),
    )
    starts = [0] * 5
    for lengths in ([37, 512, 1, 130, 16], [20, 1, 9, 1, 100], [1] * 5, [5] * 5, [1] * 5, [3] * 5):
        rows = [x[s : s + n] for x, s, n in zip(ids, starts, lengths, strict=True)]
        got, expected = (one.logits(rows, starts) for one in passes)
        error = ((got - expected).norm() / expected.norm()).item()
        assert error < 2e-2, f"{lengths}: {error}"
        starts = [s + n for s, n in zip(starts, lengths, strict=True)]


@pytest.mark.parametrize("params", [GREEDY, DRAWN], ids=["greedy", "drawn"])
def test_graphs_change_nothing(config: ModelConfig, params: SamplingParams) -> None:
    """The same tokens without graphs, with them, and with two steps in flight; lengths differ and grow."""
    found = []
    lengths = [300, 1, 17, 299, 64, 65, 128, 2, 250, 33, 16, 15]
    for settings, in_flight in (({"capture": "off"}, 1), ({}, 1), ({}, 2)):
        bench = seated(config, params=params, **settings)
        tokens = []
        for num_rows in (1, 3, 8, 12):
            bench.seat(lengths)
            tokens.append(bench.tokens(num_rows, 20, in_flight=in_flight))
        found.append(tokens)
        if not settings:
            assert bench.decoder.figures()["graph_captures_total"] == 4
            assert bench.decoder.figures()["eager_steps_total"] == 4
        bench.close()
    assert found[1] == found[0]
    assert found[2] == found[0]


def test_nothing_waits_on_the_launch_path() -> None:
    """First sight, capture, replays; greedy and drawn."""
    for params in (GREEDY, DRAWN):
        bench = seated(llama_8b(2), params=params)
        torch.cuda.set_sync_debug_mode("error")
        try:
            bench.tokens(5, 12, in_flight=2)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        bench.close()


@pytest.mark.parametrize("num_tokens", [40, 600, 1100])
def test_prompts(config: ModelConfig, num_tokens: int) -> None:
    """As one step: eagerly, captured, replayed; the largest without a graph. None of them waits for the device."""
    bench = Seated(config, random_model(config), num_seqs=4, context=1, room=1200)
    tokens = []
    for _ in range(3):
        bench.seat()
        torch.cuda.set_sync_debug_mode("error")
        try:
            lazy = bench.prompt(num_tokens)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        while not lazy.ready():
            pass
        assert bench.ring.slot(0)["lengths"][0] == num_tokens + 1
        tokens.append(int(bench.ring.slot(0)["tokens"][0, 0]))
    assert len(set(tokens)) == 1
    assert bench.decoder.figures()["graph_replays_total"] == (2 if num_tokens <= 1024 else 0)
    bench.close()


def test_admissions_with_penalties_do_not_wait(tmp_path: Path) -> None:
    """Their prefix hits are counted on the device."""
    write_llama(tmp_path, tokenizer=True)
    driver = Driver(tmp_path, device="cuda", dtype="float16", max_model_len=200, kv_cache_bytes=4 << 20)
    penalised = SamplingParams(temperature=0.0, repetition_penalty=1.3, presence_penalty=0.5)
    first = Seq(prompt(40), penalised)
    driver.prefill(first)
    for _ in range(2):
        hit = Seq(prompt(40), penalised, blocks=first.blocks[:2], num_computed=32)
        torch.cuda.set_sync_debug_mode("error")
        try:
            lazy, arrays = driver.launch([Row(hit, 8, KIND_PREFILL)], admit=[hit])
        finally:
            torch.cuda.set_sync_debug_mode("default")
        driver.wait(lazy)
        assert arrays["tokens"][0, 0] == first.tokens[40]
    driver.close()


def test_log_probabilities_are_of_the_logits() -> None:
    bench = seated(llama_8b(2), params=SamplingParams(temperature=0.0, logprobs=5))
    for _ in range(3):
        lazy, arrays = bench.launch(4)
        while not lazy.ready():
            pass
        assert (arrays["top_ids"][:4, 0, 0] == arrays["tokens"][:4, 0]).all()
        assert (arrays["logprobs"][:4, 0] == arrays["top_logprobs"][:4, 0, 0]).all()
        assert (arrays["top_logprobs"][:4, 0, :5] <= 0).all()
    bench.close()


@pytest.mark.parametrize(
    "settings",
    [{}, {"capture": "off"}, {"capture": "eager"}, {"max_graph_tokens": 16, "kv_cache_bytes": None}],
    ids=str,
)
def test_the_runner_gives_the_cpus_tokens(tmp_path: Path, settings: dict[str, Any]) -> None:
    """Prompts whole, in chunks and beside decoding rows, in half precision; the model has few near ties."""
    sizes = {"max_num_seqs": 6, "max_num_batched_tokens": 64, "max_model_len": 200, "kv_cache_bytes": 4 << 20}
    write_llama(tmp_path, tokenizer=True)
    found = []
    for device in ({"device": "cpu"}, {"device": "cuda", "dtype": "float16", **settings}):
        driver = Driver(tmp_path, **sizes | device)
        seqs = [Seq(prompt(length, seed)) for seed, length in enumerate((37, 5, 64, 1))]
        driver.prefill(seqs[0], chunk=16)
        driver.run([Row(seqs[1], 5, KIND_PREFILL), Row(seqs[0])], admit=seqs[1:2])
        driver.prefill(seqs[2], chunk=64)
        driver.run([Row(seqs[0]), Row(seqs[3], 1, KIND_PREFILL), Row(seqs[1])], admit=seqs[3:])
        driver.decode(seqs, 12)
        ruled = Seq(prompt(9, 9), SamplingParams(temperature=1.0, seed=3, grammar="start: /[xyz]{6}/"))
        driver.prefill(ruled)
        driver.decode([ruled, *seqs], 6)
        found.append([seq.tokens for seq in (*seqs, ruled)])
        driver.close()
    assert found[1] == found[0]


def test_flashinfer_refuses_rows_of_several_queries() -> None:
    """Planned from bounds above the real lengths it is wrong for them."""
    pytest.importorskip("flashinfer")
    device, shape = torch.device("cuda"), AttentionShape(32, 8, 128, 128**-0.5, True)
    cache = PagedKV(*torch.zeros(2, 9, 16, 8, 128, dtype=torch.bfloat16, device=device))
    rows = PagedRows(
        *(torch.zeros(size, dtype=torch.int32, device=device) for size in ((3,), (2,), (2, 4), (6,))),
        max_q_len=3, max_kv_len=64,
    )  # fmt: skip
    backend = FlashInferPagedBackend(device, torch.bfloat16, num_plans=3)
    with pytest.raises(ValueError, match="rows of 3 queries"):
        backend.static(rows, [cache], shape)


def test_flashinfer_planned_from_bounds() -> None:
    """One graph, other lengths at each replay, bounds above them, rows without keys: the same as our own kernel."""
    pytest.importorskip("flashinfer")
    device, shape, num_rows, max_blocks = torch.device("cuda"), AttentionShape(32, 8, 128, 128**-0.5, True), 8, 40
    torch.manual_seed(0)
    caches = [
        [PagedKV(*torch.randn(2, num_rows * max_blocks + 1, 16, 8, 128, device=device).bfloat16())] for _ in range(2)
    ]
    table = torch.randperm(num_rows * max_blocks, device=device).int().view(num_rows, max_blocks)
    lengths = torch.zeros(num_rows, dtype=torch.int32, device=device)
    places = torch.full((num_rows,), num_rows * max_blocks * 16, dtype=torch.int32, device=device)
    offsets = torch.arange(num_rows + 1, dtype=torch.int32, device=device)
    rows = PagedRows(offsets, lengths, table, places, max_q_len=1, max_kv_len=max_blocks * 16)
    packed = torch.randn(num_rows, 48, 128, device=device).bfloat16()
    parts = packed.split((32, 8, 8), dim=1)
    for mine, other in zip(*caches, strict=True):
        mine.k.copy_(other.k)
        mine.v.copy_(other.v)
    ours = TritonPagedBackend().static(rows, caches[0], shape)
    theirs = FlashInferPagedBackend(device, torch.bfloat16, num_plans=3).static(rows, caches[1], shape)
    theirs.prepare([0] + [num_rows] * num_rows)
    theirs(*parts, shape)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = theirs(*parts, shape)
    for step, slack in enumerate((0, 5, 100, 0, 300)):
        kv = torch.randint(1, 300, (num_rows,), generator=torch.Generator().manual_seed(step))
        kv[-2:] = 0 if step % 2 else 1
        lengths.copy_(kv)
        theirs.prepare([0, *(kv + slack).cumsum(0).tolist()])
        graph.replay()
        expected = ours(*parts, shape)
        present = (kv > 0).to(device)
        torch.testing.assert_close(out[present], expected[present], atol=2e-2, rtol=2e-2)
