"""Drafts by a second language model (Leviathan et al. 2023), or by the target's own first layers and its head.

A model of its own has entries for the tokens that the target has computed: prompts in the step that computes them,
drafts but for the last in the loop that makes them. The last one's entry is missing if it is accepted, and is made by
whatever comes next: every pass begins one token before its row's (rose.speculation.passes). So k drafts are k passes,
and a block of the prefix cache that ends with such a token is completed by who goes on behind it. What was rejected is
overwritten. It runs on the leading rank alone.

First layers need no cache: their keys and values are the target's own, which the target writes again as it verifies.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

from torch import Tensor, nn

from ipc.types import ModelFacts
from rose.attention.interface import Attend
from rose.attention.paged import PagedKV
from rose.config import SpeculationConfig
from rose.distributed.group import ALONE
from rose.kv_cache import KVShape
from rose.layers.device_layers import use_device_layers
from rose.models.config import ModelConfig, ModelError, read_config
from rose.models.llama import LlamaForCausalLM
from rose.models.load import load_model
from rose.models.registry import find_class
from rose.models.task import read_task, read_vocabulary
from rose.slots import RowInputs
from rose.speculation.draft_vocab import Logits, draft_logits
from rose.speculation.drafting import DraftLM, Draws
from rose.speculation.heads import is_head
from rose.speculation.kept_blocks import KeptBlocks
from rose.speculation.no_drafts import load_no_drafts, no_drafts
from rose.speculation.passes import Passes, Tokens, open_passes, with_tokens_before
from rose.speculation.protocol import Closing, DraftRows, Drafts, Proposer, ProposerParts, ProposerSource, Target


class DraftModel:
    """A model with a cache of its own."""

    def __init__(self, model: DraftLM, logits: Logits, parts: ProposerParts, *, sampled: bool) -> None:
        self._model, self._logits, self._parts, self._sampled = model, logits, parts, sampled
        self._kept = KeptBlocks(parts.residents.slots)

    def propose(self, rows: DraftRows) -> Drafts:
        passes = self._kept.open(rows, rows.length, from_before=True)
        if passes is None:
            return no_drafts(rows)
        parts = self._parts
        draws = Draws(parts.residents, rows, passes, sampled=self._sampled)
        _loop(self._model, self._logits, parts, parts.caches, passes, draws, rows.length)
        return draws.drafts()

    def accepted(self, step: Closing) -> None:
        has_drafts = step.tokens.shape[1] > 1  # filled as they were made, but for the last
        if step.keep_draft and not has_drafts and self._kept.serves(step):
            self._fill(step)
        self._kept.close(step, filled=step.keep_draft or has_drafts, lacks_last=has_drafts)

    def prefill(self, step: Closing) -> None:
        self._fill(step)
        self._kept.close(step, filled=True)

    def _fill(self, step: Closing) -> None:
        tokens = with_tokens_before(self._parts.residents.slots, step.inputs)
        self._model(tokens, self._parts.attention.paged(tokens.paged, self._parts.caches))


class FirstLayersDraft:
    """The target's first layers, over its own caches."""

    def __init__(self, model: "FirstLayers", logits: Logits, parts: ProposerParts, *, sampled: bool) -> None:
        self._model, self._logits, self._parts, self._sampled = model, logits, parts, sampled

    def propose(self, rows: DraftRows) -> Drafts:
        parts = self._parts
        passes = open_passes(parts.residents.slots, rows, rows.length, None)
        draws = Draws(parts.residents, rows, passes, sampled=self._sampled)
        _loop(self._model, self._logits, parts, parts.target_caches, passes, draws, rows.length)
        return draws.drafts()

    def accepted(self, step: Closing) -> None:
        """The target's entries are what this one needs."""

    def prefill(self, step: Closing) -> None:
        """As above."""


class FirstLayers(nn.Module):
    """The first `num_layers` of a Llama or one of its kin, with its embedding, last norm and head."""

    def __init__(self, model: LlamaForCausalLM, num_layers: int) -> None:
        super().__init__()
        self._model, self._num_layers = model, num_layers

    def forward(self, batch: Tokens | RowInputs, attend: Attend) -> Tensor:
        """Hidden states [T, H], norm applied."""
        inner = self._model.model
        x, turn = inner.embed_tokens(batch.input_ids), inner.rotary(batch.positions)
        for layer in inner.layers[: self._num_layers]:
            x = layer(x, turn, attend)
        return inner.norm(x)

    def logits(self, hidden: Tensor) -> Tensor:
        return self._model.logits(hidden)


class _DraftModelSource:
    def __init__(self, model: nn.Module, logits: Logits, kv_shape: KVShape, config: SpeculationConfig) -> None:
        self.kv_shape: KVShape | None = kv_shape
        self._model, self._logits, self._sampled = model, logits, config.draft_sampling == "sampled"

    def open(self, parts: ProposerParts) -> Proposer:
        return DraftModel(cast(DraftLM, self._model), self._logits, parts, sampled=self._sampled)


class _FirstLayersSource:
    kv_shape: KVShape | None = None

    def __init__(self, model: FirstLayers, logits: Logits, config: SpeculationConfig) -> None:
        self._model, self._logits, self._sampled = model, logits, config.draft_sampling == "sampled"

    def open(self, parts: ProposerParts) -> Proposer:
        return FirstLayersDraft(self._model, self._logits, parts, sampled=self._sampled)


def load_draft_model(config: SpeculationConfig, target: Target) -> ProposerSource:
    """Raises ModelError: see LoadProposer."""
    shape = check_draft_model(config, target.config, target.facts, target.directory)
    if shape is None:
        logits = draft_logits(target.model, config, target.facts.vocab_size, target.group, target.directory)
        return _FirstLayersSource(
            FirstLayers(cast(LlamaForCausalLM, target.model), config.num_layers or 0), logits, config
        )  # fmt: skip
    if not target.group.leads:
        return load_no_drafts(config, target)
    directory = Path(str(config.model))
    task = read_task(directory, shape, "generate")
    model = load_model(directory, shape, task, target.device, target.dtype)
    use_device_layers(model, target.device)
    logits = draft_logits(model, config, target.facts.vocab_size, ALONE, directory)
    return _DraftModelSource(model, logits, KVShape.of(shape, target.dtype), config)


def check_draft_model(
    config: SpeculationConfig, target: ModelConfig, facts: ModelFacts, target_directory: Path
) -> ModelConfig | None:
    """Whether the model, or so many layers, can draft for the target in that directory. The model's shape; None for
    layers of the target. Raises ModelError."""
    if (config.model is None) == (config.num_layers is None):
        raise ModelError(
            "speculation.proposer draft_model takes either speculation.model, a directory, or speculation.num_layers, "
            "how many of the target's first layers draft: set one of them"
        )
    if config.num_layers is None:
        directory = Path(str(config.model))
        draft = read_config(directory)
        _check_model(directory, draft, facts, target_directory)
        return draft
    most = target.num_hidden_layers - 1
    if not 1 <= config.num_layers <= most:
        raise ModelError(f"speculation.num_layers must be 1..{most} with this target, got {config.num_layers}")
    return None


def _check_model(directory: Path, draft: ModelConfig, facts: ModelFacts, target_directory: Path) -> None:
    if is_head(directory):
        raise ModelError(f"{directory} is a draft head, no model: speculation.proposer mtp is for heads")
    find_class(draft, read_task(directory, draft, "generate"))
    own, its = _vocabulary(directory), _vocabulary(target_directory)
    if draft.vocab_size != facts.vocab_size or (own is not None and its is not None and own != its):
        raise ModelError(
            f"{directory} has another vocabulary than {target_directory} ({draft.vocab_size} tokens, "
            f"{facts.vocab_size}): take a draft model of the target's own family"
        )
    if draft.max_model_len < facts.max_model_len:
        raise ModelError(
            f"{directory} has {draft.max_model_len} positions, the target is served up to max_model_len = "
            f"{facts.max_model_len}: lower rank.max_model_len or take another draft model"
        )


def _vocabulary(directory: Path) -> dict[str, int] | list[Any] | None:
    """See read_vocabulary; None where there is no tokenizer to compare."""
    path = directory / "tokenizer.json"
    return read_vocabulary(path) if path.exists() else None


def _loop(
    model: DraftLM,
    logits: Logits,
    parts: ProposerParts,
    caches: Sequence[PagedKV],
    passes: Passes,
    draws: Draws,
    length: int,
) -> None:
    """So many passes, each for one draft; the last draft has no entry yet."""
    tokens = passes.first()
    for place in range(length):
        hidden = model(tokens, parts.attention.paged(tokens.paged, caches))
        ids = draws.add(logits(passes.last_of(hidden)))
        if place + 1 < length:
            tokens = passes.tokens(ids, place + 1)
