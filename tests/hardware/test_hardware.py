"""The catalogue: every figure has its source, names are found, and a host's CPU is scaled to what we see of it."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from tessera.errors import ArgumentError
from tessera.hardware import catalogue, host_cpu, identify_board, lookup
from tessera.report.hardware import print_device

DEVICES = list(catalogue().values())
every_device = pytest.mark.parametrize("device", DEVICES, ids=lambda d: d.id)


def cpuinfo(tmp_path, model):
    path = tmp_path / "cpuinfo"
    path.write_text(f"processor\t: 0\nvendor_id\t: ?\nmodel name\t: {model}\nflags\t: fpu\n\nprocessor\t: 1\n")
    return path


def test_the_devices_we_build_on_are_there():
    assert {"h200", "generic-cpu"} <= set(catalogue())
    assert lookup("h200").tdp_w.value == 700


@every_device
def test_every_figure_has_a_source_and_a_sensible_value(device):
    for figure in (device.tdp_w, device.idle_w):
        assert figure is None or (figure.value > 0 and len(figure.source) > 10)
        assert figure is None or figure.error is None or 0 < figure.error < figure.value
        if figure is not None and figure.assumed:
            assert figure.source.startswith("assumed")
            assert figure.error, "an assumption without an error bar is a claim"
    if device.tdp_w and device.idle_w:
        assert device.idle_w.value < device.tdp_w.value


@every_device
def test_every_name_finds_its_device_in_any_case(device):
    for name in (device.id, *device.aliases):
        assert name == name.lower(), "look-ups are in lower case"
        assert lookup(name) == device
        assert lookup(f"  {name.upper()} ") == device


def test_no_name_is_taken_twice():
    names = [n for d in DEVICES for n in (d.id, *d.aliases)]
    assert len(set(names)) == len(names)


@pytest.mark.parametrize("device", [d for d in DEVICES if d.kind == "cpu"], ids=lambda d: d.id)
def test_every_cpu_can_be_modelled(device):
    assert device.threads
    assert device.tdp_w is not None
    assert device.idle_w is not None


@pytest.mark.parametrize("name", ["h2000", "H-200", "nvidia h2000"])
def test_a_near_miss_is_answered(name):
    with pytest.raises(ArgumentError, match=r"did you mean .*h200") as caught:
        lookup(name)
    assert "h200" in caught.value.fix


@pytest.mark.parametrize("name", ["", "zzzzzz", "²"])
def test_an_unknown_name_is_answered_with_where_the_known_ones_are(name):
    with pytest.raises(ArgumentError) as caught:
        lookup(name)
    assert caught.value.fix.startswith("`tessera hardware list` shows them all;")


@pytest.mark.parametrize(
    ("threads", "share"),
    [(120, 1.0), (240, 2.0), (16, 16 / 120)],
    ids=["one socket", "two sockets", "a virtual machine"],
)
def test_a_known_cpu_by_the_threads_we_see(tmp_path, threads, share):
    whole = lookup("xeon-8490h")
    device = host_cpu(cpuinfo(tmp_path, "Intel(R) Xeon(R) Platinum 8490H"), threads)
    assert device.id == "xeon-8490h"
    assert device.tdp_w.value == pytest.approx(whole.tdp_w.value * share)
    assert device.idle_w.value == pytest.approx(whole.idle_w.value * share)
    assert device.idle_w.error == pytest.approx(whole.idle_w.error * share), "as uncertain as the whole, relatively"
    assert device.tdp_w.error is None
    assert device.tdp_w.source == whole.tdp_w.source
    assert device.idle_w.assumed


def test_an_unknown_cpu_is_generic_and_keeps_its_name(tmp_path):
    device = host_cpu(cpuinfo(tmp_path, "Z80 @ 4 MHz"), 8)
    generic = lookup("generic-cpu")
    assert device.id == "generic-cpu"
    assert device.name == "Z80 @ 4 MHz"
    assert device.tdp_w.value == pytest.approx(8 * generic.tdp_w.value)
    assert device.tdp_w.error == pytest.approx(8 * generic.tdp_w.error)
    assert device.tdp_w.assumed


@pytest.mark.parametrize("text", [None, "", "Hardware : ARM\n"])
def test_a_machine_that_does_not_name_its_cpu(tmp_path, text):
    path = tmp_path / "cpuinfo"
    if text is not None:
        path.write_text(text)
    device = host_cpu(path, 4)
    assert (device.id, device.name) == ("generic-cpu", lookup("generic-cpu").name)


def test_scaling_leaves_the_catalogue_alone(tmp_path):
    before = lookup("xeon-8490h")
    host_cpu(cpuinfo(tmp_path, "Platinum 8490H"), 1)
    assert lookup("xeon-8490h") == before


def test_this_machine():
    device = host_cpu()
    assert device.kind == "cpu"
    assert 0 < device.idle_w.value < device.tdp_w.value


@pytest.mark.parametrize("name", ["h2000", "rtx4080", "jetson", "mi300", "zzz"])
def test_an_unknown_chip_is_answered_with_the_nearest_not_with_all(name: str) -> None:
    with pytest.raises(ArgumentError) as raised:
        lookup(name)
    lines = str(raised.value).splitlines()
    assert len(lines) == 3 and max(map(len, lines[:2])) <= 100, lines  # the third has the user's folder
    assert lines[1].endswith("`tessera hardware list` shows them all;") and "file of your own" in lines[2]
    assert ("nearest: " in lines[1]) == (name != "zzz") and sum(chip in lines[1] for chip in catalogue()) < 8


@pytest.mark.parametrize(
    ("board", "device"),
    [
        ("NVIDIA H200", "h200"),
        ("NVIDIA H200 NVL", "h200-nvl"),
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA H100 PCIe", "h100-pcie"),
        ("NVIDIA A100-SXM4-80GB", "a100"),
        ("NVIDIA A100-SXM4-40GB", "a100-40gb-sxm"),
        ("NVIDIA GeForce RTX 4090", "rtx-4090"),
        ("Tesla T4", "t4"),
        ("Tesla V100-SXM2-32GB", "v100"),
        ("NVIDIA L40S", "l40s"),
        ("NVIDIA RTX 6000 Ada Generation", "rtx-6000-ada"),
    ],
)
def test_boards_by_the_names_drivers_give(board: str, device: str) -> None:
    assert identify_board(board).id == device


@pytest.mark.parametrize("board", ["NVIDIA H200 MaxQ", "NVIDIA A100-SXM4-96GB", "Tesla V100-SXM2-24GB", ""])
def test_a_sister_board_is_not_taken_for_the_known_one(board: str) -> None:
    with pytest.raises(ArgumentError):
        identify_board(board)


@pytest.mark.parametrize("text", ["x = " + "1" * 5000, "x = " + "[" * 5000, "id = " + "{a=" * 3000])
def test_a_chip_file_that_cannot_be_parsed_names_itself(text: str) -> None:
    from tessera.errors import BadDevice
    from tessera.hardware.load import read

    with pytest.raises(BadDevice, match=r"mine\.toml"):
        read(text, "mine.toml")


@pytest.mark.parametrize(
    "line",
    [
        "tdp_w = { value = " + "9" * 400 + ', source = "x" }',
        "tdp_w = { value = 700, error = " + "9" * 400 + ', source = "x" }',
        "threads = 0x" + "f" * 5000,
        "memory" + ".a" * 400 + " = 1",
        "notes.x = " + "[" * 100 + "]" * 100,
        "\n".join(f"notes{'.a' * 300}{i} = 1" for i in range(1000)),
        "name" + ".a" * 1500 + " = 1",
    ],
    ids=range(7),
)
def test_a_hostile_chip_file_is_one_error_that_names_it(tmp_path, monkeypatch, line: str) -> None:
    from tessera.errors import BadDevice

    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    file = tmp_path / "tessera" / "hardware" / "mine.toml"
    file.parent.mkdir(parents=True)
    file.write_text(
        f'id = "mine"\nkind = "gpu"\nvendor = "x"\n{line}\n' + ("" if line[:4] == "name" else 'name = "x"\n')
    )
    with pytest.raises(BadDevice, match=r"mine\.toml") as caught:
        lookup("h200")
    assert len(str(caught.value)) < 1000


@pytest.mark.parametrize(
    ("board", "device"),
    [  # names that drivers reported in public traces (issue 24), and the chips of issue 22
        ("AMD Instinct MI300X VF", "mi300x"),
        ("Tesla V100-SXM2-16GB", "v100-16gb"),
        ("Tesla V100-SXM2-32GB", "v100"),
        ("Tesla V100-DGXS-32GB", "v100"),
        ("Tesla V100-DGXS-16GB", "v100-16gb"),
        ("A100-PG509-200", "a100-40gb-sxm"),
        ("AMD Instinct MI210", "mi210"),
        ("NVIDIA B300 SXM6 AC", "b300"),
        ("NVIDIA GeForce RTX 2080 Ti", "rtx-2080-ti"),
        ("Quadro GP100", "p100"),
        ("Tesla P100-SXM2-16GB", "p100"),
        ("Intel(R) Data Center GPU Max 1550", "max-1550"),
        ("NVIDIA GH200 480GB", "gh200"),
        ("NVIDIA H100 NVL", "h100-nvl"),
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition", "rtx-pro-6000"),
        ("AMD Instinct MI300A", "mi300a"),
        ("AMD Instinct MI325X", "mi325x"),
    ],
)
def test_names_that_drivers_report(board: str, device: str) -> None:
    assert identify_board(board).id == device


@pytest.mark.parametrize(("name", "line"), [("h200@400W", "limit        400 W"), ("h200@1200MHz", "at most 1200 MHz")])
def test_a_limit_that_is_asked_for_is_shown(name: str, line: str) -> None:
    console = Console(file=io.StringIO(), width=100)
    print_device(lookup(name), console)
    assert line in console.file.getvalue()  # type: ignore[attr-defined]
