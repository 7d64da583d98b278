"""A recorded run as people see it: on one screen, as one page, as JSON."""

from __future__ import annotations

import base64
import dataclasses
import gzip
import json
import math
import os
import re
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from click.testing import CliRunner
from rich.console import Console

from recordings import with_table
from tessera import analyze
from tessera.analyze import kernel_names
from tessera.analyze.advise import find_advice
from tessera.analyze.answer import answer
from tessera.analyze.evidence import LAUNCHING, HostGap, RunEvidence, find_host_gaps
from tessera.analyze.lanes import BARS, WHOLE
from tessera.analyze.overview import POINTS, EnergyNode, build_energy_tree, overview, thin
from tessera.analyze.run_energy import find_share_error, weigh_stacks
from tessera.analyze.run_list import describe_run
from tessera.attribute.table import EnergyRow, EnergyTable
from tessera.cli.report import command
from tessera.cli.run_report import report_run
from tessera.errors import ArgumentError
from tessera.joules import DomainSamples
from tessera.notes import Note
from tessera.profile.ranks import merge
from tessera.profile.runfile import RunFile, RunWriter
from tessera.recording import Stack
from tessera.report import energy as shown
from tessera.report.energy import rows_table
from tessera.report.html import prose
from tessera.report.run import text
from tessera.report.run_html import page
from tessera.schema import Domain, Hold
from tessera.timeline.columns import Builder, Timeline
from tessera.trace import PowerTrace
from tessera.units import format_energy_error, format_error

import synthetic_run
from rendered import check_page, text_of
from synthetic_run import EVIL, START_NS, Made, make

GPU = Domain(name="gpu0", source="nvml-samples", resolution_s=0.02, label="NVIDIA H200")
CPU = Domain(name="cpu0", source="rapl", resolution_s=0.02, label="AMD EPYC")


@pytest.fixture(scope="module")
def made() -> Made:
    return make(steps=12, data_ms=16.0, evil=True)


@pytest.fixture(scope="module")
def run(made: Made, tmp_path_factory: pytest.TempPathFactory) -> RunFile:
    path = tmp_path_factory.mktemp("runs") / "train.tessera"
    return made.write(path, work={"token": 12 * 8192})


@pytest.fixture(scope="module")
def html(run: RunFile, made: Made) -> str:
    return page(with_table(run, made.table))


def data_of(html: str) -> dict[str, Any]:
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', html, re.DOTALL)
    assert found
    data: dict[str, Any] = json.loads(found[1])
    return data


def array(packed: list[str]) -> Any:
    return np.frombuffer(base64.b64decode(packed[1]), f"<{packed[0]}")


# -- names ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "short"),
    [
        (synthetic_run.ADD, "vectorized_elementwise_kernel<8, CUDAFunctor_add<bf16>>"),
        (synthetic_run.MUL, "vectorized_elementwise_kernel<8, BinaryFunctor<MulFunctor>>"),
        (synthetic_run.NORM, "vectorized_layer_norm_kernel<bf16>"),
        (synthetic_run.GEMM, synthetic_run.GEMM),
        (synthetic_run.FLASH, "cudnn_sdpa_sm90_flash_fprop_wgmma_f16_64x128x64_4x1x1"),
        ("Memcpy HtoD (Pageable -> Device)", "Memcpy HtoD (Pageable -> Device)"),
        (
            "void cutlass::Kernel2<cutlass_75_tensorop_bf16_s1688gemm_bf16_128x128_tn_align1>(cutlass_75::Params)",
            "cutlass_75_tensorop_bf16_s1688gemm_bf16_128x128_tn_align1",
        ),
        (
            "void at::native::reduce_kernel<128, 4, at::native::ReduceOp<float, at::native::func_wrapper_t<float, "
            "at::native::sum_functor<float, float, float>::operator()(at::TensorIterator&)::{lambda(float, float)#1}>, "
            "unsigned int, float, 4, 4> >(at::native::ReduceOp<float>)",
            "reduce_kernel<128, sum_functor<f32>>",
        ),
        (
            "void at::native::vectorized_elementwise_kernel<8, at::native::(anonymous namespace)::pow_impl<float>"
            "(at::TensorIteratorBase&, float)::{lambda(float)#2}, std::array<char*, 2ul> >(int)",
            "vectorized_elementwise_kernel<8, pow_impl#2<f32>>",
        ),
        ("ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)",
         "ncclDevKernel_AllReduce_Sum_f32_RING_LL"),
        ("triton_poi_fused_add_mul_12", "triton_poi_fused_add_mul_12"),
        ("void broken::name<unclosed", "void broken::name<unclosed"),
        (EVIL, EVIL),
        ("", ""),
    ],
)  # fmt: skip
def test_kernel_names_are_short(name: str, short: str) -> None:
    assert kernel_names.short_name(name) == short


def test_names_that_would_be_the_same_are_numbered() -> None:
    twice = [f"void k<at::native::F<float>, at::OffsetCalculator<{n}> >(int)" for n in (1, 2)]
    assert list(kernel_names.distinct([*twice, twice[0]]).values()) == ["k<F<f32>>", "k<F<f32>> (2)"]


def test_a_name_is_cut_in_the_middle() -> None:
    assert kernel_names.fit("abcdefghij", 10) == "abcdefghij"
    cut = kernel_names.fit("nvjet_sm90_tst_192x128_bias_NNT", 16)
    assert len(cut) == 16
    assert cut.startswith("nvjet")
    assert cut.endswith("bias_NNT")
    assert kernel_names.fit("abcdef", 2) == "ab"


@pytest.mark.parametrize(
    ("name", "kind", "category"),
    [
        (synthetic_run.FLASH, "kernel", "attention"), (synthetic_run.GEMM, "kernel", "matrix product"),
        (synthetic_run.ADD, "kernel", "elementwise"), (synthetic_run.NORM, "kernel", "normalisation, reduction"),
        ("Memcpy DtoD (Device -> Device)", "memcpy", "copies"), ("x", "collective", "communication"),
        ("aten::mm", "op", "matrix product"), ("xyz", "kernel", "other"),
        ("aten::normal_", "op", "elementwise"), ("aten::uniform_", "op", "elementwise"),
        ("aten::bernoulli_", "op", "elementwise"), ("aten::random_", "op", "elementwise"),
        ("aten::exponential_", "op", "elementwise"), ("aten::randn", "op", "elementwise"),
        ("aten::native_layer_norm", "op", "normalisation, reduction"),
        ("l2_normalize_kernel", "kernel", "normalisation, reduction"),
    ],
)  # fmt: skip
def test_what_kernels_do(name: str, kind: str, category: str) -> None:
    assert kernel_names.category(name, kind) == category


# -- the answer -----------------------------------------------------------------------------------------------------


def test_the_answer_adds_up(run: RunFile, made: Made) -> None:
    said = answer(with_table(run, made.table))
    assert said.energy_j == made.table.energy_j
    assert said.power_w == pytest.approx(made.table.energy_j / made.table.time_s)
    assert (said.busy_j or 0) + (said.idle_j or 0) == pytest.approx(said.energy_j)
    assert sum(p.energy_j for p in said.parts) == pytest.approx(said.energy_j)
    assert sum(p.share for p in said.parts) == pytest.approx(1.0)
    assert sum(g.energy_j for g in said.gaps) == pytest.approx(made.table.idle_j)
    step, token = said.per_work
    assert (step.unit, step.amount) == ("step", 12)
    assert step.energy_j == pytest.approx(np.mean([s.energy_j for s in made.table.steps]))
    assert step.error_j >= step.energy_j * made.table.error_j / made.table.energy_j * 0.999
    assert token.energy_j == pytest.approx(made.table.energy_j / (12 * 8192))
    assert said.device == "NVIDIA H200"
    assert said.name == "python train.py --model gpt2"
    assert said.cut is None


def test_gaps_say_what_the_host_did(made: Made) -> None:
    found = find_host_gaps(made.timeline, made.table, [(START_NS, made.end_ns)])
    assert sum(g.time_s for g in found) == pytest.approx(made.table.time_s - made.table.busy_s)
    by = {g.during: g for g in found}
    assert by["in DataLoader.__next__"].count == 11  # before the first there is no kernel yet
    assert {"before the first kernel", "after the last kernel", LAUNCHING} <= set(by)
    assert by["in DataLoader.__next__"].each_s == pytest.approx(0.016, rel=0.25)


def test_a_dear_first_step_is_left_out_of_the_mean(run: RunFile, made: Made) -> None:
    steps = [dataclasses.replace(made.table.steps[0], energy_j=50.0), *made.table.steps[1:]]
    said = answer(with_table(run, dataclasses.replace(made.table, steps=steps)))
    assert said.per_work[0].without == "step_0"
    assert said.per_work[0].energy_j < 12
    out = " ".join(text_of(text(with_table(run, made.table), result=said)).split())
    assert "without step_0, which cost over 1.5 times the median step (50 J)" in out
    assert re.search(r"[\d.]+ J \(step_\d+\) to [\d.]+ J \(step_\d+", out), "the range is of those that count"


def row(name: str, joules: float, kind: str = "kernel", calls: int = 100) -> EnergyRow:
    return EnergyRow(
        name=name, kind=kind, calls=calls, time_s=joules / 400, energy_j=joules, error_j=1.0, share=joules / 100
    )


def table(*kernels: EnergyRow, idle: float = 0.0, **more: Any) -> EnergyTable:
    total = sum(k.energy_j for k in kernels) + idle
    return EnergyTable(
        energy_j=total, error_j=1.0, idle_j=idle, idle_error_j=0.1, time_s=1.0, busy_s=0.8, kernels=kernels,
        **more,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("found", "kind", "says"),
    [
        (table(row("ampere_sgemm_128x64_tn", 60), row("x", 40)), "fp32", "60 J (60%)"),
        (table(row("void Kernel2<cutlass_75_gemm_bf16_tn_align1>(p)", 60), row("x", 40)), "unaligned", "multiple"),
        (table(row("Memcpy HtoD (Pageable -> Device)", 30, "memcpy"), row("x", 70)), "copies", "pin_memory"),
        (table(row("Memcpy DtoD (Device -> Device)", 60, "memcpy"), row("x", 40)), "copies", "contiguous"),
        (table(row("vectorized_elementwise_kernel", 70), row("x", 30)), "fuse", "torch.compile"),
        (table(row("AllReduce", 80, "collective"), row("x", 20)), "communication", "overlap"),
        (table(row("x", 90), row("y", 10)), "one operator", "90 J (90%)"),
        (table(row("x", 60), idle=40.0), "idle", "keep the device fed"),
    ],
)
def test_findings_name_the_cause_and_its_joules(found: EnergyTable, kind: str, says: str) -> None:
    first = find_advice(RunEvidence(table=found, telemetry={}))[0]
    assert first.kind == kind
    assert says in first.text
    assert first.share == pytest.approx(first.energy_j / 100)


def test_many_late_launches_ask_for_a_graph() -> None:
    gaps = [HostGap(during=LAUNCHING, count=9000, time_s=0.2, energy_j=40.0)]
    found = find_advice(RunEvidence(table=table(row("x", 30), row("y", 30), idle=40.0), telemetry={}, gaps=gaps))
    assert found[0].kind == "launch"
    assert "9,000 launches" in found[0].text
    assert "CUDA graph" in found[0].text
    assert "idle" not in [f.kind for f in found]


def test_a_power_cap_and_dear_steps_are_found(made: Made) -> None:
    capped = [dataclasses.replace(t, throttle=("power cap",)) for t in made.telemetry]
    spent = [row(f"k{i}", 10) for i in range(10)]
    assert [f.kind for f in find_advice(RunEvidence(table=table(*spent), telemetry={"gpu0": capped}))] == ["power cap"]
    late, first = ([row(f"step_{i}", 50 if i == at else 5, "step", 1) for i in range(10)] for at in (4, 0))
    assert [f.kind for f in find_advice(RunEvidence(table=table(*spent, steps=late), telemetry={}))] == ["outliers"]
    assert find_advice(RunEvidence(table=table(*spent, steps=first), telemetry={})) == [], (
        "no mean counts it: the screen says so"
    )
    guessed = dataclasses.replace(table(*spent, steps=late), basis="modelled")
    assert find_advice(RunEvidence(table=guessed, telemetry={})) == [], (
        "what is dear there may be the machine's other load"
    )
    assert find_advice(RunEvidence(table=table(*spent), telemetry={})) == []
    assert find_advice(RunEvidence(table=dataclasses.replace(table(*spent), energy_j=math.nan), telemetry={})) == []


# -- the screen -----------------------------------------------------------------------------------------------------


def test_everything_on_one_screen(run: RunFile, made: Made) -> None:
    out = text_of(text(with_table(run, made.table), html=Path("train.html")))
    assert "python train.py --model gpt2 on NVIDIA H200" in out
    assert re.search(
        r"[\d.]+ ± [\d.]+ J   [\d.]+ ± [\d.]+ W   [\d.]+ ms   12 steps   peak \d+ W   nvml-samples\+counter", out
    )
    assert re.search(r"per step +[\d.]+ ± [\d.]+ J +[\d.]+ steps/s", out)
    assert re.search(r"per token +[\d.]+ ± [\d.]+ mJ", out)
    assert re.search(r"busy █+░+ idle +[\d.]+ J in .* busy, [\d.]+ ± [\d.]+ J \([\d.]+%\) idle", out)
    assert re.search(r"region +backward: 12 x [\d.]+ ± [\d.]+ J", out)
    assert re.search(r"aten::mm +[\d.]+ ± [\d.]+ J +\d+\.\d% +640 W +[\d.]+ mJ +288", out)
    assert "nvjet_sm90_tst_192x128_64x5_1x2_h_bz_coopB_TNT" in out
    assert re.search(r"do +the device idled for .* while in DataLoader.__next__", out)
    assert "report  train.html" in out
    assert f"tessera report {run.path} --by kernels --top 30" in out
    assert len(out.splitlines()) <= 32
    assert max(map(len, out.splitlines()[:-1])) <= 100


@pytest.mark.parametrize("width", [60, 80, 140])
def test_other_widths(run: RunFile, made: Made, width: int) -> None:
    out = text_of(text(with_table(run, made.table), html=Path("t.html"), width=width), width)
    lines = out.splitlines()
    assert max(map(len, lines[:-1])) <= width
    assert str(run.path) in lines[-1]  # to be copied: in one piece
    header = next(line for line in lines if line.startswith("operator"))
    assert ("per call" in header) == (width >= 80)
    assert ("columns hidden" in out or "column hidden" in out or "not shown" in out) == (width < 80)
    assert "aten::mm" in out


def test_no_color_is_respected(run: RunFile, made: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    console = Console(force_terminal=True, width=100)
    with console.capture() as captured:
        console.print(text(with_table(run, made.table)))
    assert not re.search(r"\x1b\[[0-9;]*3[0-7]", captured.get())


def test_one_view_and_its_groups(run: RunFile, made: Made) -> None:
    out = text_of(text(with_table(run, made.table), by="kernels", top=9))
    assert "operator" not in out
    assert EVIL in out
    assert re.search(r"^idle +[\d.]+ ± ", out, re.MULTILINE)
    assert len(re.findall(r"> +a +[\d.]+ ± ", out)) == 2
    assert "a: kernels with the same letter" in out
    steps = text_of(text(with_table(run, made.table), by="steps"))
    assert "step_11" in steps
    assert not re.search(r"^idle ", steps, re.MULTILINE)  # theirs is in them
    assert "no modules were recorded" in text_of(text(with_table(run, made.table), by="modules"))


def test_modules_that_were_recorded_are_on_the_screen(run: RunFile, made: Made) -> None:
    modules = [row(f"nn.Module: h.{i} (Block)", 20.0 - i, "module") for i in range(12)]
    spent = dataclasses.replace(made.table, modules=[row("nn.Module: Net", 90.0, "module"), *modules])
    out = text_of(text(with_table(run, spent)))
    assert re.search(r"^module \(10 of 13\) .*\nNet +90.0 ± .*\nh\.0 \(Block\) +20.0 ± ", out, re.MULTILINE)
    assert "nn.Module" not in out and "a module includes the modules inside it" in out
    assert "module" not in text_of(text(with_table(run, made.table)))
    assert "h.11 (Block)" in text_of(text(with_table(run, spent), by="modules"))
    shown_text = "".join(check_page(page(with_table(run, spent))).text)
    assert "h.11 (Block)" in shown_text and "nn.Module: " not in shown_text


def test_names_are_no_markup(made: Made, tmp_path: Path) -> None:
    spent = dataclasses.replace(made.table, ops=[row("[red]op[/red]", 5.0, "op")])
    with made.write(tmp_path / "x.tessera", work={"[bold]x": 3}) as run:
        out = text_of(text(with_table(run, spent)))
    assert "[red]op[/red]" in out
    assert "per [bold]x" in out


@pytest.mark.parametrize(
    ("code", "says"),
    [
        (130, "was interrupted (Ctrl-C)"),
        (-2, "was interrupted"),
        (143, "was ended by SIGTERM"),
        (1, "failed with exit code 1"),
    ],
)
def test_how_a_program_ended_is_said(made: Made, tmp_path: Path, code: int, says: str) -> None:
    with made.write(tmp_path / "x.tessera", returncode=code) as run:
        assert f"the program {says}" in text_of(text(with_table(run, made.table)))
        assert f"The program {says}" in page(with_table(run, made.table))


def test_a_limit_that_cut_nothing_is_not_named(tmp_path: Path) -> None:
    window = (START_NS, START_NS + 1_900_000_000)
    record(tmp_path / "p.tessera", stepped(19, 19), windows=[window], notes=[LIMIT]).close()
    with RunFile(tmp_path / "p.tessera") as run:
        out, rendered, _ = both(run)
    assert "19 of 19 steps" in out and "--limit" not in out and "--limit" not in rendered


def test_modelled_joules_and_failures_are_said(made: Made, tmp_path: Path) -> None:
    modelled = dataclasses.replace(made.table, basis="modelled", coverage=0.5)
    with made.write(tmp_path / "x.tessera", returncode=3) as run:
        out = text_of(text(with_table(run, modelled)))
        assert "MODELLED, not measured" in out
        assert "exit code 3" in out
        assert "saw only 50% of the run" in out
        assert "MODELLED" in page(with_table(run, modelled))


# -- a table alone --------------------------------------------------------------------------------------------------


def test_a_table_as_text_and_html(made: Made) -> None:
    out = str(made.table)
    assert re.search(r"[\d.]+ ± [\d.]+ J   [\d.]+ ± [\d.]+ W", out)
    assert "\x1b" not in out
    assert len(out.splitlines()) <= 16
    assert "operator (3 of 10)" in shown.text(made.table, by="ops", top=3)
    card = made.table._repr_html_()
    parser = check_page(card)
    assert parser.tags.count("details") == 5
    assert "CUDAFunctor_add<bf16>> + vectorized" in shown.text(made.table, by="groups", width=200)
    assert EVIL in "".join(parser.text)
    assert "MODELLED" in shown.html(dataclasses.replace(made.table, basis="modelled"))
    nothing = dataclasses.replace(made.table, energy_j=math.nan, kernels=(), ops=(), regions=(), steps=())
    assert "unknown J" in str(nothing)


# -- the page -------------------------------------------------------------------------------------------------------


def test_the_page_is_whole_and_fetches_nothing(html: str, made: Made) -> None:
    parser = check_page(html)
    said = "".join(parser.text)
    for expected in (
        "python train.py --model gpt2", "NVIDIA H200", "Do this first", "Power and what ran", "Where the joules went",
        "What the device waited for", "How it was measured", "nvml-samples", "per step", "DataLoader.__next__",
    ):  # fmt: skip
        assert expected in said
    assert parser.tags.count("canvas") == 1
    assert parser.tags.count("table") == 6  # ops, kernels, regions, steps, gaps, how each figure is known
    assert "Content-Security-Policy" in html
    assert len(html) < 400_000
    idle = re.search(r"<tr class=idle>.*?</tr>", html)
    assert idle
    assert "15." in idle[0] or "%" in idle[0]


def test_names_from_programs_are_escaped(html: str) -> None:
    assert "<script>alert" not in html
    assert "<b>bold" not in html
    parser = check_page(html)
    assert EVIL in "".join(parser.text)
    assert any(EVIL in name for name, *_ in data_of(html)["names"])


def test_the_tables_can_be_used_from_the_keyboard(html: str) -> None:
    assert html.count("role='tab'") == html.count("role='tabpanel'") == 4
    assert html.count("aria-selected='true'") == 1
    assert len(re.findall(r"<th scope='col'", html)) == len(re.findall(r"<th ", html))
    assert html.count("aria-sort='descending'") == 5
    assert "tabindex='0' role='img' aria-label='Power over time" in html
    assert "prefers-color-scheme: dark" in html
    assert "@media print" in html


def test_a_sentence_shows_what_is_typed_as_code() -> None:
    said = prose("see `tessera hardware show <chip>` & run `a`; a lone ` stays")
    assert said == (
        "see <code>tessera hardware show &lt;chip&gt;</code> &amp; run <code>a</code>; a lone ` stays"
    )  # fmt: skip


def test_the_marks_of_the_profiler_are_in_plain_words(made: Made) -> None:
    b = Builder()
    b.add("kernel", "gemm", START_NS, START_NS + 1_000_000, device=0, stream=7)
    names = ("Iteration Start: PyTorch Profiler", "epoch 1", "Record Window End")
    for i, name in enumerate(names):
        b.add("mark", name, START_NS + i * 1000, START_NS + i * 1000, thread=1)
    view = overview(b.build(), None, {}, made.table)
    assert [name for name, _ in view.marks] == ["tracing begins", "epoch 1", "tracing ends"]


def test_the_watts_of_a_row_have_an_error(html: str, made: Made) -> None:
    row = made.table.kernels[0]
    assert row.power_w is not None
    shown = format_error(row.power_w, row.power_w * row.error_j / row.energy_j, "W")
    assert "±" in shown and f">{shown}</td>" in html


def test_what_is_drawn_is_what_was_recorded(html: str, made: Made) -> None:
    data = data_of(html)
    lanes = {lane["label"]: lane for lane in data["lanes"]}
    stream = lanes["stream 7"]
    rows = made.timeline.device_rows
    assert len(array(stream["s"])) == len(rows)
    assert array(stream["e"]).sum() == pytest.approx(made.table.energy_j - made.table.idle_j, rel=1e-4)
    first = int(made.timeline["start_ns"][rows].min()) - START_NS
    assert array(stream["s"])[0] * data["unit_ns"] == pytest.approx(first, abs=2 * data["unit_ns"])
    assert len(array(lanes["steps"]["s"])) == 12
    assert {line["name"] for line in data["telemetry"]} == {"gpu0 sm clock", "gpu0 temperature", "gpu0 utilisation"}
    assert data["marks"][0][0] == "checkpoint saved"
    assert data["limit_w"] == 700.0
    assert array(data["power"][0]["v"]).max() == pytest.approx(made.watts.max(), rel=1e-5)


def test_spikes_and_their_checklist(run: RunFile, made: Made) -> None:
    from tessera.analyze.correlate import correlate

    power = run.power()
    found = correlate(made.timeline, power, telemetry=run.telemetry())
    rendered = page(with_table(run, made.table))
    parser = check_page(rendered)
    said = "".join(parser.text)
    assert len(data_of(rendered)["spikes"]) == len(found.spikes) > 0
    assert all(a.question in said for a in found.checklist)


def joules_of(node: EnergyNode) -> float:
    return node.energy_j if not node.children else sum(map(joules_of, node.children))


def test_the_tree_conserves_joules(made: Made) -> None:
    tree = build_energy_tree(made.timeline, made.table)
    assert tree.energy_j == pytest.approx(made.table.energy_j)
    assert joules_of(tree) == pytest.approx(made.table.energy_j)
    step = next(c for c in tree.children if c.name == "step")
    assert {c.name for c in step.children} >= {"backward", "forward", "optimizer.step"}
    forward = next(c for c in step.children if c.name == "forward")
    block = next(c for c in forward.children if c.name == "block")
    assert next(c for c in block.children if c.name == "aten::addmm").children[0].kind == "kernel"
    assert tree.children[-1].kind == "idle"


def many(count: int) -> Timeline:
    """Kernels in a row on two streams, ten names, one region a thousand of them."""
    b = Builder()
    starts = START_NS + np.arange(count) * 50_000
    ids = np.array([b.intern(f"void ns::kernel_{i}<float, {'x' * 300}>(int)") for i in range(10)])
    lengths = np.random.default_rng(0).integers(2_000, 90_000, count)
    kind = np.zeros(count, np.int64)
    columns = {
        "kind": kind, "name": ids[np.arange(count) % 10], "start_ns": starts, "end_ns": starts + lengths,
        "device": kind, "stream": 7 + np.arange(count) % 2,
    }  # fmt: skip
    b.extend(columns, count)
    for i in range(0, count, 1000):
        b.add("region", f"step_{i // 1000}", int(starts[i]) - 5000, int(starts[i]) + 49_000_000, thread=1)
    return b.build()


@pytest.mark.parametrize("count", [200_000])
def test_many_kernels_stay_a_small_page(count: int, tmp_path: Path) -> None:
    timeline = many(count)
    writer = RunWriter(tmp_path / "big.tessera", meta={"command": "big"})
    times = np.arange(START_NS, timeline.end_ns, 1_000_000)
    writer.add_samples(GPU, times, np.random.default_rng(1).uniform(300, 600, len(times)))
    writer.add_timeline(timeline)
    writer.close()
    kernels = [row(n, 10.0, calls=count // 10) for n in timeline.names if n.startswith("void")]
    spent = table(*kernels, idle=5.0)
    with RunFile(tmp_path / "big.tessera") as run:
        rendered = page(with_table(run, spent))
    check_page(rendered)
    assert len(rendered) < 2_500_000
    data = data_of(rendered)
    lanes = [lane for lane in data["lanes"] if lane["kind"] == "device"]
    assert sum(int(array(lane["c"]).sum()) for lane in lanes) == count
    whole = sum(int((array(lane["c"]) == 1).sum()) for lane in lanes)
    assert whole >= 900  # the step in the middle, kernel by kernel
    assert max(len(array(line["t"])) for line in data["power"]) <= POINTS


def test_merging_keeps_joules_and_bounds() -> None:
    timeline = many(60_000)
    timeline.energy_j = np.where(timeline["device"] >= 0, 0.001, np.nan)
    view = overview(timeline, None, {}, table(row("x", 1.0)))
    bars = [lane for lane in view.lanes if lane.kind == "device"]
    assert sum(float(lane.energy_j.sum()) for lane in bars) == pytest.approx(60.0)
    assert sum(len(lane.count) for lane in bars) <= 2 * BARS + WHOLE
    assert all((lane.end_ns >= lane.start_ns).all() and (np.diff(lane.start_ns) >= 0).all() for lane in bars)
    assert view.merged + sum(int((lane.count == 1).sum()) for lane in bars) == 60_000


def test_a_thinned_line_keeps_its_peaks() -> None:
    times, values = np.arange(100_000), np.sin(np.arange(100_000) / 500)
    values[54_321] = 9.0
    values[70_000:71_000] = np.nan
    kept, thinned = thin(times, values)
    assert len(kept) <= POINTS
    assert np.nanmax(thinned) == 9.0
    assert (np.diff(kept) > 0).all()
    assert np.isnan(thinned).any()


def test_the_line_of_a_modelled_cpu_has_no_peak_shorter_than_its_resolution() -> None:
    times = np.array([0, 100, 200, 201, 300]) * 1_000_000
    cpu = dataclasses.replace(CPU, source="modelled", basis="modelled", hold=Hold.MEAN, resolution_s=0.1)
    column = DomainSamples.of(cpu, times, np.array([math.nan, 2.0, 2.0, 20.0, 2.0]))  # a tick seen in 1 ms
    power = PowerTrace({"cpu0": column}, start_ns=0, end_ns=300_000_000)
    (line,) = overview(Builder().build(), power, {}, None).power
    assert np.nanmax(line.values) < 2.5
    assert np.nansum(np.diff(line.times_ns) * line.values[1:]) == pytest.approx(618e6)  # the same joules


# -- other runs -----------------------------------------------------------------------------------------------------


def record(path: Path, timeline: Timeline | None = None, **facts: Any) -> RunWriter:
    writer = RunWriter(path, meta=facts.pop("meta", {"argv": ["train.py"]}))
    times = np.arange(START_NS, START_NS + 2_000_000_001, 20_000_000)
    if facts.pop("power", True):
        writer.add_samples(facts.pop("domain", GPU), times, np.where(np.arange(len(times)) < 50, 100.0, 500.0))
    if timeline is not None:
        timeline.notes = [*timeline.notes, *facts.get("notes", ())]  # as a session does: a file keeps their kinds
        writer.add_timeline(timeline)
    for key, value in {"start_ns": START_NS, "end_ns": START_NS + 2_000_000_000, **facts}.items():
        writer.set(key, value)
    return writer


def both(run: RunFile) -> tuple[str, str, EnergyTable]:
    spent = run.recording().energy()
    rendered = page(with_table(run, spent))
    check_page(rendered)
    return text_of(text(with_table(run, spent))), rendered, spent


def test_regions_that_do_not_fit_on_the_screen_are_announced(tmp_path: Path) -> None:
    b = Builder()
    for i in range(7):
        b.add("region", f"part{i}", START_NS + i * 100_000_000, START_NS + (i + 1) * 100_000_000, thread=1)
    record(tmp_path / "r.tessera", b.build()).close()
    with RunFile(tmp_path / "r.tessera") as run:
        out = "".join(text_of(text(run.recording())).split())  # a long path is folded
        assert f"and4more:tesserareport{run.path}--byregions" in out
        assert "part6" in text_of(text(run.recording(), by="regions"))


def test_a_sampled_run_is_shared_out_by_stacks(tmp_path: Path) -> None:
    b = Builder()
    b.add("region", "train", START_NS + 1_000_000_000, START_NS + 2_000_000_000, thread=1)
    writer = record(tmp_path / "s.tessera", b.build(), mode="sampling")
    half = START_NS + 500_000_000
    pid = os.getpid()
    writer.add_stacks([(half, pid, "main;load.py:3 load", 50), (half + 10**9, pid, "main;train.py:9 step", 50)])
    writer.add_stacks([(half, 99, "wait.py:1 wait", 500)])
    writer.close()
    with RunFile(tmp_path / "s.tessera") as run:
        out, rendered, spent = both(run)
    assert spent.energy_j == pytest.approx(600, rel=0.02)
    assert "train: 1 x 500 J" in out
    assert "sampled, no kernels" in out
    assert re.search(r"train.py:9 step +~50\d J", out)  # five times the watts of loading
    assert re.search(r"load.py:3 load +~10\d J", out)
    assert "wait.py" not in out
    assert "± of a share is the 90% interval of 100 samples" in " ".join(out.split())
    assert "the 90% interval of 100 samples" in rendered and "without an interval" not in rendered
    assert "only 100 samples" not in out, "as many are enough"
    assert "Calls are counted while tracing" in " ".join(out.split())
    assert "Nothing was attributed" in rendered
    assert "data-n='main'" in rendered  # a tree of stacks
    assert "Functions (2)" in rendered
    assert re.search(r">train</td><td class='n' data-v='500'>500 J<", rendered)  # measured, and not shared out


def test_joules_by_line_of_the_users_own_code(tmp_path: Path) -> None:
    writer = record(tmp_path / "s.tessera", Builder().build(), mode="sampling")
    half, pid = START_NS + 500_000_000, os.getpid()
    stacks = {
        "profile/launch.py:1 main;./train.py:3 load;modules/linear.py:134 forward": 30,
        "profile/launch.py:1 main;./train.py:3 load;threading.py:5 wait": 10,
        "profile/launch.py:1 main;./train.py:9 step;/home/me/mine.py:2 helper": 40,
        "profile/launch.py:1 main;python3.11/typing.py:5 x": 20,
    }
    writer.add_stacks([(half, pid, stack, count) for stack, count in stacks.items()])
    writer.close()
    with RunFile(tmp_path / "s.tessera") as run:
        out, rendered, spent = both(run)
        alone = text_of(text(with_table(run, spent), by="lines"))
        by_function = text_of(text(with_table(run, spent), by="functions"))
    for screen in (out, alone):
        assert re.search(r"/home/me/mine\.py:2 helper +~24\d J +40\.0 ± 8\.\d% +40", screen)
        assert re.search(r"train\.py:3 load +~24\d J +40\.0 ± 8\.\d% +40", screen)
        assert re.search(r"not in your code +~12\d J +20\.0%", screen)
        assert "a function or line includes what it calls" in " ".join(screen.split())
    assert "Your lines (2)" in rendered and rendered.count(">40.0 ± 8.") == 6
    for screen in (out, by_function):
        assert re.search(r"\./train\.py step +~24\d J +40\.0 ± 8\.\d% +40", screen), "with what it calls"
        assert re.search(r"/home/me/mine\.py helper +~24\d J +40\.0 ± 8\.\d% +40", screen)
        assert re.search(r"\./train\.py load +~24\d J +40\.0 ± 8\.\d% +40", screen)
    assert "Your functions (3)" in rendered
    record(tmp_path / "none.tessera", Builder().build(), mode="sampling").close()
    with RunFile(tmp_path / "none.tessera") as run:
        assert "no lines were recorded: use tessera run --stack" in text_of(text(run.recording(), by="lines"))


def test_shares_of_few_samples_have_a_wide_interval_and_a_note(tmp_path: Path) -> None:
    writer = record(tmp_path / "s.tessera", Builder().build(), mode="sampling")
    half, pid = START_NS + 500_000_000, os.getpid()
    writer.add_stacks([(half, pid, "./train.py:3 load", 14), (half, pid, "./train.py:9 step", 14)])
    writer.close()
    with RunFile(tmp_path / "s.tessera") as run:
        out, rendered, spent = both(run)
        said = msgspec.to_builtins(answer(with_table(run, spent)).to_dict())
    told = "only 28 samples of Python stacks: a share of 50% is known to ± 15%; a longer run has more"
    assert told in " ".join(out.split()) and told in said["notes"] and told in rendered
    assert re.search(r"train\.py:3 load +~30\d J +50\.0 ± 14\.\d% +14", out)
    for view in ("ops", "functions", "lines"):
        assert [row["share_error"] for row in said[view]] == pytest.approx([0.148, 0.148], abs=1e-3)


def test_the_interval_of_a_share_is_wilsons() -> None:
    # By hand, with z = 1.645: of 50 in 100 it is 0.4189 to 0.5811, of 0 in 20 it is 0 to 0.1192.
    assert find_share_error(0.5, 100) == pytest.approx(0.0811, abs=1e-4)
    assert find_share_error(0.0, 20) == pytest.approx(0.1192, abs=1e-4)
    assert find_share_error(1.0, 20) == pytest.approx(0.1192, abs=1e-4)
    assert find_share_error(0.5, 0) == 1.0


def test_samples_that_come_rarely_stand_for_more_time() -> None:
    times = np.array([START_NS, START_NS + 4 * 10**9], np.int64)
    power = PowerTrace(
        {"gpu0": DomainSamples.of(GPU, times, np.array([100.0, 100.0]))}, start_ns=START_NS, end_ns=START_NS
    )
    # Where the last ones end is not known: they stand for as long as those before them on average.
    counts = {0: 40, 1: 10, 2: 10, 3: 20}
    stacks = [Stack(START_NS + second * 10**9, 1, "./a.py:1 f", count) for second, count in counts.items()]
    assert [joules for _, _, joules in weigh_stacks(stacks, power, 400.0, 1)] == pytest.approx([100.0] * 4)


def test_a_summarised_run_is_shared_out_by_time(tmp_path: Path) -> None:
    kernels = [
        {"name": synthetic_run.GEMM, "kind": "kernel", "calls": 100, "time_s": 0.6},
        {"name": synthetic_run.ADD, "kind": "kernel", "calls": 900, "time_s": 0.2},
    ]
    regions = [{"name": "step_N", "kind": "region", "calls": 10, "time_s": 1.0}]
    summary = {"windows": 3, "traced_s": 1.0, "kernels": kernels, "ops": [], "regions": regions, "counters": []}
    windows = [(START_NS + 1_000_000_000, START_NS + 2_000_000_000)]
    record(tmp_path / "s.tessera", mode="summary", summary=summary, windows=windows).close()
    with RunFile(tmp_path / "s.tessera") as run:
        out, rendered, spent = both(run)
        said = answer(with_table(run, spent))
    assert re.search(r"nvjet_\S+ +~300 J +49\.7%", out)  # of the second that had steps, and not of the one before
    assert re.search(r"CUDAFunctor_add<bf16>> +~100 J +16\.6%", out)
    assert re.search(r"the rest +~204 J +33\.8%", out)
    assert "per step  ~" in out and "10 steps" in out
    assert said.kernels[0].energy_j == pytest.approx(0.6 * 500, rel=0.02)
    assert sum(r.energy_j for r in said.kernels) + said.rest_j == pytest.approx(spent.energy_j)
    assert said.per_work[0].energy_j == pytest.approx(50, rel=0.02)
    shown_text = "".join(check_page(rendered).text)
    assert "Where the joules went" in shown_text and "the rest" in shown_text and "~50" in shown_text


def record_summary(path: Path) -> None:
    """Thirty operators, of two seconds in steps; the begin of the first of six steps is not known."""
    ops = [{"name": f"aten::op{i}", "kind": "op", "calls": 5, "time_s": 0.03, "self_s": 0.03} for i in range(30)]
    regions = [{"name": "step_N", "kind": "region", "calls": 6, "time_s": 1.0, "min_ns": 0},
               {"name": "train", "kind": "region", "calls": 6, "time_s": 1.2, "traced": False}]  # fmt: skip
    summary = {"windows": 3, "traced_s": 1.0, "kernels": [], "ops": ops, "regions": regions, "counters": []}
    windows = [(START_NS + 1_000_000_000, START_NS + 2_000_000_000)]
    record(path, Builder().build(), mode="summary", summary=summary, windows=windows, domain=CPU).close()


def test_the_table_of_a_summary_sums_to_the_run_and_says_which_step_is_missing(tmp_path: Path) -> None:
    record_summary(tmp_path / "s.tessera")
    with RunFile(tmp_path / "s.tessera") as run:
        out, _, _ = both(run)
        few = text_of(text(run.recording(), by="ops", top=3))
    for screen, more in ((out, 20), (few, 27)):
        lines = [line for line in screen.splitlines() if line.startswith(("aten::op", f"{more} more ops", "the rest"))]
        assert len(lines) == 32 - more
        assert sum(float(re.findall(r"([\d.]+)%", line)[0]) for line in lines) == pytest.approx(100, abs=1)
    assert re.search(r"per step .* without the first: its begin is\s+not known", out)


def test_json_and_diff_have_the_rows_that_the_screen_of_a_summary_shows(tmp_path: Path) -> None:
    record_summary(tmp_path / "s.tessera")
    path = str(tmp_path / "s.tessera")
    printed = CliRunner().invoke(command, [path, "--json"])
    data = json.loads(printed.output)
    assert len(data["ops"]) == len(data["answer"]["ops"]) == 30
    assert [r["name"] for r in data["regions"]] == [r["name"] for r in data["answer"]["regions"]] == ["train"]
    (tmp_path / "s.json").write_text(printed.output)
    for side in (path, str(tmp_path / "s.json")):
        found = analyze.diff(path, side, by="regions")
        assert [(r.name, r.change_j) for r in found.rows] == [("train", pytest.approx(0.0))]
    assert "idle" not in {r.name for r in analyze.diff(path, path, by="ops").rows}


def test_a_host_alone(tmp_path: Path) -> None:
    b = Builder()
    for i in range(40):
        at = START_NS + i * 50_000_000
        b.add("op", "aten::linear", at, at + 40_000_000, thread=1)
        b.add("op", "aten::addmm", at + 1_000_000, at + 39_000_000, thread=1)
        b.add("op", "aten::relu", at + 41_000_000, at + 46_000_000, thread=1)
    record(tmp_path / "c.tessera", b.build(), domain=CPU).close()
    with RunFile(tmp_path / "c.tessera") as run:
        out, rendered, spent = both(run)
    assert spent.kernels == ()
    assert "Region, operator;" in rendered and "kernels beneath" not in rendered
    assert re.search(r"operator.*\n.*aten::addmm +[\d.]+ ± [\d.]+ J", out)
    assert "~" not in out


def stepped(count: int = 20, traced: int = 5, *, seen: int = 0) -> Timeline:
    """Steps of 100 ms, kernels in the first of them only; the step after those has half of its kernels.

    The steps before `seen` have no row: nobody saw them begin.
    """
    b = Builder()
    for i in range(count):
        at = START_NS + i * 100_000_000
        if i >= seen:
            b.add("region", f"step_{i}", at, at + 100_000_000, thread=1)
        for k in range(10 if i < traced else 5 if i == traced else 0):
            began = at + k * 10_000_000
            b.add("op", "aten::mm", began, began + 1_000_000, thread=1)
            b.add("runtime", "cudaLaunchKernel", began + 1000, began + 2000, thread=1, correlation=i * 10 + k + 1)
            b.add("kernel", "gemm", began + 1_000_000, began + 9_000_000, device=0, stream=7,
                  correlation=i * 10 + k + 1)  # fmt: skip
    return b.build()


LIMIT = Note("the time limit for tracing was reached: from there on there is power, but no events", "time_limit")


def test_every_surface_states_the_step_of_the_whole_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """20 steps and 600 J are 30 J a step, also where only the first 5 were traced, at 10 J each."""
    path = tmp_path / "p.tessera"
    record(path, stepped(), windows=[(START_NS, START_NS + 550_000_000)], notes=[LIMIT]).close()
    with RunFile(path) as run:
        (step,) = answer(run.recording()).per_work
    assert (step.amount, step.traced_steps) == (20, 5)
    assert step.energy_j == pytest.approx(30, rel=0.02) and step.rate_per_s == pytest.approx(10)
    printed = CliRunner().invoke(command, [str(path), "--json"]).output
    (tmp_path / "p.json").write_text(printed)
    assert json.loads(printed)["answer"]["per_work"][0]["energy_j"] == pytest.approx(step.energy_j)
    with RunFile(path) as run:
        report_run(run.recording(), 0, None, as_json=True)
    (tmp_path / "run.json").write_text(capsys.readouterr().out)  # what `tessera run --json` prints
    listed = describe_run(path, read=True).joules
    assert listed is not None and listed.step_j == pytest.approx(step.energy_j)
    for after in (path, tmp_path / "p.json", tmp_path / "run.json"):
        found = analyze.diff(path, after)
        assert found.per == "step" and found.work == (20, 20)
        assert (found.total.before_j, found.total.after_j) == (pytest.approx(step.energy_j),) * 2
        assert sum(r.before_j for r in found.rows) == pytest.approx(step.energy_j)
        assert found.outside is not None and found.outside.before_j == pytest.approx(0.0, abs=1.0)
        assert "the total is of 20 steps (" in found.note and "the rows are of the 5 traced ones" in found.note


def test_a_run_none_of_whose_steps_was_traced_still_has_joules_per_step(tmp_path: Path) -> None:
    """A first step that outlasts the time limit is all that was traced, and not from begin to end."""
    path, traced = tmp_path / "p.tessera", tmp_path / "traced.tessera"
    record(path, stepped(traced=1, seen=1), windows=[(START_NS, START_NS + 100_000_000)], notes=[LIMIT]).close()
    record(traced, stepped(), windows=[(START_NS, START_NS + 550_000_000)], notes=[LIMIT]).close()
    with RunFile(path) as run:
        out, rendered, _ = both(run)
        said = answer(run.recording())
    (step,) = said.per_work
    assert (step.amount, step.traced_steps, said.traced_steps) == (19, 0, 0)
    assert step.energy_j == pytest.approx(31, rel=0.02) and step.rate_per_s == pytest.approx(10)
    assert re.search(r"per step +31(\.\d+)? ± .* J   10 steps/s \(of 19 steps, 0 traced\)   ", out)
    assert "per step (of 19 steps, 0 traced)" in "".join(check_page(rendered).text)
    (tmp_path / "p.json").write_text(CliRunner().invoke(command, [str(path), "--json"]).output)
    listed = describe_run(path, read=True).joules
    assert listed is not None and listed.step_j == pytest.approx(step.energy_j)
    for before, after in ((path, traced), (traced, path), (path, tmp_path / "p.json")):
        found = analyze.diff(before, after)
        assert found.per == "step" and set(found.work) <= {19, 20}
        assert (found.total.before_j, found.total.after_j) == (pytest.approx(30.5, rel=0.04),) * 2
        assert not found.rows and "only the total can be compared" in found.note
        assert found.outside is not None


def test_the_mean_step_of_ranks_is_of_all_their_steps(tmp_path: Path) -> None:
    """Rank 1 begins and ends each step 4 ms later. All 20 steps are known, though only 5 were traced."""
    for rank in range(2):
        timeline = stepped()
        timeline.rank = rank
        for edge in ("start_ns", "end_ns"):
            timeline.columns[edge] += rank * 4_000_000
        windows = [(START_NS, START_NS + 550_000_000)]
        record(tmp_path / f"rank{rank}.tessera", timeline, windows=windows, notes=[LIMIT], rank=rank).close()
    (step,) = answer(merge(tmp_path)).per_work
    assert (step.amount, step.traced_steps) == (20, 5)
    assert step.energy_j == pytest.approx(30, rel=0.03) and step.rate_per_s == pytest.approx(10)


def test_the_headline_is_the_whole_run(tmp_path: Path) -> None:
    window = (START_NS, START_NS + 550_000_000)
    record(tmp_path / "p.tessera", stepped(), windows=[window], notes=[LIMIT], work={"token": 2000}).close()
    with RunFile(tmp_path / "p.tessera") as run:
        out, rendered, spent = both(run)
        said = answer(with_table(run, spent))
        path = analyze.critical_path(run.recording())
    assert spent.energy_j == pytest.approx(55, rel=0.02)
    assert said.whole.energy_j == pytest.approx(600, rel=0.02)
    assert (said.whole.time_s, said.whole.steps, said.traced_steps) == (2.0, 20, 5)
    assert path.facts["traced_s"] == said.time_s == 0.55 and path.facts["recorded_s"] == 2.0
    first, second, third = out.splitlines()[1:4]
    (after,) = said.outside
    assert (after.where, after.steps) == ("after", 15) and after.time_s == pytest.approx(1.45)
    assert said.energy_j + after.energy_j == pytest.approx(said.whole.energy_j)
    assert re.match(r"not in these tables: 5\d\d J in 1\.45 s after tracing ended \(15 steps\)", third)
    assert re.match(r"60\d[.\d]* ± [\d.]+ J   30\d[.\d]* ± [\d.]+ W   2 s   20 steps   peak 500 W", first)
    assert second.startswith("traced 550 ms, 5 of 20 steps, 5")
    assert second.rstrip().endswith("J: the tables show this part (--limit 0 traces everything)")
    assert re.search(r"per step +30(\.\d+)? ± .* J   10 steps/s \(of 20 steps, 5 traced\)   ", out)  # 600 J in 20
    assert "step_5" not in out  # traced in part
    assert said.per_work[1].energy_j == pytest.approx(0.3, rel=0.02)  # a token: the user counted those of the whole run
    assert said.per_work[1].rate_per_s == pytest.approx(1000)
    assert "note" not in out  # it is said in the second line
    text_ = "".join(check_page(rendered).text)
    assert "2 swall time, 20 steps" in text_
    assert text_.count("Traced 550 ms, 5 of 20 steps") == 1 and "Not in these tables: 5" in text_
    assert "<code>tessera run --limit 0</code> traces everything." in rendered and "`" not in text_
    assert "per step (of 20 steps, 5 traced)" in text_
    done = invoke(str(tmp_path / "p.tessera"), "--json")
    data = json.loads(done.stdout)
    assert data["run"] == {
        "energy_j": pytest.approx(said.whole.energy_j), "error_j": pytest.approx(said.whole.error_j),
        "time_s": 2.0, "steps": 20,
    }  # fmt: skip
    assert data["energy_j"] == pytest.approx(spent.energy_j)


def test_windows_of_a_schedule_are_summed(tmp_path: Path) -> None:
    windows = [(START_NS, START_NS + 200_000_000), (START_NS + 300_000_000, START_NS + 500_000_000)]
    record(tmp_path / "w.tessera", stepped(), windows=windows, scheduled=True).close()
    with RunFile(tmp_path / "w.tessera") as run:
        out, _, spent = both(run)
        said = answer(with_table(run, spent))
    assert said.time_s == pytest.approx(0.4)
    assert sum(g.time_s for g in said.gaps) == pytest.approx(0.4 - spent.busy_s)
    assert "traced 400 ms, 4 of 20 steps" in out
    assert [(o.where, o.steps) for o in said.outside] == [("between", 1), ("after", 15)]
    assert said.energy_j + sum(o.energy_j for o in said.outside) == pytest.approx(said.whole.energy_j)
    assert "--limit" not in out


@pytest.mark.parametrize(
    ("gap_ns", "command", "steps"), [(0, "python x.py", 6), (1000, "python x.py", 5), (0, None, 5)]
)
def test_a_first_step_whose_begin_nobody_saw_is_counted(
    tmp_path: Path, gap_ns: int, command: str | None, steps: int
) -> None:
    b = Builder()
    for i in range(1, 6):  # as the optimizer's hook tells: step_0 ended where step_1 begins
        at = START_NS + 1_000_000_000 + i * 100_000_000
        b.add("region", f"step_{i}", at, at + 100_000_000 - gap_ns, thread=1)
        b.add("op", "aten::mm", at + 1_000_000, at + 90_000_000, thread=1)
    windows = [(START_NS + 1_050_000_000, START_NS + 1_600_000_000)]
    meta = {"argv": ["x.py"]} | ({"command": command} if command else {})
    record(tmp_path / "f.tessera", b.build(), domain=CPU, windows=windows, meta=meta).close()
    with RunFile(tmp_path / "f.tessera") as run:
        out, _, spent = both(run)
        said = answer(with_table(run, spent))
    assert (said.whole.steps, said.whole.whole_steps, said.traced_steps) == (steps, 5, 5)
    assert f"   {steps} steps" in out.splitlines()[1]
    assert f"5 of {steps} steps{' (the first' * (steps == 6)}" in out
    assert "before tracing started (imports, setup)" in out
    assert said.energy_j + sum(o.energy_j for o in said.outside) == pytest.approx(said.whole.energy_j)


def test_steps_without_power_are_left_out(tmp_path: Path) -> None:
    b = Builder()
    for i in range(24):
        at = START_NS + i * 100_000_000
        b.add("region", f"step_{i}", at, at + 100_000_000, thread=1)
    writer = record(tmp_path / "k.tessera", b.build(), end_ns=START_NS + 2_400_000_000)
    writer.flush()
    with RunFile(tmp_path / "k.tessera") as run:
        out, rendered, spent = both(run)
    writer.close()
    assert len(spent.steps) == 20
    assert re.search(r"per step +30 ± ", out)
    assert "4 of 24 steps have no power sample" in "".join([out, rendered])
    assert "nan" not in out
    assert "unknown" not in out
    assert not re.search(r"\bnan\b", "".join(check_page(rendered).text))
    assert "'nan'" not in rendered


def test_a_model_has_no_peak_and_says_so_once(tmp_path: Path) -> None:
    modelled = dataclasses.replace(CPU, source="modelled", basis="modelled")
    b = Builder()
    for i in range(40):
        b.add("op", "aten::mm", START_NS + i * 50_000_000, START_NS + i * 50_000_000 + 40_000_000, thread=1)
    record(tmp_path / "m.tessera", b.build(), domain=modelled).close()
    with RunFile(tmp_path / "m.tessera") as run:
        out, rendered, _ = both(run)
    assert "peak" not in out.splitlines()[1]
    assert len(re.findall("modelled", out, re.IGNORECASE)) == 1
    said = "".join(check_page(rendered).text)
    assert "Joules are modelled, not measured" in said
    assert "clocks, temperature" not in said


def test_joules_are_in_the_unit_of_the_larger() -> None:
    assert format_energy_error(485e-6, 25.372e-3) == "0 to 26 mJ"
    assert format_energy_error(12.3, 0.5) == "12.30 ± 0.50 J"
    assert format_energy_error(0.0, None) == "0 J"
    assert format_energy_error(math.nan, 1.0) == "unknown J"


def test_names_cut_to_the_same_are_told_apart() -> None:
    long = [f"some_kernel_{'x' * 30}_{n}_{'y' * 60}" for n in range(3)]
    cut = list(kernel_names.fit_all(long, 40).values())
    assert len(set(cut)) == 3
    assert max(map(len, cut)) <= 40
    assert (
        kernel_names.region_name("enumerate(DataLoader)#_MultiProcessingDataLoaderIter.__next__")
        == "DataLoader.__next__"
    )
    in_main = kernel_names.region_name("enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__")
    assert in_main == "DataLoader.__next__ (no workers)"
    assert kernel_names.region_name("Optimizer.step#AdamW.step") == "AdamW.step"
    assert kernel_names.region_name("forward") == "forward"


def test_modules_are_cut_where_they_are_alike() -> None:
    layers = [f"model.layers.{n}.self_attn (LlamaAttention)" for n in range(12)]
    assert list(kernel_names.fit_all(layers, 25, "modules").values())[-1] == "model.layers.11.self_attn"
    assert list(kernel_names.fit_all(layers, 16, "modules").values())[-1] == "…rs.11.self_attn"


def test_a_run_without_power_says_so(tmp_path: Path) -> None:
    b = Builder()
    b.add("kernel", "k", START_NS, START_NS + 1_000_000, device=0, stream=7)
    record(tmp_path / "n.tessera", b.build(), power=False).close()
    with RunFile(tmp_path / "n.tessera") as run:
        out, _, spent = both(run)
    assert math.isnan(spent.energy_j)
    assert "unknown J" in out
    assert "no power was recorded" in out


def test_an_empty_run(tmp_path: Path) -> None:
    RunWriter(tmp_path / "e.tessera").close()
    with RunFile(tmp_path / "e.tessera") as run:
        out, _, _ = both(run)
    assert "e on" not in out
    assert "unknown J" in out


# -- the command ----------------------------------------------------------------------------------------------------


def invoke(*args: str) -> Any:
    return CliRunner().invoke(command, list(args), catch_exceptions=False, standalone_mode=False)


def test_the_command_prints_and_writes_the_page(made: Made, tmp_path: Path) -> None:
    made.write(tmp_path / "train.tessera").close()
    done = invoke(str(tmp_path / "train.tessera"))
    assert done.return_value == 0
    assert "aten::mm" in done.stdout
    rendered = (tmp_path / "train.html").read_text()
    check_page(rendered)
    assert "aten::mm" in rendered
    other = tmp_path / "other.html"
    assert invoke(str(tmp_path / "train.tessera"), "--html", str(other), "--by", "kernels", "--top", "2").exit_code == 0
    assert other.exists()


def test_json_has_the_table_and_the_answer(made: Made, tmp_path: Path) -> None:
    made.write(tmp_path / "train.tessera", work={"token": 1000}).close()
    done = invoke(str(tmp_path / "train.tessera"), "--json")
    data = json.loads(done.stdout)
    assert not (tmp_path / "train.html").exists()
    assert data["crashed"] is False
    assert {"energy_j", "error_j", "idle_j", "time_s", "busy_s", "kernels", "ops", "regions"} <= set(data)
    assert data["energy_j"] == pytest.approx(sum(k["energy_j"] for k in data["kernels"]) + data["idle_j"], rel=1e-6)
    assert {"kernel_name", "energy_j", "error_j", "calls", "power_w"} <= set(data["kernels"][0])
    said = data["answer"]
    assert {"energy_j", "error_j", "power_w", "per_work", "advice", "gaps", "parts"} <= set(said)
    assert {p["unit"] for p in said["per_work"]} == {"step", "token"}
    assert said["advice"][0]["evidence"]


def test_a_run_that_was_cut_opens(made: Made, tmp_path: Path) -> None:
    run = made.write(tmp_path / "cut.tessera", close=False)
    run.close()
    done = invoke(str(tmp_path / "cut.tessera"))
    assert done.return_value == 0
    assert "INCOMPLETE: the file was never closed" in done.stdout
    assert "Incomplete:" in (tmp_path / "cut.html").read_text()


def test_a_page_that_cannot_be_written_leaves_the_answer(made: Made, tmp_path: Path) -> None:
    made.write(tmp_path / "train.tessera").close()
    done = invoke(str(tmp_path / "train.tessera"), "--html", str(tmp_path / "no" / "where.html"))
    assert done.return_value == 1
    assert "aten::mm" in done.output
    assert f"mkdir -p {tmp_path / 'no'}" in done.output


def test_what_is_no_run_is_named(made: Made, tmp_path: Path) -> None:
    made.write(tmp_path / "train.tessera").close()
    with pytest.raises(ArgumentError, match=r"train\.tessera"):
        invoke(str(tmp_path / "other.tessera"))
    trace = tmp_path / "x.kineto.json.gz"
    trace.write_bytes(gzip.compress(b'{"traceEvents": []}'))
    assert "contains no event" in " ".join(invoke(str(trace)).output.split())


def test_the_next_command_is_another(run: RunFile, made: Made) -> None:
    for by in ("kernels", "ops", "regions", "steps"):
        out = text_of(text(with_table(run, made.table), by=by, html=Path("t.html")))
        assert f"--by {by}" not in out
    regions = dataclasses.replace(made.table, regions=[*made.table.regions, *made.table.steps])
    assert "region (1 of 5)" in text_of(text(with_table(run, regions), by="regions", top=1))


def test_piped_lines_end_where_the_text_does(made: Made, tmp_path: Path) -> None:
    made.write(tmp_path / "train.tessera").close()
    assert not re.search(r" +$", invoke(str(tmp_path / "train.tessera")).stdout, re.MULTILINE)


def test_the_watts_of_a_step_are_over_the_seconds_of_its_joules() -> None:
    """The device runs behind its host: the last step of a script ends there while most of it is still to run."""
    step = dataclasses.replace(row("step_9", 40.0, "step", calls=1), time_s=0.06, idle_s=0.04, wall_s=0.01)
    shown = text_of(rows_table([step, dataclasses.replace(step, name="step_8", devices=2)], "steps", width=100))
    assert [re.search(r"[\d.]+ k?W", line)[0] for line in shown.splitlines() if "step_" in line] == ["400 W", "800 W"]
