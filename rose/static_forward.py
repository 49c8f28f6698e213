"""A language model's forward pass over static buffers, for small steps of any rows: prompts, alone or beside decoding.

Such a step takes the GPU less time than its launches one by one take the host. Stands where the model does: what comes
before the pass and after it is the caller's (rose.decoder). Tokens and rows are padded to the graph's shape: padding
tokens belong to no row and write to the dummy block, padding rows are empty.
"""

from collections.abc import Callable
from typing import cast

import torch
from torch import Tensor, nn

from rose.attention.interface import Attend
from rose.attention.paged import PagedRows
from rose.decoder import LanguageModel
from rose.graph_policy import SMALL_STEP, GraphKey, padded_seqs
from rose.slots import RowInputs, Slots
from rose.static_decoder import DecodeBatch

MAX_TOKENS = 1024  # of a step that is worth a graph, unless set: Llama 8B's launches take as long as 1300 tokens
_FINE_TOKENS = 512  # up to here in small steps, above in twice as large ones, so that there are not too many graphs


def small_tokens(num_tokens: int) -> int:
    """How many tokens a small step is padded to."""
    step = SMALL_STEP if num_tokens <= _FINE_TOKENS else 2 * SMALL_STEP
    return -(-num_tokens // step) * step


class StaticForward:
    """For steps of up to `max_tokens`. `hidden`: size and dtype of a token's hidden state. `run` takes a key through
    the graphs, which call `forward`."""

    def __init__(
        self,
        model: LanguageModel,
        slots: Slots,
        *,
        max_tokens: int,
        max_num_seqs: int,
        hidden: tuple[int, torch.dtype],
        attention: str,
        run: Callable[[GraphKey], None],
    ) -> None:
        self._model = model
        self._dummy_place = slots.dummy_block * slots.block_size
        self.max_tokens, self._max_num_seqs, self._attention, self._run = max_tokens, max_num_seqs, attention, run
        device, num_tokens = slots.ids.device, small_tokens(max_tokens)
        self._input_ids, self._positions, self._slot_mapping = torch.zeros(
            3, num_tokens, dtype=torch.int32, device=device
        )
        self._cu_seqlens = torch.zeros(max_num_seqs + 1, dtype=torch.int32, device=device)
        self._kv_lengths = torch.zeros(max_num_seqs, dtype=torch.int32, device=device)
        self._block_table = torch.zeros(max_num_seqs, slots.block_table.shape[1], dtype=torch.int32, device=device)
        self._max_kv_len = slots.ids.shape[1]
        self._hidden = torch.zeros(num_tokens, hidden[0], dtype=hidden[1], device=device)

    def __call__(self, batch: RowInputs, attend: Attend) -> Tensor:
        """Hidden states [T, H]; of a small step they last until the next one."""
        num_rows, num_tokens = len(batch.paged.kv_lengths), len(batch.input_ids)
        if num_tokens > self.max_tokens:
            return self._model(batch, attend)
        key = self.key(num_rows, num_tokens)
        self._fill(key, batch)
        self._run(key)
        return self._hidden[:num_tokens]

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [N, H] -> float32 [N, V]."""
        return self._model.logits(hidden)

    def key(self, num_rows: int, num_tokens: int) -> GraphKey:
        rows = padded_seqs(num_rows, self._max_num_seqs)
        return GraphKey("encode", rows, small_tokens(num_tokens), 0, self._attention)

    def fits(self, key: GraphKey) -> bool:
        """Whether steps can have this key."""
        return key.num_tokens <= len(self._input_ids) and key == self.key(key.num_seqs, key.num_tokens)

    def paged_rows(self, key: GraphKey) -> PagedRows:
        """Where attention reads what a step of `key` is made of."""
        return PagedRows(
            self._cu_seqlens[: key.num_seqs + 1],
            self._kv_lengths[: key.num_seqs],
            self._block_table[: key.num_seqs],
            self._slot_mapping[: key.num_tokens],
            max_q_len=key.num_tokens,
            max_kv_len=self._max_kv_len,
        )

    @torch.inference_mode()
    def forward(self, key: GraphKey, attend: Attend) -> None:
        """Enqueues the pass over the buffers."""
        batch = DecodeBatch(self._input_ids[: key.num_tokens], self._positions[: key.num_tokens])
        self._hidden[: key.num_tokens] = cast(nn.Module, self._model)(batch, attend)  # a graph keeps no memory for it

    def clear(self, key: GraphKey) -> None:
        """Makes the buffers a step of nobody's tokens."""
        self._pad(key, 0, 0)

    def _fill(self, key: GraphKey, batch: RowInputs) -> None:
        paged, num_tokens, num_rows = batch.paged, len(batch.input_ids), len(batch.paged.kv_lengths)
        self._input_ids[:num_tokens] = batch.input_ids
        self._positions[:num_tokens] = batch.positions
        self._slot_mapping[:num_tokens] = paged.slot_mapping
        self._cu_seqlens[: num_rows + 1] = paged.cu_seqlens_q
        self._kv_lengths[:num_rows] = paged.kv_lengths
        self._block_table[:num_rows] = paged.block_table
        self._pad(key, num_rows, num_tokens)

    def _pad(self, key: GraphKey, num_rows: int, num_tokens: int) -> None:
        """What is behind the first `num_rows` and `num_tokens`."""
        self._input_ids[num_tokens : key.num_tokens] = 0
        self._positions[num_tokens : key.num_tokens] = 0
        self._slot_mapping[num_tokens : key.num_tokens] = self._dummy_place
        self._cu_seqlens[num_rows + (num_rows > 0) : key.num_seqs + 1] = num_tokens
        self._kv_lengths[num_rows : key.num_seqs] = 0
