"""Operators inside graphs, maps and derivatives of derivatives: as torch's own, or refused by name."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch._subclasses.fake_tensor import FakeTensorMode  # noqa: E402
from torch.autograd import forward_ad  # noqa: E402
from torch.nn import functional as F  # noqa: E402

from tessera import op  # noqa: E402
from tessera.errors import ArgumentError  # noqa: E402
from tessera.op import bounded, normalize, padding  # noqa: E402

TILE = (64, 64, 32)
pytestmark = [
    pytest.mark.usefixtures("formula_only"),
    pytest.mark.filterwarnings("ignore:`torch.jit.script`"),  # torch's forward mode calls it
]


@pytest.fixture(autouse=True)
def _nothing_kept() -> None:
    bounded.forget()  # a kept choice looks at no value


def rand(*shape: int) -> Any:
    torch.manual_seed(sum(shape))
    return torch.randn(*shape, dtype=torch.double)


def dense(x: Any, gate: Any, w1: Any, w2: Any) -> Any:
    """Two of all experts, every one computed for every token."""
    shares, chosen = torch.softmax(F.linear(x, gate), -1).topk(2, -1)
    each = torch.einsum("...eh,edh->...ed", F.silu(torch.einsum("...d,ehd->...eh", x, w1)), w2)
    picked = each.gather(-2, chosen[..., None].expand(*chosen.shape, each.shape[-1]))
    return (picked * (shares / shares.sum(-1, keepdim=True))[..., None]).sum(-2)


def attended(q: Any, k: Any, v: Any) -> Any:
    seen = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool).tril()
    return torch.softmax((q @ k.mT / q.shape[-1] ** 0.5).masked_fill(~seen, -torch.inf), -1) @ v


heads, pair, image = [rand(1, 2, 5, 4)] * 3, [rand(4, 8), rand(8, 6)], [rand(1, 2, 5, 5), rand(3, 2, 3, 3)]
experts = [rand(5, 8), rand(4, 8), rand(4, 6, 8), rand(4, 8, 6)]
CASES: dict[str, tuple[Any, Any, list[Any]]] = {
    "precision": (lambda a, b: op.matmul(a, b, precision="fp32"), torch.matmul, [x.round() for x in pair]),  # exact
    "tile": (lambda a, b: op.matmul(a, b, tile_shape=TILE), torch.matmul, pair),
    "tolerance": (lambda a, b: op.matmul(a, b, error_tolerance=1e-12), torch.matmul, pair),
    "both": (lambda a, b: op.matmul(a, b, error_tolerance=1e-12, tile_shape=TILE), torch.matmul, pair),
    "stack": (lambda a, b: op.matmul(a, b, tile_shape=TILE), torch.matmul, [rand(3, 4, 8), rand(3, 8, 6)]),
    "linear": (lambda x, w: op.linear(x, w, tile_shape=TILE), F.linear, [rand(4, 8), rand(6, 8)]),
    "conv": (lambda x, w: op.conv2d(x, w, tile_shape=TILE), F.conv2d, image),
    "attention": (lambda *qkv: op.flash_attention(*qkv, causal=True, tile_shape=(64, 32)), attended, heads),
    "moe": (op.moe, dense, experts),
}
each_case = pytest.mark.parametrize("case", CASES)


def summed(run: Any) -> Any:
    return lambda *given: run(*given).square().sum()


def same(found: Any, wanted: Any) -> bool:
    several = isinstance(found, tuple)
    pairs = zip(found, wanted, strict=True) if several else [(found, wanted)]
    return all(torch.allclose(a, b, rtol=1e-9, atol=1e-9) for a, b in pairs)


@each_case
@pytest.mark.filterwarnings("ignore:torch.searchsorted")  # of its speed
def test_function_gradients_and_those_of_single_samples(case: str) -> None:
    ours, theirs, given = CASES[case]
    each = tuple(range(len(given)))
    found, wanted = (torch.func.grad(summed(run), argnums=each)(*given) for run in (ours, theirs))
    assert same(found, wanted)
    many = [torch.stack([x, 0.5 * x]) for x in given]
    found, wanted = (torch.func.vmap(torch.func.grad(summed(run), argnums=each))(*many) for run in (ours, theirs))
    assert same(found, wanted)


@each_case
@pytest.mark.filterwarnings("ignore:torch.searchsorted")  # of its speed
def test_maps(case: str) -> None:
    ours, theirs, given = CASES[case]
    many = [torch.stack([x, 0.5 * x], 1) for x in given]
    found, wanted = (torch.func.vmap(run, in_dims=1)(*many) for run in (ours, theirs))
    assert same(found, wanted)
    dims = (1, *[None] * (len(given) - 1))
    found, wanted = (torch.func.vmap(run, in_dims=dims)(many[0], *given[1:]) for run in (ours, theirs))
    assert same(found, wanted)


@each_case
def test_no_tangent_is_lost(case: str) -> None:
    ours, theirs, given = CASES[case]
    tangents = tuple(x.flip(0) for x in given)
    if case == "moe":  # its products are torch's where nobody maps
        assert same(*(torch.func.jvp(run, tuple(given), tangents)[1] for run in (ours, theirs)))
        return
    with pytest.raises(ArgumentError, match="forward mode"):
        torch.func.jvp(ours, tuple(given), tangents)
    with forward_ad.dual_level(), pytest.raises(ArgumentError, match="forward mode"):
        ours(*(forward_ad.make_dual(x, t) for x, t in zip(given, tangents, strict=True)))


@each_case
def test_gradients_of_gradients(case: str) -> None:
    ours, _, given = CASES[case]
    if case == "precision":
        pytest.skip("differences of fp32 are too coarse")
    assert torch.autograd.gradgradcheck(ours, [x.clone().requires_grad_() for x in given], fast_mode=True)


@pytest.mark.parametrize("name", ["layer_norm", "rms_norm"])
@pytest.mark.parametrize("with_residual", [False, True])
def test_gradients_of_the_gradients_of_our_norms(name: str, with_residual: bool) -> None:
    x, weight, residual = (rand(*shape).requires_grad_() for shape in ((3, 8), (8,), (3, 8)))

    def run(x: Any, weight: Any, residual: Any = None) -> Any:
        return normalize.norm_rows(name, x, weight, None, 1e-5, residual, 8)

    assert torch.autograd.gradgradcheck(run, (x, weight, residual) if with_residual else (x, weight))
    assert torch.autograd.gradgradcheck(normalize.softmax_rows, (x,))


@each_case
def test_tensors_that_are_only_shapes(case: str) -> None:
    ours, theirs, given = CASES[case]
    mode = FakeTensorMode()
    fakes = [mode.from_tensor(x) for x in given]
    with mode:
        found = ours(*fakes)
    assert found.shape == theirs(*given).shape and found.dtype is torch.double


@pytest.mark.parametrize("dynamic", [False, True])
def test_a_mixture_of_experts_is_one_graph(dynamic: bool) -> None:
    leaves = [x.clone().requires_grad_() for x in experts]
    run = torch.compile(op.moe, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    found, wanted = run(*leaves), op.moe(*leaves)
    assert torch.equal(found, wanted)
    mine, theirs = (torch.autograd.grad(y.square().sum(), leaves) for y in (found, wanted))
    assert all(torch.equal(a, b) for a, b in zip(mine, theirs, strict=True))
    assert run(rand(0, 8), *leaves[1:]).shape == (0, 8)
    alone = [x.detach() for x in leaves]
    alone[1] = torch.full((4, 8), -1.0, dtype=torch.double)  # everybody to the first two: the others have no row
    alone[1][:2] = 1.0
    tokens = rand(5, 8).abs()
    assert torch.equal(run(tokens, *alone[1:]), op.moe(tokens, *alone[1:]))


def test_the_operators_of_experts_are_well_formed() -> None:
    from tessera.op.moe import expert_products, expert_weights

    ends = torch.tensor([2, 2, 5], dtype=torch.int32)
    rows, w, g = rand(5, 8).requires_grad_(), rand(3, 6, 8).requires_grad_(), rand(5, 6).requires_grad_()
    torch.library.opcheck(expert_products, (rows, w, ends))
    torch.library.opcheck(expert_weights, (g, rows, ends))
    if hasattr(torch.Tag, "cudagraph_unsafe"):  # they wait for the device, which nobody can while a graph is captured
        both = torch.ops.tessera.expert_products, torch.ops.tessera.expert_weights
        assert all(torch.Tag.cudagraph_unsafe in op.default.tags for op in both)


def test_what_is_torchs_own_has_torchs_rules(monkeypatch: pytest.MonkeyPatch) -> None:
    """Padded products and our kernels of rows, which plain calls take on a GPU, are left out under a transform."""
    a, b = (x.to(torch.bfloat16) for x in (rand(4, 7), rand(7, 5)))
    with padding.use("always"):
        found = torch.func.jvp(op.matmul, (a, b), (a, b))[1]
        assert torch.equal(found, torch.func.jvp(torch.matmul, (a, b), (a, b))[1])
    monkeypatch.setattr(torch.Tensor, "is_cuda", property(lambda self: True), raising=False)
    monkeypatch.setattr(normalize, "has_triton", lambda: True)
    seen = []

    def look(x: Any) -> Any:
        seen.append(normalize.can_run_kernel(x, 8))
        return x.sum()

    x = torch.ones(4, 8)
    look(x)
    torch.func.grad(look)(x)
    with forward_ad.dual_level():
        look(x)
    assert seen == [True, False, False]
