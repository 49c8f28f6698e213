"""RoBERTa and XLM-RoBERTa: BERT whose positions start at pad_token_id + 1, with a head of their own.

logits = out_proj(tanh(dense(first token)))      [N, num_labels]
"""

from torch import Tensor, nn

from rose.attention.interface import Attend
from rose.batch import EncodeBatch
from rose.distributed.group import ALONE, Group
from rose.layers.linear import Linear
from rose.models.bert import FUSED, BertEncoder, embeddings
from rose.models.config import ModelConfig
from rose.models.task import ScoreTask


class XlmRobertaModel(nn.Module):
    """Token ids -> hidden states [T, H]."""

    fused = FUSED
    prefixes = ("roberta.",)
    unused = ("pooler.", "lm_head.", "embeddings.position_ids")  # heads and buffers of other uses

    def __init__(self, config: ModelConfig, *, group: Group = ALONE) -> None:
        super().__init__()
        self.embeddings = embeddings(config)
        self.encoder = BertEncoder(config, group=group)

    def forward(self, batch: EncodeBatch, attend: Attend) -> Tensor:
        x = self.embeddings(batch.input_ids, batch.positions, batch.token_types)
        return self.encoder(x, attend)


class XlmRobertaClassificationHead(nn.Module):
    def __init__(self, config: ModelConfig, num_labels: int) -> None:
        super().__init__()
        self.dense = Linear(config.hidden_size, config.hidden_size, act="tanh")
        self.out_proj = Linear(config.hidden_size, num_labels)

    def forward(self, x: Tensor) -> Tensor:
        return self.out_proj(self.dense(x))


class XlmRobertaForSequenceClassification(nn.Module):
    """Token ids -> logits [N, num_labels]."""

    fused = FUSED
    prefixes = ()
    unused = ("roberta.embeddings.position_ids", "roberta.pooler.")

    def __init__(self, config: ModelConfig, task: ScoreTask, *, group: Group = ALONE) -> None:
        super().__init__()
        self.roberta = XlmRobertaModel(config, group=group)
        self.classifier = XlmRobertaClassificationHead(config, task.num_labels)

    def forward(self, batch: EncodeBatch, attend: Attend) -> Tensor:
        return self.classifier(batch.first(self.roberta(batch, attend)))
