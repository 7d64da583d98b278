"""Programs as `torch.compile` runs them: what is fused, what is not, and that a compiled model is predicted so."""

import pytest
import torch
from torch import nn

import tessera
from tessera.estimate import sweep
from tessera.estimate.compiled import compile_program
from tessera.graph.capture import capture


class Chain(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(8):
            x = torch.sin(x)
        return x


class Block(nn.Module):
    """A block of a transformer's kind: products, a gate, a residual that is read twice, a norm, a sum."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.gate, self.down = nn.Linear(256, 512), nn.Linear(256, 512), nn.Linear(512, 256)
        self.norm = nn.LayerNorm(256)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(x)
        x = x + self.down(nn.functional.silu(self.gate(y)) * self.up(y))
        return x + self.norm(x) * x.float().mean(-1, keepdim=True).to(x.dtype)


BIG = torch.empty(1 << 25, device="meta")


def test_a_chain_is_one_kernel_at_the_speed_of_memory() -> None:
    fused = tessera.predict(Chain(), BIG, launch="compile")
    eager = tessera.predict(Chain(), BIG, launch="eager")
    assert len(fused.descriptors) == 1
    assert fused.prediction.launch == "compile"
    moved = 2 * 4 * (1 << 25)
    assert moved / 4.8e12 <= fused.prediction.device_s < 1.3 * moved / 4.8e12
    assert fused.prediction.device_s < eager.prediction.device_s / 6
    assert fused.prediction.peak_memory_bytes <= eager.prediction.peak_memory_bytes


@pytest.mark.filterwarnings("ignore")  # of torch's compiler, when it is imported
@pytest.mark.parametrize("program", [Chain(), lambda x: torch.sin(torch.sin(x))])
def test_a_compiled_model_is_predicted_as_compiled(program) -> None:
    compiled = torch.compile(program, backend="eager")
    report = tessera.predict(compiled, BIG)
    assert len(report.descriptors) == 1
    assert any(note.startswith("the model is compiled: predicted as launch='compile'") for note in report.notes)
    assert sweep(compiled, BIG, on="h200").launch == "compile"
    assert tessera.predict(compiled, BIG, launch="eager").prediction.launch == "eager"


@pytest.mark.filterwarnings("ignore")
def test_a_compiled_part_is_said() -> None:
    inner = torch.compile(Chain(), backend="eager")
    report = tessera.predict(lambda x: inner(x) * 2, BIG)
    assert report.prediction.launch == "eager"
    assert any(note.startswith("a part of the program is compiled") for note in report.notes)


@pytest.mark.parametrize("mode", ["infer", "train"])
def test_products_keep_to_themselves_and_phases_apart(mode: str) -> None:
    graph = capture(Block(), torch.empty(64, 256), mode=mode)
    compiled, report = compile_program(graph)
    assert compiled.flops == graph.flops
    assert 0 < len(compiled.kernels) < len(graph.kernels)
    for piece in report.subgraphs:
        phases = {op.phase for op in piece.kernels}
        assert len(phases) == 1
        if any(op.flops for op in piece.kernels):
            assert len(piece.kernels) == 1
    # Every value that a kernel reads was written before it, or is there before the program.
    written = {s.id for s in graph.storages.values() if s.birth < 0}
    made = {t.storage for op in graph.kernels for t in op.outputs}
    for op in compiled.kernels:
        assert {t.storage for t in op.inputs if t.storage in made} <= written | {t.storage for t in op.outputs}
        written |= {t.storage for t in op.outputs}


def test_a_vocabulary_without_aligned_rows_is_padded() -> None:
    with torch.device("meta"):
        head, x = nn.Linear(768, 50257, bias=False).bfloat16(), torch.empty(8192, 768, dtype=torch.bfloat16)
    eager, compiled = (tessera.predict(head, x, launch=launch).prediction.device_s for launch in ("eager", "compile"))
    assert compiled < 0.5 * eager
