"""The catalogue: real devices with sourced figures, power modes, the user's own files, and `tessera hardware`."""

from __future__ import annotations

import dataclasses
import json
import re
import time
import tomllib
from importlib import resources

import pytest
from click.testing import CliRunner

from calls import list_calls
from tessera.cli.main import cli, main
from tessera.device import ASSUMED_ERROR, PRECISIONS, Device, Figure
from tessera.errors import ArgumentError, BadDevice
from tessera.hardware import catalogue, lookup, user_folder
from tessera.hardware.index import _load_catalogue, _read_packaged
from tessera.hardware.load import build, read

from places import REPOSITORY

ROOT = REPOSITORY

FOLDER = resources.files("tessera.hardware") / "catalog"
FILES = sorted((f for f in FOLDER.iterdir() if f.name.endswith(".toml")), key=lambda f: f.name)
DEVICES = [build(read(f.read_text(), f.name), f.name, ("test",)) for f in FILES]
REAL = [d for d in DEVICES if d.id != "generic-cpu"]
every_device = pytest.mark.parametrize("device", DEVICES, ids=lambda d: d.id)
every_real = pytest.mark.parametrize("device", REAL, ids=lambda d: d.id)

# What people type (issue 3), and the device it must give.
NAMES = {
    "h200": "h200",
    "h200-sxm": "h200",
    "h100": "h100",
    "h100-sxm": "h100",
    "h100-pcie": "h100-pcie",
    "a100": "a100",
    "a100-80gb-sxm": "a100",
    "a100-40gb-sxm": "a100-40gb-sxm",
    "b200": "b200",
    "gb200": "gb200",
    "l40s": "l40s",
    "l4": "l4",
    "t4": "t4",
    "v100": "v100",
    "mi250x": "mi250x",
    "mi300x": "mi300x",
    "rtx-4090": "rtx-4090",
    "jetson-orin": "jetson-orin",
    "jetson-agx-orin": "jetson-orin",
    "jetson-orin-nano": "jetson-orin-nano",
    "gaudi3": "gaudi3",
    "epyc-9654": "epyc-9654",
    "xeon-8490h": "xeon-8490h",
    "m4-max": "m4-max",
    "tpu-v5e": "tpu-v5e",
    "NVIDIA H200": "h200",
}

# (device, figure, value): dense TFLOP/s, GB/s, W of shared/hardware.md.
SPOTS = [
    ("h200", "peaks.matrix.bf16", 989e12),
    ("h200", "peaks.matrix.fp8", 1979e12),
    ("h200", "tdp_w", 700),
    ("h200", "memory.bandwidth_bytes_per_s", 4.8e12),
    ("h200", "idle_w", 77),
    ("h200", "peaks.vector.fp32", 67e12),
    ("a100", "peaks.matrix.bf16", 312e12),
    ("a100", "memory.bandwidth_bytes_per_s", 2.039e12),
    ("a100", "peaks.matrix.tf32", 156e12),
    ("a100-40gb-sxm", "memory.bandwidth_bytes_per_s", 1.555e12),
    ("h100", "memory.bandwidth_bytes_per_s", 3.35e12),
    ("h100-pcie", "peaks.matrix.bf16", 756e12),
    ("b200", "peaks.matrix.bf16", 2250e12),
    ("gb200", "tdp_w", 1200),
    ("l4", "peaks.matrix.fp8", 242e12),
    ("l40s", "peaks.matrix.bf16", 362e12),
    ("t4", "peaks.matrix.int8", 130e12),
    ("v100", "peaks.matrix.fp16", 125e12),
    ("mi250x", "peaks.matrix.fp64", 95.7e12),
    ("mi300x", "memory.bandwidth_bytes_per_s", 5.3e12),
    ("rtx-4090", "peaks.matrix.bf16", 165e12),
    ("gaudi3", "peaks.matrix.fp8", 1835e12),
    ("jetson-orin", "peaks.matrix.int8", 85e12),
    ("tpu-v5e", "peaks.matrix.bf16", 197e12),
    ("xeon-8490h", "peaks.matrix.bf16", 117e12),
    ("epyc-9654", "memory.bandwidth_bytes_per_s", 460.8e9),
]

# What a reader looks for first: known, or the notes say why not.
CORE = (
    "memory.capacity_bytes",
    "memory.bandwidth_bytes_per_s",
    "caches.l2_bytes",
    "clocks.base_hz",
    "clocks.boost_hz",
    "units",
    "tdp_w",
    "idle_w",
)

MINIMAL = 'id = "mychip"\nname = "My chip"\nkind = "gpu"\nvendor = "me"\n'


@pytest.fixture
def user(tmp_path, monkeypatch):
    """Write a device file of the user's, in a config folder of its own."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    user_folder().mkdir(parents=True)

    def write(text, name="mine.toml"):
        path = user_folder() / name
        path.write_text(text)
        return path

    return write


@pytest.fixture(autouse=True)
def no_user_files(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))


def figures(device):
    return dict(device.figures())


# ---------------------------------------------------------------- the devices


def test_there_are_enough_devices_of_every_kind():
    assert len(REAL) >= 34
    assert {d.kind for d in REAL} == {"gpu", "cpu", "accelerator", "soc"}
    assert {"NVIDIA", "AMD", "Intel", "Google", "Apple"} <= {d.vendor for d in REAL}


def test_every_file_is_named_by_its_id():
    assert [f.name for f in FILES] == [f"{tomllib.loads(f.read_text())['id']}.toml" for f in FILES]


def test_names_are_unique_and_lower_case():
    names = [n for d in DEVICES for n in (d.id, *d.aliases)]
    assert len(set(names)) == len(names)
    assert all(n == n.lower() and "@" not in n for n in names)


@pytest.mark.parametrize(("name", "device"), NAMES.items())
def test_what_people_type_is_found(name, device):
    assert lookup(name).id == device


@every_device
def test_every_figure_has_a_source(device):
    for name, figure in device.figures():
        assert len(figure.source) > 8, name
        assert "@" not in figure.source[:1], f"{name}: the source was not expanded"
        assert figure.value > 0
    for point in device.operating_points:
        assert len(point.power_w.source) > 8


@every_device
def test_what_is_assumed_is_wide_and_says_why(device):
    for name, figure in device.figures():
        if figure.assumed:
            assert figure.error >= ASSUMED_ERROR * figure.value * (1 - 1e-9), name
            assert figure.source.startswith("assumed: ")
            assert len(figure.source) > 25 or device.id == "generic-cpu"
        else:
            assert not figure.source.startswith("assumed")


@every_device
def test_no_idle_is_silently_a_percentage(device):
    assert not re.search(r"\d+ ?% of (the )?TDP", " ".join(f.source for _, f in device.figures()))
    assert device.idle_w is not None
    assert device.tdp_w is not None
    assert 0 < device.idle_w.value < device.tdp_w.value


@every_real
def test_what_is_unknown_says_why(device):
    known = figures(device)
    for name in CORE:
        assert name in known or len(device.notes.get(name, "")) > 8, f"{device.id}: {name}"
    assert device.vector or "peaks.vector" in device.notes
    assert device.architecture
    assert device.unit_name


@every_real
def test_peaks_are_dense_and_in_order(device):
    assert device.vector or device.matrix
    for unit in ("vector", "matrix"):
        assert set(getattr(device, unit)) <= set(PRECISIONS)
    matrix = device.matrix
    for slow, fast in (("tf32", "bf16"), ("bf16", "fp8"), ("fp16", "fp8"), ("fp16", "int8"), ("fp8", "fp4")):
        if slow in matrix and fast in matrix:
            assert matrix[slow].value <= matrix[fast].value * 1.001
    best = device.peak("bf16") or device.peak("fp16")
    if best and device.memory.bandwidth_bytes_per_s:
        balance = best.value / device.memory.bandwidth_bytes_per_s.value
        assert 10 < balance < 1000, "FLOP per byte of a real chip"  # a Jetson Thor has 948


@every_real
def test_no_chip_beats_physics(device):
    best = device.peak("fp16") or device.peak("bf16")
    if best:
        assert best.value / device.tdp_w.value < 20e12, "FLOP/s per watt"
    for name, figure in device.energy.items():
        assert 1e-14 < figure.value < 1e-9, name


@pytest.mark.parametrize(("device", "name", "value"), SPOTS)
def test_spot_values(device, name, value):
    assert figures(lookup(device))[name].value == pytest.approx(value, rel=0.01)


def test_a_memory_holds_what_its_label_says():
    assert figures(lookup("h200"))["memory.capacity_bytes"].value == 143771 * 2**20, "as NVML reads it on a board"
    assert lookup("a100-40gb-sxm").memory.capacity_bytes.value == 40 * 2**30
    assert lookup("t4").memory.capacity_bytes.value < 16 * 2**30, "inline ECC takes its share"


def test_links_say_how_they_count():
    assert lookup("h200").interconnect["nvlink"].direction == "total"
    assert lookup("h200").interconnect["nvlink"].one_way_bytes_per_s == pytest.approx(450e9)
    assert lookup("h200").interconnect["pcie"].one_way_bytes_per_s == pytest.approx(63e9, rel=0.01)


def test_loading_is_quick():
    """By the functions called, which no busy machine changes: 190,000 take about 0.1 s."""
    _read_packaged.cache_clear()
    _load_catalogue.cache_clear()
    cold = list_calls(catalogue)
    assert cold.count("loads") == len(FILES)  # each file is parsed once
    assert len(cold) < 5000 * len(FILES)
    assert len(list_calls(lambda: lookup("h200"))) < 500


# ---------------------------------------------------------------- the noun


def test_a_device_cannot_be_changed():
    device = lookup("h200")
    with pytest.raises(dataclasses.FrozenInstanceError):
        device.tdp_w = None
    with pytest.raises(dataclasses.FrozenInstanceError):
        device.tdp_w.value = 1.0
    with pytest.raises(TypeError):
        catalogue()["h200"] = device


@pytest.mark.parametrize(
    "figure", [{"value": 0}, {"value": -1}, {"value": float("nan")}, {"value": float("inf")}, {"error": 0}]
)
def test_a_figure_is_a_positive_number(figure):
    with pytest.raises(ArgumentError):
        Figure(**{"value": 1.0, "source": "a datasheet", **figure})


def test_a_figure_has_a_source():
    with pytest.raises(ArgumentError, match="source"):
        Figure(value=1.0, source=" ")


def test_peaks_by_unit():
    h200 = lookup("h200")
    assert h200.peak("fp64", "vector").value == 34e12
    assert h200.peak("fp64", "matrix").value == 67e12
    assert h200.peak("fp64").value == 67e12
    assert h200.peak("fp4") is None, "unknown is not zero"
    assert lookup("m4-max").peak("bf16", "matrix") is None
    with pytest.raises(ArgumentError, match="did you mean 'bf16'"):
        h200.peak("bf-16")


# ---------------------------------------------------------------- power modes


@pytest.mark.parametrize("name", ["jetson-orin@15W", "Jetson-AGX-Orin@15w", " orin@15W "])
def test_a_device_at_a_power_mode(name):
    whole, mode = lookup("jetson-orin"), lookup(name)
    assert mode.id == "jetson-orin@15W"
    assert mode.point == "15W"
    assert mode.tdp_w.value == 15
    assert mode.clocks.boost_hz.value == 408e6
    assert mode.memory.bandwidth_bytes_per_s.value < whole.memory.bandwidth_bytes_per_s.value
    share = 408 / 1300.5 * 6 / 16
    assert mode.peak("fp16").value == pytest.approx(whole.peak("fp16").value * share)
    assert "scaled to 15W" in mode.peak("fp16").source
    assert whole.tdp_w.value == 60, "the whole device is as it was"


def test_more_watts_do_more():
    modes = [lookup(f"jetson-orin@{w}W") for w in (15, 30, 50, 60)]
    peaks = [m.peak("fp16").value for m in modes]
    assert peaks == sorted(peaks)
    assert [m.tdp_w.value for m in modes] == [15, 30, 50, 60]
    assert peaks[-1] == pytest.approx(lookup("jetson-orin").peak("fp16").value)


@pytest.mark.parametrize(("name", "watts"), [("gaudi3@1200W", 1200), ("mi250x@500W", 500), ("mi250x@560w", 560)])
def test_a_mode_whose_clock_is_not_known_says_so(name, watts):
    mode = lookup(name)
    assert mode.tdp_w.value == watts
    assert "is not known" in mode.notes["peaks"]


@pytest.mark.parametrize(("name", "near"), [("jetson-orin@51W", "50W"), ("gaudi3@120W", "1200W")])
def test_a_wrong_mode_is_answered(name, near):
    with pytest.raises(ArgumentError, match=f"did you mean '{near}'") as caught:
        lookup(name)
    assert near in caught.value.fix


def test_a_device_without_modes():
    with pytest.raises(ArgumentError, match="no operating point") as caught:
        lookup("h200@fast")
    assert "h200@300W" in caught.value.fix
    with pytest.raises(ArgumentError, match="cannot be limited to 20W"):
        lookup("h200@20W")
    assert lookup("h200@300W").power_limit_w == 300.0


# ---------------------------------------------------------------- the user's files


def test_a_user_adds_a_device(user):
    path = user(MINIMAL + 'aliases = ["Mine"]\ntdp_w = { value = 90, source = "the label on the back" }\n')
    device = lookup("mine")
    assert device.id == "mychip"
    assert device.tdp_w == Figure(value=90.0, source=f"the label on the back ({path})")
    assert device.origin == (str(path),)
    assert "mychip" in catalogue()


def test_a_user_replaces_a_figure_and_keeps_the_rest(user):
    path = user(
        'id = "h200"\nidle_w = { value = 71.5, error = 2 }\n[memory]\nbandwidth_bytes_per_s = { value = 4.1e12 }\n'
    )
    device, packaged = lookup("h200-sxm"), next(d for d in DEVICES if d.id == "h200")
    assert device.idle_w == Figure(value=71.5, error=2.0, source=f"given in {path}")
    assert device.memory.bandwidth_bytes_per_s.value == 4.1e12
    assert device.memory.capacity_bytes == packaged.memory.capacity_bytes
    assert device.matrix == packaged.matrix
    assert device.origin == ("the catalogue", str(path))


def test_a_note_on_a_figure_goes_with_it(user):
    assert "no published figure" in lookup("h100").notes["clocks.base_hz"]
    user('id = "h100"\n[clocks]\nbase_hz = { value = 1.1e9 }\n[notes]\nidle_w = "after an hour"\n')
    notes = lookup("h100").notes
    assert "clocks.base_hz" not in notes
    assert notes["idle_w"] == "after an hour"


def test_a_file_that_changes_is_read_again(user):
    user(MINIMAL + "tdp_w = { value = 90 }\n")
    assert lookup("mychip").tdp_w.value == 90
    time.sleep(0.02)
    path = user(MINIMAL + "tdp_w = { value = 95 }\n")
    assert lookup("mychip").tdp_w.value == 95
    path.unlink()
    with pytest.raises(ArgumentError):
        lookup("mychip")


def test_the_default_folder(monkeypatch):
    monkeypatch.delenv("XDG_CONFIG_HOME")
    monkeypatch.setenv("HOME", "/home/someone")
    assert str(user_folder()) == "/home/someone/.config/tessera/hardware"


def test_an_alias_of_another_device_is_refused(user):
    path = user(MINIMAL + 'aliases = ["h200"]\n')
    with pytest.raises(BadDevice, match="already 'h200'") as caught:
        catalogue()
    assert str(path) in caught.value.what


FIG = "value = 1e12"
BAD = {
    "not TOML": ("id = ", "not TOML"),
    "no id": ('name = "x"\n', "id: is missing"),
    "no vendor": ('id = "x"\nname = "x"\nkind = "gpu"\n', "vendor: is missing"),
    "unknown key": (MINIMAL + "tdp = 3\n", r"tdp: no such key; did you mean 'tdp_w'"),
    "unknown part": (
        MINIMAL + f"[memory]\ncapacity = {{ {FIG} }}\n",
        r"memory\.capacity: no such key; did you mean 'capa",
    ),
    "unknown precision": (
        MINIMAL + f"[peaks.matrix]\nbf_16 = {{ {FIG} }}\n",
        r"peaks\.matrix\.bf_16: .*did you mean 'bf16'",
    ),
    "unknown unit": (MINIMAL + f"[peaks.tensor]\nbf16 = {{ {FIG} }}\n", r"peaks\.tensor: no such key"),
    "unknown figure key": (
        MINIMAL + "tdp_w = { value = 3, sources = 'x' }\n",
        r"tdp_w\.sources: .*did you mean 'source'",
    ),
    "unknown kind": (MINIMAL.replace('"gpu"', '"gpus"'), r"kind: no kind 'gpus'; did you mean 'gpu'"),
    "unknown source": (
        MINIMAL + 'tdp_w = { value = 3, source = "@nvida" }\n[sources]\nnvidia = "x"\n',
        "did you mean 'nvidia'",
    ),
    "a bare number": (MINIMAL + "tdp_w = 300\n", r"tdp_w: a figure is \{ value"),
    "text for a number": (MINIMAL + 'tdp_w = { value = "300" }\n', r"tdp_w\.value: must be a number"),
    "a boolean number": (MINIMAL + "tdp_w = { value = true }\n", r"tdp_w\.value: must be a number"),
    "negative": (MINIMAL + "tdp_w = { value = -5 }\n", "tdp_w: a figure must be a positive number"),
    "zero error": (MINIMAL + "tdp_w = { value = 5, error = 0 }\n", "tdp_w: an error must be a positive half-width"),
    "error to zero": (MINIMAL + "tdp_w = { value = 5, error = 6 }\n", "reaches zero"),
    "narrow assumption": (
        MINIMAL + 'idle_w = { value = 50, error = 5, assumed = true, source = "assumed: x" }\n',
        "at least 30%",
    ),
    "bare assumption": (MINIMAL + 'idle_w = { value = 50, assumed = true, source = "assumed: x" }\n', "at least 30%"),
    "silent assumption": (
        MINIMAL + 'idle_w = { value = 50, error = 25, assumed = true, source = "a hunch" }\n',
        "does not say",
    ),
    "idle above TDP": (MINIMAL + "tdp_w = { value = 50 }\nidle_w = { value = 60 }\n", "idle_w: is not below tdp_w"),
    "teraflops": (MINIMAL + "[peaks.matrix]\nbf16 = { value = 989 }\n", "too small to be in SI"),
    "gigabytes": (MINIMAL + "[memory]\ncapacity_bytes = { value = 141 }\n", "too small to be in SI"),
    "sparse peak": (
        MINIMAL + "[peaks.matrix]\nbf16 = { value = 1e15 }\nfp8 = { value = 4e15 }\n",
        r"matrix\.fp8: .*the sparse figure",
    ),
    "bf16 below tf32": (
        MINIMAL + "[peaks.matrix]\ntf32 = { value = 2e14 }\nbf16 = { value = 1e14 }\n",
        "bf16: is below tf32",
    ),
    "base above boost": (
        MINIMAL + "[clocks]\nbase_hz = { value = 2e9 }\nboost_hz = { value = 1e9 }\n",
        "is above boost_hz",
    ),
    "link without direction": (MINIMAL + f"[interconnect]\nnvlink = {{ {FIG} }}\n", r"nvlink\.direction"),
    "energy without a unit": (MINIMAL + "[energy]\nhbm = { value = 5e-12 }\n", "_j_per_byte"),
    "a CPU without threads": (MINIMAL.replace('"gpu"', '"cpu"'), "threads"),
    "threads of text": (MINIMAL + 'threads = "8"\n', "threads: must be a number"),
    "aliases of text": (MINIMAL + 'aliases = "x"\n', "aliases: must be a list"),
    "memory as a number": (MINIMAL + "memory = 5\n", "memory: must be a table"),
    "memory kind as a number": (MINIMAL + "[memory]\nkind = 3\n", r"memory\.kind: must be text"),
    "points as a table": (MINIMAL + "[operating_points]\nname = 3\n", "operating_points: must be a list"),
    "a point without watts": (
        MINIMAL + '[[operating_points]]\nname = "5W"\n',
        r"operating_points\[0\]: needs a name and power",
    ),
    "notes of numbers": (MINIMAL + "[notes]\nidle_w = 3\n", r"notes\.idle_w: must be text"),
}


@pytest.mark.parametrize(("text", "problem"), BAD.values(), ids=BAD)
def test_a_bad_file_names_itself_and_the_key(user, text, problem):
    path = user(text)
    with pytest.raises(BadDevice, match=problem) as caught:
        catalogue()
    assert str(path) in caught.value.what
    assert caught.value.fix


def test_a_packaged_figure_needs_a_source():
    with pytest.raises(BadDevice, match=r"tdp_w\.source: is missing"):
        build(read(MINIMAL + "tdp_w = { value = 5 }\n", "x.toml"), "x.toml", ())


def test_a_file_that_is_not_text(user):
    path = user("")
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(BadDevice, match="cannot be read"):
        catalogue()


# ---------------------------------------------------------------- tessera hardware


def run(*args):
    return CliRunner().invoke(cli, ["hardware", *args], catch_exceptions=False)


def test_list_fits_the_terminal():
    lines = run("list").output.splitlines()
    assert max(map(len, lines)) <= 80
    for device in DEVICES:
        assert any(line.startswith(f"{device.id} ") for line in lines)
    h200 = next(line for line in lines if line.startswith("h200 "))
    assert h200.split() == ["h200", "gpu", "67", "T", "989", "T", "140", "GiB", "4.8", "T", "700", "W", "77", "W"]
    assert "~" in next(line for line in lines if line.startswith("h100 ")), "an assumed idle is marked"
    assert "next: tessera hardware show" in lines[-1]


@pytest.mark.parametrize("width", [40, 60, 79, 120])
def test_a_narrow_list_loses_columns_and_not_parts_of_them(width):
    result = CliRunner(env={"COLUMNS": str(width)}).invoke(cli, ["hardware", "list"], catch_exceptions=False)
    lines = result.output.splitlines()
    assert "…" not in result.output
    assert all(len(line) <= width for line in lines[: len(DEVICES) + 1])
    h200 = next(line for line in lines if line.startswith("h200 "))
    assert re.search(r"989 T +140 GiB", h200) and "700 W" in h200
    assert ("not shown:" in result.output) == (width < 79)


def test_the_list_counts_chips():
    chips = [device for device in DEVICES if device.id != "generic-cpu"]
    assert f"{len(chips)} chips and generic-cpu, for any other CPU" in run("list").output
    assert "generic-cpu" not in run("list", "--kind", "gpu").output


def test_list_by_kind():
    text = run("list", "--kind", "cpu").output
    assert "epyc-9654" in text
    assert "h200 " not in text
    assert isinstance(CliRunner().invoke(cli, ["hardware", "list", "--kind", "fpga"]).exception, ArgumentError)


def test_list_as_json():
    devices = json.loads(run("list", "--json").output)
    assert {d["id"] for d in devices} == {d.id for d in DEVICES}
    assert all(d["idle_w"]["source"] for d in devices)


def test_show_gives_units_sources_and_marks_assumptions():
    text = run("show", "h100").output
    assert re.search(r"bf16 +989\.4 TFLOP/s", text)
    assert re.search(r"int8 +1\.979 Pop/s", text)
    assert re.search(r"nvlink +900 GB/s total", text)
    assert re.search(r"units +132 SMs", text)
    assert re.search(r"idle_w +75 W ± 30 W  ASSUMED", text)
    assert re.search(r"tdp_w +700 W\n", text)
    for _, figure in lookup("h100").figures():
        assert figure.source in " ".join(text.split())
    assert "clocks.base_hz: no published figure found" in text


@every_device
def test_sources_are_there_for_a_stranger(device):
    for name, figure in device.figures():
        assert "shared/" not in figure.source, f"{name} cites a path that only the developers have"
        for path in re.findall(r"\b(?:benchmarks|docs)/[\w./-]*\w", figure.source):
            assert (ROOT / path).exists(), path


@every_device
def test_every_device_can_be_shown(device):
    assert device.name in run("show", device.id).output
    for point in device.operating_points:
        assert point.name in run("show", f"{device.id}@{point.name}").output


def test_show_energy_in_picojoules():
    assert re.search(r"matmul_bf16_j_per_flop +1\.03 pJ/flop", run("show", "h200").output)


def test_show_as_json_is_the_device():
    shown = json.loads(run("show", "jetson-orin@30W", "--json").output)
    assert shown["id"] == "jetson-orin@30W"
    assert shown["tdp_w"]["value"] == 30
    assert [p["name"] for p in shown["operating_points"]] == ["15W", "30W", "50W", "60W"]
    assert set(shown) == {f.name for f in dataclasses.fields(Device)}


def test_show_names_the_users_file(user):
    path = user('id = "h200"\nidle_w = { value = 71.5, error = 2 }\n')
    assert f"fromthecatalogue,{path}" in "".join(run("show", "h200").output.split()), (
        "the path may be longer than a line"
    )


def test_a_board_is_found_by_its_drivers_name_and_never_taken_for_another():
    assert lookup("H100-SXM5-80GB").id == "h100"
    with pytest.raises(ArgumentError, match="did you mean 'h100-") as caught:
        lookup("H100-SXM5-40GB")
    assert "a100" not in caught.value.what


def test_a_wrong_name_exits_2_with_the_nearest(capsys):
    with pytest.raises(SystemExit) as caught:
        main(["hardware", "show", "mi300"])
    assert caught.value.code == 2
    err = capsys.readouterr().err
    assert "did you mean 'mi300x'?" in err
    assert "Traceback" not in err


def test_a_wrong_subcommand_exits_2_with_the_nearest(capsys):
    with pytest.raises(SystemExit) as caught:
        main(["hardware", "lst"])
    assert caught.value.code == 2
    assert "did you mean 'list'?" in capsys.readouterr().err
