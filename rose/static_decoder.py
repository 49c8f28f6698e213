"""A language model's decode steps over static device buffers: all of one that lies between its two copies.

Only launches, sizes from the key alone: so it can be captured. Runs on any device that Triton's kernels run on. What
the rows' sampling needs is part of the key, so that a step of greedy rows does greedy work only.
"""

from typing import NamedTuple, cast

import torch
from torch import Tensor, nn

from rose.attention.interface import Attend
from rose.attention.paged import PagedRows
from rose.decode_buffers import DecodeBuffers
from rose.decoder import LanguageModel
from rose.distributed.agreement import Agreement
from rose.generate_outputs import Decision
from rose.graph_policy import GraphKey
from rose.kernels.slot_rows import advance_rows, mark_non_finite, slot_rows
from rose.residents import Residents
from rose.sampling.params import Needs
from rose.sampling.sampler import Sampled


class DecodeBatch(NamedTuple):
    """What the model reads."""

    input_ids: Tensor  # int32 [T]
    positions: Tensor  # int32 [T]


_FORWARD = "forward"  # in a key: its steps stop at the logits


def decode_key(num_rows: int, attention: str, needs: Needs | None) -> GraphKey:
    """Of decode steps with so many rows, padded ones included; `needs` None: of their forward pass alone."""
    names = (_FORWARD,) if needs is None else (name for name, needed in needs._asdict().items() if needed)
    return GraphKey("decode", num_rows, num_rows, 1, "+".join((attention, *names)))


def attention_of(key: GraphKey) -> str:
    return key.backend.partition("+")[0]


def needs_of(key: GraphKey) -> Needs | None:
    """Raises TypeError for a need that is not known."""
    names = key.backend.split("+")[1:]
    return None if names == [_FORWARD] else Needs(**dict.fromkeys(names, True))


class StaticDecoder:
    """Steps of sequences that all are past their prompts."""

    def __init__(
        self, model: LanguageModel, residents: Residents, buffers: DecodeBuffers, agreement: Agreement
    ) -> None:
        self._model = model
        self._agreement = agreement
        self._residents = residents
        self._buffers = buffers
        self._logits: dict[GraphKey, Tensor] = {}  # float32 [R, V], of steps that stop there

    def paged_rows(self, key: GraphKey) -> PagedRows:
        """Where attention reads what a step of `key` is made of; filled by `forward`."""
        rows = self._buffers.rows(key)
        max_kv_len = self._residents.slots.ids.shape[1]
        return PagedRows(
            rows.cu_seqlens_q, rows.kv_lengths, rows.block_table, rows.slot_mapping, max_q_len=key.q,
            max_kv_len=max_kv_len,
        )  # fmt: skip

    @torch.inference_mode()
    def forward(self, key: GraphKey, attend: Attend) -> None:
        """Enqueues a step: from the buffers' table and the slots to the slots and the buffers' outputs."""
        rows = self._buffers.rows(key)
        slot_rows(self._residents.slots, rows)
        hidden = cast(nn.Module, self._model)(DecodeBatch(rows.input_ids, rows.positions), attend)
        logits = self._model.logits(hidden)
        mark_non_finite(logits, rows.status)
        needs = needs_of(key)
        if needs is None:
            self._logits[key] = logits  # of a graph: where every replay leaves them
        else:
            self._finish(key, logits, needs, None)

    @torch.inference_mode()
    def finish(self, key: GraphKey, needs: Needs, bitmask: Tensor | None) -> None:
        """The rest of the last step of `key`, which has stopped at its logits; bitmask int32 [R, ceil(V / 32)], the
        leader's."""
        self._finish(key, self._logits[key], needs, bitmask)

    def _finish(self, key: GraphKey, logits: Tensor, needs: Needs, bitmask: Tensor | None) -> None:
        buffers, rows = self._buffers, self._buffers.rows(key)
        new, outputs = buffers.ones[: key.num_seqs], buffers.row_outputs(key.num_seqs)

        def decide() -> Decision:
            draws = self._residents.sampler.sample(
                logits, rows.slots, rows.num_known, rows.num_output, needs=needs, bitmask=bitmask
            )
            if needs.logprobs:
                self._write_logprobs(draws)
            return Decision(rows.status, draws.tokens[:, None], new, buffers.zeros[: key.num_seqs], None)

        decision = self._agreement.decision(decide, num_rows=key.num_seqs, width=1)
        advance_rows(self._residents.slots, rows, decision.tokens, new, outputs)

    def _write_logprobs(self, draws: Sampled) -> None:
        buffers = self._buffers
        assert draws.logprobs is not None
        assert draws.top_ids is not None
        assert draws.top_logprobs is not None
        num_rows, num_top = draws.top_ids.shape  # a small vocabulary has fewer than a slot has room for
        buffers.logprobs[:num_rows, 0] = draws.logprobs
        buffers.top_ids[:num_rows, 0, :num_top] = draws.top_ids
        buffers.top_logprobs[:num_rows, 0, :num_top] = draws.top_logprobs
