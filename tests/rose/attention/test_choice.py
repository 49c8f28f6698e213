"""The measured choice of attention backends."""

import pytest
import torch

from rose.attention import backends
from rose.attention.choice import Choice, choose
from rose.attention.choice_table import TABLE
from rose.attention.interface import AttentionShape

ROWS = [
    Choice(64, False, 1, 128, "triton"),
    Choice(64, False, 1, 4096, "fa3"),
    Choice(64, False, 32, 4096, "fa2"),
    Choice(64, True, 1, 128, "sdpa"),
    Choice(32, False, 1, 128, "triton"),
]


def shape(head_dim: int = 64, causal: bool = False) -> AttentionShape:
    return AttentionShape(8, 8, head_dim, head_dim**-0.5, causal)


def test_nearest_point_wins() -> None:
    assert choose(shape(), 1, 100, table=ROWS) == "triton"
    assert choose(shape(), 1, 3000, table=ROWS) == "fa3"
    assert choose(shape(), 20, 4000, table=ROWS) == "fa2"
    assert choose(shape(causal=True), 1, 4096, table=ROWS) == "sdpa"
    assert choose(shape(32), 32, 4096, table=ROWS) == "triton"


def test_unmeasured_head_dim_takes_the_nearest() -> None:
    assert choose(shape(80), 1, 4096, table=ROWS) == "fa3"


def test_only_what_is_available() -> None:
    assert choose(shape(), 1, 4096, table=ROWS, available=("sdpa", "triton")) == "triton"
    assert choose(shape(), 1, 4096, table=[], available=("sdpa",)) == "sdpa"


def test_override() -> None:
    assert choose(shape(), 1, 128, table=ROWS, override="fa2") == "fa2"
    assert choose(shape(), 1, 128, table=ROWS, override="auto") == "triton"
    with pytest.raises(ValueError, match="not available here: use auto or sdpa"):
        choose(shape(), 1, 128, override="fa3", available=("sdpa",))


def test_the_measured_table_is_well_formed() -> None:
    assert len({row[:4] for row in TABLE}) == len(TABLE)
    for head_dim, _, num_seqs, num_tokens, backend in TABLE:
        assert head_dim in (32, 64, 128)
        assert 1 <= num_seqs <= num_tokens
        assert backend in ("triton", "fa2", "fa3"), "flash4 is for those who name it"


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_many_sequences_may_have_any_backend(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype) -> None:
    """One that reads past an end runs contained: test_contained.py."""
    monkeypatch.setattr(backends, "available", lambda *_: ("triton", "fa3", "sdpa"))
    made = backends.Backends(shape(128, causal=True), dtype, torch.device("cpu"), override="auto", num_plans=2)
    assert made.choose(25, 12_800) == made.choose(1, 12_800) == "fa3"
