"""What came of a generate step, and its way into the arrays of the step's slot (layout: ipc.step_ring).

On a GPU these are copies queued on the current stream.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from ipc.step import STATUS_OK
from ipc.step_ring import Arrays


class Logprobs(NamedTuple):
    """Log probabilities of tokens and of the most probable M in their places; shapes begin as those of the tokens."""

    tokens: Tensor  # float32 [...]
    top_ids: Tensor  # int32 [..., M]
    top: Tensor  # float32 [..., M]


class Decision(NamedTuple):
    """What R rows got, k + 1 tokens each at most."""

    status: Tensor  # int32 [R]
    tokens: Tensor  # int32 [R, k + 1], of which the first `num_new` count
    num_new: Tensor  # int32 [R]
    num_drafts: Tensor  # int32 [R], verified
    logprobs: Logprobs | None  # [R, k + 1]; None where no row asks for them


def write_outputs(decision: Decision, lengths: Tensor, arrays: Arrays) -> None:
    """lengths int32 [R]: tokens that each slot holds now. A row that failed gives none."""
    _put(arrays, "status", decision.status)
    _put(arrays, "num_tokens", decision.num_new * (decision.status == STATUS_OK))
    _put(arrays, "tokens", decision.tokens)
    _put(arrays, "num_drafts", decision.num_drafts)
    _put(arrays, "lengths", lengths)
    if decision.logprobs is not None:
        _put(arrays, "logprobs", decision.logprobs.tokens)
        _put(arrays, "top_ids", decision.logprobs.top_ids)
        _put(arrays, "top_logprobs", decision.logprobs.top)


def write_prompt_logprobs(begin: int, logprobs: Logprobs, arrays: Arrays) -> None:
    """Lines of prompt tokens [n], from line `begin` on."""
    _put(arrays, "prompt_logprobs", logprobs.tokens, begin)
    _put(arrays, "prompt_top_ids", logprobs.top_ids, begin)
    _put(arrays, "prompt_top_logprobs", logprobs.top, begin)


def _put(arrays: Arrays, name: str, values: Tensor, begin: int = 0) -> None:
    """To the first places of the array's other dimensions: a small vocabulary has fewer than M tokens."""
    target = torch.from_numpy(arrays[name][begin : begin + len(values)])
    target[tuple(slice(size) for size in values.shape)].copy_(values, non_blocking=True)
