"""The fastest backend, measured on an H200: (head_dim, heads, kv heads, rows, queries of a row, backend).

From bench/results/2026-11-30_h200_decode.md, contexts of 512 and 2048 keys: FlashInfer's tensor-core decode, which is
planned on the host before each step, has to win by more than 5 %. With one query it does nowhere. For rows of several
queries it is never chosen: planned from bounds above the real lengths it gives wrong results there.
"""

TABLE: tuple[tuple[int, int, int, int, int, str], ...] = (
    (128, 32, 8, 1, 1, "triton"),
    (128, 32, 8, 8, 1, "triton"),
    (128, 32, 8, 32, 1, "triton"),
    (128, 32, 8, 128, 1, "triton"),
    (128, 8, 1, 1, 1, "triton"),
    (128, 8, 1, 8, 1, "triton"),
    (128, 8, 1, 32, 1, "triton"),
    (128, 8, 1, 128, 1, "triton"),
)
