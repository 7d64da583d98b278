"""What is captured as a CUDA graph, against a CUDA that is made up: a capture runs nothing, a replay runs it once."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tessera.rewrite.cudagraph import WARM_UP, ReplayedProgram, abandon_capture
from tessera.rewrite.program import Program
from tessera.rewrite.state import State
from tessera.runtime.options import ScheduleOptions
from tessera.runtime.tuning import changes
from tessera.runtime.tuning.changes import apply_setting
from tessera.runtime.tuning.cudagraph import CapturableOptimizers, GraphedFunction
from tessera.runtime.tuning.parts import FunctionParts, NotApplicable, find_parts
from tessera.runtime.tuning.plan import Plan
from tessera.runtime.tuning.trial import TrialBench
from tessera.runtime.tuning.tuner import TunedFunction


class FakeCuda:
    """Streams and graphs in name; `broken` makes a capture fail in its body and again at its end, as CUDA's does."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.known: FunctionParts | None = None
        self.body: Any = None
        self.broken = False
        self.stream = "default"
        self.ended: list[str] = []
        self.replays = 0
        for name in ("CUDAGraph", "current_stream", "graph", "Stream", "set_stream"):
            monkeypatch.setattr(torch.cuda, name, getattr(self, name))
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(sys.modules["torch.optim.adam"], "_get_capturable_supported_devices", lambda **_: ["cpu"])
        monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: (0, 7))
        monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
        monkeypatch.setattr(torch.cuda, "get_rng_state_all", list)
        monkeypatch.setattr(torch.cuda, "set_rng_state_all", lambda states: None)
        monkeypatch.setattr(torch.cuda, "default_generators", (self,))
        monkeypatch.setattr(torch._C, "_cuda_endAllocateToPool", self._end, raising=False)
        monkeypatch.setattr(torch._C, "_cuda_releasePool", lambda d, p: self.ended.append("release"), raising=False)

    def _end(self, device: int, pool: tuple[int, int]) -> None:
        if not self.broken:
            raise RuntimeError("endAllocatePool: not currently recording to mempool_id")
        self.ended.append("end")

    def clone_state(self) -> str:
        return "fresh"

    def graphsafe_set_state(self, state: str) -> None:
        self.ended.append(state)

    def current_stream(self, *_: Any) -> Any:
        return self

    def wait_stream(self, other: Any) -> None:
        pass

    def set_stream(self, stream: Any) -> None:
        self.stream = "default"

    def Stream(self) -> Any:
        return self

    @contextlib.contextmanager
    def stream_context(self) -> Iterator[None]:
        yield

    def CUDAGraph(self) -> Any:
        return self

    @contextlib.contextmanager
    def graph(self, graph: Any, *, pool: Any, capture_error_mode: str) -> Iterator[None]:
        assert capture_error_mode == "thread_local" and self.known is not None
        before, self.stream = State(self.known), "capture"
        try:
            yield
        except RuntimeError:
            raise RuntimeError("capture was invalidated")  # noqa: B904  (as from __exit__: a context, no cause)
        finally:
            before.restore()
        self.stream = "default"

    def replay(self) -> None:
        self.replays += 1
        self.body()


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    fake = FakeCuda(monkeypatch)
    monkeypatch.setattr(torch.cuda, "stream", lambda side: fake.stream_context())
    return fake


def training(seed: int = 0) -> tuple[Any, Any, Any]:
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Dropout(0.5), torch.nn.Linear(8, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    x = torch.randn(16, 8)

    def step() -> Any:
        optimizer.zero_grad(set_to_none=True)
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step, model, optimizer


def weights(model: Any) -> Any:
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def test_every_call_is_one_step_the_first_too(cuda: FakeCuda) -> None:
    plain, model, _ = training()
    for _ in range(4):
        plain()
    step, same, optimizer = training()
    cuda.known, cuda.body = find_parts(step), step
    captured = GraphedFunction(step, find_parts(step))
    for _ in range(4):
        captured()
    assert cuda.replays == 3  # the first made the optimizer's state, eagerly: a graph would make it at every replay
    assert torch.allclose(weights(same), weights(model), atol=1e-5)  # a step is 0.05
    assert optimizer.param_groups[0]["capturable"]
    captured.release()
    assert not optimizer.param_groups[0]["capturable"]


def test_warming_up_is_no_change_of_the_weights(cuda: FakeCuda) -> None:
    """WeightCopies of weights that saw one would be made anew within the graph, and by every replay."""
    step, model, _ = training()
    step()
    cuda.known, cuda.body = find_parts(step), lambda: None
    before, within = [p._version for p in model.parameters()], []

    def noted() -> Any:
        if cuda.stream == "capture":
            within.append([p._version for p in model.parameters()])
        return step()

    GraphedFunction(noted, find_parts(step))()
    assert within == [before]


def test_a_capture_that_fails_leaves_nothing_behind(cuda: FakeCuda) -> None:
    step, model, _ = training()
    step()
    before, grads = weights(model).clone(), [p.grad.clone() for p in model.parameters()]
    cuda.known, cuda.body, cuda.broken = find_parts(step), step, True

    def reads() -> Any:
        loss = step()
        if cuda.stream == "capture":
            raise RuntimeError("operation not permitted when stream is capturing\nsearch for help")
        return loss

    with pytest.raises(NotApplicable, match=r"operation not permitted when stream is capturing$"):
        GraphedFunction(reads, find_parts(step))()
    assert cuda.stream == "default"
    assert cuda.ended == ["end", "release", "fresh"]
    assert torch.equal(weights(model), before)
    assert all(torch.equal(p.grad, g) for p, g in zip(model.parameters(), grads, strict=True))


def test_a_pool_that_had_ended_is_not_released_twice(cuda: FakeCuda) -> None:
    abandon_capture(cuda, (0, 7))
    assert cuda.ended == ["fresh"]


def inference(cuda: FakeCuda, *, fails: bool = False) -> tuple[Any, Any, list[str]]:
    """A model of which every call notes whether it was within a capture, and the same replayed."""
    model, calls = torch.nn.Linear(4, 2), []

    def call(x: Any) -> Any:
        calls.append(cuda.stream)
        if fails and cuda.stream == "capture":
            raise RuntimeError("not while capturing")
        return model(x)

    replayed = ReplayedProgram(Program(call=call, modules=(model,), optimizers=(), mode="infer"))

    def body() -> None:
        with torch.no_grad():
            replayed._outputs.copy_(model(*replayed._inputs))

    cuda.known, cuda.body = find_parts(model), body
    return model, replayed, calls


def test_an_inference_is_captured_once_and_its_results_stay(cuda: FakeCuda) -> None:
    model, replayed, calls = inference(cuda)
    one, two = torch.randn(3, 4), torch.randn(3, 4)
    first, second = replayed(one), replayed(two)
    assert calls == [*["default"] * WARM_UP, "capture"] and cuda.replays == 2
    assert torch.equal(first, model(one)) and torch.equal(second, model(two))
    assert not first.requires_grad
    assert replayed(torch.randn(5, 4)).shape == (5, 2) and cuda.replays == 2  # another shape runs eagerly
    model.eval()
    assert torch.equal(replayed(one), model(one)) and cuda.replays == 2  # so does another mode
    assert calls[WARM_UP + 1 :] == ["default"] * 2


def test_an_inference_that_cannot_be_captured_leaves_nothing_behind(cuda: FakeCuda) -> None:
    _, replayed, _ = inference(cuda, fails=True)
    cuda.broken = True
    with pytest.raises(RuntimeError, match="invalidated"):
        replayed(torch.randn(3, 4))
    assert cuda.stream == "default" and cuda.ended == ["end", "release", "fresh"]


def test_a_tensor_in_host_memory_is_not_captured(cuda: FakeCuda) -> None:
    model = torch.nn.Linear(4, 4)
    with pytest.raises(NotApplicable, match="host memory"):
        GraphedFunction(model, find_parts(model))(torch.randn(2, 4))


def test_the_graph_takes_the_place_of_the_compilers_own(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []

    @contextlib.contextmanager
    def noted(call: Any, known: Any, setting: Any) -> Iterator[Any]:
        seen.append((setting["compile"], setting.get("graph")))
        yield call

    monkeypatch.setitem(changes._CHANGES, "compile", noted)
    monkeypatch.setitem(changes._CHANGES, "graph", noted)
    model = torch.nn.Linear(2, 2)
    for setting in ({"compile": "reduce-overhead"}, {"compile": "reduce-overhead", "graph": True}):
        with apply_setting(model, find_parts(model), setting, {}):
            pass
    assert seen == [("reduce-overhead", None), ("default", True), ("default", True)]


@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning", "ignore:.*script_method:DeprecationWarning")
def test_the_compiler_may_keep_many_versions_meanwhile() -> None:
    import torch._dynamo

    before = torch._dynamo.config.recompile_limit
    model = torch.nn.Linear(2, 2)
    with apply_setting(model, find_parts(model), {"compile": "default"}, {}):
        assert torch._dynamo.config.recompile_limit >= 256
    assert torch._dynamo.config.recompile_limit == before
    assert model._compiled_call_impl is None


def test_a_layout_that_was_channels_last_stays() -> None:
    model = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.Conv2d(8, 8, 3))
    model.register_buffer("planes", torch.randn(1, 3, 4, 4))
    model[1].to(memory_format=torch.channels_last)
    buffer = model.planes
    with apply_setting(model, find_parts(model), {"layout": "channels_last"}, {}):
        assert all(c.weight.is_contiguous(memory_format=torch.channels_last) for c in model.children())
        assert model.planes is buffer
    assert model[0].weight.is_contiguous()
    assert model[1].weight.is_contiguous(memory_format=torch.channels_last) and not model[1].weight.is_contiguous()


def test_a_learning_rate_that_changes_is_read_from_device_memory() -> None:
    step, _, optimizer = training()
    step()
    held = CapturableOptimizers(find_parts(step))
    group = optimizer.param_groups[0]
    assert held.ready and not held.update_rates()
    with held.prepare():
        assert group["lr"] == 0.05 and isinstance(group["lr"], float)  # as it is while nobody changes it
    group["lr"] = 0.01
    assert held.update_rates()  # what was captured has the old one
    with held.prepare():
        rate = group["lr"]
        assert torch.is_tensor(rate) and rate.item() == pytest.approx(0.01)
    assert group["lr"] == 0.01
    group["lr"] = 0.002
    assert not held.update_rates()
    assert rate.item() == pytest.approx(0.002)
    held.release()
    assert not group["capturable"]


def test_a_function_that_changes_its_optimizer_is_not_captured(cuda: FakeCuda) -> None:
    step, _, optimizer = training()
    step()
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)

    def both() -> Any:
        loss = step()
        scheduler.step()
        return loss

    cuda.known = find_parts(step)
    with pytest.raises(NotApplicable, match="changes the optimizer"):
        GraphedFunction(both, find_parts(step))()
    assert optimizer.param_groups[0]["lr"] == 0.05


def test_a_trial_of_a_fused_optimizer_runs_fused() -> None:
    step, _, optimizer = training()
    step()
    known, seen = find_parts(step), []

    def noted() -> Any:
        seen.append(optimizer.param_groups[0]["fused"])
        return step()

    bench = TrialBench(fn=noted, args=(), kwargs={}, parts=known, state=State(known), own={}, trial_s=0.05)
    bench({})
    seen.clear()
    assert not bench({"optimizer": "fused"}).refused
    assert set(seen) == {True}
    assert not optimizer.param_groups[0]["fused"]


def test_a_plan_goes_on_without_a_graph_that_cannot_be(cuda: FakeCuda, caplog: pytest.LogCaptureFixture) -> None:
    step, _, _ = training()
    step()
    cuda.known, cuda.broken = find_parts(step), True

    def reads() -> Any:
        loss = step()
        if cuda.stream == "capture":
            raise RuntimeError("not while capturing")
        return loss

    fn = TunedFunction(reads, ScheduleOptions(policy="energy"))
    fn._adopt(
        Plan(
            function="reads",
            policy="energy",
            setting={"graph": True},
            why={},
            trials=[],
            ops=[],
            device="cpu",
            key={},
            notes=[],
            spent_s=0.0,
            made="",
        ),
        find_parts(step),
    )
    assert torch.is_tensor(fn()) and torch.is_tensor(fn())
    assert fn.plan().setting == {}
    assert "not while capturing" in fn.plan().notes[0] and "not while capturing" in caplog.text
