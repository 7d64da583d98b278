"""Which matrices of a block are split together, by how strangers name and order them."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tessera.dist.block_stack import find_pairs, find_stack
from tessera.dist.tensor_parallel import SplitLinear


def build(heads: int | None = None, **children: object) -> nn.Module:
    """A module with Linear layers of the given sizes; a dict is a module inside."""
    module = nn.Module()
    if heads:
        module.num_heads = heads
    for name, value in children.items():
        if isinstance(value, dict):
            module.add_module(name, build(**value))
        else:
            module.add_module(name, value if isinstance(value, nn.Module) else nn.Linear(*value))
    return module


H, F = 16, 40
SQUARE, UP, DOWN = (H, H), (H, F), (F, H)


@pytest.mark.parametrize(
    ("block", "expected"),
    [
        ({"attn": {"q": SQUARE, "k": (H, 8), "v": (H, 8), "o": SQUARE, "heads": 4}}, ["attn.q attn.k attn.v > attn.o"]),
        ({"a": {"key": SQUARE, "query": SQUARE, "value": SQUARE, "anything": SQUARE, "heads": 4}},
         ["a.key a.query a.value > a.anything"]),
        ({"attn": {"o_proj": SQUARE, "qkv_proj": (H, 32), "heads": 4}}, ["attn.qkv_proj(16,8,8) > attn.o_proj"]),
        ({"mlp": {"w1": UP, "w2": DOWN, "w3": UP}}, ["mlp.w1 mlp.w3 > mlp.w2"]),
        ({"mlp": {"gate_up": (H, 2 * F), "down": DOWN}}, ["mlp.gate_up(40,40) > mlp.down"]),
        ({"self": {"query": SQUARE, "key": SQUARE, "value": SQUARE, "heads": 4}, "output": {"dense": SQUARE},
          "up": {"dense": UP}, "down": {"dense": DOWN}},
         ["self.query self.key self.value > output.dense", "up.dense > down.dense"]),
        ({"qkv": (H, 3 * H), "proj": SQUARE, "fc1": UP, "fc2": DOWN, "heads": 2},
         ["qkv(16,16,16) > proj", "fc1 > fc2"]),
        ({"attention": {"query_key_value": (H, 3 * H), "dense": SQUARE, "heads": 2}},
         ["attention.query_key_value > attention.dense"]),
        ({"to_q": SQUARE, "to_k": SQUARE, "to_v": SQUARE, "to_out": nn.Sequential(nn.Linear(H, H), nn.Dropout())},
         ["to_q to_k to_v > to_out.0"]),
        ({"fc": UP, "back": DOWN, "router": (H, 3)}, ["fc > back"]),
        ({"only": SQUARE}, []),
    ],
)  # fmt: skip
def test_pairs(block, expected):
    pairs = find_pairs(build(**block))
    told = [
        f"{' '.join(p.columns)}{'(' + ','.join(map(str, p.parts)) + ')' if p.parts else ''} > {p.row}" for p in pairs
    ]
    assert told == expected


def test_torch_own_layer_splits_its_mlp_only():
    pairs = find_pairs(nn.TransformerEncoderLayer(H, 4, F))
    assert [(p.kind, p.columns, p.row) for p in pairs] == [("mlp", ("linear1",), "linear2")]


def test_the_stack_is_the_list_with_most_parameters():
    model = build(words=nn.Embedding(50, H), head=(H, 50))
    model.small = nn.ModuleList(nn.Linear(2, 2) for _ in range(9))
    model.deep = nn.Sequential(nn.Embedding(3, 3), nn.ModuleList(nn.Linear(H, H) for _ in range(4)))
    stack = find_stack(model)
    assert stack is not None
    assert (stack.path, len(stack), stack.embedding, stack.head, stack.tied) == ("deep.1", 4, "words", "head", False)


@pytest.mark.parametrize(
    "take",
    [
        lambda y: y.split(H, dim=2),
        lambda y: y.chunk(3, -1),
        lambda y: torch.split(y, [H, H, H], dim=-1),
        lambda y: y.view(2, 5, 3, 4, 4).unbind(2),
        lambda y: y.reshape(2, 5, 3, 4, 4).permute(2, 0, 3, 1, 4),
        lambda y: y.unflatten(-1, (3, 4, 4)).unbind(2),
        lambda y: (y[..., :H], y[..., H:-H], y[..., -H:]),
        lambda y: y.view(2, 5, 4, 12).transpose(1, 2).chunk(3, dim=-1),
        lambda y: (y + 1, torch.relu(y), y.float()),
    ],
)
def test_parts_of_a_matrix_are_taken_as_from_the_whole(take):
    torch.manual_seed(0)
    whole = nn.Linear(H, 3 * H)
    split = SplitLinear([nn.Linear(H, H) for _ in range(3)], is_transposed=False)
    for number, part in enumerate(split):
        part.weight.data = whole.weight.data[number * H : (number + 1) * H].clone()
        part.bias.data = whole.bias.data[number * H : (number + 1) * H].clone()
    x = torch.randn(2, 5, H)
    y = split(x)
    assert y.shape == (2, 5, 3 * H) and y.dtype == torch.float32 and y.size(-1) == 3 * H
    for mine, expected in zip(take(y), take(whole(x)), strict=True):
        torch.testing.assert_close(mine, expected)
