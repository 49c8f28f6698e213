"""Which backend serves decode rows: the nearest point that was measured, of the nearest heads."""

import pytest
import torch

from rose.attention.interface import AttentionShape
from rose.attention.paged_choice import PagedBackends, PagedChoice, choose

TABLE = [
    PagedChoice(128, 32, 8, 1, 1, "fa2"),
    PagedChoice(128, 32, 8, 32, 1, "triton"),
    PagedChoice(128, 32, 8, 32, 5, "fa2"),
    PagedChoice(128, 8, 1, 32, 1, "fa2"),
    PagedChoice(64, 9, 3, 1, 1, "triton"),
]
BOTH = ("triton", "fa2")


def shape(num_heads: int, num_kv_heads: int, head_dim: int) -> AttentionShape:
    return AttentionShape(num_heads, num_kv_heads, head_dim, head_dim**-0.5, True)


def test_the_nearest_measured_point_decides() -> None:
    llama = shape(32, 8, 128)
    assert choose(llama, 2, 1, available=BOTH, table=TABLE) == "fa2"
    assert choose(llama, 64, 1, available=BOTH, table=TABLE) == "triton"
    assert choose(llama, 64, 4, available=BOTH, table=TABLE) == "fa2"
    assert choose(shape(16, 2, 128), 32, 1, available=BOTH, table=TABLE) == "fa2"
    assert choose(shape(12, 4, 64), 100, 5, available=BOTH, table=TABLE) == "triton"
    assert choose(llama, 2, 1, available=("triton",), table=TABLE) == "triton"
    assert choose(llama, 2, 1, available=BOTH, table=[]) == "triton"


def test_one_query_a_row_is_never_worth_a_plan() -> None:
    for heads in (shape(32, 8, 128), shape(8, 1, 128), shape(9, 3, 64)):
        assert {choose(heads, rows, 1, available=("fa2", "triton")) for rows in (1, 7, 64, 256)} == {"triton"}


def test_rows_of_several_queries_are_never_planned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rose.attention.paged_choice.available", lambda *_: BOTH)
    backends = PagedBackends(shape(32, 8, 128), torch.float16, torch.device("cpu"), override="fa2", num_plans=4)
    assert (backends.choose(7, 1), backends.choose(7, 4)) == ("fa2", "triton")


def test_an_override_wins_or_is_refused() -> None:
    device = torch.device("cpu")
    backends = PagedBackends(shape(4, 2, 64), torch.float16, device, override="triton", num_plans=4)
    assert backends.choose(7, 1) == "triton"
    with pytest.raises(ValueError, match="use auto or triton"):
        PagedBackends(shape(4, 2, 64), torch.float16, device, override="fa2", num_plans=4)
