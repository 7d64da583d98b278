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


def test_a_fused_softmax_goes_along_the_rows_of_its_own_operand() -> None:
    """Its piece reads one dimension more: rows of 50,257 are not columns of the 1,024 positions before them."""
    logits = torch.empty(8, 1024, 50257, dtype=torch.bfloat16, device="meta")

    def loss(x: torch.Tensor) -> torch.Tensor:
        return nn.functional.log_softmax(x.float().reshape(-1, 50257), dim=1)

    (apart,) = tessera.predict(loss, logits.view(-1, 50257), launch="compile").descriptors
    (fused,) = tessera.predict(loss, logits, launch="compile").descriptors
    assert fused.latency_s == pytest.approx(apart.latency_s, rel=0.01)


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


class Masked(nn.Module):
    """Builds a mask only while it is compiled, as transformers does, and then multiplies by it."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ torch.ones_like(x) if torch.compiler.is_compiling() else x.relu()


def test_a_program_that_asks_learns_that_it_is_compiled() -> None:
    x = torch.empty(256, 256, device="meta")
    names = {launch: [op.name for op in capture(Masked(), x, launch=launch).kernels] for launch in ("eager", "compile")}
    assert names["eager"] == ["aten.relu"] and "aten.mm" in names["compile"]
    assert any("whether it is being compiled" in note for note in capture(Masked(), x, launch="compile").assumptions)
    assert not torch.compiler.is_compiling()  # put back


def test_torch_itself_is_not_told_that_it_is_compiled() -> None:
    """AdamW would leave out its own preparation, which Dynamo does for it."""
    eager, compiled = (
        capture(Block(), torch.empty(64, 256, device="meta"), mode="train", optimizer="adamw", launch=launch)
        for launch in ("eager", "compile")
    )
    assert [op.name for op in compiled.ops] == [op.name for op in eager.ops]


def _generated(program, *inputs: torch.Tensor) -> list[tuple[str, int]]:
    """Name and bytes read of every launch of the compiled program."""
    with torch.no_grad():
        graph, _ = compile_program(capture(program, inputs))
    return [(op.label.rpartition(".")[2], op.bytes_in) for op in graph.kernels]


def test_rows_and_their_sum_and_constants_are_one_kernel() -> None:
    """A softmax that gives 0 for rows of -inf: Inductor makes one kernel of it, and constants are part of the code."""

    def safe_softmax(x: torch.Tensor) -> torch.Tensor:
        hidden = torch.isneginf(x).all(-1, keepdim=True)
        return torch.where(hidden, torch.scalar_tensor(0.0, device=x.device), torch.softmax(x, -1))

    x = torch.empty(4096, 512, device="meta")
    ((_, read),) = _generated(safe_softmax, x)
    assert read == 4 * 4096 * 512


def test_lookups_are_part_of_the_kernel_and_read_their_rows_only() -> None:
    words, ids = nn.Embedding(100_000, 64, device="meta"), torch.empty(8, 16, dtype=torch.int64, device="meta")
    ((_, read),) = _generated(lambda ids: words(ids).relu(), ids)
    assert read == 8 * 16 * (8 + 4 * 64)


def test_a_concatenation_is_generated_code_at_the_speed_of_memory() -> None:
    parts = [torch.empty(64, 1 << 18, device="meta").mT for _ in range(2)]
    compiled, eager = (
        tessera.predict(lambda a, b: torch.cat([a, b], 0), parts, launch=launch) for launch in ("compile", "eager")
    )
    assert compiled.prediction.device_s <= eager.prediction.device_s
    assert compiled.prediction.device_s < 1.5 * 4 * parts[0].nbytes / 4.8e12
