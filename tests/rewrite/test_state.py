"""What a program may write comes back: exactly, into the same memory, and nothing else is written."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from tessera.rewrite.compare import Reference
from tessera.rewrite.program import Program
from tessera.rewrite.state import State

OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "adamw": lambda p: torch.optim.AdamW(p, lr=torch.tensor(1e-2), amsgrad=True),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=1e-2),
    "lbfgs": lambda p: torch.optim.LBFGS(p, lr=0.1, max_iter=2),  # its state holds lists of tensors
}


class Norm(nn.BatchNorm1d):
    """One that counts in a buffer that no state dict has."""

    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.register_buffer("calls", torch.zeros(()), persistent=False)

    def forward(self, x: Any) -> Any:
        self.calls = self.calls + 1  # another tensor
        return super().forward(x)


def training(name: str) -> tuple[Program, Any]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), Norm(4), nn.Dropout(0.5), nn.Linear(4, 4))
    model[3].weight = model[0].weight  # tied
    optimizer = OPTIMIZERS[name](model.parameters())
    x = torch.randn(8, 4)

    def loss() -> Any:
        optimizer.zero_grad(set_to_none=False)
        found = model(x).square().sum() + model[1].calls
        found.backward()
        return found

    return Program(call=lambda: optimizer.step(loss), modules=(model,), optimizers=(optimizer,), mode="call"), optimizer


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("before", [0, 2])
def test_training_goes_on_as_if_nothing_had_happened(name: str, before: int) -> None:
    program, optimizer = training(name)
    (model,) = program.modules
    for _ in range(before):
        program.call()
    kept, state = {k: v.clone() for k, v in model.state_dict().items()}, State(program)
    held = [p.grad for p in model.parameters()]
    first = [program.call().item() for _ in range(3)]
    optimizer.param_groups[0]["lr"] = 0.5
    model.eval()
    state.restore()
    assert model.training and float(optimizer.param_groups[0]["lr"]) != 0.5
    assert all(torch.equal(v, kept[k]) for k, v in model.state_dict().items())
    assert all(p.grad is g for p, g in zip(model.parameters(), held, strict=True))
    assert bool(optimizer.state) == (before > 0 and name != "sgd")
    assert [program.call().item() for _ in range(3)] == first


def test_memory_stays_and_only_what_changed_is_written() -> None:
    program, optimizer = training("adamw")
    (model,) = program.modules
    program.call()
    moments = [v for s in optimizer.state.values() for v in s.values()]
    tensors = [*model.parameters(), *model.buffers(), *(p.grad for p in model.parameters()), *moments]
    places = [t.data_ptr() for t in tensors]
    state, versions = State(program), [t._version for t in tensors]
    state.restore()
    assert [t._version for t in tensors] == versions  # weights that were folded into something are not stale now
    program.call()
    model[0].weight.grad = None
    state.restore()
    moments = [v for s in optimizer.state.values() for v in s.values()]
    after = [*model.parameters(), *model.buffers(), *(p.grad for p in model.parameters()), *moments]
    assert [t.data_ptr() for t in after] == places  # a captured graph reads what it read
    assert torch.is_tensor(optimizer.param_groups[0]["lr"])


def test_what_a_state_is_taken_of_may_be_odd() -> None:
    model = nn.EmbeddingBag(8, 4, sparse=True)
    model.register_buffer("mask", torch.ones(1, 4).expand(3, 4))  # torch lets nobody write here
    model(torch.tensor([[1, 2]])).sum().backward()
    state, grad = State(Program(call=model, modules=(model, model), optimizers=(), mode="call")), model.weight.grad
    wanted = grad.to_dense()
    model(torch.tensor([[2, 5]])).sum().backward()
    state.restore()
    assert model.weight.grad is grad and torch.equal(grad.to_dense(), wanted)


def test_how_an_optimizer_computes_is_left_to_who_changed_it() -> None:
    program, optimizer = training("adamw")
    program.call()
    (group,) = optimizer.param_groups
    state = State(program)
    group["foreach"], group["lr"] = True, 0.5
    optimizer.state.clear()
    state.restore()
    assert group["foreach"] and group["lr"].item() == pytest.approx(1e-2)
    assert {s["step"].item() for s in optimizer.state.values()} == {1.0}
    state.restore(flags=True)
    assert not group["foreach"]


def test_two_models_with_the_same_names_are_told_apart() -> None:
    models = tuple(nn.Linear(2, 2, bias=False) for _ in range(2))
    x = torch.ones(1, 2)

    def step(scale: float = 1.0) -> Any:
        (models[0](x) * scale).sum().backward()
        models[1](x).sum().backward()

    program = Program(call=step, modules=models, optimizers=(), mode="step")
    seen = program.observe(step, (), {})
    assert {"gradient of 0.weight", "gradient of 1.weight"} < set(seen)
    assert Reference(observed=seen).compare(program.observe(step, (2.0,), {})).where == "all gradients"
