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
from rose.layers.rotary import Rotary, rotate
from rose.models.config import ModelConfig, ModelError
from rose.models.task import ScoreTask

FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}


class Qwen3Attention(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        q_size = config.num_attention_heads * config.head_dim
        kv_size = config.num_key_value_heads * config.head_dim
        self.sizes = (q_size, kv_size, kv_size)
        self.qkv_proj = FusedLinear(config.hidden_size, self.sizes, bias=config.attention_bias)
        self.o_proj = Linear(q_size, config.hidden_size, bias=config.attention_bias)
        self.q_norm = RMSNorm(config.head_dim, config.norm_eps)
        self.k_norm = RMSNorm(config.head_dim, config.norm_eps)
        self.attention = Attention(
            num_heads=config.num_attention_heads,
            num_kv_heads=config.num_key_value_heads,
            head_dim=config.head_dim,
            causal=config.causal,
        )

    def forward(self, x: Tensor, angles: tuple[Tensor, Tensor], attend: Attend) -> Tensor:
        q, k, v = self.qkv_proj(x).split(self.sizes, dim=-1)
        q, k = self._turn(q, self.q_norm, angles), self._turn(k, self.k_norm, angles)
        return self.o_proj(self.attention(q, k, v, attend))

    def _turn(self, heads: Tensor, norm: RMSNorm, angles: tuple[Tensor, Tensor]) -> Tensor:
        """Normalises each head and turns it by its position. [T, heads * head_dim], out as in."""
        per_head = norm(heads.unflatten(-1, (-1, self.attention.shape.head_dim)))
        return rotate(per_head, *angles).flatten(1)


class Qwen3Layer(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.norm_eps)
        self.self_attn = Qwen3Attention(config)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.norm_eps)
        self.mlp = GatedMlp(config.hidden_size, config.intermediate_size)

    def forward(
        self, x: Tensor, residual: Tensor | None, angles: tuple[Tensor, Tensor], attend: Attend
    ) -> tuple[Tensor, Tensor]:
        """(what the layer adds, the stream without it) -> the same, one layer on."""
        x, residual = self.input_layernorm.add(x, residual)
        x, residual = self.post_attention_layernorm.add(self.self_attn(x, angles, attend), residual)
        return self.mlp(x), residual


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
        x, residual = self.embed_tokens(batch.input_ids), None
        angles = self.rotary(batch.positions)
        for layer in self.layers:
            x, residual = layer(x, residual, angles, attend)
        return self.norm.add(x, residual)[0]


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
        return self.score(_last(self.model(batch, attend), batch))


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
        logits = self.lm_head(_last(self.model(batch, attend), batch)).float()
        return logits if logits.shape[1] == 1 else logits[:, :1] - logits[:, 1:]


def _last(hidden: Tensor, batch: EncodeBatch) -> Tensor:
    """hidden [T, H] -> [N, H]."""
    return hidden[batch.sequences.cu_seqlens[1:] - 1]
