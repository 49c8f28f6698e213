"""The fastest backend, measured: (head_dim, heads, kv heads, rows, queries of a row, backend). Nothing measured yet."""

TABLE: tuple[tuple[int, int, int, int, int, str], ...] = ()
