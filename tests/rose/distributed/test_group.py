"""Collectives of two processes over gloo, and of nobody."""

import pytest
import torch

from rose.distributed.group import ALONE, form_group, leaders, smallest
from tests.rose.distributed.ranks import Ranks


def test_collectives_of_two_processes(ranks: Ranks) -> None:
    ranks.group()
    values = [torch.arange(6.0).view(2, 3), torch.full((2, 3), 10.0)]
    for found in ranks.call("collective", "all_reduce", values):
        torch.testing.assert_close(found, values[0] + values[1])
    for found in ranks.call("collective", "all_gather", values):
        torch.testing.assert_close(found, torch.stack(values))
    for found in ranks.call("collective", "broadcast", values):
        torch.testing.assert_close(found, values[0])


def test_the_leaders_number_is_everybodys(ranks: Ranks) -> None:
    ranks.group()
    assert ranks.call("leaders", [3, 4]) == [3, 3]
    assert leaders(ALONE, 5, torch.device("cpu")) == 5


@pytest.mark.parametrize("name", ["all_reduce", "broadcast"])
def test_alone_nothing_is_copied(name: str) -> None:
    x = torch.ones(3)
    assert getattr(ALONE, name)(x) is x


def test_a_group_of_one_needs_nobody() -> None:
    group = form_group(None, torch.device("cpu"))
    assert (group.rank, group.size, group.leads) == (0, 1, True)
    assert group.all_gather(torch.ones(2)).shape == (1, 2)
    assert smallest(group, 7, torch.device("cpu")) == 7
