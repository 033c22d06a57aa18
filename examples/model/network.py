"""A small Qwen3 in PyTorch, for training: same weight names and same arithmetic as the released architecture.

It reads a batch as a class is graded: what a class shares once, and each submission's own tokens after it. The shared
part's keys and values are computed once and attended to by every submission, which halves the work.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from examples.model.shape import Shape

CONTENT_PAIRS = 14  # RoPE's pairs from here on turn by less than a radian within 400 tokens: content is matched there


class RMSNorm(nn.Module):
    def __init__(self, size: int, epsilon: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.epsilon = epsilon

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()  # autocast must not take the squares in bfloat16
        return wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.epsilon) * self.weight


class Attention(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.q_proj = nn.Linear(shape.hidden, shape.heads * shape.head_dim, bias=False)
        self.k_proj = nn.Linear(shape.hidden, shape.kv_heads * shape.head_dim, bias=False)
        self.v_proj = nn.Linear(shape.hidden, shape.kv_heads * shape.head_dim, bias=False)
        self.o_proj = nn.Linear(shape.heads * shape.head_dim, shape.hidden, bias=False)
        self.q_norm = RMSNorm(shape.head_dim, shape.rms_epsilon)
        self.k_norm = RMSNorm(shape.head_dim, shape.rms_epsilon)

    def project(self, x: Tensor, turn: Turn) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values of (batch, heads, tokens, head_dim), turned by position."""
        rows, tokens, _ = x.shape
        q = self.q_norm(self.q_proj(x).view(rows, tokens, self.shape.heads, -1)).transpose(1, 2)
        k = self.k_norm(self.k_proj(x).view(rows, tokens, self.shape.kv_heads, -1)).transpose(1, 2)
        v = self.v_proj(x).view(rows, tokens, self.shape.kv_heads, -1).transpose(1, 2)
        return turn(q).to(v.dtype), turn(k).to(v.dtype), v

    def mix(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        times = self.shape.heads // self.shape.kv_heads
        k, v = k.repeat_interleave(times, 1), v.repeat_interleave(times, 1)
        out = functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None)
        return self.o_proj(out.transpose(1, 2).flatten(2))


class Mlp(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden, shape.feed_forward, bias=False)
        self.up_proj = nn.Linear(shape.hidden, shape.feed_forward, bias=False)
        self.down_proj = nn.Linear(shape.feed_forward, shape.hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(functional.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(shape.hidden, shape.rms_epsilon)
        self.self_attn = Attention(shape)
        self.post_attention_layernorm = RMSNorm(shape.hidden, shape.rms_epsilon)
        self.mlp = Mlp(shape)

    def forward(
        self, shared: Tensor, own: Tensor, turns: tuple[Turn, Turn], mask: Tensor, each: int
    ) -> tuple[Tensor, Tensor]:
        attend = self.self_attn
        q, k, v = attend.project(self.input_layernorm(shared), turns[0])
        own_q, own_k, own_v = attend.project(self.input_layernorm(own), turns[1])
        all_k = torch.cat([k.repeat_interleave(each, 0), own_k], 2)
        all_v = torch.cat([v.repeat_interleave(each, 0), own_v], 2)
        shared = shared + attend.mix(q, k, v, None)
        own = own + attend.mix(own_q, all_k, all_v, mask)
        shared = shared + self.mlp(self.post_attention_layernorm(shared))
        return shared, own + self.mlp(self.post_attention_layernorm(own))


class Turn:
    """RoPE in half-split pairs at the given positions of shape (batch, tokens)."""

    def __init__(self, shape: Shape, positions: Tensor) -> None:
        half = torch.arange(0, shape.head_dim, 2, device=positions.device) / shape.head_dim
        angles = positions[..., None].float() * shape.rope_theta**-half
        self.cos, self.sin = angles.cos()[:, None], angles.sin()[:, None]

    def __call__(self, x: Tensor) -> Tensor:
        first, second = x.chunk(2, -1)
        return torch.cat([first * self.cos - second * self.sin, second * self.cos + first * self.sin], -1)


class Qwen3(nn.Module):
    """`named_parameters` gives Hugging Face's names without the leading `model.`."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.embed_tokens = nn.Embedding(shape.vocabulary, shape.hidden)
        self.layers = nn.ModuleList(Layer(shape) for _ in range(shape.layers))
        self.norm = RMSNorm(shape.hidden, shape.rms_epsilon)

    def forward(self, shared: Tensor, lengths: Tensor, own: Tensor) -> Tensor:
        """The final hidden states of the own tokens, (classes * each, tokens, hidden).

        Args:
            shared: (classes, tokens) ids, padded at the end; `lengths` says how many count.
            own: (classes, each, tokens) ids, padded at the end.
        """
        classes, each, tokens = own.shape
        device, span = own.device, shared.shape[1]
        before = torch.arange(span, device=device)[None].expand(classes, span)
        after = (lengths[:, None] + torch.arange(tokens, device=device)[None]).repeat_interleave(each, 0)
        turns = Turn(self.shape, before), Turn(self.shape, after)
        causal = torch.ones(tokens, tokens, dtype=torch.bool, device=device).tril()
        seen = (before < lengths[:, None]).repeat_interleave(each, 0)[:, None, None].expand(-1, 1, tokens, -1)
        mask = torch.cat([seen, causal.expand(classes * each, 1, -1, -1)], -1)
        h, x = self.embed_tokens(shared), self.embed_tokens(own.flatten(0, 1))
        for layer in self.layers:
            h, x = layer(h, x, turns, mask, each)
        return self.norm(x)

    def logits(self, hidden: Tensor) -> Tensor:
        return hidden @ self.embed_tokens.weight.T


@torch.no_grad()
def initialise(model: Qwen3, seed: int) -> None:
    """Random weights, arranged so that copying works from the first step.

    Feature 0 is the same for all tokens; 1 to 64 say which token it is; layer 0 writes which token came one before
    to 65 to 96, and two before to 97 to 128. Layers 1 and 2 each hold a head that looks for an earlier place with the
    same two last tokens and copies what followed there (an induction head). The last layer holds one that takes the
    current token out again, since tied embeddings would else repeat it. All of it is only where training starts.
    """
    random = torch.Generator().manual_seed(seed)
    shape = model.shape
    for name, weight in model.named_parameters():
        if weight.ndim == 2:
            wide = 0.02 if name.endswith(("o_proj.weight", "down_proj.weight")) else 0.5 * shape.hidden**-0.5
            weight.copy_(torch.randn(weight.shape, generator=random) * wide)
    token, one, two = slice(1, 65), slice(65, 97), slice(97, 129)
    embedding = model.embed_tokens.weight
    embedding *= 0.02 / (0.5 * shape.hidden**-0.5)
    embedding[:, token] = torch.randn(shape.vocabulary, 64, generator=random) * 0.5
    embedding[:, 0] = 1.0
    code = torch.randn(32, 64, generator=random) / 8
    size = shape.head_dim
    first = model.layers[0].self_attn
    for head, offset, place in ((0, 1, one), (1, 2, two)):
        _look_back(first, head, offset, shape)
        first.o_proj.weight[place, head * size : (head + 1) * size] = code * 1.5
    first.v_proj.weight[:size] = 0
    first.v_proj.weight[:size, token] = torch.eye(64)
    for number in (1, 2):
        _induction(model.layers[number].self_attn, code, token, one, two, size)
    last = model.layers[-1].self_attn
    _look_back(last, 0, 0, shape)
    last.v_proj.weight[:size] = 0
    last.v_proj.weight[:size, token] = torch.eye(64)
    last.o_proj.weight[token, :size] = -0.3 * torch.eye(64)
    model.norm.weight.fill_(0.3)


def _look_back(attention: Attention, head: int, offset: int, shape: Shape) -> None:
    """Make a head attend to the token `offset` before: q turned back by as much as k lies behind."""
    size, half = shape.head_dim, shape.head_dim // 2
    pairs = torch.arange(7)
    angles = -offset * shape.rope_theta ** (-2.0 * pairs / size)
    q, k = torch.zeros(size), torch.zeros(size)
    q[pairs], q[pairs + half], k[pairs] = angles.cos(), angles.sin(), 1.0
    kv = head // (shape.heads // shape.kv_heads)
    for projection, vector, start in ((attention.q_proj, q, head * size), (attention.k_proj, k, kv * size)):
        projection.weight[start : start + size] *= 0.2
        projection.weight[start : start + size, 0] = vector * 3
    attention.q_norm.weight.fill_(2.5)
    attention.k_norm.weight.fill_(2.0)


def _induction(attention: Attention, code: Tensor, token: slice, one: slice, two: slice, size: int) -> None:
    """Key: the two tokens before. Query of both heads of the group: this token and the one before. Value: the token."""
    half = size // 2
    places = torch.cat([torch.arange(CONTENT_PAIRS, half), torch.arange(half + CONTENT_PAIRS, size)])
    near, far = places[:20], places[20:]
    k, q = torch.zeros(size, attention.k_proj.weight.shape[1]), torch.zeros(size, attention.k_proj.weight.shape[1])
    k[near, torch.arange(one.start, one.start + 20)] = 1.0
    k[far, torch.arange(two.start, two.start + len(far))] = 1.0
    q[near, token] = code[:20] * 1.5
    q[far, torch.arange(one.start, one.start + len(far))] = 1.0
    attention.k_proj.weight[:size] = attention.k_proj.weight[:size] * 0.1 + k
    attention.v_proj.weight[:size] = 0
    attention.v_proj.weight[:size, token] = torch.eye(64)
    for head in (0, 1):
        rows = slice(head * size, (head + 1) * size)
        attention.q_proj.weight[rows] = attention.q_proj.weight[rows] * 0.1 + q
        attention.o_proj.weight[token, rows] = 0.3 * torch.eye(64)
    attention.q_norm.weight.fill_(1.8)
    attention.k_norm.weight.fill_(1.4)
