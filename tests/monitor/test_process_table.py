"""Processes beside watts: a made-up /proc and a made-up NVML."""

from __future__ import annotations

import types

import pytest

from sensors.test_processes import Machine
from tessera.monitor.process_table import GpuUse, ProcessTable
from tessera.monitor.snapshot import PowerWatch
from tessera.report.metrics import SnapshotCollector, format_metrics
from tessera.report.watch import screen
from tessera.schema import Domain
from tessera.sensors.discover import DiscoveredSensors
from tessera.sensors.gpu_processes import GpuProcessReader

from fakes.sensor import ScriptSensor

JOB, POD = "4711", "0f1e2d3c-aaaa-bbbb-cccc-0123456789ab"


class NoSamples(Exception):
    pass


class Nvml:
    """One GPU; what each process has of it."""

    NVMLError = NVMLError_NotFound = NoSamples
    NVMLError_NotSupported = NVMLError_FunctionNotFound = NVMLError_NoPermission = NVMLError_InvalidArgument = KeyError

    def __init__(self, sm: dict[int, float] | None) -> None:
        self.sm = sm

    def nvmlInit(self) -> None:
        pass

    def nvmlDeviceGetCount(self) -> int:
        return 1

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        return index

    def nvmlDeviceGetComputeRunningProcesses(self, handle: int) -> list[types.SimpleNamespace]:
        return [types.SimpleNamespace(pid=pid, usedGpuMemory=2**30) for pid in (101, 102)]

    def nvmlDeviceGetProcessUtilization(self, handle: int, since_us: int) -> list[types.SimpleNamespace]:
        if self.sm is None:
            raise NoSamples
        return [
            types.SimpleNamespace(pid=pid, smUtil=pct, memUtil=0, timeStamp=since_us + 1)
            for pid, pct in self.sm.items()
        ]


@pytest.fixture
def machine(tmp_path):
    machine = Machine(tmp_path)
    for pid, cgroup in ((101, f"0::/slurm/uid_0/job_{JOB}/step_0"), (102, f"0::/kubepods/burstable/pod{POD}/c")):
        machine.run(pid, 1, own=100, name=f"train{pid}")
        (tmp_path / str(pid) / "cgroup").write_text(cgroup)
        (tmp_path / str(pid) / "status").write_text("Uid:\t0\t0\t0\t0\n")
    machine.run(103, 1, own=500, name="asleep")
    return machine


def table(machine, **options) -> ProcessTable:
    made = ProcessTable(proc=machine.proc, clock=lambda: machine.now_s, **options)
    assert made.read({}) == []
    return made


def pass_second(machine):
    """Process 101 runs for 0.75 s, 102 for 0.25 s."""
    machine.now_s += 1.0
    machine.run(101, 1, own=175, name="train101")
    machine.run(102, 1, own=125, name="train102")


def test_a_measured_package_is_divided_by_cpu_time(machine):
    processes = table(machine)
    pass_second(machine)
    one, two = processes.read({"cpu0": ("rapl", 80.0)})
    assert [(r.pid, r.name, r.cores, r.cpu_w) for r in (one, two)] == [
        (101, "train101", pytest.approx(0.75), pytest.approx(60.0)),
        (102, "train102", pytest.approx(0.25), pytest.approx(20.0)),
    ]
    assert (one.owner.user, one.owner.job, one.owner.pod) == ("root", JOB, None)
    assert (two.owner.user, two.owner.job, two.owner.pod) == ("root", None, POD)


def test_modelled_watts_are_those_of_measure(machine, monkeypatch):
    monkeypatch.setattr("os.cpu_count", lambda: 4)
    processes = table(machine, full_w=200.0)
    pass_second(machine)
    one, _ = processes.read({"cpu0": ("modelled", 80.0)})
    assert one.cpu_w == pytest.approx(0.75 / 4 * 200.0), "whatever the neighbours do"


def test_a_board_is_divided_by_sm_time(machine):
    processes = table(machine, gpus=GpuProcessReader(Nvml({101: 60.0, 102: 20.0})))
    pass_second(machine)
    readings = processes.read({"gpu0": ("nvml-samples", 400.0)})
    assert {r.pid: r.gpus["gpu0"] for r in readings} == {
        101: GpuUse(memory_bytes=2**30, sm_pct=60.0, power_w=pytest.approx(300.0)),
        102: GpuUse(memory_bytes=2**30, sm_pct=20.0, power_w=pytest.approx(100.0)),
    }


def test_without_utilisation_no_watts_are_made_up(machine):
    processes = table(machine, gpus=GpuProcessReader(Nvml(None)))
    pass_second(machine)
    readings = processes.read({"gpu0": ("nvml-samples", 400.0)})
    assert [(r.pid, r.power_w, r.gpus["gpu0"].memory_bytes) for r in readings] == [
        (101, None, 2**30),
        (102, None, 2**30),
    ]


def test_joules_of_a_job_add_up_from_reading_to_reading(machine):
    processes = table(machine)
    pass_second(machine)
    processes.read({"cpu0": ("rapl", 80.0)})
    machine.now_s += 1.0
    machine.run(101, 1, own=275, name="train101")
    processes.read({"cpu0": ("rapl", 180.0)})
    totals = {owner.job or owner.pod: total for owner, total in processes.totals.items()}
    assert totals[JOB].cpu_j == pytest.approx(60.0 + 100.0) and totals[JOB].cpu_s == pytest.approx(1.75)
    assert totals[POD].cpu_j == pytest.approx(20.0) and totals[POD].power_w is None
    assert totals[JOB].gpu_j is None and totals[JOB].gpu_memory_bytes is None


def test_processes_are_on_the_screen_and_in_the_metrics(machine):
    pytest.importorskip("prometheus_client")
    domain = Domain(name="cpu0", source="rapl", resolution_s=0.02)
    sensor = ScriptSensor(lambda t: 50.0, clock=lambda: 0, domain=domain)
    processes = ProcessTable(proc=machine.proc, clock=lambda: machine.now_s)
    with PowerWatch(DiscoveredSensors([sensor], []), 0.1, processes=processes) as watch:
        pass_second(machine)
        look = watch.take_snapshot()
        pass_second(machine)
        text = format_metrics(SnapshotCollector(watch.take_snapshot))
    shown = screen(look, width=120, processes=1).plain
    assert "estimated" in shown and "train101" in shown and "train102" not in shown and JOB in shown
    assert "train101" not in screen(look, width=120).plain
    assert f'tessera_job_cpu_seconds_total{{job="{JOB}",pod="",user="root"}} 0.75' in text
    assert f'pod="{POD}"' in text and 'part="gpu"' not in text
