"""A small Qwen3 in PyTorch, for training: same weight names and same arithmetic as the released architecture.

It reads a batch as a class is graded: what a class shares once, and each submission's own tokens after it. The shared
part's keys and values are computed once and attended to by every submission, which halves the work.
"""

from dataclasses import dataclass

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

    def project(self, x: Tensor, turn: "Turn") -> tuple[Tensor, Tensor, Tensor]:
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


class TransformerLayer(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(shape.hidden, shape.rms_epsilon)
        self.self_attn = Attention(shape)
        self.post_attention_layernorm = RMSNorm(shape.hidden, shape.rms_epsilon)
        self.mlp = Mlp(shape)

    def forward(
        self, shared: Tensor, own: Tensor, turns: "tuple[Turn, Turn]", mask: Tensor, each: int
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
        self.layers = nn.ModuleList(TransformerLayer(shape) for _ in range(shape.layers))
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


# --- where training starts ---

# Features of the residual stream: which token this is, which ones came one to three before, ...
_TOKEN, _ONE, _TWO, _THREE = slice(1, 49), slice(49, 73), slice(73, 97), slice(97, 117)
# ... the last two tokens of a criterion's name, which sign was last passed, whether this token is "=", ...
_NAMED, _NAMED_BEFORE, _PLACE, _EQUALS = slice(117, 130), slice(130, 143), slice(143, 146), 146
# ... and what comparing has found, here and a few tokens later.
_FOUND, _FOUND_BEFORE = slice(147, 150), slice(150, 153)
_IDENTITY = torch.eye(48)
_SHARP_PAIRS = 7  # RoPE's pairs up to here turn so fast that they tell neighbours apart
_PLACE_WEIGHTS = torch.tensor([0.0, 1.2, 0.0])  # what lies in the submission is looked at first


@dataclass(frozen=True, slots=True)
class Signs:
    """Ids of the tokens that part a prompt, and of the one between a variable and its value."""

    solution: int  # stands before each part of the solution
    submission: int  # before each part of the submission
    question: int  # ends the one question that may follow the submission
    answer: int  # ends the prompt
    equals: int


@torch.no_grad()
def initialise(model: Qwen3, seed: int, signs: Signs) -> None:
    """Random weights, arranged so that every step of grading is there from the start, though roughly.

    Layer 0 writes what came before each token and which sign was last passed. Layers 1 and 2 hold induction heads: they
    look for an earlier place with the same three last tokens, in the submission first, and copy what followed there
    (Olsson et al., In-context Learning and Induction Heads, 2022). A head of layer 1 fetches a criterion's name to
    where its evidence begins; two of layer 2 look there whether the submission has that name with a value, and after a
    value whether the solution has the same. Layer 3 takes the current token out again, since tied embeddings would else
    repeat it, and fetches what was found to where points and feedback begin. What follows from it is left to training.
    """
    random = torch.Generator().manual_seed(seed)
    shape = model.shape
    for name, weight in model.named_parameters():
        if weight.ndim == 2:
            wide = 0.004 if name.endswith(("o_proj.weight", "down_proj.weight")) else 0.5 * shape.hidden**-0.5
            weight.copy_(torch.randn(weight.shape, generator=random) * wide)
    _embed(model.embed_tokens.weight, signs, random)
    code = torch.randn(24, 48, generator=random) / 48**0.5
    first, second, third, last = (layer.self_attn for layer in model.layers)
    _look_around(first, code)
    _induction(second, code)
    _induction(third, code)
    _fetch_name(second)
    _compare(third)
    _conclude(last)
    model.norm.weight.fill_(0.3)


def _embed(embedding: Tensor, signs: Signs, random: torch.Generator) -> None:
    embedding *= 0.02
    embedding[:, _TOKEN] = torch.randn(embedding.shape[0], 48, generator=random) * 0.6
    embedding[:, 0] = 1.0
    embedding[:, _PLACE.start : _EQUALS + 1] = 0.0
    mark_places(embedding, signs)
    embedding[signs.equals, _EQUALS] = 1.0


@torch.no_grad()
def mark_places(embedding: Tensor, signs: Signs) -> None:
    """What follows a question is no longer the submission, though its criterion is written like a result in one."""
    for number, marks in enumerate(((signs.solution,), (signs.submission,), (signs.question, signs.answer))):
        embedding[list(marks), _PLACE] = torch.eye(3)[number]


def _look_around(attention: Attention, code: Tensor) -> None:
    """What came one, two and three tokens before; and, by head 3, the last sign: later ones outweigh earlier ones."""
    size = attention.shape.head_dim
    for head, offset in enumerate((1, 2, 3)):
        _look_back(attention, head, offset)
    for group in (0, 1):
        _values(attention, group)[:48, _TOKEN] = _IDENTITY
    attention.v_proj.weight[size + 48 : size + 51, _PLACE] = torch.eye(3)
    for head, place in enumerate((_ONE, _TWO, _THREE)):
        attention.o_proj.weight[place, head * size : head * size + 48] = code[: place.stop - place.start] * 0.5
    k, q = _keys(attention, 1), _queries(attention, 3)
    steady = size // 2 - 2
    k[[steady, size - 1]] = 0.0
    k[size - 1, _PLACE] = torch.tensor([1.5, 3.0, 5.0])
    k[steady, 0] = 2.0
    q *= 0.1
    q[size - 1, 0] = 8.0
    attention.o_proj.weight[_PLACE, 3 * size + 48 : 3 * size + 51] = 0.5 * torch.eye(3)
    attention.q_norm.weight.fill_(2.8)
    attention.k_norm.weight.fill_(2.2)


def _induction(attention: Attention, code: Tensor) -> None:
    """Key: the three tokens before. Query of both heads of the group: this token and two before. Value: the token."""
    size = attention.shape.head_dim
    near, middle, far = _content(size)
    _keys_of_the_three_before(attention, 0)
    _values(attention, 0)[:48, _TOKEN] = _IDENTITY
    for head in (0, 1):
        q = _queries(attention, head)
        q *= 0.1
        q[near, _TOKEN] += code[: len(near)] * 1.5
        _match(q, middle, _ONE)
        _match(q, far, _TWO)
        q[size - 1, 0] = 1.5
        attention.o_proj.weight[_TOKEN, head * size : head * size + 48] = 0.3 * _IDENTITY
    attention.q_norm.weight.fill_(1.8)
    attention.k_norm.weight.fill_(1.5)


def _fetch_name(attention: Attention) -> None:
    """To the end of `name": {"evidence":`, from the token after the name, what came one and two before that."""
    size, width = attention.shape.head_dim, _NAMED.stop - _NAMED.start
    _look_back(attention, 2, 3)
    values = _values(attention, 1)
    for number, (source, target) in enumerate(((_ONE, _NAMED), (_TWO, _NAMED_BEFORE))):
        rows = slice(number * width, (number + 1) * width)
        values[rows, source.start : source.start + width] = torch.eye(width)
        attention.o_proj.weight[target, 2 * size + rows.start : 2 * size + rows.stop] = torch.eye(width)


def _compare(attention: Attention) -> None:
    """Head 2 looks for a criterion's name in the submission, head 3 for the three tokens just written anywhere."""
    size = attention.shape.head_dim
    near, middle, far = _content(size)
    _keys_of_the_three_before(attention, 1)
    name, written = _queries(attention, 2), _queries(attention, 3)
    name *= 0.1
    _match(name, near, _NAMED)
    _match(name, middle, _NAMED_BEFORE)
    name[size - 1, 0] = 1.5
    written *= 0.1
    for places, features in ((near, _ONE), (middle, _TWO), (far, _THREE)):
        _match(written, places, features)
    values = _values(attention, 1)
    values[0, _EQUALS] = 1.0
    values[1:4, _PLACE] = torch.eye(3)
    out = attention.o_proj.weight[_FOUND, 2 * size :]
    out[:, :4] = torch.tensor([[1.0, 0.0, 0.0, 0.0], [0.0, 0.0, 1.0, 0.0], [0.0, 0.0, 0.0, 0.0]])
    out[2, size : size + 4] = torch.tensor([0.0, 3.0, 0.0, 0.0])


def _conclude(attention: Attention) -> None:
    """Head 0 takes the current token out; heads 2 and 3 fetch what was found four and five tokens before."""
    size = attention.shape.head_dim
    for head, offset in ((0, 0), (2, 4), (3, 5)):
        _look_back(attention, head, offset)
    for group in (0, 1):
        _values(attention, group)[:48, _TOKEN] = _IDENTITY
    attention.v_proj.weight[size + 48 : size + 51, _FOUND] = torch.eye(3)
    attention.o_proj.weight[_TOKEN, :48] = -0.3 * _IDENTITY
    attention.o_proj.weight[_FOUND_BEFORE, 2 * size + 48 : 2 * size + 51] = torch.eye(3)
    attention.q_norm.weight.fill_(2.5)
    attention.k_norm.weight.fill_(2.0)


def _look_back(attention: Attention, head: int, offset: int) -> None:
    """Make a head attend to the token `offset` before: q turned back by as much as k lies behind."""
    shape = attention.shape
    size, half = shape.head_dim, shape.head_dim // 2
    pairs = torch.arange(_SHARP_PAIRS)
    angles = -offset * shape.rope_theta ** (-2.0 * pairs / size)
    q, k = _queries(attention, head), _keys(attention, head // (shape.heads // shape.kv_heads))
    q *= 0.1
    q[pairs, 0], q[pairs + half, 0] = angles.cos() * 3, angles.sin() * 3
    if k[0, 0] != 3:  # else it was done for the other head of the group
        k *= 0.1
        k[pairs, 0] = 3


def _keys_of_the_three_before(attention: Attention, group: int) -> None:
    k = _keys(attention, group)
    k *= 0.1
    for places, features in zip(_content(attention.shape.head_dim), (_ONE, _TWO, _THREE), strict=True):
        _match(k, places, features)
    k[-1, _PLACE] = _PLACE_WEIGHTS


def _match(rows: Tensor, places: Tensor, features: slice) -> None:
    """Put the first of these features into these places."""
    width = min(len(places), features.stop - features.start)
    rows[places[:width], torch.arange(features.start, features.start + width)] += 1.0


def _content(size: int) -> tuple[Tensor, Tensor, Tensor]:
    """The places of a head in which tokens one, two and three before are matched; its last place is another's."""
    half = size // 2
    places = torch.cat([torch.arange(CONTENT_PAIRS, half - 1), torch.arange(half + CONTENT_PAIRS, size - 1)])
    return places[:13], places[13:25], places[25:34]


def _queries(attention: Attention, head: int) -> Tensor:
    size = attention.shape.head_dim
    return attention.q_proj.weight[head * size : (head + 1) * size]


def _keys(attention: Attention, group: int) -> Tensor:
    size = attention.shape.head_dim
    return attention.k_proj.weight[group * size : (group + 1) * size]


def _values(attention: Attention, group: int) -> Tensor:
    """The rows of a group, emptied."""
    size = attention.shape.head_dim
    return attention.v_proj.weight[group * size : (group + 1) * size].zero_()
