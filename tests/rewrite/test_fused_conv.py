"""Convolution, batch norm, addition and ReLU as one call: the same results, whatever the program does around them."""

from __future__ import annotations

import copy
import inspect
import operator
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from tessera.errors import RewriteError
from tessera.graph.rewrites import collect_rewrites
from tessera.rewrite import folded_conv
from tessera.rewrite.folded_conv import FoldedConvolution
from tessera.rewrite.fused_conv import find_chains, fuse
from tessera.rewrite.fx_graph import trace_forward

from models import Residual, declare_torchvision

C = 4


def lively(module: nn.Module, dtype: torch.dtype = torch.float64) -> nn.Module:
    """In eval mode, with batch norms that do something."""
    for m in module.modules():
        if isinstance(m, nn.BatchNorm2d) and m.running_mean is not None:
            m.running_mean.normal_(0.0, 0.3)
            m.running_var.uniform_(0.5, 2.0)
            if m.affine:
                nn.init.normal_(m.weight, 1.0, 0.3)
                nn.init.normal_(m.bias, 0.0, 0.3)
    return module.to(dtype).eval()


def run(module: nn.Module, x: torch.Tensor) -> tuple[Any, torch.Tensor]:
    """What a module returns, and what it left in its input."""
    mine = x.clone()
    with torch.no_grad():
        return module(mine), mine


def same(module: nn.Module, x: torch.Tensor) -> Any:
    """Fuse it: results and input must be as before, within the rounding of fp64; what was fused."""
    before = run(module, x)
    with fuse(module) as fused:
        after = run(module, x)
    close(after, before)
    again = run(module, x)
    assert all(torch.equal(a, b) for a, b in zip(leaves(again), leaves(before), strict=True))
    return fused


def leaves(value: Any) -> list[torch.Tensor]:
    return [t for t in torch.utils._pytree.tree_leaves(value) if isinstance(t, torch.Tensor)]


def close(found: Any, expected: Any) -> None:
    for a, b in zip(leaves(found), leaves(expected), strict=True):
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        assert float((a - b).abs().max()) <= 1e-10 * max(1.0, float(b.abs().max()))


class Net(nn.Module):
    """Three convolutions and two batch norms, and a forward given as a function of (self, x)."""

    def __init__(self, forward: Callable[..., Any], bias: bool = False) -> None:
        super().__init__()
        self.conv1, self.conv2, self.conv3 = (nn.Conv2d(C, C, 3, padding=1, bias=bias) for _ in range(3))
        self.bn1, self.bn2 = nn.BatchNorm2d(C), nn.BatchNorm2d(C)
        self.relu, self.relu_ = nn.ReLU(), nn.ReLU(inplace=True)
        self.same = nn.Identity()
        self.go = forward
        lively(self)

    def forward(self, x: torch.Tensor) -> Any:
        return self.go(self, x)


def image(channels: int = C, size: int = 6) -> torch.Tensor:
    return torch.randn(2, channels, size, size, dtype=torch.float64)


# -- whole networks ---------------------------------------------------------------------------------------------------


def resnet(**options: Any) -> nn.Module:
    declare_torchvision()
    models = pytest.importorskip("torchvision", exc_type=ImportError).models
    return models.resnet.ResNet(models.resnet.Bottleneck, [2, 1, 1, 1], num_classes=5, **options)


def resnext() -> nn.Module:
    return resnet(groups=4, width_per_group=4)


def mobilenet() -> nn.Module:
    declare_torchvision()
    models = pytest.importorskip("torchvision", exc_type=ImportError).models
    return models.MobileNetV2(width_mult=0.25, num_classes=5)


def densenet() -> nn.Module:
    declare_torchvision()
    models = pytest.importorskip("torchvision", exc_type=ImportError).models
    return models.DenseNet(growth_rate=4, block_config=(2, 2), num_init_features=8, num_classes=5)


@pytest.mark.parametrize(
    ("make", "counts"),
    [
        (resnet, {"cudnn_convolution_relu": 11, "cudnn_convolution_add_relu": 5, "conv2d": 4}),
        (resnext, {"cudnn_convolution_relu": 11, "cudnn_convolution_add_relu": 5, "conv2d": 4}),
        (mobilenet, {"conv2d": 52}),
        (densenet, {"cudnn_convolution_relu": 5}),  # the stem and the inner pairs; a norm before a convolution stays
        (Residual, {"cudnn_convolution_relu": 2, "cudnn_convolution_add_relu": 1}),
    ],
    ids=["resnet", "resnext", "mobilenet", "densenet", "residual"],
)
def test_networks(make, counts):
    fused = same(lively(make()), image(3, 32))
    found = [rewrite.after for rewrite in fused.rewrites]
    assert {name: found.count(name) for name in set(found)} == counts
    assert fused.count == sum(counts.values()) == len(fused.calls)


def test_names():
    fused = fuse(lively(resnet()))
    assert fused.calls[:6] == (
        "conv1+bn1+relu",
        "layer1.0.conv1+bn1+relu",
        "layer1.0.conv2+bn2+relu",
        "layer1.0.conv3+bn3+add+relu",
        "layer1.0.downsample.0+1",
        "layer1.1.conv1+bn1+relu",
    )


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_bf16_is_no_worse_than_before(layout):
    exact, x = lively(Residual(), torch.float32), torch.randn(4, 3, 16, 16).to(memory_format=layout)
    expected, _ = run(exact, x)
    rough = lively(Residual(), torch.bfloat16).to(memory_format=layout)
    rough.load_state_dict(exact.state_dict())
    exact.load_state_dict(rough.state_dict())  # the same rounded weights
    expected, _ = run(exact, x.bfloat16().float())
    before, _ = run(rough, x.bfloat16())
    with fuse(rough):
        after, _ = run(rough, x.bfloat16())
    assert after.dtype == torch.bfloat16

    def off(y):
        return float((y.float() - expected).norm() / expected.norm())

    assert off(after) < 2.0 * off(before) + 2**-9


# -- random programs --------------------------------------------------------------------------------------------------

STEPS: dict[str, Callable[..., Any]] = {
    "conv": lambda net, a, b, k: (net.conv1, net.conv2, net.conv3)[k](a),
    "bn": lambda net, a, b, k: (net.bn1, net.bn2)[k % 2](a),
    "relu": lambda net, a, b, k: (net.relu(a), F.relu(a), a.relu())[k],
    "relu_": lambda net, a, b, k: (net.relu_(a), F.relu(a, inplace=True), a.relu_())[k],
    "add": lambda net, a, b, k: (a + b, torch.add(a, b), a.add(b))[k],
    "iadd": lambda net, a, b, k: a.add_(b) if k else operator.iadd(a, b),
    "same": lambda net, a, b, k: net.same(a),
    "conv+bn+relu": lambda net, a, b, k: net.relu_(net.bn1((net.conv1, net.conv2, net.conv3)[k](a))),
    "conv+bn+add+relu": lambda net, a, b, k: net.relu_(net.bn2((net.conv1, net.conv2, net.conv3)[k](a)) + b),
    "conv+bn": lambda net, a, b, k: net.bn1((net.conv1, net.conv2, net.conv3)[k](a)),
}
step = st.tuples(st.sampled_from(sorted(STEPS)), st.integers(0, 3), st.integers(0, 3), st.integers(0, 2))


@settings(max_examples=60, deadline=None)
@given(steps=st.lists(step, min_size=2, max_size=9), returned=st.integers(1, 4), bias=st.booleans())
def test_random_programs(steps, returned, bias):
    """Operands are among the last four values, counted from the end; in-place steps write into what others read."""

    def forward(net, x):
        values = [x]
        for name, a, b, k in steps:
            values.append(STEPS[name](net, values[-1 - a % len(values)], values[-1 - b % len(values)], k))
        return tuple(values[-returned:])

    torch.manual_seed(len(steps))
    net = Net(forward, bias)
    try:
        same(net, image(size=4))
    except RewriteError as e:
        assert "no convolution to fuse" in str(e)


# -- what must not be fused, or only in part --------------------------------------------------------------------------


def twice(net, x):
    y = net.conv1(x)
    return net.relu(net.bn1(y)) + y


def norm_twice(net, x):
    y = net.bn1(net.conv1(x))
    return net.relu(y) + y


def input_written_meanwhile(net, x):
    y = net.bn1(net.conv1(x))
    z = x.relu_()
    return net.relu(y + z)


def summand_written_meanwhile(net, x):
    y = net.bn1(net.conv1(x)) + x
    x.mul_(3.0)
    return net.relu(y) + x


def into_the_other(net, x):
    x += net.bn1(net.conv1(x))
    return net.relu_(x)


def alias(net, x):
    kept = x
    x += net.relu(net.bn1(net.conv1(x)))
    return net.relu(net.bn2(net.conv2(x)) + kept)


def doubled(net, x):
    y = net.bn1(net.conv1(x))
    return net.relu(y + y)


def scaled(net, x):
    return net.relu(torch.add(net.bn1(net.conv1(x)), x, alpha=2))


def number(net, x):
    return net.relu(net.bn1(net.conv1(x)) + 1.5)


def shared(net, x):
    y = net.relu(net.bn1(net.conv1(x)))
    return net.relu(net.bn1(net.conv1(y)) + net.bn1(net.conv2(x)))


def summand_read_elsewhere(net, x):
    z = net.bn2(net.conv2(x))
    return net.relu(net.bn1(net.conv1(x)) + z) + z


def other_activation(net, x):
    return F.relu6(net.bn1(net.conv1(x)))


def identity_between(net, x):
    return net.relu_(net.same(net.bn1(net.same(net.conv1(x)))))


def no_norm(net, x):
    return net.relu(net.conv2(net.relu(net.conv1(x))) + x)


def later_writer(net, x):
    y = net.relu(net.bn1(net.conv1(x)))
    z = net.bn2(net.conv2(y))
    y.add_(1.0)
    return F.relu(z, inplace=True) + y


@pytest.mark.parametrize(
    ("forward", "calls"),
    [
        (twice, None),
        (norm_twice, ["conv1+bn1"]),
        (input_written_meanwhile, ["conv1+bn1"]),
        (summand_written_meanwhile, ["conv1+bn1"]),
        (into_the_other, ["conv1+bn1"]),
        (alias, ["conv1+bn1+relu", "conv2+bn2+add+relu"]),
        (doubled, ["conv1+bn1"]),
        (scaled, ["conv1+bn1"]),
        (number, ["conv1+bn1"]),
        (shared, ["conv1+bn1+relu", "conv1+bn1", "conv2+bn1+add+relu"]),
        (summand_read_elsewhere, ["conv2+bn2", "conv1+bn1+add+relu"]),
        (other_activation, ["conv1+bn1"]),
        (identity_between, ["conv1+bn1+relu"]),
        (no_norm, ["conv1+relu", "conv2+add+relu"]),
        (later_writer, ["conv1+bn1+relu", "conv2+bn2+relu"]),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
@pytest.mark.parametrize("bias", [False, True])
def test_only_what_nobody_else_reads(forward, calls, bias):
    net = Net(forward, bias)
    if calls is None:
        with pytest.raises(RewriteError, match="no convolution to fuse"):
            fuse(net)
        return
    assert list(same(net, image()).calls) == calls


def one(net, x):
    return net.relu(net.bn1(net.conv1(x)))


def _hooked(net):
    net.conv1.register_forward_hook(lambda m, args, out: out * 2)


def _statistics_of_the_batch(net):
    net.bn1 = nn.BatchNorm2d(C, track_running_stats=False).double().eval()


def _reflected(net):
    net.conv1 = nn.Conv2d(C, C, 3, padding=1, padding_mode="reflect").double()


def _named_padding(net):
    net.conv1 = nn.Conv2d(C, C, 3, padding="same").double()


def _read_elsewhere(net):
    net.go = lambda net, x: one(net, x) * net.conv1.weight.mul_(1.0).sum()


def _parametrized(net):
    nn.utils.parametrizations.weight_norm(net.conv1)


def _own_forward(net):
    conv = net.conv1
    conv.forward = lambda x: type(conv).forward(conv, x) * 2


def _of_inference(net):
    with torch.inference_mode():
        net.conv1 = nn.Conv2d(C, C, 3, padding=1).double()


@pytest.mark.parametrize(
    "change",
    [_hooked, _reflected, _named_padding, _read_elsewhere, _parametrized, _own_forward, _of_inference],
)
def test_left_alone(change):
    net = Net(one)
    change(net)
    with pytest.raises(RewriteError, match="no convolution to fuse"):
        fuse(net)


def test_a_norm_without_statistics_is_left_and_its_convolution_too():
    net = Net(lambda net, x: net.relu(net.bn1(net.conv1(x))) + net.relu(net.conv2(x)))
    _statistics_of_the_batch(net)
    assert same(net, image()).calls == ("conv2+relu",)


def test_a_block_with_a_hook_is_called_with_it():
    seen = []
    model = nn.Sequential(nn.Sequential(Net(one)), Net(one))
    model[0].register_forward_hook(lambda m, args, out: seen.append(type(out)))
    assert same(lively(model), image()).calls == ("1.conv1+bn1+relu",)
    assert set(seen) == {torch.Tensor}


# -- the module around it ---------------------------------------------------------------------------------------------


def test_the_module_is_as_it_was():
    net, x = Net(one), image()
    heard = []
    net.register_forward_hook(lambda m, args, out: heard.append(1))
    attributes = {name: set(m.__dict__) for name, m in net.named_modules()}
    state = {k: (v, v.clone()) for k, v in net.state_dict(keep_vars=True).items()}
    with pytest.raises(ZeroDivisionError), fuse(net) as fused:
        assert fused.count == 1
        run(net, x)
        assert set(net.state_dict()) == set(state)
        _ = 1 / 0
    assert len(heard) == 1
    assert {name: set(m.__dict__) for name, m in net.named_modules()} == attributes
    now = net.state_dict(keep_vars=True)
    assert all(now[k] is v and torch.equal(v, copy) for k, (v, copy) in state.items())
    fused.undo()  # once more does nothing


def test_a_constant_of_the_forward_is_not_left_on_the_module():
    net = Net(lambda net, x: one(net, x) * torch.tensor(2.0, dtype=torch.float64))
    same(net, image())
    assert not [k for k in net.__dict__ if "constant" in k]


def test_new_weights_are_seen():
    net, x, other = Net(shared), image(), Net(shared)
    with fuse(net) as fused:
        run(net, x)
        assert fused.refresh() == 0
        memory = [c._weight.data_ptr() for c in fused._convolutions]
        net.load_state_dict(other.state_dict())
        close(run(net, x), run(other, x))
        assert [c._weight.data_ptr() for c in fused._convolutions] == memory  # a captured graph reads it
        with torch.no_grad():
            net.bn1.running_mean.add_(1.0)
            other.bn1.running_mean.add_(1.0)
        close(run(net, x), run(other, x))
        net.conv2.weight = nn.Parameter(other.conv2.weight * 2)
        other.conv2.weight = net.conv2.weight
        assert fused.refresh() == 1
        close(run(net, x), run(other, x))
        net.float()
        assert run(net, x.float())[0].dtype == torch.float32


def test_under_inference_mode_and_refolded_outside():
    net, other, x = Net(one), Net(one), image()
    before = run(net, x)
    with torch.inference_mode():
        fused = fuse(net)
        assert fused.calls == ("conv1+bn1+relu",)
        close(run(net, x), before)
    net.load_state_dict(other.state_dict())
    close(run(net, x), run(other, x))
    fused.undo()


def test_a_copy_runs_on_its_own_weights():
    net, x = Net(one), image()
    with fuse(net):
        twin = copy.deepcopy(net)
        before, _ = run(net, x)
        with torch.no_grad():
            twin.conv1.weight.zero_()
            twin.bn1.bias.fill_(1.0)
            twin.bn1.running_mean.zero_()
        assert bool((run(twin, x)[0] == 1.0).all())
        assert torch.equal(run(net, x)[0], before)
        assert inspect.signature(net.forward) == inspect.signature(type(net).forward.__get__(net))


def test_hooks_added_inside_are_run():
    seen = []
    model = lively(nn.Sequential(nn.Sequential(Net(one)), Net(one)))
    with fuse(model) as fused:
        for part in (model[0], model[1].bn1):
            handle = part.register_forward_hook(lambda m, args, out: seen.append(type(m)))
            run(model, image())
            handle.remove()
        assert seen == [nn.Sequential, nn.BatchNorm2d]
        with collect_rewrites() as heard:
            run(model, image())
        assert heard == [fused.rewrites]


def test_training_is_refused():
    net, x = Net(one), image()
    net.bn2.train()  # not even one that is not used
    with pytest.raises(RewriteError, match="'bn2' of Net is in training mode"):
        fuse(net)
    net.eval()
    with fuse(net):
        with pytest.raises(RewriteError, match="where gradients are recorded"):
            net(x)
        net.train()
        with torch.no_grad(), pytest.raises(RewriteError, match="switched between"):
            net(x)
        net.eval()
        for p in net.parameters():
            p.requires_grad_(False)
        assert not net(x).requires_grad  # nothing asks for a gradient
        with pytest.raises(RewriteError, match="where gradients are recorded"):
            net(x.clone().requires_grad_())


def test_what_cannot_be_folded_in_fp16():
    net = Net(one).half()
    with torch.no_grad():
        net.conv1.weight.fill_(1000.0)
        net.bn1.running_var.zero_()
    with pytest.raises(RewriteError, match=r"weights of conv1\+bn1\+relu are not finite in float16"):
        fuse(net)
    assert "forward" not in net.__dict__


def test_fused_twice_is_refused():
    net = Net(one)
    with fuse(net), pytest.raises(RewriteError, match="already been replaced"):
        fuse(net)


def test_who_profiles_hears_of_it():
    net = Net(one)
    with fuse(net) as fused, collect_rewrites() as heard:
        run(net, image())
    assert heard == [fused.rewrites]
    assert (fused.rewrites[0].rule, fused.rewrites[0].by) == ("fused_conv", "tessera")


# -- tracing ----------------------------------------------------------------------------------------------------------


class Optional(nn.Module):
    """A forward with arguments that may be left out."""

    def __init__(self) -> None:
        super().__init__()
        self.net = Net(one)

    def forward(self, x, mask=None, *, scale=1.0, **rest):
        y = self.net(x) * scale
        return y if mask is None else y * mask


def test_optional_arguments_go_the_way_of_the_plain_call():
    module, x = Optional().eval(), image()
    with torch.no_grad():
        expected = [module(x), module(x, None), module(x, mask=x), module(x=x, scale=3.0)]
        with fuse(module), collect_rewrites() as heard:
            found = [module(x), module(x, None), module(x, mask=x), module(x=x, scale=3.0)]
            assert len(heard) == 1
            close(module(x=x), expected[0])
    close(found, expected)


def by_value(net, x):
    return one(net, x) if x.sum() > 0 else x


def draws(net, x):
    return one(net, x) + torch.rand(1)


def writes(net, x):
    net.last = one(net, x)
    return net.last


def appends(net, x):
    net.seen.append(x)
    return one(net, x)


def sets(net, x):
    x.data = x * 2
    return one(net, x)


@pytest.mark.parametrize(
    ("forward", "match"),
    [
        (by_value, "cannot be traced"),
        (draws, "draws random numbers"),
        (writes, "writes last"),
        (appends, "writes seen"),
        (sets, "sets data of a tensor"),
    ],
)
def test_what_cannot_be_traced(forward, match):
    net = Net(forward)
    net.seen = []
    with pytest.raises(RewriteError, match=match):
        fuse(net)
    assert "last" not in net.__dict__
    assert net.seen == []


def test_a_buffer_that_forward_writes_is_written_each_time():
    def counts(net, x):
        net.count.add_(1)
        return one(net, x) * net.count

    net, x = Net(counts), image()
    net.register_buffer("count", torch.zeros((), dtype=torch.float64))
    with fuse(net):
        assert float(net.count) == 0
        run(net, x)
        run(net, x)
    assert float(net.count) == 2


def test_the_kind_of_result_is_kept():
    net = Net(lambda net, x: OrderedDict(out=one(net, x), x=[x, (x, {"a": x})]))
    before, _ = run(net, x := image())
    with fuse(net):
        after, _ = run(net, x)
    assert type(after) is OrderedDict
    assert [type(v) for v in after.values()] == [type(v) for v in before.values()]
    close(after, before)


def test_example_inputs_find_what_the_trace_got_wrong():
    net = Net(lambda net, x: one(net, x) if isinstance(x, torch.Tensor) else one(net, x) * 2)
    with pytest.raises(RewriteError, match="gives another result"):
        fuse(net, image())
    assert "forward" not in net.__dict__
    x = image()
    kept = x.clone()
    with fuse(Net(into_the_other), (x,)) as fused:
        assert fused.count == 1
    assert torch.equal(x, kept)  # it ran on a copy


# -- what is given at run time ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("in_place", [False, True])
def test_a_summand_of_another_shape_or_format(in_place):
    class Sum(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = Net(one)

        def forward(self, x, z):
            y = self.net.bn1(self.net.conv1(x))
            y = operator.iadd(y, z) if in_place else z + y
            return self.net.relu(y)

    module = lively(Sum(), torch.float32)
    x = image().float()
    for z in (x[:, :1], x.double(), torch.ones(()), 2.0, x):
        with torch.no_grad():
            expected = module(x, z)
            with fuse(module) as fused:
                assert fused.calls == ("net.conv1+bn1+add+relu",)
                found = module(x, z)
        assert found.dtype == expected.dtype
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def test_one_image_without_a_batch():
    assert same(Net(no_norm), image()[0]).calls == ("conv1+relu", "conv2+add+relu")


# -- cuDNN's operators ------------------------------------------------------------------------------------------------


def _call(net: nn.Module, dtype: torch.dtype = torch.bfloat16) -> FoldedConvolution:
    fused = fuse(net.to(dtype))
    fused.undo()
    call = fused._convolutions[-1]
    assert isinstance(call, FoldedConvolution)
    return call


@pytest.mark.parametrize("forward", [one, no_norm])
def test_the_arguments_fit_the_schema(forward):
    x = image().bfloat16()
    call = _call(Net(forward))
    op, args = call.cudnn_call(x, x if call.adds else None)
    assert op._schema.name == f"aten::{call.operator}"
    names = [argument.name for argument in op._schema.arguments]
    wanted = [
        "self",
        "weight",
        *(["z", "alpha"] if call.adds else []),
        "bias",
        "stride",
        "padding",
        "dilation",
        "groups",
    ]
    assert names == wanted
    assert len(args) == len(names)
    with pytest.raises(NotImplementedError):  # parsed, and refused only for want of a kernel
        op(*args)
    with pytest.raises((RuntimeError, TypeError)) as refused:
        op(*args[:-1], None)
    assert not isinstance(refused.value, NotImplementedError)


@pytest.fixture
def cudnn(monkeypatch):
    """Kernels of the two operators for the CPU, and a device that has them: the way of the call without a GPU."""
    asked: list[str] = []
    wrong = {"by": 0.0, "error": ""}

    def add_relu(x, weight, z, alpha, bias, stride, padding, dilation, groups):
        asked.append("add_relu" if z is not None else "relu")
        if wrong["error"]:
            raise RuntimeError(wrong["error"])
        y = F.conv2d(x.float(), weight.float(), bias.float(), stride, padding, dilation, groups)
        y = y if z is None else y + alpha * z.float()
        return (y.relu() + wrong["by"]).to(x.dtype)

    def relu(x, weight, bias, *how):
        return add_relu(x, weight, None, 0.0, bias, *how)

    library = torch.library.Library("aten", "IMPL", "CPU")
    library.impl("cudnn_convolution_relu", relu)
    library.impl("cudnn_convolution_add_relu", add_relu)
    monkeypatch.setattr(folded_conv, "_is_cudnn_allowed", lambda x: True)
    yield asked, wrong
    library._destroy()


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_the_path_through_cudnn(cudnn, layout):
    asked, _ = cudnn
    net = lively(Residual(), torch.bfloat16).to(memory_format=layout)
    x = torch.randn(2, 3, 8, 8, dtype=torch.bfloat16).to(memory_format=layout)
    with torch.no_grad():
        expected = net(x)
        with fuse(net) as fused:
            net(x)
            assert asked == ["relu"] * 4 + ["add_relu"] * 2  # each compared, then taken
            asked.clear()
            found = net(x)
            assert asked == ["relu", "relu", "add_relu"]
            assert fused.fallbacks == ()
    assert float((found - expected).norm() / expected.norm()) < 2e-2


@pytest.mark.parametrize("problem", [{"by": 0.5}, {"by": float("nan")}, {"error": "unable to find an engine"}])
def test_a_wrong_or_missing_engine_is_left_to_torch(cudnn, problem):
    asked, wrong = cudnn
    wrong |= problem
    net, x = Net(one).bfloat16(), image().bfloat16()
    with torch.no_grad(), fuse(net) as fused:
        first, second = net(x), net(x)
        assert asked == ["relu"]  # once for this shape
        assert fused.fallbacks == ("conv1+bn1+relu",)
    wrong |= {"by": 0.0, "error": ""}
    with torch.no_grad():
        folded_weights = fused._convolutions[0]._by_torch(x, None)
    assert torch.equal(first, folded_weights)
    assert torch.equal(second, folded_weights)


def test_what_cudnn_is_never_asked(cudnn):
    asked, _ = cudnn
    with torch.no_grad():
        for x in (image(), image().bfloat16()[0], image().bfloat16()[:0]):
            with fuse(Net(one).to(x.dtype)) as fused:
                fused._module(x)
        sums = _call(Net(no_norm))
        x = image().bfloat16()
        for z in (x[:, :1], x.float(), 2.0):  # its plans do not know the shape of z
            sums(x, z)
        deep = nn.Sequential(nn.Conv2d(C, C, 3, groups=C), nn.BatchNorm2d(C), nn.ReLU()).eval().bfloat16()
        with fuse(deep) as fused:
            deep(x)
            assert fused.rewrites[0].after == "conv2d + relu_"
    assert asked == []


def test_a_chain_needs_no_weights_to_be_found():
    with torch.device("meta"):
        net = Net(one)
    graph, needed = trace_forward(net)
    assert needed == ("x",)
    assert [chain.name for chain in find_chains(graph)] == ["conv1+bn1+relu"]
    with torch.no_grad(), fuse(net):
        assert net(image().to("meta")).shape == (2, C, 6, 6)
