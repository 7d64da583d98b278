"""The lines of `optimize()`'s trace against what each of them saves when it is the only thing changed.

    PYTHONPATH=src:.carry/site python benchmarks/device/trace_lines.py RESULTS.json --trace benchmarks/results/optimize.json
                                                                     [--only resnet50,bert,gpt2,gaps] [--again] [--quick]

A trace shares a measured difference out among rewrites; nobody measures one rewrite alone while it is made. Here it is
done by hand: the eager program is captured as a CUDA graph (what the device no longer waits is one line), then in that
graph one place is exchanged for what Inductor makes of it (each is another line), and the joules of both are measured in
turns. What `optimize` told is read from `--trace`; `--again` measures nothing and holds what RESULTS.json has against
another trace. GPT-2: forward and backward, without the optimizer.
`gaps`: ResNet-50's convolutions back to back, and the same with waits between them: whether the same kernels take more
joules when nothing waits. `--quick` runs tiny models on the CPU: the logic, no figures. No clock or limit is changed.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics as st
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional as F  # noqa: N812 - the name everybody knows it by

import fused_conv
import optimize
import vision
from tessera.monitor.iteration import IterationMeasurement, measure_iteration

sys.path.insert(0, str(Path(__file__).parents[1]))
from result_file import write_result

ROUNDS = 3
SECONDS_EACH = 1.5
WAITING = ["cuda_graph"]
WAIT_US = (0.0, 6.0, 30.0)  # after each of ResNet-50's 53 convolutions, about 31 us each


@dataclass(slots=True)
class Part:
    """One thing exchanged: what the trace calls it (rule or operators before), and the iteration that has it."""

    told: tuple[str, ...]
    iteration: Callable[[], Any]


@dataclass(slots=True)
class Case:
    """A model as it is and as a replay, and the parts that are exchanged in the replay."""

    plain: Callable[[], Any] | None
    replayed: Callable[[], Any]
    parts: dict[str, Part] = field(default_factory=dict)


def captured(call: Callable[[], Any]) -> Callable[[], Any]:
    """A call as a CUDA graph's replay; the call itself on a CPU."""
    return fused_conv.graphed(call)[0]


def by_inductor(function: Callable[..., Any]) -> Callable[..., Any]:
    return torch.compile(function, dynamic=False, fullgraph=True)


# -- ResNet-50 -----------------------------------------------------------------------------------------------------


def _norm(x: torch.Tensor, bn: torch.nn.BatchNorm2d) -> torch.Tensor:
    return F.batch_norm(x, bn.running_mean, bn.running_var, bn.weight, bn.bias, False, 0.0, bn.eps)


def _norm_relu(x: torch.Tensor, bn: torch.nn.BatchNorm2d) -> torch.Tensor:
    return F.relu(_norm(x, bn), inplace=True)


def _norm_add_relu(x: torch.Tensor, bn: torch.nn.BatchNorm2d, skip: torch.Tensor) -> torch.Tensor:
    out = _norm(x, bn)
    out += skip
    return F.relu(out, inplace=True)


def _two_norms(x: torch.Tensor, bn: torch.nn.BatchNorm2d, skip: torch.Tensor, second: Any) -> torch.Tensor:
    out, other = _norm(x, bn), _norm(skip, second)
    out += other
    return F.relu(out, inplace=True)


def _stem(x: torch.Tensor, bn: torch.nn.BatchNorm2d) -> torch.Tensor:
    return F.max_pool2d(_norm_relu(x, bn), 3, 2, 1)


EAGER = {"relu": _norm_relu, "add": _norm_add_relu, "down": _two_norms, "stem": _stem}


def resnet_forward(net: Any, x: torch.Tensor, use: dict[str, Callable[..., Any]]) -> torch.Tensor:
    """The forward of torchvision, of bottleneck blocks, in the pieces that `use` names."""
    x = use["stem"](net.conv1(x), net.bn1)
    for block in (*net.layer1, *net.layer2, *net.layer3, *net.layer4):
        y = use["relu"](block.conv1(x), block.bn1)
        y = block.conv3(use["relu"](block.conv2(y), block.bn2))
        if block.downsample is None:
            x = use["add"](y, block.bn3, x)
        else:
            x = use["down"](y, block.bn3, block.downsample[0](x), block.downsample[1])
    return net.fc(torch.flatten(net.avgpool(x), 1))


def _resnet(quick: bool, device: str, dtype: torch.dtype) -> tuple[Any, torch.Tensor]:
    vision.importable()
    import torchvision

    net = torchvision.models.resnet50(weights=None).eval().to(device, dtype, memory_format=torch.channels_last)
    x = torch.randn((1, 3, 32, 32) if quick else (64, 3, 224, 224), device=device, dtype=dtype)
    return net, x.to(memory_format=torch.channels_last)


def resnet50(quick: bool, device: str, dtype: torch.dtype) -> Case:
    net, x = _resnet(quick, device, dtype)
    fused = {name: by_inductor(function) for name, function in EAGER.items()}

    def run(*exchanged: str) -> Callable[[], Any]:
        use = {name: (fused if name in exchanged else EAGER)[name] for name in EAGER}

        def forward() -> Any:
            with torch.no_grad():
                return resnet_forward(net, x, use)

        return captured(forward)

    def plain() -> Any:
        with torch.no_grad():
            return net(x)

    with torch.no_grad():
        assert torch.allclose(net(x), resnet_forward(net, x, EAGER), rtol=0.05, atol=0.05)
    return Case(plain, run(), {
        "norm, relu (and the stem's pool)": Part(("batch_norm + relu", "max_pool2d_with_indices"), run("relu", "stem")),
        "norm, add, relu": Part(("batch_norm + add + relu", "batch_norm + add + relu + mean"), run("add")),
        "two norms, add, relu": Part(("2 batch_norm + add + relu",), run("down")),
        "all of them": Part(("batch_norm + relu", "max_pool2d_with_indices", "batch_norm + add + relu",
                             "batch_norm + add + relu + mean", "2 batch_norm + add + relu"), run(*EAGER)),
    })  # fmt: skip


def gaps(quick: bool, device: str, dtype: torch.dtype) -> dict[str, Callable[[], Any]]:
    """ResNet-50's convolutions alone, with microseconds of waiting behind each: a kernel of one thread that spins."""
    net, x = _resnet(quick, device, dtype)
    seen: list[tuple[torch.nn.Conv2d, torch.Tensor]] = []
    hooks = [
        m.register_forward_pre_hook(lambda m, args: seen.append((m, args[0].clone())))
        for m in net.modules() if isinstance(m, torch.nn.Conv2d)
    ]  # fmt: skip
    with torch.no_grad():
        net(x)
    for hook in hooks:
        hook.remove()
    clock_hz = 1e6 * _sm_mhz()

    def with_waits(wait_us: float) -> Callable[[], Any]:
        def run() -> Any:
            with torch.no_grad():
                for conv, given in seen:
                    conv(given)
                    if wait_us and torch.cuda.is_available():
                        torch.cuda._sleep(int(wait_us * 1e-6 * clock_hz))

        return captured(run)

    return {f"{wait_us:g} us between": with_waits(wait_us) for wait_us in WAIT_US}


def _sm_mhz() -> float:
    return float(torch.cuda.clock_rate()) if torch.cuda.is_available() else 1.0


# -- BERT and GPT-2 ------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def exchanged(places: list[tuple[Any, str, Any]]) -> Iterator[None]:
    """Attributes that are others for a while."""
    before = [(owner, name, getattr(owner, name)) for owner, name, _ in places]
    try:
        for owner, name, value in places:
            setattr(owner, name, value)
        yield
    finally:
        for owner, name, value in before:
            setattr(owner, name, value)


def bert(quick: bool, device: str, dtype: torch.dtype) -> Case:
    from transformers.models.bert import modeling_bert

    load = optimize.bert(quick, device, dtype)
    forward = load.iteration(load.model)
    # Asking whether the mask hides anything waits for the device, which a capture forbids; eager finds it hides nothing.
    nothing = [(modeling_bert, name, lambda *_, **__: None) for name in
               ("create_bidirectional_mask", "_prepare_4d_attention_mask_for_sdpa") if hasattr(modeling_bert, name)]  # fmt: skip

    def add_norm(y: torch.Tensor, x: torch.Tensor, norm: torch.nn.LayerNorm) -> torch.Tensor:
        return F.layer_norm(y + x, norm.normalized_shape, norm.weight, norm.bias, norm.eps)

    fused = by_inductor(add_norm)
    outputs = [m for m in load.model.modules() if type(m).__name__ in ("BertSelfOutput", "BertOutput")]
    norms = [(m, "forward", lambda y, x, m=m: fused(m.dense(y), x, m.LayerNorm)) for m in outputs]
    embeddings = load.model.embeddings
    front = [(embeddings, "forward", torch.compile(embeddings.forward, dynamic=False))]

    def run(places: list[tuple[Any, str, Any]]) -> Callable[[], Any]:
        with exchanged([*nothing, *places]):
            return captured(forward)

    return Case(forward, run([]), {
        "add, layer_norm": Part(("add + layer_norm",), run(norms)),
        "embeddings": Part(("gather + 3 embedding + 2 add + layer_norm", "3 embedding + 2 add + layer_norm"), run(front)),
    })  # fmt: skip


def _next_token_loss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """That of transformers: in float32, each position against the next token."""
    shifted = F.pad(labels, (0, 1), value=-100)[..., 1:].contiguous()
    return F.cross_entropy(logits.float().view(-1, logits.shape[-1]), shifted.view(-1), ignore_index=-100)


def gpt2(quick: bool, device: str, dtype: torch.dtype) -> Case:
    """Forward and backward. A padded product is that of a vocabulary padded from the beginning."""
    from transformers import GPT2Config, GPT2LMHeadModel

    size = {"n_layer": 1, "n_embd": 64, "n_head": 2} if quick else {}
    words = 127 if quick else GPT2Config().vocab_size

    def model_of(vocab_size: int) -> Any:
        return GPT2LMHeadModel(GPT2Config(use_cache=False, vocab_size=vocab_size, **size)).to(device, dtype)

    model, padded = model_of(words), model_of(-(-words // 64) * 64)
    ids = torch.randint(0, words, (2, 32) if quick else (8, 1024), device=device)

    def step(net: Any, loss: Callable[..., Any]) -> Callable[[], Any]:
        def both() -> Any:
            for p in net.parameters():
                p.grad = None
            loss(net(input_ids=ids).logits, ids).backward()

        return both

    whole = torch.compile(_next_token_loss, dynamic=False)
    acts = [(block.mlp, "act", torch.compile(block.mlp.act, dynamic=False)) for block in model.transformer.h]
    eager = captured(step(model, _next_token_loss))
    with exchanged(acts):
        gelu = captured(step(model, _next_token_loss))
    return Case(None, eager, {
        "padded products": Part(("pad_gemm",), captured(step(padded, _next_token_loss))),
        "gelu, both ways": Part(("4 mul + pow + 2 add + tanh", "7 mul + tanh_backward + pow + 2 add"), gelu),
        "loss, both ways": Part(("log_softmax + nll_loss_backward + log_softmax_backward", "to_copy"),
                                captured(step(model, whole))),
    })  # fmt: skip


CASES: dict[str, Callable[[bool, str, torch.dtype], Case]] = {"resnet50": resnet50, "bert": bert, "gpt2": gpt2}


# -- measuring -----------------------------------------------------------------------------------------------------


def in_rounds(calls: dict[str, Callable[[], Any]], quick: bool) -> dict[str, dict[str, float | None]]:
    """Each call's seconds and joules, in turns: the medians, and how far the joules of single rounds are apart."""
    found: dict[str, list[IterationMeasurement]] = {name: [] for name in calls}
    for _ in range(1 if quick else ROUNDS):
        for name, call in calls.items():
            call()
            found[name].append(measure_iteration(call, 0.1 if quick else SECONDS_EACH))
    rows: dict[str, dict[str, float | None]] = {}
    for name, each in found.items():
        joules = [m.energy_j for m in each if m.energy_j is not None]
        rows[name] = {
            "ms": st.median(m.time_s for m in each) * 1e3,
            "j": st.median(joules) if joules else None,
            "range_j": max(joules) - min(joules) if joules else None,
        }
    return rows


def told_of(lines: list[dict[str, Any]], names: list[str]) -> tuple[float, float] | None:
    """The joules and seconds that a trace's lines of these names save together; None where it has none of them."""
    mine = [line for line in lines if line["rule"] in names or line["before"] in names]
    return (sum(line["saved_j"] for line in mine), sum(line["saved_s"] for line in mine)) if mine else None


def lines_of(case: Case, quick: bool) -> dict[str, Any]:
    """Rows of joules; `before` and `after` name the two that a row is the difference of, `lines` what traces call it."""
    calls = {"replayed": case.replayed, **{name: part.iteration for name, part in case.parts.items()}}
    if case.plain is not None:
        calls["eager"] = case.plain
    rows: dict[str, Any] = in_rounds(calls, quick)
    for name, part in case.parts.items():
        rows[name] |= {"before": "replayed", "after": name, "lines": list(part.told)}
    if case.plain is not None:
        rows["eager"] |= {"before": "eager", "after": "replayed", "lines": WAITING}
    return rows


def beside(rows: dict[str, Any], told: list[dict[str, Any]]) -> None:
    """What each part saves as measured, beside what the trace told; waits by the watt, as no two runs wait alike."""
    for row in rows.values():
        found = told_of(told, row["lines"]) if "lines" in row else None
        if found is None:
            continue
        before, after = rows[row["before"]], rows[row["after"]]
        row["told_saved_j"], row["told_saved_ms"] = found[0], found[1] * 1e3
        row["saved_ms"] = before["ms"] - after["ms"]
        if before["j"] is not None and after["j"] is not None:
            row["saved_j"] = before["j"] - after["j"]
            row["told_over_saved"] = found[0] / row["saved_j"]
            if row["lines"] == WAITING:
                row["told_over_saved"] *= row["saved_ms"] / row["told_saved_ms"]


def show(model: str, rows: dict[str, Any]) -> None:
    for name, row in rows.items():
        figures = "  ".join(f"{key} {value:.4g}" for key, value in row.items() if isinstance(value, float))
        print(f"{model:9s} {name:34s} {figures}", flush=True)


def told_again(path: Path, told: dict[str, Any]) -> None:
    data = json.loads(path.read_text())
    for model, rows in data["models"].items():
        if model in told:
            beside(rows, told[model]["optimize"]["rewrites"]["rewrites"])
        show(model, rows)
    write_result(path, data)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--trace", type=Path, default=Path("benchmarks/results/optimize.json"))
    parser.add_argument("--only", default=",".join([*CASES, "gaps"]))
    parser.add_argument("--again", action="store_true")
    parser.add_argument("--quick", action="store_true")
    given = parser.parse_args()
    told = json.loads(given.trace.read_text())["models"]
    if given.again:
        return told_again(given.out, told)
    if not given.quick and not torch.cuda.is_available():
        sys.exit("no CUDA device: --quick runs the logic on the CPU")
    vision.importable()
    torch._dynamo.config.recompile_limit = 64  # a shape each
    device, dtype = ("cpu", torch.float32) if given.quick else ("cuda", torch.bfloat16)
    name = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    data: dict[str, Any] = {"device": name, "torch": torch.__version__, "models": {}}
    for model in given.only.split(","):
        torch.manual_seed(0)
        begin = time.monotonic()
        try:
            if model == "gaps":
                rows: dict[str, Any] = in_rounds(gaps(given.quick, device, dtype), given.quick)
            else:
                rows = lines_of(CASES[model](given.quick, device, dtype), given.quick)
                beside(rows, told[model]["optimize"]["rewrites"]["rewrites"])
        except Exception:  # noqa: BLE001 - the next model may work
            traceback.print_exc()
            continue
        show(model, rows)
        print(f"{model:9s} took {time.monotonic() - begin:.0f} s", flush=True)
        data["models"][model] = rows
        write_result(given.out, data)
        torch._dynamo.reset()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
    return None


if __name__ == "__main__":
    main()
