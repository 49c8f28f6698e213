"""Small BERT encoders under many short requests, and what bf16 and int8 do to retrieval.

    python -m bench.small_models --minilm DIR [--hardware h200]

MiniLM with its real weights and bge-small's shape with random ones: 32 tokens a request, 1, 32 and 256 in flight.
Retrieval: a sentence finds the passage it was taken out of; recall@10 against sentence-transformers in float32.
"""

import argparse
import base64
import json
import re
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import save_file

from bench import report
from bench.client import Address, Connection
from bench.load import LoadError, LoadSpec, percentile, run_load
from bench.peers import HttpSetup
from bench.peers.bouquet import Bouquet
from bench.report import Report, Row
from bench.servers import ServerFailed, running
from bench.stack import end_in_order_when_told
from bench.tables import ask
from bench.token_inputs import TokenInputs, read_passages
from bench.workloads import load_tokenizer

PORT = 8380
LENGTH = 32
LEVELS = ((1, 1, 400), (32, 4, 2000), (256, 4, 4000))  # in flight, client processes, requests of each
MINILM, BGE = "minilm", "bge-small"
BGE_SIZES = {"layers": 12, "hidden": 384, "intermediate": 1536, "heads": 12, "positions": 512, "vocabulary": 30_522}
NUM_DOCUMENTS = 1000
TOP = 10


def write_bge_shape(target: Path, minilm: Path) -> Path:
    """A random BERT in bge-small's shape, first token, normalised; MiniLM's vocabulary, which is the same."""
    target.mkdir(parents=True, exist_ok=True)
    generator = torch.Generator().manual_seed(1)
    hidden, inner = BGE_SIZES["hidden"], BGE_SIZES["intermediate"]

    def normal(*shape: int) -> torch.Tensor:
        return torch.empty(shape).normal_(0, 0.04, generator=generator).bfloat16()

    def norm(name: str) -> dict[str, torch.Tensor]:
        return {f"{name}.weight": normal(hidden) + 1, f"{name}.bias": normal(hidden)}

    def linear(name: str, rows: int, columns: int) -> dict[str, torch.Tensor]:
        return {f"{name}.weight": normal(rows, columns), f"{name}.bias": normal(rows)}

    tables = (("word", BGE_SIZES["vocabulary"]), ("position", BGE_SIZES["positions"]), ("token_type", 2))
    weights = {f"embeddings.{name}_embeddings.weight": normal(rows, hidden) for name, rows in tables}
    weights |= norm("embeddings.LayerNorm")
    for index in range(BGE_SIZES["layers"]):
        layer = f"encoder.layer.{index}."
        for name in ("query", "key", "value"):
            weights |= linear(f"{layer}attention.self.{name}", hidden, hidden)
        weights |= linear(f"{layer}attention.output.dense", hidden, hidden)
        weights |= norm(f"{layer}attention.output.LayerNorm")
        weights |= linear(f"{layer}intermediate.dense", inner, hidden)
        weights |= linear(f"{layer}output.dense", hidden, inner) | norm(f"{layer}output.LayerNorm")
    save_file(weights, str(target / "model.safetensors"), metadata={"format": "pt"})
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (target / name).write_bytes((minilm / name).read_bytes())
    config = json.loads((minilm / "config.json").read_text()) | {"num_hidden_layers": BGE_SIZES["layers"]}
    (target / "config.json").write_text(json.dumps(config))
    kinds = ("Transformer", "Pooling", "Normalize")
    modules = [
        {"idx": i, "name": str(i), "path": f"{i}_{kind}" if i else "", "type": f"sentence_transformers.models.{kind}"}
        for i, kind in enumerate(kinds)
    ]
    (target / "modules.json").write_text(json.dumps(modules))
    (target / "1_Pooling").mkdir(exist_ok=True)
    (target / "1_Pooling" / "config.json").write_text(json.dumps({"pooling_mode_cls_token": True}))
    return target


def measure_levels(into: Report, url: str, model: str, inputs: TokenInputs, quick: bool) -> None:
    """embeddings/s and latencies at each number of requests in flight."""
    for in_flight, processes, full_count in LEVELS:
        count = 20 if quick else full_count
        specs = []
        for _ in range(processes):
            ids = inputs.take_ids(LENGTH, count)
            bodies = [msgspec.json.encode({"model": model, "input": one, "encoding_format": "base64"}) for one in ids]
            specs.append(
                LoadSpec(
                    url=url,
                    path="/v1/embeddings",
                    bodies=[body.decode() for body in bodies],
                    concurrency=max(1, in_flight // processes),
                    num_requests=count,
                    num_warmup=count // 2,
                    max_seconds=10.0,
                )
            )
        results = run_load(specs)
        if errors := [result.errors for result in results if result.errors]:
            raise LoadError(f"{model}: requests failed: {errors}")
        latencies = [value for result in results for value in result.latencies_ms]
        per_s = len(latencies) / max(result.seconds for result in results)
        case = f"{model}, 1 x {LENGTH}, {in_flight} in flight"
        into.rows.append(Row("small", case, "embeddings_per_s", round(per_s, 1)))
        for metric, percent in (("p50_ms", 50.0), ("p99_ms", 99.0)):
            into.rows.append(Row("small", case, metric, round(percentile(latencies, percent), 3)))


def retrieval_set(passages: list[str], count: int) -> tuple[list[str], list[str]]:
    """(queries, documents): a middle sentence, and the passage without it."""
    queries, documents = [], []
    for passage in passages:
        sentences = re.split(r"(?<=[.!?])\s+", " ".join(passage.split()))
        middle = len(sentences) // 2
        if len(sentences) >= 4 and 6 <= len(sentences[middle].split()) <= 40:
            queries.append(sentences[middle])
            documents.append(" ".join(sentences[:middle] + sentences[middle + 1 :]))
        if len(queries) == count:
            break
    return queries, documents


def served(url: str, texts: list[str], encoding: str) -> NDArray[np.float32]:
    """Vectors over HTTP, float32 whatever they came as."""
    dtype = "<i1" if encoding == "base64_int8" else "<f4"
    rows: list[Any] = []
    with Connection(Address.of(url)) as connection:
        for at in range(0, len(texts), 64):
            body = {"model": MINILM, "input": texts[at : at + 64], "encoding_format": encoding, "truncate": True}
            rows += ask(connection, url, "/v1/embeddings", msgspec.json.encode(body))["data"]
    return np.stack([np.frombuffer(base64.b64decode(row["embedding"]), dtype) for row in rows]).astype(np.float32)


def ranking(queries: NDArray[np.float32], documents: NDArray[np.float32]) -> NDArray[np.int64]:
    """The TOP documents of each query, best first."""
    unit = [m / np.linalg.norm(m, axis=1, keepdims=True) for m in (queries, documents)]
    return np.argsort(-(unit[0] @ unit[1].T), axis=1, kind="stable")[:, :TOP]


def measure_retrieval(into: Report, url: str, minilm: Path, passages: list[str], count: int) -> None:
    """recall@10 of float32, bf16 and int8, and how much of float32's ten each finds."""
    from sentence_transformers import SentenceTransformer

    queries, documents = retrieval_set(passages, count)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    reference = SentenceTransformer(str(minilm), device=device, model_kwargs={"torch_dtype": torch.float32})
    exact = [np.asarray(reference.encode(t, batch_size=64, show_progress_bar=False)) for t in (queries, documents)]
    right = ranking(*exact)
    truth = np.arange(len(queries))[:, None]
    into.rows.append(Row("retrieval", "sentence-transformers, float32", "recall_at_10", _share(right == truth)))
    for name, encoding in (("served", "base64"), ("served, int8", "base64_int8")):
        vectors = [served(url, t, encoding) for t in (queries, documents)]
        found = ranking(*vectors)
        overlap = np.mean([len(set(a) & set(b)) / TOP for a, b in zip(found.tolist(), right.tolist(), strict=True)])
        into.rows.append(Row("retrieval", name, "recall_at_10", _share(found == truth)))
        into.rows.append(Row("retrieval", name, "overlap_with_float32", round(float(overlap), 4)))
        cosines = (vectors[1] * exact[1]).sum(1) / np.linalg.norm(vectors[1], axis=1) / np.linalg.norm(exact[1], axis=1)
        into.rows.append(Row("retrieval", name, "min_cosine_to_float32", round(float(cosines.min()), 6)))
    into.notes.append(
        f"retrieval: {len(queries)} sentences, each searched among {len(documents)} passages without them"
    )


def _share(hits: NDArray[np.bool_]) -> float:
    return round(float(hits.any(1).mean()), 4)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.small_models", description=__doc__)
    parser.add_argument("--minilm", type=Path, required=True, help="a directory with the model's files")
    parser.add_argument("--hardware", default="cpu")
    parser.add_argument("--device", default="auto", help="of our ranks")
    parser.add_argument("--passages", type=Path, help="JSON lines with `text`; default: the demo's")
    parser.add_argument("--results", type=Path, default=report.RESULTS)
    parser.add_argument("--commit", help="what is measured, where there is no repository to ask")
    parser.add_argument("--quick", action="store_true")
    args = parser.parse_args()
    end_in_order_when_told()
    into = report.new_report("small-models" + ("-quick" if args.quick else ""), args.hardware)
    into.commit = args.commit or into.commit
    passages = read_passages(args.passages)
    with ExitStack() as stack:
        state = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="bqs-")))
        models = {MINILM: args.minilm.absolute(), BGE: write_bge_shape(state / BGE, args.minilm)}
        peer = Bouquet("small", PORT, models, max_model_len=256)
        try:
            stack.enter_context(running(peer.servers(HttpSetup(state, state, None, args.device)), state, 120.0))
            url = peer.endpoint().embed_url
            inputs = TokenInputs(load_tokenizer(args.minilm), passages)
            for model in models:
                measure_levels(into, url, model, inputs, args.quick)
            measure_retrieval(into, url, args.minilm, passages, 50 if args.quick else NUM_DOCUMENTS)
        except (ServerFailed, LoadError) as error:
            sys.exit(f"bench: {error}")
    path = report.write(into, args.results)
    print("\n".join(report.table_lines(into.rows)))
    print(path)


if __name__ == "__main__":
    main()
