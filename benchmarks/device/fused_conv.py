"""Convolution, batch norm, addition and ReLU as one cuDNN call: whether it works in bf16, and what it saves.

    PYTHONPATH=src:.carry/site python benchmarks/device/fused_conv.py RESULTS.json [--budget-s 60] [--quick]

First each operator once, in the shapes of ResNet-50: the error cuDNN gives, if any, the deviation from fp32 (also with
NaNs left in the memory of the result, and with the summand in the input's memory), and milliseconds beside conv2d with
add_ and relu_. Then ResNet-50 inference, bf16, channels last, batch 64, replayed from a CUDA graph: as it is, fused,
both with cuDNN's own search, and compiled where 45 s are left; the two best in turns; and the kernels of one call.
`--quick` runs a small model on the CPU: the logic, no figures. No clock, limit or mode of the GPU is changed.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import gc
import os
import statistics as st
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - the name everybody knows it by

os.environ["TESSERA_CONTROL"] = "0"  # limits and clocks of this GPU are never changed here, whatever the shell says

import vision
from tessera.monitor import EnergyBenchmark
from tessera.rewrite.fused_conv import fuse

sys.path.insert(0, str(Path(__file__).parents[1]))
from result_file import write_result

Call = Callable[[], Any]
COMPILE_S = 45.0  # torch.compile of ResNet-50 in its default mode took about 30 s on the H200's host
TURNS = 3
# (channels in, out, size of the image, kernel, stride, groups) of ResNet-50, and one of ResNeXt's.
SHAPES = {
    "conv1": (3, 64, 224, 7, 2, 1),
    "layer1 1x1": (256, 64, 56, 1, 1, 1),
    "layer1 3x3": (64, 64, 56, 3, 1, 1),
    "layer1 out": (64, 256, 56, 1, 1, 1),
    "layer3 3x3": (256, 256, 14, 3, 1, 1),
    "layer4 out": (512, 2048, 7, 1, 1, 1),
    "resnext 3x3": (128, 128, 56, 3, 1, 32),
}


class Results:
    """What was found, written after each row; a row that fails says so and the next one runs."""

    def __init__(self, path: Path, budget_s: float) -> None:
        self.path, self.deadline = path, time.monotonic() + budget_s
        name = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
        self.data: dict[str, Any] = {
            "device": name, "torch": torch.__version__,
            "cudnn": torch.backends.cudnn.version(), "operators": {}, "model": {}, "skipped": [],
        }  # fmt: skip

    def row(self, group: str, name: str, make: Callable[[], dict[str, Any]], needs_s: float) -> dict[str, Any]:
        left = self.deadline - time.monotonic()
        if left < needs_s:
            self.data["skipped"].append(f"{group} {name}: {needs_s:.0f} s needed, {left:.0f} s left")
            found: dict[str, Any] = {"error": "skipped: no time left"}
        else:
            try:
                found = make()
            except Exception as e:  # noqa: BLE001 - a row must not take the others with it
                traceback.print_exc()
                found = {"error": f"{type(e).__name__}: {str(e)[:600]}"}
        self.data[group][name] = found
        write_result(self.path, self.data)
        print(f"{group:9s} {name:24s} " + "  ".join(f"{k} {short(v)}" for k, v in found.items() if k != "kernels"),
              flush=True)  # fmt: skip
        return found


def short(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def off(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Relative Frobenius error."""
    return float((found.double() - expected.double()).norm() / expected.double().norm())


def timed_ms(call: Call, times: int = 30) -> float:
    """Milliseconds a call on the device, of `times` in a row; on a CPU, of the host."""
    for _ in range(3):
        call()
    if not torch.cuda.is_available():
        begin = time.perf_counter()
        call()
        return (time.perf_counter() - begin) * 1e3
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    for _ in range(times):
        call()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / times


@contextlib.contextmanager
def searching(on: bool) -> Iterator[None]:
    """Whether cuDNN measures its engines, or takes what its heuristics say."""
    before = torch.backends.cudnn.benchmark
    torch.backends.cudnn.benchmark = on
    try:
        yield
    finally:
        torch.backends.cudnn.benchmark = before


def operator(shape: tuple[int, ...], batch: int, device: str) -> dict[str, Any]:
    """One call of each operator, as cuDNN answers it: nothing of ours in between."""
    inward, outward, size, kernel, stride, groups = shape
    last = {"device": device, "dtype": torch.bfloat16}
    x = torch.randn(batch, inward, size, size, **last).to(memory_format=torch.channels_last)
    w = torch.randn(outward, inward // groups, kernel, kernel, **last).to(memory_format=torch.channels_last)
    w /= (inward // groups * kernel * kernel) ** 0.5
    b, how = torch.randn(outward, **last), ((stride, stride), (kernel // 2, kernel // 2), (1, 1), groups)
    plain = F.conv2d(x, w, b, *how)
    z = torch.randn_like(plain)
    exact = F.conv2d(x.float(), w.float(), b.float(), *how)
    found: dict[str, Any] = {
        "torch_off": off(plain.relu(), exact.relu()),
        "torch_ms": timed_ms(lambda: F.conv2d(x, w, b, *how).relu_()),
        "torch_add_ms": timed_ms(lambda: F.conv2d(x, w, b, *how).add_(z).relu_()),
    }
    aten = torch.ops.aten
    calls: dict[str, tuple[Call, torch.Tensor]] = {
        "relu": (lambda: aten.cudnn_convolution_relu(x, w, b, *how), exact.relu()),
        "add_relu": (lambda: aten.cudnn_convolution_add_relu(x, w, z, 1.0, b, *how), (exact + z.float()).relu()),
    }
    if x.shape == plain.shape:
        calls["add_input_relu"] = (
            lambda: aten.cudnn_convolution_add_relu(x, w, x, 1.0, b, *how),
            (exact + x.float()).relu(),
        )
    for name, (call, expected) in calls.items():
        for search in (False, True):
            label = f"{name}{'_searched' if search else ''}"
            try:
                with searching(search):
                    found[f"{label}_off"] = off(call(), expected)
                    if name == "relu":
                        poison = [torch.full_like(plain, float("nan")) for _ in range(4)]
                        del poison
                        found[f"{label}_over_nans_off"] = off(call(), expected)
                    found[f"{label}_ms"] = timed_ms(call)
            except (RuntimeError, NotImplementedError) as e:
                found[f"{label}_error"] = f"{type(e).__name__}: {str(e).splitlines()[0][:300]}"
    return found


def resnet(quick: bool, device: str) -> tuple[torch.nn.Module, torch.Tensor, torch.Tensor]:
    """ResNet-50 in bf16 with batch norms that know their data, an input, and what fp32 makes of both."""
    vision.importable()
    import torchvision

    torch.manual_seed(0)
    exact = (torchvision.models.resnet18 if quick else torchvision.models.resnet50)(weights=None).to(device)
    x = torch.randn((8, 3, 64, 64) if quick else (64, 3, 224, 224), device=device).bfloat16()
    norms = [m for m in exact.modules() if isinstance(m, torch.nn.BatchNorm2d)]
    for norm in norms:
        norm.momentum = 1.0
    with torch.no_grad():
        exact.train()(x.float())
        for tensor in exact.state_dict().values():
            if tensor.is_floating_point():
                tensor.copy_(tensor.bfloat16())  # both have the same weights, so that only arithmetic differs
        expected = exact.eval()(x.float())
    model = exact.to(torch.bfloat16, memory_format=torch.channels_last)
    return model, x.to(memory_format=torch.channels_last), expected


def graphed(call: Call) -> tuple[Call, Any]:
    """A call replayed from a CUDA graph, and its result; on a CPU the call itself."""
    if not torch.cuda.is_available():
        return call, call()
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            call()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = call()
    graph.replay()
    torch.cuda.synchronize()
    return graph.replay, result


def replayed(replay: Call, weights: Any) -> None:
    """Replay a graph that reads the folded weights of `weights`: they must live as long."""
    replay()


def measured(call: Call, seconds: float) -> dict[str, Any]:
    bench = EnergyBenchmark(target=0.01, min_s=seconds, budget_s=2 * seconds)
    bench.measure(name="call")(call)()
    found = bench.results[0]
    joules = found.energy_per_call_j if found.basis == "measured" else None
    return {
        "ms": found.time_per_call_s.value * 1e3,
        "j": joules.value if joules else None,
        "error_j": joules.error if joules else None,
    }


def kernels(call: Call) -> dict[str, int]:
    """Names and counts of the kernels of one call; on a CPU, of its operators."""
    from torch.profiler import ProfilerActivity, profile

    cuda = torch.cuda.is_available()
    call()
    with profile(activities=[ProfilerActivity.CUDA if cuda else ProfilerActivity.CPU]) as seen:
        call()
        if cuda:
            torch.cuda.synchronize()
    kind = "CUDA" if cuda else "CPU"
    names = Counter(e.name[:90] for e in seen.events() if str(e.device_type).endswith(kind))
    return dict(names.most_common(25))


def one_way(model: Any, x: torch.Tensor, expected: torch.Tensor, kept: dict[str, Call], name: str, seconds: float,
            *, fused: bool, search: bool, compiled: bool = False) -> dict[str, Any]:  # fmt: skip
    """One way to run the model: how far off, milliseconds, joules."""
    with contextlib.ExitStack() as stack, torch.no_grad():
        stack.enter_context(searching(search))
        found: dict[str, Any] = {}
        rewritten = stack.enter_context(fuse(model)) if fused else None
        called = torch.compile(model) if compiled else model
        begin = time.monotonic()
        replay, result = graphed(lambda: called(x))
        found["prepared_s"] = time.monotonic() - begin
        found["off"] = off(result, expected)
        if rewritten is not None:
            found |= {"calls": rewritten.count, "refused": list(rewritten.fallbacks)}
        found |= measured(replay, seconds)
        if not compiled:
            found["kernels"] = kernels(lambda: called(x))
            found["kernels_a_call"] = sum(found["kernels"].values())
    if torch.cuda.is_available():  # on a CPU the module is as it was again
        kept[name] = functools.partial(replayed, replay, rewritten)
    return found


def in_turns(kept: dict[str, Call], first: str, second: str, seconds: float) -> dict[str, Any]:
    """Two ways in turns, so that drift falls on both: medians of the ratios."""
    pairs = [(measured(kept[first], seconds), measured(kept[second], seconds)) for _ in range(TURNS)]
    found: dict[str, Any] = {"first": first, "second": second}
    found["ms_ratio"] = st.median(a["ms"] / b["ms"] for a, b in pairs)
    if all(a["j"] and b["j"] for a, b in pairs):
        found["j_ratio"] = st.median(a["j"] / b["j"] for a, b in pairs)
    return found


def models(results: Results, quick: bool, device: str) -> None:
    model, x, expected = resnet(quick, device)
    seconds, kept = (0.2 if quick else 1.5), dict[str, Call]()
    ways = {
        "eager": {"fused": False, "search": False},
        "fused": {"fused": True, "search": False},
        "eager, searched": {"fused": False, "search": True},
        "fused, searched": {"fused": True, "search": True},
    }
    for name, how in ways.items():
        results.row("model", name, lambda name=name, how=how: one_way(model, x, expected, kept, name, seconds, **how),
                    3 * seconds)  # fmt: skip
    if not quick:
        results.row("model", "compiled", lambda: one_way(model, x, expected, kept, "compiled", seconds, fused=False,
                                                         search=False, compiled=True), COMPILE_S)  # fmt: skip
    rows = {name: found for name, found in results.data["model"].items() if name in kept and "ms" in found}

    def cost(name: str) -> float:
        return float(rows[name]["j"] or rows[name]["ms"])

    ours = min((name for name in rows if name.startswith("fused")), key=cost, default=None)
    theirs = min((name for name in rows if not name.startswith("fused")), key=cost, default=None)
    if ours and theirs:
        results.row("model", "in turns", lambda: in_turns(kept, ours, theirs, seconds / 1.5), 2 * TURNS * seconds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--budget-s", type=float, default=60.0)
    parser.add_argument("--quick", action="store_true")
    given = parser.parse_args()
    if not given.quick and not torch.cuda.is_available():
        sys.exit("no CUDA device: --quick runs the logic on the CPU")
    if torch.cuda.is_available():
        os.environ.setdefault("TESSERA_SENSORS", "nvml")  # the GPU's joules alone, whatever RAPL may say
    device = "cpu" if given.quick else "cuda"
    # The reference must be fp32's own.
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = False
    results = Results(given.out, given.budget_s)
    for name, shape in list(SHAPES.items())[: 2 if given.quick else None]:
        small = (*shape[:2], 14, *shape[3:]) if given.quick else shape
        results.row("operators", name, lambda small=small: operator(small, 2 if given.quick else 64, device), 2.0)
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    models(results, given.quick, device)
    print("\nway                       ms        J         off       kernels")
    for name, found in results.data["model"].items():
        if "ms" in found:
            figures = (short(found[k]) for k in ("ms", "j", "off"))
            print(f"{name:25s} " + "".join(f"{v:10s}" for v in figures) + str(found.get("kernels_a_call", "")))
        else:
            print(f"{name:25s} {found.get('error') or found}")
    for line in results.data["skipped"]:
        print("skipped:", line)


if __name__ == "__main__":
    main()
