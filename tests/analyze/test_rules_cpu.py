"""Advice for programs on the CPU: each rule speaks on a run that asks for it, and is silent on one that does not."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np
import pytest

from tessera import analyze
from tessera.analyze.advise import advise
from tessera.analyze.answer import answer
from tessera.analyze.evidence import RunEvidence
from tessera.analyze.rules_host import check_main_operator
from tessera.analyze.run_energy import FUNCTION
from tessera.attribute.table import EnergyRow, EnergyTable
from tessera.joules import DomainSamples
from tessera.recording import EVALUATION, CpuUse, Facts, Recording
from tessera.report import run
from tessera.report.console import plain_console
from tessera.report.measure import busy_text
from tessera.report.run import children_text, threads_text
from tessera.schema import Domain, Hold
from tessera.timeline import Builder
from tessera.trace import PowerTrace

T0 = 1_790_000_000_000_000_000
MS = 1_000_000
CPU = Domain(name="cpu0", source="modelled", resolution_s=0.1, hold=Hold.MEAN, basis="modelled", scope="process")
LOADER = "enumerate(DataLoader)#_{}Iter.__next__"
IN_WORKERS, IN_MAIN = LOADER.format("MultiProcessingDataLoader"), LOADER.format("SingleProcessDataLoader")
QUIET = CpuUse(cpu_s=1.0, children={}, cores=8, threads=1, waited_s=0.0)


class Program:
    """Steps on the CPU, written operator by operator."""

    def __init__(self) -> None:
        self.build, self.now, self.steps, self.began = Builder(), T0, 0, T0

    def op(self, name: str, ms: float, shapes: str = "") -> Program:
        more = {"shapes": self.build.intern(shapes)} if shapes else {}
        self.build.add("op", name, self.now, self.now + round(ms * MS), thread=1, **more)
        self.now += round(ms * MS)
        return self

    def region(self, name: str, ms: float) -> Program:
        self.build.add("region", name, self.now, self.now + round(ms * MS), thread=1)
        self.now += round(ms * MS)
        return self

    def pause(self, ms: float) -> Program:
        self.now += round(ms * MS)
        return self

    def step(self) -> Program:
        self.build.add("region", f"step_{self.steps}", self.began, self.now, thread=1)
        self.steps, self.began = self.steps + 1, self.now
        return self

    def recording(self, use: CpuUse | None = QUIET) -> Recording:
        times = np.arange(T0 - 100 * MS, self.now + 200 * MS, 100 * MS)
        samples = DomainSamples.of(CPU, times, np.full(len(times), 20.0))
        power = PowerTrace({"cpu0": samples}, start_ns=T0, end_ns=self.now)
        facts = Facts(kind="run", span_ns=(T0, self.now), windows=[(T0, self.now)], cpu_use=use)  # type: ignore[arg-type]
        return Recording(self.build.build(), power, facts=facts)

    def advice(self, use: CpuUse | None = QUIET) -> dict[str, Any]:
        return {a.kind: a for a in advise(self.recording(use)).advice}


def train(load_ms: float, name: str = IN_WORKERS, steps: int = 12) -> Program:
    program = Program()
    for _ in range(steps):
        program.region(name, load_ms).op("aten::mm", 10.0).op("aten::add", 10.0).step()
    return program


WORKERS = {"pt_data_worker": (2, 2.0), "sh": (1, 0.01)}


def test_a_loader_bound_program_is_told_to_load_faster() -> None:
    use = CpuUse(cpu_s=3.4, children=WORKERS, cores=16, threads=1, waited_s=0.0)
    advice = train(30.0).advice(use)["data loading"]
    assert "in the DataLoader's next for 60% of the time, 30 ms a batch" in advice.evidence
    assert "2 workers have 59% of the CPU time, of 16 cores: raise num_workers and prefetch_factor" in advice.action
    assert advice.saves_s == pytest.approx(12 * 0.03)


def test_more_workers_are_not_advised_where_no_core_is_left() -> None:
    use = CpuUse(cpu_s=3.4, children=WORKERS, cores=2, threads=1, waited_s=0.0)
    assert "more num_workers or prefetch_factor would not help" in train(30.0).advice(use)["data loading"].action


def test_workers_that_wait_are_not_what_fills_the_cores() -> None:
    use = CpuUse(
        cpu_s=3.4, children={"pt_data_worker": (2, 0.3)}, cores=2, threads=1, waited_s=0.0, others_s=5.0, over_s=4.0
    )
    action = train(30.0).advice(use)["data loading"].action
    assert "2 workers use 4% of a core each: they wait" in action and "other programs" in action
    assert "raise num_workers" in action and "would not help" not in action


def test_workers_are_counted_at_once_and_while_they_live() -> None:
    """Each of 3 epochs starts 2 workers; together they live 1.5 s of 10, most of which the imports take."""
    use = CpuUse(
        cpu_s=3.4, children={"pt_data_worker": (6, 1.2)}, alive={"pt_data_worker": (2, 1.5)}, cores=4, threads=2,
        waited_s=0.3, over_s=10.0,
    )  # fmt: skip
    action = train(30.0).advice(use)["data loading"].action
    assert "2 workers have 35% of the CPU time, of 4 cores" in action and "they wait" not in action
    assert "threads" not in train(0.1).advice(use)  # 2 threads and 2 workers have a core each


def test_a_loader_in_the_main_process_is_told_to_use_workers() -> None:
    assert "num_workers=2 or more" in train(30.0, IN_MAIN).advice()["data loading"].action
    alone = CpuUse(cpu_s=1.0, children={}, cores=1, threads=1, waited_s=0.0)
    assert "num_workers" not in train(30.0, IN_MAIN).advice(alone)["data loading"].action


def test_a_loader_that_keeps_up_gets_no_advice() -> None:
    assert "data loading" not in train(0.1).advice()


def test_a_gpu_that_waits_for_data_has_a_rule_of_its_own() -> None:
    program = train(30.0)
    program.build.add("kernel", "gemm", T0, T0 + MS, device=0, stream=7)
    assert "data loading" not in program.advice()


def test_slow_steps_are_explained_by_what_ran_then() -> None:
    program = Program()
    for i in range(24):
        program.op("aten::mm", 10.0)
        if i in (7, 15):
            program.region("save checkpoint", 40.0)
        program.step()
    evidence = program.advice()["stragglers"].evidence
    assert (
        "2 of 23 whole traced steps after the first one take 80 ms more than the median one (step_7: 5.0 times)"
        in evidence
    )
    assert "80 ms of it in save checkpoint" in evidence


@pytest.mark.parametrize("saved_in_train", [False, True])
def test_only_what_few_steps_do_is_to_be_done_less_often(saved_in_train: bool) -> None:
    program = Program()
    for i in range(24):
        slow, began = i in (7, 15), program.now
        program.op("autograd::engine::evaluate_function: AddmmBackward0", 50.0 if slow and not saved_in_train else 10.0)
        if slow and saved_in_train:
            program.region("save checkpoint", 40.0)
        program.build.add("region", "train", began, program.now, thread=1)
        program.step()
    advice = program.advice()["stragglers"]
    assert ("less often" in advice.action) is saved_in_train
    assert ("save checkpoint" in advice.evidence) is saved_in_train
    assert ("which other steps have too" in advice.evidence and "disturbed" in advice.action) is not saved_in_train


def test_short_steps_that_a_loaded_machine_delays_do_not_hide_a_straggler() -> None:
    program = Program()
    for i in range(24):
        program.op("aten::mm", 5.0 if i % 3 == 0 else 1.0)
        if i == 13:
            program.region("save checkpoint", 200.0)
        program.step()
    assert "1 of 23 whole traced steps after the first one take 200 ms more" in program.advice()["stragglers"].evidence


def test_slow_steps_without_a_traced_cause_are_not_blamed_on_an_operator() -> None:
    program = Program()
    for i in range(24):
        program.op("aten::mm", 10.0).pause(40.0 if i in (7, 15) else 0.0).step()
    advice = program.advice()["stragglers"]
    assert "no traced operator accounts for it" in advice.evidence
    assert "garbage collection" in advice.action
    busy_neighbours = CpuUse(cpu_s=0.3, children={}, cores=2, threads=1, waited_s=0.08)
    assert "stragglers" not in program.advice(busy_neighbours), "it waited for a core"


def epochs(loader: str, *, evaluates: bool = False, validates: int = 0) -> Program:
    """Three epochs of 12 steps: the first step of each makes an iterator (40 ms), and its operators are slower."""
    program = Program()
    for epoch in range(3):
        if epoch and evaluates:
            began = program.pause(1.0).now
            program.op("aten::addmm", 60.0)
            program.build.add("region", EVALUATION, began, program.now, thread=1)
            program.began = program.now
        for _ in range(validates if epoch else 0):
            program.region(IN_MAIN, 1.0).op("aten::addmm", 5.0)
        program.pause(40.0)
        for i in range(12):
            program.region(loader, 5.0 if i == 0 else 1.0)
            program.op("aten::mm", 20.0 if i == 0 else 10.0).op("aten::relu", 20.0 if i == 0 else 10.0).step()
        program.region(loader, 1.0)  # it is empty
    return program


@pytest.mark.parametrize("evaluates", [False, True])
def test_the_first_batch_of_an_epoch_is_named(evaluates: bool) -> None:
    advice = epochs(IN_WORKERS, evaluates=evaluates).advice()["stragglers"]
    assert "until the DataLoader's first batch of an epoch came" in advice.evidence
    assert ("evaluation came before, and is in no step" in advice.evidence) is evaluates
    assert "persistent_workers=True" in advice.action
    assert "no traced operator" not in advice.evidence and "garbage" not in advice.action
    assert "workers" not in epochs(IN_MAIN, evaluates=evaluates).advice()["stragglers"].action


def test_evaluation_inside_a_step_is_told_by_its_batches() -> None:
    advice = epochs(IN_WORKERS, validates=6).advice()["stragglers"]
    assert "while 8 batches are loaded, where other steps load 1" in advice.evidence
    assert "model.eval()" in advice.action


@pytest.mark.parametrize("slow", [{1}, set(range(8, 24))])
def test_steps_that_warm_up_or_are_mostly_slow_are_no_stragglers(slow: set[int]) -> None:
    program = Program()
    for i in range(24):
        program.op("aten::mm", 14.0 if i in slow else 10.0).step()
    assert "stragglers" not in program.advice()


def test_dropout_that_draws_many_numbers_is_named() -> None:
    program = Program()
    for _ in range(12):
        program.op("aten::mm", 10.0).op("aten::bernoulli_", 10.0).step()
    advice = program.advice()["dropout"]
    assert "50%" in advice.evidence and "12 calls" in advice.evidence and "Dropout2d" in advice.action
    assert "one operator" not in program.advice(), "a lower precision is no help for random numbers"


def test_a_little_dropout_and_other_random_numbers_are_not() -> None:
    program = Program()
    for _ in range(12):
        program.op("aten::mm", 20.0).op("aten::bernoulli_", 1.0).op("aten::normal_", 10.0).step()
    assert "dropout" not in program.advice()


def busy(threads: int, *, cores: float = 4, waited_s: float = 0.2, cpu_s: float = 0.9, workers: int = 0) -> CpuUse:
    children = {"pt_data_worker": (workers, 0.3)} if workers else {}
    return CpuUse(cpu_s=cpu_s, children=children, cores=cores, threads=threads, waited_s=waited_s)


def test_more_threads_than_cores_are_told() -> None:
    program = train(0.1)  # 0.24 s
    advice = program.advice(busy(4, workers=3))["threads"]
    assert "4 x torch thread beside 3 DataLoader workers on 4 cores" in advice.evidence and "83%" in advice.evidence
    assert "torch.set_num_threads(1)" in advice.action
    assert program.advice(busy(1, workers=6))["threads"].action == "use fewer num_workers"


@pytest.mark.parametrize(
    "use",
    [
        busy(4),  # a thread for each core
        busy(8, waited_s=0.01),  # nobody waits
        busy(8, cpu_s=0.1),  # the neighbours use the cores
        None,
    ],
)
def test_threads_that_do_not_get_in_each_others_way_are_not(use: CpuUse | None) -> None:
    assert "threads" not in train(0.1).advice(use)


def products(dtype: str, formats: list[str], product_ms: float = 10.0) -> dict[str, Any]:
    program = Program()
    for _ in range(12):
        program.op("aten::addmm", product_ms, f"[64,64]{dtype} [64,64]{dtype}").op("aten::add", 5.0).step()
    return program.advice(CpuUse(cpu_s=1.0, children={}, cores=8, threads=1, waited_s=0.0, formats=formats))


def test_fp32_products_are_told_of_bf16_where_the_cpu_has_it() -> None:
    advice = products("f32", ["bf16", "int8"])["formats"]
    assert "in fp32 take" in advice.evidence and "torch.autocast" in advice.action and "int8" in advice.action
    assert "int8" not in products("f32", ["bf16"])["formats"].action


@pytest.mark.parametrize(
    ("dtype", "formats", "ms"), [("f32", [], 10.0), ("bf16", ["bf16"], 10.0), ("f32", ["bf16"], 1.0)]
)
def test_products_that_are_narrow_small_or_on_an_older_cpu_are_not(dtype: str, formats: list[str], ms: float) -> None:
    assert "formats" not in products(dtype, formats, ms)


def test_children_are_on_the_screen_with_their_joules() -> None:
    use = CpuUse(cpu_s=4.0, children=WORKERS | {"(short-lived)": (0, 0.0)}, cores=16)
    result = answer(train(30.0).recording(use))
    assert result.children_j == pytest.approx(20.0 * 0.6 * 2.01 / 4.0)
    assert children_text(result) == "2 x pt_data_worker: 2 s of CPU time (50.0%), ~6 J of the run's joules"
    assert result.to_dict()["cpu_use"] == use


def test_without_children_there_is_no_such_line() -> None:
    result = answer(train(30.0).recording())
    assert children_text(result) == "" and result.children_j == 0.0
    unknown = answer(train(30.0).recording(None))
    assert unknown.children_j is None and children_text(unknown) == "" and not math.isnan(unknown.energy_j)


def test_a_busy_machine_is_on_the_screen_and_a_program_that_crowds_itself_is_not() -> None:
    waited = dataclasses.replace(QUIET, waited_s=0.4, over_s=1.0)
    crowded = train(30.0).recording(dataclasses.replace(waited, others_s=1.5))
    assert busy_text(answer(crowded).cpu_use) == (
        "busy machine: other programs used 1.5 cores, and the main thread waited 40.0% of the time for one; "
        "on a quiet machine the run takes less time"
    )
    one = train(30.0).recording(dataclasses.replace(waited, others_s=1.0))
    assert "other programs used 1 core, and" in busy_text(answer(one).cpu_use)
    assert "busy machine: other programs used 1.5 cores" in plain_console(200).text(run.text(crowded))
    for use in (waited, dataclasses.replace(waited, others_s=0.1), dataclasses.replace(QUIET, over_s=1.0), None):
        assert busy_text(answer(train(30.0).recording(use)).cpu_use) == ""


def test_two_runs_of_one_program_on_a_machine_whose_load_changed_are_noise() -> None:
    quiet, held_up = (Program(), Program())
    for program, factor in ((quiet, 1.0), (held_up, 1.5)):
        for i in range(24):
            program.op("aten::mm", factor * (10.0 + 0.1 * (i % 3))).step()
    crowded = dataclasses.replace(QUIET, waited_s=0.35, others_s=1.0, over_s=1.0)
    alone = analyze.diff(quiet.recording(), held_up.recording())
    assert alone.total.significant and alone.total.significant_s
    found = analyze.diff(quiet.recording(), held_up.recording(crowded))
    assert not found.total.significant and not found.total.significant_s and not any(r.significant for r in found.rows)
    assert "waited 0% of the time for a core before and 35.0% after" in found.notes[0]
    both = [quiet.recording(crowded), held_up.recording(crowded)]
    assert not analyze.diff(*both).total.significant_s, "others did not do the same to both"
    several = analyze.diff(*([side] * 3 for side in both))
    assert several.total.significant_s, "all waited alike: the rest is the program's"


@pytest.mark.parametrize(("samples", "told"), [(9, False), (10, True)])
def test_a_function_seen_a_few_times_is_no_advice(samples: int, told: bool) -> None:
    row = EnergyRow(
        name="./a.py:4 f", kind=FUNCTION, calls=samples, time_s=1.0, energy_j=9.0, error_j=math.nan, share=0.9
    )
    table = EnergyTable(
        energy_j=10.0, error_j=1.0, idle_j=0.0, idle_error_j=0.0, time_s=1.0, busy_s=1.0, ops=[row], kernels=[],
        regions=[], steps=[], groups=[], source="modelled",
    )  # fmt: skip
    advice = check_main_operator(RunEvidence(table=table, telemetry={}))
    assert (advice is not None) == told
    assert advice is None or "the host is in ./a.py:4 f while 9 J" in advice.evidence


@pytest.mark.parametrize("name", ["subprocess.py:2000 Popen._try_wait", "subprocess.py:1 Popen._wait"])
def test_waiting_for_children_is_no_work_to_make_faster(name: str) -> None:
    row = EnergyRow(name=name, kind=FUNCTION, calls=40, time_s=1.0, energy_j=9.0, error_j=math.nan, share=0.9)
    table = EnergyTable(
        energy_j=10.0, error_j=1.0, idle_j=0.0, idle_error_j=0.0, time_s=1.0, busy_s=1.0, ops=[row], kernels=[],
    )  # fmt: skip
    advice = check_main_operator(RunEvidence(table=table, telemetry={}))
    assert advice is not None and "waits for its children" in advice.evidence and "faster" not in advice.action


def test_what_the_compiler_does_is_no_operator_to_make_narrower() -> None:
    program = Program()
    for name, ms in (
        ("compile_file (dynamo_timed)", 500.0),
        ("build_guards (dynamo_timed)", 100.0),
        ("aten::mm", 20.0),
    ):
        program.op(name, ms)
    advice = program.advice()
    assert "one operator" not in advice
    assert "torch.compile compiles while" in advice["compilation"].evidence
    assert advice["compilation"].share == pytest.approx(600 / 620, abs=0.01)
    assert "TORCHINDUCTOR_CACHE_DIR" in advice["compilation"].action


@pytest.mark.parametrize(
    "name",
    [
        "python3.11/threading.py:1139 Thread._wait_for_tstate_lock",
        "python3.12/threading.py:355 Condition.wait",
        "python3.11/selectors.py:468 EpollSelector.select",
    ],
)
def test_waiting_for_threads_is_no_work_to_make_faster(name: str) -> None:
    row = EnergyRow(name=name, kind=FUNCTION, calls=40, time_s=1.0, energy_j=9.0, error_j=math.nan, share=0.9)
    table = EnergyTable(
        energy_j=10.0, error_j=1.0, idle_j=0.0, idle_error_j=0.0, time_s=1.0, busy_s=1.0, ops=[row], kernels=[],
    )  # fmt: skip
    advice = check_main_operator(RunEvidence(table=table, telemetry={}))
    assert advice is not None and "the main thread waits" in advice.evidence and "faster" not in advice.action


def test_threads_beside_the_main_one_are_on_the_screen_and_in_the_advice() -> None:
    program = Program()
    for _ in range(12):
        program.op("aten::mm", 10.0).pause(30.0).step()
    use = dataclasses.replace(QUIET, beside={"ThreadPoolExecutor": (8, 0.5), "tqdm": (1, 0.001)})
    result = answer(program.recording(use))
    assert result.beside_j is not None and result.beside_j == pytest.approx(0.501 * result.whole.energy_j, rel=0.01)
    where, said = threads_text(result).split(": ", 1)
    assert where == "beside the main one, whose operators and functions the tables show"
    assert said.startswith("8 x ThreadPoolExecutor: 500 ms of CPU time (50.0%), ~")
    assert "in other threads, or between them" in plain_console(200).text(run.text(program.recording(use)))
    advice = program.advice(use)["between operators"]
    assert "by 8 x ThreadPoolExecutor: threads whose operators are not traced" in advice.evidence
    assert "on the main thread" in advice.action
    assert threads_text(answer(program.recording(QUIET))) == ""
    nothing = threads_text(answer(Program().pause(500.0).recording(use)))  # all operators are in other threads
    assert "the only one whose operators can be traced" in nothing and "tables" not in nothing


def test_time_between_operators_of_a_host_is_not_called_idle() -> None:
    program = Program()
    for _ in range(12):
        program.op("aten::mm", 10.0).pause(30.0).step()
    recording = program.recording()
    shown = plain_console(200).text(run.text(recording))
    assert "J in 120 ms in operators, " in shown and "between them (Python, waiting)" in shown
    by_ops = plain_console(200).text(run.text(recording, by="ops"))
    assert any(line.startswith("between operators ") for line in by_ops.splitlines())
    assert "idle" not in shown and "idle" not in by_ops
    parts = {part.name: part.share for part in answer(recording).parts}
    assert parts["between operators"] == pytest.approx(0.75, abs=0.01) and "idle" not in parts
    for one in (recording, recording.energy()):  # by step, and of all
        rows = {row.name: row for row in analyze.diff(one, one, by="ops").rows}
        assert rows["between operators"].kind == "idle" and "idle" not in rows


@pytest.mark.parametrize(("pause_ms", "told"), [(8.0, False), (30.0, True)])
def test_joules_between_operators_are_advice_where_they_are_most(pause_ms: float, told: bool) -> None:
    program = Program()
    for _ in range(12):
        program.op("aten::mm", 10.0).pause(pause_ms).step()
    found = advise(program.recording())
    rows = [r for r in found.rows if r["kind"] == "between operators"]
    assert len(rows) == told
    for row in rows:
        assert "(75%) are used between operators: by Python on the host" in row["evidence"]
        assert "`tessera run --mode sampling SCRIPT`" in row["action"]
        assert not any("no known change" in note for note in found.notes)


def test_what_is_spent_before_the_steps_is_no_python_between_operators() -> None:
    program = Program().pause(4000.0)
    program.began = program.now
    for _ in range(12):
        program.op("aten::mm", 20.0).pause(2.0).step()
    assert "between operators" not in program.advice()


def test_a_dataloader_that_has_the_joules_between_operators_is_the_advice() -> None:
    program = Program()
    for _ in range(12):
        program.op("aten::mm", 10.0).region(IN_MAIN, 30.0).step()
    kinds = [row["kind"] for row in advise(program.recording()).rows]
    assert "data loading" in kinds and "between operators" not in kinds


def test_children_that_have_the_joules_between_operators_are_the_advice() -> None:
    program = Program()
    for _ in range(12):
        program.op("aten::mm", 10.0).pause(30.0).step()
    busy = CpuUse(cpu_s=4.0, children={"python": (2, 2.5), "sh": (1, 0.5)}, cores=8)
    advice = program.advice(busy)
    assert "between operators" not in advice
    assert (
        advice["children"].evidence
        == "child processes (2 x python, 1 x sh) use 75% of the CPU time, and are not traced"
    )
    assert "`tessera run` on their script" in advice["children"].action
    for few in ({"python": (2, 1.5)}, {"pt_data_worker": (2, 3.0)}):
        assert "children" not in program.advice(dataclasses.replace(busy, children=few))
    some = program.advice(dataclasses.replace(busy, children={"python": (2, 1.5)}))["between operators"]
    assert some.evidence.endswith(", and by child processes (2 x python), which are not traced")
