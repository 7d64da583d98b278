"""Finding sensors: what works is started, what does not is missing with reason and fix, and nothing is left open."""

from __future__ import annotations

import pytest

from tessera.errors import ArgumentError, RecordingError, SensorError, SensorPermission, SensorUnavailable
from tessera.schema import Domain
from tessera.sensors import discover as module
from tessera.sensors.base import Batch, Sensor
from tessera.sensors.discover import KINDS, ON_REQUEST, VARIABLE, discover, make

from fakes.nvml import FakeNvml, Scenario


class Stub:
    """A sensor that notes whether it was started and stopped."""

    period_s = 1.0

    def __init__(self, name, domains, error=None):
        self.name, self._domains, self._error = name, domains, error
        self.running = False
        self.starts = self.stops = 0

    def start(self):
        self.starts += 1
        self.running = True
        if self._error:
            raise self._error

    def domains(self):
        basis = "modelled" if self.name == "modelled" else "measured"
        counted = self.name not in ("redfish", "ipmi")
        return [Domain(name=d, source=self.name, resolution_s=1.0, basis=basis, counted=counted) for d in self._domains]

    def capabilities(self):
        return []

    def read(self):
        return Batch()

    def stop(self):
        self.stops += 1
        self.running = False


@pytest.fixture
def machine(monkeypatch):
    """A machine with the sensors the test puts in; `made` has every sensor that was made."""
    made: dict[str, list[Stub]] = {}

    def put(name, domains=(), error=None, at=None):
        def build():
            if at == "make":
                raise error
            stub = Stub(name, domains, error)
            made.setdefault(name, []).append(stub)
            return stub

        kinds[name] = build

    kinds: dict[str, object] = {}
    monkeypatch.setattr(module, "KINDS", kinds)
    put("nvml", ["gpu0", "gpu0.memory"])
    put("amd", error=SensorUnavailable("no AMD GPU", why="amdsmi is not installed", fix="pip install amdsmi"))
    put("intel", ["gpu0"])
    put("rapl", ["cpu0"], SensorPermission("energy_uj is for root", fix="chmod it"))
    put("redfish", ["node"])
    put("ipmi", ["node"])
    put("modelled", ["cpu0"])
    put.made = made
    return put


def names(found):
    return [s.name for s in found.sensors]


def reasons(found):
    return {c.name: c for c in found.missing}


def test_what_the_machine_has_is_started_and_the_rest_is_missing_with_reason_and_fix(machine):
    found = discover(environ={})
    assert names(found) == ["nvml"]
    assert found.sensors[0].running
    assert not found.modelled_only
    missing = reasons(found)
    assert set(missing) == {"amd", "intel", "rapl"}
    assert all(not c.available and c.fix for c in missing.values())
    assert missing["amd"].reason == "no AMD GPU: amdsmi is not installed"
    assert missing["amd"].fix == "pip install amdsmi"
    assert missing["rapl"].reason.startswith("no permission: energy_uj is for root")


def test_two_sensors_for_one_domain_do_not_mix_and_the_first_wins(machine):
    found = discover(environ={})
    assert "gpu0" in reasons(found)["intel"].reason
    assert VARIABLE + "=intel" in reasons(found)["intel"].fix
    assert not machine.made["intel"][0].running, "the second is stopped again"
    assert names(discover(["intel", "nvml"], {})) == ["intel"]


def test_failed_sensors_are_stopped_for_what_they_may_have_taken(machine):
    discover(environ={})
    assert not machine.made["amd"][0].running
    assert not machine.made["rapl"][0].running


def test_sensors_that_need_more_than_a_look_are_only_started_on_request(machine):
    discover(environ={})
    assert not set(machine.made) & set(ON_REQUEST)
    assert names(discover(["ipmi"], {})) == ["ipmi"]


def test_with_nothing_to_measure_there_is_the_model(machine):
    for name in ("nvml", "intel"):
        machine(name, error=SensorUnavailable(f"no {name}"))
    found = discover(environ={})
    assert names(found) == ["modelled"]
    assert found.modelled_only


def test_with_a_bmc_alone_there_is_the_model_too(machine):
    """A node's power is not counted: without the model the total was 0 J, measured."""
    for name in ("nvml", "intel"):
        machine(name, error=SensorUnavailable(f"no {name}"))
    found = discover(environ={"TESSERA_REDFISH_URL": "https://bmc"})
    assert sorted(names(found)) == ["modelled", "redfish"] and found.modelled_only


def test_the_model_never_stands_in_for_what_was_asked_for(machine):
    with pytest.raises(SensorError) as caught:
        discover(["amd", "rapl"], {})
    assert "amd, rapl" in caught.value.what
    assert "amdsmi is not installed" in caught.value.why
    assert "no permission" in caught.value.why
    assert "tessera doctor" in caught.value.fix
    assert "modelled" not in machine.made


def test_no_sensor_at_all(machine):
    for name in ("nvml", "intel", "modelled"):
        machine(name, error=SensorUnavailable(f"no {name}"))
    with pytest.raises(SensorError, match="none of the requested sensors") as caught:
        discover(environ={})
    assert "no modelled" in caught.value.why


def test_the_environment_picks(machine):
    assert names(discover(environ={VARIABLE: " intel , modelled ,"})) == ["intel", "modelled"]
    assert names(discover(environ={VARIABLE: " , "})) == ["nvml"], "nothing picked: all there is"
    assert names(discover(["nvml"], environ={VARIABLE: "modelled"})) == ["nvml"], "an argument counts more"


def test_the_environment_of_the_process_is_the_default(machine, monkeypatch):
    monkeypatch.setenv(VARIABLE, "modelled")
    assert names(discover()) == ["modelled"]


def test_a_redfish_address_is_a_request(machine):
    assert names(discover(environ={"TESSERA_REDFISH_URL": "https://bmc"})) == ["nvml", "redfish"]
    assert names(discover(["nvml"], {"TESSERA_REDFISH_URL": "https://bmc"})) == ["nvml"]


def test_asked_for_twice_it_is_started_once(machine):
    found = discover(["nvml", "nvml"], {})
    assert names(found) == ["nvml"]
    assert not found.missing
    assert len(machine.made["nvml"]) == 1


@pytest.mark.parametrize(("name", "meant"), [("nvlm", "nvml"), ("NVML", "nvml"), ("repaly:x.csv", None), ("zz", None)])
def test_a_wrong_name_is_answered_and_leaves_nothing_running(machine, name, meant):
    with pytest.raises(ArgumentError) as caught:
        discover(["nvml", name], {})
    assert repr(name) in caught.value.what
    assert meant is None or f"did you mean {meant!r}?" in caught.value.what
    assert "replay:FILE.csv" in caught.value.fix
    assert not machine.made["nvml"][0].running


def test_a_sensor_that_cannot_even_be_made_is_missing(machine):
    machine("redfish", error=SensorUnavailable("no address", fix="set it"), at="make")
    found = discover(["nvml", "redfish"], {})
    assert reasons(found)["redfish"].fix == "set it"


def test_a_bug_is_not_a_missing_sensor(machine):
    machine("intel", error=ZeroDivisionError("a bug"))
    with pytest.raises(ZeroDivisionError):
        discover(["nvml", "intel"], {})
    assert not machine.made["nvml"][0].running


# -- the real kinds ---------------------------------------------------------------------------------------------


def test_a_recording(tmp_path):
    path = tmp_path / "power.csv"
    path.write_text("epoch_us,domain,watts\n1000000,gpu0,100\n1020000,gpu0,110\n")
    found = discover([f"replay:{path}"], {})
    assert [d.name for d in found.sensors[0].domains()] == ["gpu0"]
    assert not found.modelled_only


def test_a_recording_that_is_not_there(tmp_path):
    with pytest.raises(RecordingError, match=r"power\.csv"):
        discover([f"replay:{tmp_path / 'power.csv'}"], {})


@pytest.mark.parametrize("name", ["replay", "replay:"])
def test_a_recording_without_a_name(name):
    with pytest.raises(ArgumentError) as caught:
        make(name)
    assert "replay:FILE.csv" in caught.value.fix


@pytest.mark.parametrize("name", [k for k in KINDS if k != "redfish"])
def test_every_kind_can_be_made_without_touching_the_machine(name):
    assert isinstance(make(name), Sensor)


def test_redfish_without_an_address_says_what_to_set(monkeypatch):
    monkeypatch.delenv("TESSERA_REDFISH_URL", raising=False)
    with pytest.raises(SensorUnavailable) as caught:
        make("redfish")
    assert "TESSERA_REDFISH_URL" in caught.value.fix


def test_the_model_of_this_machine():
    found = discover(["modelled"], {})
    assert found.modelled_only
    assert {d.basis for d in found.sensors[0].domains()} == {"modelled"}


@pytest.mark.parametrize(
    ("scope", "environ", "expected"),
    [
        (None, {}, "process"),
        (None, {"TESSERA_SCOPE": "machine"}, "machine"),
        ("process", {"TESSERA_SCOPE": "machine"}, "process"),
        ("machine", {}, "machine"),
    ],
)
def test_modelled_energy_is_the_processs_unless_the_machine_is_asked_for(scope, environ, expected):
    (sensor,) = discover(["modelled"], environ, scope=scope).sensors
    assert {d.scope for d in sensor.domains()} == {expected}


def test_a_scope_that_there_is_not_is_refused():
    with pytest.raises(ArgumentError, match="TESSERA_SCOPE=job"):
        discover(["modelled"], {"TESSERA_SCOPE": "job"})


def test_nvidia_gpus(fake_nvml: FakeNvml, monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    fake_nvml.set(Scenario(gpus=2))
    found = discover(["nvml"], {})
    assert {"gpu0", "gpu1"} <= {d.name for d in found.sensors[0].domains()}
    found.sensors[0].stop()


@pytest.mark.parametrize("scenario", [Scenario(init="driver_not_loaded"), Scenario(gpus=0)])
def test_nvidia_gpus_that_are_not_there(fake_nvml: FakeNvml, monkeypatch, scenario):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    fake_nvml.set(scenario)
    found = discover(["nvml", "modelled"], {})
    assert names(found) == ["modelled"]
    assert reasons(found)["nvml"].fix


def test_nvml_without_gpus_is_shut_down_again(fake_nvml: FakeNvml):
    fake_nvml.set(Scenario(gpus=0))
    discover(["nvml", "modelled"], {})
    assert fake_nvml.calls("nvmlShutdown") == 1
