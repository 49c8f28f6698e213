"""Qwen3, causal or bidirectional, with the two ways it is made to score. Tensors are packed: T tokens, H hidden.

x = embed_tokens                                             [T, H]
per layer:  x = x + W_o attention(rope(norm(q)), rope(norm(k)), v)      q, k, v = W_qkv norm(x)
            x = x + W_down (silu(gate) * up)                            gate, up = W_gate_up norm(x)
x = norm(x)
"""

from torch import Tensor, nn

from rose.attention.interface import Attend
from rose.batch import EncodeBatch
from rose.layers.attention import Attention
from rose.layers.embedding import Embedding
from rose.layers.linear import FusedLinear, Linear, RowsLinear
from rose.layers.mlp import GatedMlp
from rose.layers.norm import RMSNorm
from rose.layers.rotary import Rotary, Turn
from rose.models.config import ModelConfig, ModelError
from rose.models.task import ScoreTask

FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}


class Qwen3Attention(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        q_size = config.num_attention_heads * config.head_dim
        kv_size = config.num_key_value_heads * config.head_dim
        self.qkv_proj = FusedLinear(config.hidden_size, (q_size, kv_size, kv_size), bias=config.attention_bias)
        self.o_proj = Linear(q_size, config.hidden_size, bias=config.attention_bias)
        self.q_norm = RMSNorm(config.head_dim, config.norm_eps)
        self.k_norm = RMSNorm(config.head_dim, config.norm_eps)
        self.attention = Attention(
            num_heads=config.num_attention_heads,
            num_kv_heads=config.num_key_value_heads,
            head_dim=config.head_dim,
            causal=config.causal,
        )

    def forward(self, x: Tensor, norm: RMSNorm, turn: Turn, attend: Attend) -> Tensor:
        q, k, v = turn(self.qkv_proj(x, norm=norm), self.q_norm, self.k_norm, self.attention.shape)
        return self.o_proj(self.attention(q, k, v, attend), residual=x)


class Qwen3Layer(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.norm_eps)
        self.self_attn = Qwen3Attention(config)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.norm_eps)
        self.mlp = GatedMlp(config.hidden_size, config.intermediate_size)

    def forward(self, x: Tensor, turn: Turn, attend: Attend) -> Tensor:
        x = self.self_attn(x, self.input_layernorm, turn, attend)
        return self.mlp(x, self.post_attention_layernorm)


class Qwen3Model(nn.Module):
    """Token ids -> hidden states [T, H]."""

    fused = FUSED
    prefixes = ("model.",)
    unused = ("lm_head.",)  # heads of other uses

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.embed_tokens = Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Qwen3Layer(config) for _ in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, config.norm_eps)
        self.rotary = Rotary(config.head_dim, config.max_position_embeddings, config.rope_theta)

    def forward(self, batch: EncodeBatch, attend: Attend) -> Tensor:
        x = self.embed_tokens(batch.input_ids)
        turn = self.rotary(batch.positions)
        for layer in self.layers:
            x = layer(x, turn, attend)
        return self.norm(x)


class Qwen3ForSequenceClassification(nn.Module):
    """Token ids -> logits [N, num_labels] of each last token."""

    fused = FUSED
    prefixes = ()
    unused = ()

    def __init__(self, config: ModelConfig, task: ScoreTask) -> None:
        super().__init__()
        self.model = Qwen3Model(config)
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

    def __init__(self, config: ModelConfig, task: ScoreTask) -> None:
        super().__init__()
        for token_id in (task.yes_token_id, task.no_token_id):
            if token_id >= config.vocab_size:
                raise ModelError(f"answer token {token_id} is outside the vocabulary of {config.vocab_size}")
        self.model = Qwen3Model(config)
        rows = (task.yes_token_id, task.no_token_id) if task.no_token_id >= 0 else (task.yes_token_id,)
        self.lm_head = RowsLinear(config.hidden_size, rows)
        self.tied = {"lm_head.weight": "model.embed_tokens.weight"} if config.tie_word_embeddings else {}

    def forward(self, batch: EncodeBatch, attend: Attend) -> Tensor:
        logits = self.lm_head(batch.last(self.model(batch, attend))).float()
        return logits if logits.shape[1] == 1 else logits[:, :1] - logits[:, 1:]
