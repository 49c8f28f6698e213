"""The result file of a decode step: what is compared with what, and what failed is left out."""

from typing import Any

from bench.micro.decode_results import report_of

VERSIONS = {
    "gpu": "NVIDIA H200",
    "torch": "2.11",
    "triton": "3.6",
    "python": "3.12",
    "command": "/somewhere/decode_step.py",
}


def attention(variant: str, us: float, error: float = 1e-3) -> dict[str, Any]:
    return {"case": "32:8 rows 1 q 1 context 512", "variant": variant, "us": us, "error_vs_fp32": error}


def test_rows() -> None:
    step = {"rows": 8, "sampling": "greedy", "queued_ms": 5.0, "gpu_ms": 4.9, "peer_ms": 5.12, "plain_ms": 5.06}
    prompts = [{"tokens": 512, "ms": 14.0, "peer_ms": 14.9}, {"tokens": 1024, "ms": 25.0, "peer_ms": None}]
    found = [attention("triton", 8.0), attention("flashinfer tc", 10.0), attention("triton 4/64/64/4/3", 6.0)]
    document = {
        **VERSIONS,
        "step": {"result": [step, {"rows": 32, "sampling": "greedy", "error": "not begun: out of time"}]},
        "prefill": {"result": prompts},
        "products": {"error": "RuntimeError"},
        "attention": {"result": [*found, attention("triton 1/64/64/4/3", 1.0, error=0.5)]},
    }
    report = report_of(document, commit="abc", date="2026-12-01", notes=[])
    assert [(row.table, row.ours, row.peer, row.peer_name) for row in report.rows] == [
        ("step, two in flight", 5.0, 5.12, "vllm"),
        ("step alone", 4.9, 5.06, "graph of library kernels"),
        ("prompt", 14.0, 14.9, "vllm"),
        ("prompt", 25.0, None, None),
        ("attention", 8.0, 10.0, "flashinfer tc"),
        ("attention", 8.0, 6.0, "triton 4/64/64/4/3"),
    ]
    assert "somewhere" not in report.command
    assert report.details["products"] == {"error": "RuntimeError"}
