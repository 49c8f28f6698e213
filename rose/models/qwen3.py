"""Qwen3: Llama with norms on the heads of q and k. Causal or bidirectional; embeds, scores in two ways, generates."""

from torch import Tensor, nn

from rose.attention.interface import Attend
from rose.batch import EncodeBatch
from rose.distributed.group import ALONE, Group
from rose.layers.linear import Linear, RowsLinear
from rose.models.config import ModelConfig, ModelError
from rose.models.llama import FUSED, LlamaForCausalLM, LlamaModel
from rose.models.task import ScoreTask


class Qwen3Model(LlamaModel):
    """Token ids -> hidden states [T, H]."""

    def __init__(self, config: ModelConfig, *, group: Group = ALONE) -> None:
        super().__init__(config, qk_norm=True, group=group)


class Qwen3ForCausalLM(LlamaForCausalLM):
    """Token ids -> hidden states, and their logits."""

    qk_norm = True


class Qwen3ForSequenceClassification(nn.Module):
    """Token ids -> logits [N, num_labels] of each last token."""

    fused = FUSED
    prefixes = ()
    unused = ()

    def __init__(self, config: ModelConfig, task: ScoreTask, *, group: Group = ALONE) -> None:
        super().__init__()
        self.model = Qwen3Model(config, group=group)
        self.score = Linear(config.hidden_size, task.num_labels, bias=False)

    def forward(self, batch: EncodeBatch, attend: Attend) -> Tensor:
        return self.score(batch.last(self.model(batch, attend)))


class Qwen3ForYesNo(nn.Module):
    """Token ids -> logit(yes) - logit(no) [N, 1] of each last token; its sigmoid is the probability of yes.

    Of the language model's head only these two rows are kept.
    """

    fused = FUSED
    prefixes = ()
    unused = ()

    def __init__(self, config: ModelConfig, task: ScoreTask, *, group: Group = ALONE) -> None:
        super().__init__()
        for token_id in (task.yes_token_id, task.no_token_id):
            if token_id >= config.vocab_size:
                raise ModelError(f"answer token {token_id} is outside the vocabulary of {config.vocab_size}")
        self.model = Qwen3Model(config, group=group)
        rows = (task.yes_token_id, task.no_token_id) if task.no_token_id >= 0 else (task.yes_token_id,)
        self.lm_head = RowsLinear(config.hidden_size, rows)
        self.tied = {"lm_head.weight": "model.embed_tokens.weight"} if config.tie_word_embeddings else {}

    def forward(self, batch: EncodeBatch, attend: Attend) -> Tensor:
        logits = self.lm_head(batch.last(self.model(batch, attend))).float()
        return logits if logits.shape[1] == 1 else logits[:, :1] - logits[:, 1:]
