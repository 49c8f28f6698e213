"""A cross-encoder through real processes: text pairs, token types and scores equal transformers' own."""

from collections.abc import Iterator
from pathlib import Path

import aiohttp
import numpy as np
import pytest
import torch
from transformers import AutoTokenizer, BertConfig, BertForSequenceClassification

from tests.integration.stack import Stack

MODEL = "tiny-reranker"
QUERY = "which flowers come in spring?"
DOCUMENTS = ["tulips and daffodils", "a text spelling [SEP] and [CLS]", "東京は日本の首都です。", "petals fall " * 400]


@pytest.fixture(scope="module")
def scores(tmp_path_factory: pytest.TempPathFactory, minilm_dir: Path) -> tuple[Path, list[float]]:
    """A random model's directory, and what transformers gives for QUERY with each of DOCUMENTS."""
    path = tmp_path_factory.mktemp("cross")
    torch.manual_seed(1)
    config = BertConfig(hidden_size=64, num_hidden_layers=2, num_attention_heads=2, intermediate_size=128, num_labels=1)
    model = BertForSequenceClassification(config).eval()
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() == 2:
                weight.normal_(std=0.3)  # far enough apart for scores that differ
    model.save_pretrained(path)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (path / name).write_bytes((minilm_dir / name).read_bytes())
    tokenizer = AutoTokenizer.from_pretrained(str(path), split_special_tokens=True)
    found = []
    for document in DOCUMENTS:
        inputs = tokenizer(QUERY, document, truncation=True, max_length=512, return_tensors="pt")
        with torch.inference_mode():
            found.append(float(torch.sigmoid(model(**inputs).logits[0, 0])))
    return path, found


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory, scores: tuple[Path, list[float]]) -> Iterator[Stack]:
    with Stack(tmp_path_factory.mktemp("bq"), {MODEL: scores[0]}) as made:
        yield made


async def test_rerank_and_score_equal_transformers(stack: Stack, scores: tuple[Path, list[float]]) -> None:
    expected = np.array(scores[1])
    assert expected.max() - expected.min() > 0.01
    rerank = {"model": MODEL, "query": QUERY, "documents": DOCUMENTS}
    score = {"model": MODEL, "text_1": QUERY, "text_2": DOCUMENTS}
    async with aiohttp.ClientSession() as session:
        async with session.post(f"{stack.url}/v1/rerank", json=rerank) as response:
            ranked = await response.json()
        async with session.post(f"{stack.url}/v1/score", json=score) as response:
            scored = await response.json()
        async with session.post(f"{stack.url}/v1/embeddings", json={"model": MODEL, "input": "a"}) as response:
            assert response.status == 400
    assert ranked["method"] == scored["method"] == "cross_encoder"
    assert [result["index"] for result in ranked["results"]] == np.argsort(-expected).tolist()
    np.testing.assert_allclose(
        [result["relevance_score"] for result in ranked["results"]], np.sort(expected)[::-1], atol=1e-5
    )
    np.testing.assert_allclose([item["score"] for item in scored["data"]], expected, atol=1e-5)
