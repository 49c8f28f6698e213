"""BERT. Tensors are packed: T tokens of all sequences, H hidden, I intermediate.

x = LayerNorm(word + position + type)                       [T, H]
per layer:  x = LayerNorm(x + W_o attention(W_qkv x))       [T, H]
            x = LayerNorm(x + W_down gelu(W_up x))          [T, H]
"""

from torch import Tensor, nn

from rose.attention.interface import Attend
from rose.batch import EncodeBatch
from rose.distributed.group import ALONE, Group
from rose.layers.attention import Attention
from rose.layers.embedding import PositionedEmbeddings
from rose.layers.linear import ColumnLinear, FusedLinear, Linear, RowLinear
from rose.layers.norm import LayerNorm
from rose.models.config import ModelConfig
from rose.models.task import ScoreTask

FUSED = {"query_key_value": ("query", "key", "value")}


def embeddings(config: ModelConfig) -> PositionedEmbeddings:
    return PositionedEmbeddings(
        vocab_size=config.vocab_size,
        num_positions=config.max_position_embeddings,
        num_types=config.type_vocab_size,
        hidden_size=config.hidden_size,
        norm_eps=config.norm_eps,
        position_offset=config.position_offset,
    )


class BertSelfAttention(nn.Module):
    def __init__(self, config: ModelConfig, *, group: Group = ALONE) -> None:
        super().__init__()
        self.query_key_value = FusedLinear(config.hidden_size, 3 * (config.hidden_size,), group=group)
        self.attention = Attention(
            num_heads=config.num_attention_heads,
            num_kv_heads=config.num_key_value_heads,
            head_dim=config.head_dim,
            causal=config.causal,
            group=group,
        )

    def forward(self, x: Tensor, attend: Attend) -> Tensor:
        q, k, v = self.query_key_value(x).chunk(3, dim=-1)
        return self.attention(q, k, v, attend)


class BertOutput(nn.Module):
    """LayerNorm(residual + dense(x)): closes both halves of a layer."""

    def __init__(self, config: ModelConfig, in_features: int, *, group: Group = ALONE) -> None:
        super().__init__()
        self.dense = RowLinear(in_features, config.hidden_size, group=group)
        self.LayerNorm = LayerNorm(config.hidden_size, config.norm_eps)

    def forward(self, x: Tensor, residual: Tensor) -> Tensor:
        return self.LayerNorm(self.dense(x), residual)


class BertAttention(nn.Module):
    def __init__(self, config: ModelConfig, *, group: Group = ALONE) -> None:
        super().__init__()
        self.self = BertSelfAttention(config, group=group)
        self.output = BertOutput(config, config.hidden_size, group=group)

    def forward(self, x: Tensor, attend: Attend) -> Tensor:
        return self.output(self.self(x, attend), x)


class BertIntermediate(nn.Module):
    def __init__(self, config: ModelConfig, *, group: Group = ALONE) -> None:
        super().__init__()
        self.dense = ColumnLinear(config.hidden_size, config.intermediate_size, act=config.hidden_act, group=group)

    def forward(self, x: Tensor) -> Tensor:
        return self.dense(x)


class BertLayer(nn.Module):
    def __init__(self, config: ModelConfig, *, group: Group = ALONE) -> None:
        super().__init__()
        self.attention = BertAttention(config, group=group)
        self.intermediate = BertIntermediate(config, group=group)
        self.output = BertOutput(config, config.intermediate_size, group=group)

    def forward(self, x: Tensor, attend: Attend) -> Tensor:
        x = self.attention(x, attend)
        return self.output(self.intermediate(x), x)


class BertEncoder(nn.Module):
    def __init__(self, config: ModelConfig, *, group: Group = ALONE) -> None:
        super().__init__()
        self.layer = nn.ModuleList(BertLayer(config, group=group) for _ in range(config.num_hidden_layers))

    def forward(self, x: Tensor, attend: Attend) -> Tensor:
        for layer in self.layer:
            x = layer(x, attend)
        return x


class BertPooler(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.dense = Linear(config.hidden_size, config.hidden_size, act="tanh")

    def forward(self, x: Tensor) -> Tensor:
        return self.dense(x)


class BertModel(nn.Module):
    """Token ids -> hidden states [T, H]."""

    fused = FUSED
    prefixes = ("bert.",)
    unused = ("pooler.", "cls.", "embeddings.position_ids")  # heads and buffers of other uses

    def __init__(self, config: ModelConfig, pooler: BertPooler | None = None, *, group: Group = ALONE) -> None:
        super().__init__()
        self.embeddings = embeddings(config)
        self.encoder = BertEncoder(config, group=group)
        self.pooler = pooler

    def forward(self, batch: EncodeBatch, attend: Attend) -> Tensor:
        x = self.embeddings(batch.input_ids, batch.positions, batch.token_types)
        return self.encoder(x, attend)

    def pool(self, hidden: Tensor, batch: EncodeBatch) -> Tensor:
        """The pooler's view of each first token, [N, H]."""
        assert self.pooler is not None, "this model was built without a pooler: give it one"
        return self.pooler(batch.first(hidden))


class BertForSequenceClassification(nn.Module):
    """Token ids -> logits [N, num_labels]: classifier(tanh(pooler(first token)))."""

    fused = FUSED
    prefixes = ()
    unused = ("bert.embeddings.position_ids",)

    def __init__(self, config: ModelConfig, task: ScoreTask, *, group: Group = ALONE) -> None:
        super().__init__()
        self.bert = BertModel(config, BertPooler(config), group=group)
        self.classifier = Linear(config.hidden_size, task.num_labels)

    def forward(self, batch: EncodeBatch, attend: Attend) -> Tensor:
        return self.classifier(self.bert.pool(self.bert(batch, attend), batch))
