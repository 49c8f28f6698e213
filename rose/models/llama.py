"""Llama 2 and 3, and the layers that Qwen3 shares. Tensors are packed: T tokens, H hidden, V vocabulary.

x = embed_tokens                                             [T, H]
per layer:  x = x + W_o attention(rope(q), rope(k), v)       q, k, v = W_qkv norm(x)      (Qwen3: rope(norm(q)) ...)
            x = x + W_down (silu(gate) * up)                 gate, up = W_gate_up norm(x)
x = norm(x)
logits = W_head x                                            [T, V]; W_head may be embed_tokens itself
"""

from typing import Protocol

from torch import Tensor, nn

from rose.attention.interface import Attend
from rose.distributed.group import ALONE, Group
from rose.layers.attention import Attention
from rose.layers.embedding import Embedding, GatherLogits
from rose.layers.linear import ColumnLinear, FusedLinear, RowLinear
from rose.layers.mlp import GatedMlp
from rose.layers.norm import RMSNorm
from rose.layers.rotary import Rotary, Turn
from rose.models.config import ModelConfig

FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}


class Tokens(Protocol):
    """What these models read of a batch."""

    @property
    def input_ids(self) -> Tensor:
        """int32 [T]"""

    @property
    def positions(self) -> Tensor:
        """int32 [T], each below max_position_embeddings"""


class LlamaAttention(nn.Module):
    def __init__(self, config: ModelConfig, *, qk_norm: bool, group: Group = ALONE) -> None:
        super().__init__()
        q_size = config.num_attention_heads * config.head_dim
        kv_size = config.num_key_value_heads * config.head_dim
        sizes, bias = (q_size, kv_size, kv_size), config.attention_bias
        self.qkv_proj = FusedLinear(config.hidden_size, sizes, bias=bias, group=group)
        self.o_proj = RowLinear(q_size, config.hidden_size, bias=bias, group=group)
        self.q_norm = RMSNorm(config.head_dim, config.norm_eps) if qk_norm else None
        self.k_norm = RMSNorm(config.head_dim, config.norm_eps) if qk_norm else None
        self.attention = Attention(
            num_heads=config.num_attention_heads,
            num_kv_heads=config.num_key_value_heads,
            head_dim=config.head_dim,
            causal=config.causal,
            group=group,
        )

    def forward(self, x: Tensor, norm: RMSNorm | None, turn: Turn, attend: Attend) -> Tensor:
        q, k, v = turn(self.qkv_proj(x, norm=norm), self.q_norm, self.k_norm, self.attention.shape, attend)
        return self.o_proj(self.attention(q, k, v, attend), residual=x)


class LlamaLayer(nn.Module):
    def __init__(self, config: ModelConfig, *, qk_norm: bool, group: Group = ALONE) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.norm_eps)
        self.self_attn = LlamaAttention(config, qk_norm=qk_norm, group=group)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.norm_eps)
        self.mlp = GatedMlp(config.hidden_size, config.intermediate_size, bias=config.mlp_bias, group=group)

    def forward(self, x: Tensor, turn: Turn, attend: Attend) -> Tensor:
        x = self.self_attn(x, self.input_layernorm, turn, attend)
        return self.mlp(x, self.post_attention_layernorm)


class LlamaModel(nn.Module):
    """Token ids -> hidden states [T, H]."""

    fused = FUSED
    prefixes = ("model.",)
    unused = ("lm_head.",)  # heads of other uses

    def __init__(self, config: ModelConfig, *, qk_norm: bool = False, group: Group = ALONE) -> None:
        super().__init__()
        self.embed_tokens = Embedding(config.vocab_size, config.hidden_size, group=group)
        self.layers = nn.ModuleList(
            LlamaLayer(config, qk_norm=qk_norm, group=group) for _ in range(config.num_hidden_layers)
        )
        self.norm = RMSNorm(config.hidden_size, config.norm_eps)
        self.rotary = Rotary(
            config.head_dim, config.max_position_embeddings, config.rope_theta, scaling=config.rope_scaling
        )

    def forward(self, batch: Tokens, attend: Attend) -> Tensor:
        x = self.embed_tokens(batch.input_ids)
        turn = self.rotary(batch.positions)
        for layer in self.layers:
            x = layer(x, turn, attend)
        return self.norm(x)


class LlamaForCausalLM(nn.Module):
    """Token ids -> hidden states, and their logits, which only the rows that sample need."""

    fused = FUSED
    prefixes = ()
    qk_norm = False

    def __init__(self, config: ModelConfig, *, group: Group = ALONE) -> None:
        super().__init__()
        self.model = LlamaModel(config, qk_norm=self.qk_norm, group=group)
        self.lm_head = ColumnLinear(config.hidden_size, config.vocab_size, bias=False, group=group)
        self.gather = GatherLogits(config.vocab_size, group=group)
        self.unused: tuple[str, ...] = ()
        self.tied: dict[str, str] = {}
        if config.tie_word_embeddings:  # one matrix, not two alike
            self.lm_head.weight = self.model.embed_tokens.weight
            self.unused = ("lm_head.",)
            self.tied = {"lm_head.weight": "model.embed_tokens.weight"}

    def forward(self, batch: Tokens, attend: Attend) -> Tensor:
        """Hidden states [T, H], the final norm applied."""
        return self.model(batch, attend)

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [N, H] -> float32 [N, V]."""
        return self.gather(self.lm_head(hidden))
