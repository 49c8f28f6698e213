"""The fastest attention backend, measured on an H200: (head_dim, causal, sequences, tokens, backend).

Written by `python -m bench.micro.attention`; do not edit by hand.
"""

TABLE: tuple[tuple[int, bool, int, int, str], ...] = (
    (128, False, 1, 32, "fa2"),
    (128, False, 1, 128, "fa2"),
    (128, False, 1, 512, "fa3"),
    (128, False, 5, 2560, "fa3"),
)
