"""Single operators with shapes drawn at random, to fit on: what models seldom use, and what users try.

    python benchmarks/device/record_models.py benchmarks/device/operator_cases.py OUT_PREFIX --stages trace --quick

A case is a program of some forty operators of one family, each on tensors of its own, so one trace of an iteration times
them all. Shapes are drawn anew for each case, always the same ones. In training their gradients are computed too. This
set is never used to judge the predictor: operator_kept_cases.py is.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812 - its usual name

sys.path.insert(0, str(Path(__file__).parent))

from case_forms import Case, by_hand, case, loss, named, tf32, whole

Shape = tuple[int, ...]
Call = Callable[..., torch.Tensor]
Use = tuple[Call, list[Shape]]
"""A function of tensors, and their shapes."""
Family = Callable[[random.Random], Use]
OPERATORS = 40


class Operators(nn.Module):
    """Calls each operator on fresh random tensors; in training, its answer is a loss that needs all their gradients."""

    def __init__(self, uses: list[Use], *, trained: bool) -> None:
        super().__init__()
        self.uses, self.trained = uses, trained
        self.anchor = nn.Parameter(torch.zeros(1))  # says on which device, in which format

    def forward(self, x: torch.Tensor | None = None, labels: Any = None) -> torch.Tensor | SimpleNamespace:
        total = self.anchor.float().sum()
        for fn, shapes in self.uses:
            tensors = [
                torch.randn(s, device=self.anchor.device, dtype=self.anchor.dtype, requires_grad=self.trained)
                for s in shapes
            ]
            y = fn(*tensors)
            if self.trained:
                total = total + (y.float().mean() if y.is_floating_point() else 0.0)
        return loss(total) if self.trained else total


def log_uniform(rng: random.Random, low: float, high: float) -> int:
    return round(low * (high / low) ** rng.random())


def near(rng: random.Random, low: float, high: float, multiple: int) -> int:
    """A size as people choose them: mostly a multiple, now and then none."""
    n = log_uniform(rng, low, high)
    return max(n, 1) if rng.random() < 0.3 else max(round(n / multiple), 1) * multiple


def rows_of(rng: random.Random, elements: tuple[float, float] = (2**12, 2**25)) -> tuple[int, int]:
    """Rows and columns of a matrix."""
    columns = near(rng, 8, 16384, 64)
    return max(log_uniform(rng, *elements) // columns, 1), columns


def planes(rng: random.Random, elements: float = 2**24) -> tuple[int, int, int, int]:
    side = rng.choice((7, 8, 14, 16, 28, 32, 56, 64, 100, 112, 128))
    channels = near(rng, 3, 1024, 16)
    most = max(int(elements / (channels * side * side)), 1)
    return log_uniform(rng, 1, min(most, 256)), channels, side, side


# -- products ---------------------------------------------------------------------------------------------------


def attention(rng: random.Random) -> Use:
    d = rng.choice((32, 40, 64, 64, 64, 72, 80, 96, 128, 128, 128, 160, 192, 256))
    s = near(rng, 8, 6000, 64)
    kv = s if rng.random() < 0.6 else near(rng, 8, 6000, 64)
    if rng.random() < 0.15:
        s = rng.choice((1, 1, 4, 16))
    heads = rng.choice((1, 4, 6, 8, 12, 16, 20, 32, 40))
    group = rng.choice((1, 1, 1, 4, 8)) if heads % 8 == 0 else 1
    causal, masked = rng.random() < 0.4 and s == kv, rng.random() < 0.3
    # masks and groups may be computed by kernels that keep all scores
    most = 2e8 if masked or group > 1 else 1e11 / d
    b = max(min(log_uniform(rng, 1, 256), int(most / (heads * s * kv))), 1)
    more: dict[str, Any] = {"enable_gqa": group > 1, "is_causal": causal and not masked}
    q, k = (b, heads, s, d), (b, heads // group, kv, d)
    if masked:
        mask = rng.choice(((b, 1, s, kv), (1, 1, s, kv), (b, heads, s, kv)))
        return lambda q, k, v, m: F.scaled_dot_product_attention(q, k, v, attn_mask=m, **more), [q, k, k, mask]
    return lambda q, k, v: F.scaled_dot_product_attention(q, k, v, **more), [q, k, k]


def product(rng: random.Random) -> Use:
    m, n, k = near(rng, 1, 16384, 64), near(rng, 8, 16384, 64), near(rng, 8, 16384, 64)
    while 2 * m * n * k > 2e12 or m * n + n * k + m * k > 3e8:
        m, n, k = max(m // 2, 1), max(n // 2, 8), max(k // 2, 8)
    form = rng.choice(("nn", "nt", "nt", "tn", "linear"))
    if form == "linear":
        return F.linear, [(m, k), (n, k), (n,)]
    a, b = (k, m) if form == "tn" else (m, k), (n, k) if form == "nt" else (k, n)
    return lambda x, y: torch.mm(x.t() if form == "tn" else x, y.t() if form == "nt" else y), [a, b]


def batched(rng: random.Random) -> Use:
    m, n, k = (near(rng, 1, 4096, 16) for _ in range(3))
    b = log_uniform(rng, 2, 2048)
    while 2 * b * m * n * k > 5e11 or b * (m * n + n * k + m * k) > 1e8:
        b, m, n, k = max(b // 2, 2), *(max(x * 2 // 3, 1) for x in (m, n, k))
    right = rng.random() < 0.5
    return lambda x, y: torch.bmm(x, y.mT if right else y), [(b, m, k), (b, n, k) if right else (b, k, n)]


def contraction(rng: random.Random) -> Use:
    form = rng.choice(
        ("bhid,bhjd->bhij", "bhij,bhjd->bhid", "bic,cd->bid", "bnc,bmc->bnm", "bijc,bjkc->bikc", "ab,ac->bc")
    )
    sizes = {c: near(rng, 8, 512, 8) for c in sorted(set(form) - set(",->"))}
    sizes |= {"b": log_uniform(rng, 1, 32), "h": rng.choice((4, 8, 12, 16)), "d": rng.choice((32, 64, 128))}
    left, right = form.partition("->")[0].split(",")
    return lambda x, y: torch.einsum(form, x, y), [tuple(sizes[c] for c in side) for side in (left, right)]


def convolution(rng: random.Random) -> Use:
    dims = rng.choice((1, 1, 2, 2, 3))
    groups = rng.choice((1, 1, 1, 2, 4, 0))  # 0: one for each channel
    c, o = near(rng, 4, 512, 16), near(rng, 4, 512, 16)
    if groups:
        c, o = -(-c // groups) * groups, -(-o // groups) * groups
    else:
        groups, o = c, c
    kernel, stride = rng.choice((1, 3, 3, 5, 7)), rng.choice((1, 1, 2))
    dilation = rng.choice((1, 1, 1, 2)) if stride == 1 else 1
    side = {1: near(rng, 64, 16384, 16), 2: rng.choice((14, 28, 32, 56, 64, 128)), 3: rng.choice((8, 16, 24, 32))}[dims]
    b = max(min(log_uniform(rng, 1, 64), int(1.5e7 / (max(c, o) * side**dims))), 1)
    transposed = rng.random() < 0.2 and dilation == groups == 1
    name = f"conv_transpose{dims}d" if transposed else f"conv{dims}d"
    weight = (c, o // groups) if transposed else (o, c // groups)
    more = {"stride": stride, "padding": dilation * (kernel // 2), "groups": groups, "dilation": dilation}
    return lambda x, w: getattr(F, name)(x, w, **more), [(b, c, *[side] * dims), (*weight, *[kernel] * dims)]


# -- what goes over its elements ---------------------------------------------------------------------------------

UNARY = [
    "exp",
    "log1p",
    "erf",
    "sin",
    "tanh",
    "sigmoid",
    "sqrt",
    "rsqrt",
    "abs",
    "neg",
    "reciprocal",
    "square",
    "relu",
    "floor",
    "sign",
]
LAYERS = ["gelu", "silu", "softplus", "mish", "leaky_relu", "elu", "hardswish", "hardsigmoid", "relu6", "logsigmoid"]
BINARY = ["add", "sub", "mul", "div", "maximum", "atan2", "pow"]


def elementwise(rng: random.Random) -> Use:
    shape = rng.choice((rows_of(rng), planes(rng), (near(rng, 1, 64, 1), near(rng, 4, 512, 4), near(rng, 8, 1024, 8))))
    kind = rng.random()
    if kind < 0.25:
        return getattr(torch, rng.choice(UNARY)), [shape]
    if kind < 0.4:
        return getattr(F, rng.choice(LAYERS)), [shape]
    op = getattr(torch, rng.choice(BINARY))
    if kind < 0.55:
        return op, [shape, shape]
    if kind < 0.8:  # broadcast over some dimensions
        return op, [shape, tuple(n if rng.random() < 0.5 else 1 for n in shape)]
    if kind < 0.9:  # crossed layouts
        return lambda x, y: op(x, y.mT), [shape, (*shape[:-2], shape[-1], shape[-2])]
    return lambda x, y: torch.where(x > 0, y, x * 0.5), [shape, shape]


def dims_of(rng: random.Random, shape: Shape) -> tuple[int, ...]:
    count = rng.choice((1, 1, 1, 2, len(shape)))
    return tuple(sorted(rng.sample(range(len(shape)), min(count, len(shape)))))


def reduction(rng: random.Random) -> Use:
    shape = rng.choice(
        (rows_of(rng), rows_of(rng), planes(rng), (near(rng, 1, 64, 1), near(rng, 8, 512, 4), near(rng, 8, 1024, 8)))
    )
    dims = dims_of(rng, shape)
    name = rng.choice(
        ("sum", "sum", "mean", "mean", "amax", "amin", "var", "std", "logsumexp", "norm", "cumsum", "argmax")
    )
    if name in ("cumsum", "argmax"):
        return lambda x: getattr(torch, name)(x, dims[0]), [shape]
    if name == "norm":
        return lambda x: torch.linalg.vector_norm(x, dim=dims), [shape]
    return lambda x: getattr(torch, name)(x, dims), [shape]


def rows(rng: random.Random) -> Use:
    shape = rows_of(rng)
    n = shape[-1]
    kind = rng.choice(
        ("softmax", "softmax", "softmax0", "log_softmax", "layer", "layer", "rms", "rms_by_hand", "group", "batch")
    )
    if kind.startswith("softmax"):
        return lambda x: torch.softmax(x, 0 if kind == "softmax0" else -1), [shape]
    if kind == "log_softmax":
        return lambda x: torch.log_softmax(x, -1), [shape]
    if kind == "layer":
        return lambda x, w, b: F.layer_norm(x, (n,), w, b), [shape, (n,), (n,)]
    if kind == "rms":
        return lambda x, w: F.rms_norm(x, (n,), w), [shape, (n,)]
    if kind == "rms_by_hand":
        return lambda x, w: w * (x * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype), [
            shape,
            (n,),
        ]
    b, c, *side = planes(rng)
    if kind == "batch":
        return lambda x, w, z: F.batch_norm(x, None, None, w, z, training=True), [(max(b, 2), c, *side), (c,), (c,)]
    groups = rng.choice((1, 4, 8, 32))
    c = -(-c // groups) * groups
    return lambda x, w, z: F.group_norm(x, groups, w, z), [(b, c, *side), (c,), (c,)]


# -- what moves data ---------------------------------------------------------------------------------------------


def indexed(rng: random.Random) -> Use:
    n, width = rows_of(rng, (2**12, 2**24))
    width, count = min(width, 2048), log_uniform(rng, 16, 2e5)
    count = max(min(count, 2**24 // width), 1)

    def at(x: torch.Tensor, *shape: int) -> torch.Tensor:
        return torch.randint(0, n, shape, device=x.device)

    kind = rng.choice(
        (
            "embedding",
            "embedding",
            "select",
            "gather",
            "take",
            "index_add",
            "scatter_add",
            "index_put",
            "bag",
            "one_row",
        )
    )
    if kind == "embedding":
        return lambda w: F.embedding(at(w, count), w), [(n, width)]
    if kind == "select":
        return lambda x: x.index_select(0, at(x, count)), [(n, width)]
    if kind == "gather":
        return lambda x: x.gather(0, at(x, count, width)), [(n, width)]
    if kind == "take":
        return lambda x: x[at(x, count)], [(n, width)]
    if kind == "index_add":
        return lambda x, y: x.index_add(0, at(x, count), y), [(n, width), (count, width)]
    if kind == "scatter_add":
        return lambda x, y: x.scatter_add(0, at(x, count, width), y), [(n, width), (count, width)]
    if kind == "index_put":
        return lambda x, y: x.index_put((at(x, count),), y), [(n, width), (count, width)]
    if kind == "bag":
        each = rng.choice((2, 8, 32))
        return lambda w: F.embedding_bag(at(w, max(count // each, 1), each), w, mode="sum"), [(n, width)]
    return lambda x: x[:, at(x, count) % width], [(min(n, max(2**24 // count, 1)), width)]


def moved(rng: random.Random) -> Use:
    shape = rng.choice(
        (planes(rng), (near(rng, 1, 32, 1), near(rng, 8, 512, 4), near(rng, 8, 64, 8), near(rng, 16, 128, 8)))
    )
    b, c, h, w = shape
    order = rng.sample(range(4), 4)
    kinds: list[Use] = [
        (lambda x: x.permute(order).contiguous(), [shape]),
        (lambda x: x.permute(order).reshape(b * c, -1), [shape]),
        (lambda x: x.to(torch.float32 if x.dtype != torch.float32 else torch.bfloat16), [shape]),
        (lambda x, y: torch.cat((x, y), 1), [shape, (b, max(c // 2, 1), h, w)]),
        (lambda x, y: torch.stack((x, y), -1), [shape, shape]),
        (lambda x: F.pad(x, (1, 1, 1, 1)), [shape]),
        (lambda x: torch.roll(x, (h // 2, w // 2), (2, 3)), [shape]),
        (lambda x: x.flip(-1), [shape]),
        (lambda x: x.repeat_interleave(2, 1), [shape]),
        (lambda x: x.repeat(1, 2, 1, 1), [shape]),
        (lambda x: x[..., ::2].contiguous(), [shape]),
        (lambda x: torch.cat((-x[..., w // 2 :], x[..., : w // 2]), -1), [shape]),
        (lambda x: x.masked_fill(x > 1, 0.0), [shape]),
        (lambda x: x.tril(), [shape]),
        (lambda x: F.interpolate(x, scale_factor=2, mode="nearest"), [shape]),
        (lambda x: F.interpolate(x, scale_factor=2, mode="bilinear"), [shape]),
        (lambda x: F.max_pool2d(x, 3, 2, 1), [shape]),
        (lambda x: F.avg_pool2d(x, 2), [shape]),
        (lambda x: F.adaptive_avg_pool2d(x, 1), [shape]),
        (lambda x: F.unfold(x, 3, padding=1), [shape if b * c * h * w < 4e6 else (1, c, h, w)]),
        (lambda x: F.glu(x, 2), [(b, c, 2 * h, w)]),
        (lambda x: F.dropout(x, 0.1), [shape]),
    ]
    return rng.choice(kinds)


def sorted_(rng: random.Random) -> Use:
    shape = rows_of(rng, (2**10, 2**23))
    n = shape[-1]
    k = max(min(rng.choice((1, 2, 8, 50, 256)), n), 1)
    kinds: list[Call] = [
        lambda x: torch.sort(x, -1).values,
        lambda x: torch.topk(x, k, -1).values,
        lambda x: torch.cumsum(x, -1),
        lambda x: torch.max(x, -1).values,
        lambda x: torch.argsort(x, -1),
        lambda x: torch.cumsum(x, 0),
        lambda x: torch.median(x, -1).values,
    ]
    return rng.choice(kinds), [shape]


def losses(rng: random.Random) -> Use:
    n, vocab = log_uniform(rng, 16, 16384), near(rng, 2, 130000, 64)
    n = max(min(n, 2**26 // vocab), 1)

    def labels(x: torch.Tensor) -> torch.Tensor:
        return torch.randint(0, vocab, (n,), device=x.device)

    kinds: list[Use] = [
        (lambda x: F.cross_entropy(x, labels(x)), [(n, vocab)]),
        (lambda x: F.cross_entropy(x.float(), labels(x)), [(n, vocab)]),
        (lambda x: F.cross_entropy(x, labels(x), label_smoothing=0.1), [(n, vocab)]),
        (F.mse_loss, [(n, vocab), (n, vocab)]),
        (lambda x, y: F.binary_cross_entropy_with_logits(x, y.sigmoid()), [(n, vocab), (n, vocab)]),
        (lambda x, y: F.kl_div(x.log_softmax(-1), y.softmax(-1), reduction="batchmean"), [(n, vocab), (n, vocab)]),
        (F.smooth_l1_loss, [(n, vocab), (n, vocab)]),
        (lambda x: F.nll_loss(x.log_softmax(-1), labels(x)), [(n, vocab)]),
        (lambda x, y: F.cosine_similarity(x, y, dim=-1), [(n, vocab), (n, vocab)]),
        (lambda x: F.normalize(x, dim=-1), [(n, vocab)]),
    ]
    return rng.choice(kinds)


# -- the set ------------------------------------------------------------------------------------------------------

# Family: in which formats, how many cases of inference and of training in each.
SWEEP: dict[Family, tuple[str, int, int]] = {
    attention: ("bf16 fp16 fp32", 2, 2),
    product: ("bf16 fp16 fp32 tf32", 4, 2),
    batched: ("bf16 fp32 tf32", 3, 3),
    contraction: ("bf16 fp32", 3, 3),
    convolution: ("bf16 fp16 fp32", 3, 4),
    elementwise: ("bf16 fp32", 4, 4),
    reduction: ("bf16 fp32", 5, 5),
    rows: ("bf16 fp32", 4, 5),
    indexed: ("bf16 fp32", 4, 5),
    moved: ("bf16 fp32", 5, 5),
    sorted_: ("bf16 fp32", 4, 0),
    losses: ("bf16 fp32", 0, 5),
}


def draw(family: Family, dtype: str, mode: str, mark: str) -> Case:
    """A case whose operators follow from its name."""
    name, trained = f"operators_{family.__name__.strip('_')}_{dtype}_{mode}_{mark}", mode == "train"
    rng = random.Random(name)
    uses = [family(rng) for _ in range(OPERATORS)]
    inputs = named("x labels", lambda device, dtype: whole(2, 1)(device, dtype) * 2) if trained else whole(2, 1)
    factory = by_hand(lambda: Operators(uses, trained=trained), inputs)
    if dtype == "tf32":
        factory = tf32(factory)
    return case(name, factory, 1, "fp32" if dtype == "tf32" else dtype, mode=mode)


CASES = [
    draw(family, dtype, mode, str(i))
    for family, (dtypes, inferred, trained) in SWEEP.items()
    for dtype in dtypes.split()
    for mode, count in (("infer", inferred), ("train", trained))
    for i in range(count)
]
