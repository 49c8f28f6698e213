"""The GPU's way through a step, in Triton's interpreter where there is no GPU, against the CPU's way."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers as hf

from ipc.step import STATUS_BAD_TOKEN, STATUS_NON_FINITE, STATUS_OK
from rose.config import RankConfig
from rose.cuda_encoder import CudaEncoder
from rose.encoder import load_encoder
from rose.model_runner import Loaded
from rose.runner import OutOfMemory
from rose.shape_list import read_shapes
from tests.rose.driving import Driver, ragged_ids
from tests.rose.host_stream import HostStream
from tests.rose.tiny_models import add_modules, bert_config, qwen3_config, save, xlm_roberta_config

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
LENGTHS = (1, 7, 31, 2, 15)  # 64 tokens with padding: the interpreter is slow


def static_driver(directory: Path, **settings: Any) -> tuple[Driver, CudaEncoder, HostStream]:
    """A Driver whose runner goes the GPU's way, in float16."""
    sizes = {"max_num_batched_tokens": 128, "max_num_seqs": 6}
    driver = Driver(directory, **(settings | sizes))
    runner, loader = driver.runner, driver.runner.loader
    config = RankConfig(**({"capture": "lazy", "max_graph_tokens": 4096} | settings | sizes))
    parts = load_encoder(directory, loader._model_config, loader._task, DEVICE, torch.float16)
    stream = HostStream()
    encoder = CudaEncoder(
        parts,
        loader._model_config,
        driver.facts,
        config,
        device=DEVICE,
        dtype=torch.float16,
        stream=stream,
        shapes=directory / "shapes.json",
    )
    runner.close()
    runner.use(Loaded(encoder, encoder.encode))
    return driver, encoder, stream


def worst_cosine(rows: np.ndarray, expected: np.ndarray) -> float:
    norms = np.linalg.norm(rows, axis=1) * np.linalg.norm(expected, axis=1)
    return float(((rows * expected).sum(1) / norms).min())


def both_ways(directory: Path, sequences: Sequence[Sequence[int]], **columns: Any) -> None:
    """The same vectors in one batch and in the opposite order: first sight, capture, replay."""
    plain = Driver(directory)
    expected = plain.vectors(sequences, **columns)
    plain.close()
    driver, encoder, _ = static_driver(directory)
    for _ in range(2):
        assert worst_cosine(driver.vectors(sequences, **columns), expected) > 0.9995
    for name, values in columns.items():
        columns[name] = values[::-1] if isinstance(values, list) else values
    assert worst_cosine(driver.vectors(sequences[::-1], **columns), expected[::-1]) > 0.9995
    assert encoder.figures()["graph_replays_total"] == 2


def test_bert(tmp_path: Path) -> None:
    save(hf.BertModel, bert_config(hidden_size=64), tmp_path)
    both_ways(tmp_path, ragged_ids(128, LENGTHS), type_starts=[-1, 3, 20, 0, -1])


def test_xlm_roberta(tmp_path: Path) -> None:
    save(hf.XLMRobertaModel, xlm_roberta_config(hidden_size=64), tmp_path)
    add_modules(tmp_path, "Transformer", "Pooling", "Normalize", pooling={"pooling_mode": "cls"})
    both_ways(tmp_path, ragged_ids(128, LENGTHS))


def test_qwen3_causal_last_token(tmp_path: Path) -> None:
    save(hf.Qwen3Model, qwen3_config(), tmp_path)
    add_modules(tmp_path, "Transformer", "Pooling", "Normalize", pooling={"pooling_mode_lasttoken": True})
    both_ways(tmp_path, ragged_ids(128, LENGTHS))


def test_qwen3_bidirectional_mean(tmp_path: Path) -> None:
    save(hf.Qwen3Model, qwen3_config(use_bidirectional_attention=True, attention_bias=True), tmp_path)
    both_ways(tmp_path, ragged_ids(128, LENGTHS))


def test_scores(tmp_path: Path) -> None:
    save(hf.Qwen3ForCausalLM, qwen3_config(tie_word_embeddings=True), tmp_path)
    (tmp_path / "tokenizer.json").write_text('{"model": {"vocab": {"yes": 17, "no": 42}}}')
    sequences = ragged_ids(128, LENGTHS)
    expected = Driver(tmp_path, task="score").vectors(sequences)
    driver, _, _ = static_driver(tmp_path, task="score")
    np.testing.assert_allclose(driver.vectors(sequences), expected, atol=5e-3)


def test_classification_head_reads_first_tokens_of_a_full_bucket(tmp_path: Path) -> None:
    save(hf.BertForSequenceClassification, bert_config(hidden_size=64, num_labels=3), tmp_path)
    sequences = ragged_ids(128, (30, 30, 4))  # 64 tokens: the empty fourth sequence begins behind the last token
    expected = Driver(tmp_path).vectors(sequences)
    driver, _, _ = static_driver(tmp_path)
    np.testing.assert_allclose(driver.vectors(sequences), expected, atol=5e-3)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("tiny")
    save(hf.Qwen3Model, qwen3_config(num_hidden_layers=1), directory)
    return directory


def test_every_kind_of_row_in_one_step(tiny: Path) -> None:
    columns = {
        "pooling": [0, 1, 2, 1, 2],
        "dtype": [0, 1, 2, 0, 1],
        "dimensions": [48, 40, 48, 20, 12],
        "normalize": [1, 0, 0, 1, 1],
        "offsets": [0, 192, 300, 340, 420],
    }
    sequences = ragged_ids(128, LENGTHS)
    plain, (driver, _, stream) = Driver(tiny), static_driver(tiny)
    expected, arrays = plain.run(sequences, **columns), driver.run(sequences, **columns)
    assert stream.num_copies == [1, 1]
    for first, last in ((0, 192), (340, 420)):
        got, want = (a["values"][first:last].view(np.float32) for a in (arrays, expected))
        np.testing.assert_allclose(got, want, atol=5e-3)
    for first, last in ((192, 232), (420, 432)):
        got, want = (a["values"][first:last].view(np.int8).astype(int) for a in (arrays, expected))
        assert np.abs(got - want).max() <= 2
    got, want = (np.unpackbits(a["values"][300:306]) for a in (arrays, expected))
    assert (got != want).mean() <= 0.05


def test_other_splits_under_the_same_key(tiny: Path) -> None:
    plain, (driver, encoder, stream) = Driver(tiny), static_driver(tiny)
    splits = [(20, 20, 9), (1, 40, 9, 14), (62, 1, 1), (3, 3, 3)]
    for seed, lengths in enumerate(splits):
        sequences = ragged_ids(128, lengths, seed)
        assert worst_cosine(driver.vectors(sequences), plain.vectors(sequences)) > 0.9995
    assert stream.num_captures == 1
    assert encoder.figures()["graph_replays_total"] == 3


def test_repeats_are_bit_identical(tiny: Path) -> None:
    driver, _, _ = static_driver(tiny)
    sequences = ragged_ids(128, LENGTHS)
    first = driver.vectors(sequences)
    for _ in range(2):
        driver.vectors(ragged_ids(128, (60,), seed=9))  # something else in the buffers
        np.testing.assert_array_equal(driver.vectors(sequences), first)


def test_a_bad_token_fails_its_row_alone(tiny: Path) -> None:
    driver, _, _ = static_driver(tiny)
    sequences = ragged_ids(128, (9, 5, 20))
    expected = driver.vectors(sequences)
    for bad in (128, -1, 2**31 - 1):
        arrays = driver.run([sequences[0], [4, bad, 9, 9, 9], sequences[2]])
        assert arrays["status"][:3].tolist() == [STATUS_OK, STATUS_BAD_TOKEN, STATUS_OK]
        rows = driver.read(arrays, 3)
        np.testing.assert_array_equal(rows[[0, 2]], expected[[0, 2]])
        assert (rows[1] == 0).all()
    np.testing.assert_array_equal(driver.vectors(sequences), expected)  # the slot's status column is clean again


def test_a_row_that_is_not_finite_fails_alone(tmp_path: Path) -> None:
    model = save(hf.Qwen3Model, qwen3_config(num_hidden_layers=1), tmp_path)
    with torch.no_grad():
        model.embed_tokens.weight[77] = float("nan")
    model.save_pretrained(tmp_path)
    driver, _, _ = static_driver(tmp_path)
    arrays = driver.run([[5, 6], [5, 77, 6], [9]])
    assert arrays["status"][:3].tolist() == [STATUS_OK, STATUS_NON_FINITE, STATUS_OK]
    rows = driver.read(arrays, 3)
    assert np.isfinite(rows).all()
    assert (rows[1] == 0).all()


def test_shapes_are_listed_and_captured_by_idle_steps_of_the_next_start(tiny: Path) -> None:
    (tiny / "shapes.json").unlink(missing_ok=True)
    driver, _, _ = static_driver(tiny)
    for lengths in ((9,), (9,), (8, 9), (8, 9), (5, 5, 5)):
        driver.vectors(ragged_ids(128, lengths))
    listed = read_shapes(tiny / "shapes.json")
    assert [(key.num_seqs, key.num_tokens) for key in listed] == [(2, 64), (1, 64)]
    driver, encoder, stream = static_driver(tiny, capture="list")
    assert encoder.figures()["graphs_waiting"] == 2
    for _ in range(3):
        assert encoder.idle().ready()
    assert stream.num_captures == 2
    before = encoder.figures()["eager_steps_total"]
    driver.vectors(ragged_ids(128, (64,)))
    assert (encoder.figures()["graph_replays_total"], encoder.figures()["eager_steps_total"]) == (1, before)


def test_eager_capture_makes_every_graph_before_the_first_step(tiny: Path) -> None:
    (tiny / "shapes.json").unlink(missing_ok=True)
    driver, encoder, stream = static_driver(tiny, capture="eager", max_graph_tokens=64)
    assert stream.num_captures == 4  # 1, 2, 4 and 6 sequences
    driver.vectors(ragged_ids(128, (3, 60)))
    assert encoder.figures()["graph_replays_total"] == 1


def test_a_capture_without_memory_runs_eagerly(tiny: Path) -> None:
    driver, encoder, stream = static_driver(tiny)
    sequences = ragged_ids(128, (9, 9))
    expected = driver.vectors(sequences)
    stream.out_of_memory = True
    np.testing.assert_array_equal(driver.vectors(sequences), expected)
    assert encoder.figures()["graphs"] == 0
    np.testing.assert_array_equal(driver.vectors(sequences), expected)
    assert encoder.figures()["graphs"] == 1


def test_a_step_without_memory_fails_small(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    driver, encoder, _ = static_driver(tiny)

    def no_room(*_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(encoder.graphs, "_forward", no_room)
    with pytest.raises(OutOfMemory):
        driver.run(ragged_ids(128, (9, 9)))


def test_an_attention_backend_that_cannot_run_is_refused(tiny: Path) -> None:
    with pytest.raises(ValueError, match="fa3"):
        static_driver(tiny, attention="fa3")
