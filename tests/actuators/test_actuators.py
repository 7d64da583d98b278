"""Power limits and clocks: the real nvidia-ml-py on the fake NVML; what is changed is put back, whatever happens."""

from __future__ import annotations

import json
import os
import shutil
import signal
import stat
import subprocess
import sys
import threading
import time
from contextlib import ExitStack
from pathlib import Path

import msgspec
import pynvml as nv
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tessera import actuators
from tessera.actuators import Actuator, claims, guard, hold, journal, locks
from tessera.actuators.journal import Claim, ClockChange, Journal, LimitChange
from tessera.clock import boot_id
from tessera.errors import ActuatorError, ActuatorPermission, ArgumentError
from tessera.sensors.health import power_control

from fakes.nvml import Scenario, control_state, fake_env
from waiting import wait_until

UUID = "GPU-00000000-0000-0000-0000-00000000000{}"


@pytest.fixture(autouse=True)
def run_dir(monkeypatch, tmp_path):
    monkeypatch.setenv("TESSERA_RUNTIME_DIR", str(tmp_path / "run"))
    monkeypatch.setenv("TESSERA_WATCHER", "0")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return tmp_path / "run"


@pytest.fixture
def fake(fake_nvml):
    fake_nvml.set(Scenario(gpus=2))
    nv.nvmlInit()
    yield fake_nvml
    nv.nvmlShutdown()


def limit_w(gpu: int = 0) -> float:
    return nv.nvmlDeviceGetPowerManagementLimit(nv.nvmlDeviceGetHandleByIndex(gpu)) / 1000


def set_limit(limit: float, gpu: int = 0) -> None:
    nv.nvmlDeviceSetPowerManagementLimit(nv.nvmlDeviceGetHandleByIndex(gpu), round(limit * 1000))


def journals(run_dir: Path) -> list[str]:
    return sorted(p.name for p in run_dir.glob("*.json"))


# ---- what a hold does


def test_a_cap_holds_in_the_block_and_not_after(fake, run_dir):
    with actuators.cap_power("gpu0", cap_w=300) as hold:
        assert (limit_w(0), limit_w(1)) == (300, 700)
        assert hold.gpus == ("gpu0",)
        (written,) = run_dir.glob("*.json")
        assert stat.S_IMODE(written.stat().st_mode) == 0o600
        assert stat.S_IMODE(run_dir.stat().st_mode) == 0o700
        found = journal.read_journal(UUID.format(0))
        assert found.limit == LimitChange(was_w=700, ours_w=(300,))
        assert [(c.pid, c.cap_w) for c in found.claims] == [(os.getpid(), 300)]
    assert limit_w() == 700
    assert journals(run_dir) == []


def test_it_restores_what_was_and_not_the_default(fake):
    set_limit(555.5)
    with pytest.raises(KeyError), actuators.cap_power("gpu0", cap_w=300):
        raise KeyError("the body fails")
    assert limit_w() == 555.5


def test_a_cap_just_below_what_was_is_put_back_too(fake):
    set_limit(420.5)
    with ExitStack() as first:
        first.enter_context(actuators.cap_power("gpu0", cap_w=300))
        with actuators.cap_power("gpu0", cap_w=420):
            first.close()
            assert limit_w() == 420
    assert limit_w() == 420.5


def test_a_cap_never_raises_a_limit(fake, run_dir):
    set_limit(250)
    with actuators.cap_power("gpu0", cap_w=300):
        assert limit_w() == 250
        assert journal.read_journal(UUID.format(0)).limit is None
        set_limit(600)  # the administrator, meanwhile: nothing of ours to put back
    assert limit_w() == 600
    assert journals(run_dir) == []


def test_the_tightest_wins_and_the_next_tightest_follows(fake):
    with ExitStack() as first, ExitStack() as second:
        first.enter_context(actuators.cap_power("gpu0", cap_w=300))
        second.enter_context(actuators.cap_power("gpu0", cap_w=250))
        assert limit_w() == 250
        with actuators.cap_power(["gpu0", "gpu1"], cap_w=500):
            assert (limit_w(0), limit_w(1)) == (250, 500)
        second.close()
        assert limit_w() == 300
        first.close()
        assert (limit_w(0), limit_w(1)) == (700, 700)


caps = st.one_of(st.none(), st.integers(200, 700))
ranges = st.one_of(st.none(), st.tuples(st.integers(23, 132), st.integers(23, 132)).map(sorted))


@settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
@given(st.lists(st.tuples(caps, ranges, st.integers(0, 5)), min_size=1, max_size=8), st.sampled_from([700, 450]))
def test_any_order_of_coming_and_going(fake, run_dir, steps, was):
    """A step opens a hold, or closes the one of its number if there is one: limit and clocks are the tightest open."""
    set_limit(was)
    open_: list[tuple[ExitStack, int | None, tuple[int, int] | None]] = []
    for cap, clocks, which in steps:
        if which < len(open_):
            open_.pop(which)[0].close()
        else:
            wants = None if clocks is None else (clocks[0] * 15, clocks[1] * 15)
            stack = ExitStack()
            stack.enter_context(actuators.hold_gpus("gpu0", cap_w=cap, clocks_mhz=wants))
            open_.append((stack, cap, wants))
        assert limit_w() == min([was, *(c for _, c, _ in open_ if c is not None)])
        highs = [w[1] for _, _, w in open_ if w is not None]
        assert (fake.locked_clocks(0) or (0, 0))[1] == min(highs, default=0)
    for stack, _, _ in open_:
        stack.close()
    assert limit_w() == was
    assert fake.locked_clocks(0) is None
    assert journals(run_dir) == []


def test_clocks(fake):
    with actuators.lock_clocks("gpu0", sm_mhz=1200):
        assert fake.locked_clocks(0) == (1200, 1200)
        with actuators.lock_clocks("gpu0", sm_mhz=(345, 900)) as hold:
            assert fake.locked_clocks(0) == (900, 900), "ranges that do not overlap: the lower one"
            hold.change(clocks_mhz=(345, 1500))
            assert fake.locked_clocks(0) == (1200, 1200)
    assert fake.locked_clocks(0) is None


def test_threads_do_not_fight(fake):
    seen = []

    def work(cap):
        for _ in range(5):
            with actuators.cap_power("gpu0", cap_w=cap):
                seen.append(limit_w() <= cap)

    threads = [threading.Thread(target=work, args=(cap,)) for cap in (300, 400, 500, 600)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert len(seen) == 20 and all(seen)
    assert limit_w() == 700


# ---- what is refused


@pytest.mark.parametrize("cap_w", [150, 701, 0, float("nan")])
def test_a_cap_out_of_range(fake, run_dir, cap_w):
    with pytest.raises(ActuatorError, match="200 W to 700 W"), actuators.cap_power("gpu0", cap_w=cap_w):
        pytest.fail("the body must not run")
    assert (limit_w(), journals(run_dir)) == (700, [])


@pytest.mark.parametrize("sm_mhz", [100, 2500, (1200, 900)])
def test_clocks_out_of_range(fake, run_dir, sm_mhz):
    with pytest.raises(ActuatorError, match="345 to 1980 MHz"), actuators.lock_clocks("gpu0", sm_mhz=sm_mhz):
        pytest.fail("the body must not run")
    assert (fake.locked_clocks(0), journals(run_dir)) == (None, [])


def test_without_permission(fake, run_dir):
    fake.change(control="denied")
    with (
        pytest.raises(ActuatorPermission, match="may not set its power limit") as caught,
        actuators.cap_power(0, cap_w=300),
    ):
        pytest.fail("the body must not run")
    assert "sudo" in caught.value.fix and "nvidia-smi" in caught.value.fix and "SYS_ADMIN" in caught.value.fix
    with pytest.raises(ActuatorPermission, match="may not lock its clocks"), actuators.lock_clocks(0, sm_mhz=900):
        pytest.fail("the body must not run")
    assert (limit_w(), journals(run_dir)) == (700, [])


def test_a_board_without_the_control(fake, run_dir):
    fake.change(control="off")
    with pytest.raises(ActuatorError, match="gpu0 cannot set its power limit"), actuators.cap_power(0, cap_w=300):
        pass
    with pytest.raises(ActuatorError, match="gpu0 cannot lock its clocks"), actuators.lock_clocks(0, sm_mhz=900):
        pass
    assert journals(run_dir) == []


def test_the_second_gpu_refuses_and_the_first_is_put_back(fake, run_dir):
    fake.change(gpu={1: {"control": "denied"}})
    with (
        pytest.raises(ActuatorPermission, match=r"gpu1: .*; gpu0 had been changed and was restored"),
        actuators.hold_gpus(["gpu0", "gpu1"], cap_w=300, clocks_mhz=(345, 900)),
    ):
        pytest.fail("the body must not run")
    assert (limit_w(0), limit_w(1), fake.locked_clocks(0)) == (700, 700, None)
    assert journals(run_dir) == []


@pytest.mark.parametrize("fault", ["0:1:999", "0:1:999:applied", "0:1:15"])
@pytest.mark.parametrize("where", ["fault_limit", "fault_lock"])
def test_a_change_that_fails_half_way_is_taken_back(fake, run_dir, where, fault):
    fake.change(**{where: fault})
    with pytest.raises(ActuatorError), actuators.hold_gpus("gpu0", cap_w=300, clocks_mhz=(345, 900)):
        pytest.fail("the body must not run")
    assert (limit_w(), fake.locked_clocks(0), journals(run_dir)) == (700, None, [])


def test_a_change_of_a_hold_that_is_refused_leaves_what_held(fake):
    with actuators.hold_gpus(["gpu0", "gpu1"], cap_w=300) as hold:
        fake.change(gpu={1: {"control": "denied"}})
        with pytest.raises(ActuatorPermission):
            hold.change(cap_w=250)
        assert (limit_w(0), limit_w(1)) == (300, 300)
        fake.change(gpu={})
    assert (limit_w(0), limit_w(1)) == (700, 700)


def test_no_journal_no_change(fake, run_dir):
    with actuators.cap_power("gpu0", cap_w=600):
        pass
    (run_dir / f"{UUID.format(0)}.draft").mkdir()  # whatever keeps the journal from being written
    with pytest.raises(ActuatorError, match="is not changed"), actuators.cap_power("gpu0", cap_w=300):
        pytest.fail("the body must not run")
    assert limit_w() == 700


def test_a_folder_that_others_can_write(fake, run_dir):
    run_dir.mkdir(mode=0o777)
    run_dir.chmod(0o777)
    with pytest.raises(ActuatorError, match="open to other users"), actuators.cap_power("gpu0", cap_w=300):
        pass
    assert limit_w() == 700


def test_names(fake, monkeypatch):
    assert list(actuators.list_gpus()) == ["gpu0", "gpu1"]
    for name in ("gpu1", 1, "1", "cuda:1", UUID.format(1)):
        found = actuators.find_gpu(name)
        assert isinstance(found, Actuator)
        assert (found.gpu, found.uuid) == ("gpu1", UUID.format(1))
        found.close()
        found.close()
    assert limit_w() == 700, "closing twice did not shut NVML down under others"
    with pytest.raises(ActuatorError, match="did you mean 'gpu1'"):
        actuators.find_gpu("gqu1")
    with pytest.raises(ArgumentError, match="twice"), actuators.cap_power([0, "gpu0"], cap_w=300):
        pass
    with pytest.raises(ArgumentError, match="no GPU"), actuators.cap_power([], cap_w=300):
        pass
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    assert list(actuators.list_gpus()) == ["gpu1"]
    with pytest.raises(ActuatorError, match="this process may use gpu1"):
        actuators.find_gpu("gpu0")


def test_a_refused_hold_leaves_no_session_of_nvml_open(fake, monkeypatch):
    opened = []
    monkeypatch.setattr(hold, "find_gpu", lambda gpu: opened.append(actuators.find_gpu(gpu)) or opened[-1])
    with pytest.raises(ArgumentError, match="twice"), actuators.cap_power([0, "gpu0"], cap_w=300):
        pass
    assert [actuator._started for actuator in opened] == [False, False]


def test_slices_of_a_board_are_not_controlled(fake):
    fake.change(gpu={1: {"mig": 2}})
    assert list(actuators.list_gpus()) == ["gpu0"]


def test_no_gpu_at_all(fake_nvml):
    fake_nvml.set(Scenario(init="absent"))
    with pytest.raises(ActuatorError, match="no GPU here can be controlled") as caught:
        actuators.find_gpu(0)
    assert "NVIDIA driver" in caught.value.fix


# ---- what others do meanwhile


def test_a_limit_somebody_else_set_is_left(fake, run_dir):
    with actuators.cap_power("gpu0", cap_w=300) as hold:
        set_limit(450)
    assert limit_w() == 450
    assert any("somebody else set the limit to 450 W" in note for note in hold.notes)
    assert journals(run_dir) == []


def test_somebody_elses_limit_is_what_was_for_the_next(fake):
    with actuators.cap_power("gpu0", cap_w=300):
        set_limit(450)
        with actuators.cap_power("gpu0", cap_w=280):
            assert limit_w() == 280
        assert limit_w() == 300, "the cap that is still held is tighter than theirs"
    assert limit_w() == 450


def test_a_driver_that_rounds(fake):
    fake.change(limit_step_w=25)
    with actuators.cap_power("gpu0", cap_w=310):
        assert limit_w() == 300
    assert limit_w() == 700


def test_a_driver_restart_forgets_the_limit(fake, run_dir):
    fake.change(restart_at_s=5)
    with actuators.cap_power("gpu0", cap_w=300):
        fake.advance(6)
        nv.nvmlInit()
        assert limit_w() == 700
    assert (limit_w(), journals(run_dir)) == (700, [])


# ---- restoring that fails


def test_a_restore_is_retried(fake, run_dir):
    fake.change(fault_limit="1:3:999", fault_unlock="0:3:15")
    with actuators.hold_gpus("gpu0", cap_w=300, clocks_mhz=(345, 900)):
        pass
    assert (limit_w(), fake.locked_clocks(0), journals(run_dir)) == (700, None, [])


def test_a_restore_that_keeps_failing_is_loud_and_can_be_healed(fake, run_dir):
    fake.change(fault_limit="1:1000:999")
    with (
        pytest.warns(UserWarning, match=r"(?s)could NOT be restored.*doctor --restore"),
        actuators.hold_gpus("gpu0", cap_w=300, clocks_mhz=(345, 900)) as hold,
    ):
        pass
    assert (limit_w(), fake.locked_clocks(0)) == (300, None), "what can be restored is"
    assert hold in guard._state.holds, "it is tried again at exit"
    (left,) = actuators.list_outstanding()
    assert left.needs_restore and "from 300 W to 700 W" in left.action
    (failed,) = actuators.restore_outstanding()
    assert "could not set its power limit to 700 W" in failed.error
    fake.change(fault_limit=None)
    (healed,) = actuators.restore_outstanding()
    assert healed.error is None and "its limit is 700 W" in healed.action
    assert (limit_w(), journals(run_dir), actuators.restore_outstanding()) == (700, [], [])
    guard.unregister(hold)


def test_clocks_that_were_locked_half_way_and_cannot_be_unlocked_are_in_the_journal(fake, run_dir):
    fake.change(fault_lock="0:1:999:applied", fault_unlock="0:1000:999")
    with pytest.raises(ActuatorError, match="doctor --restore"), actuators.lock_clocks("gpu0", sm_mhz=900):
        pytest.fail("the body must not run")
    assert fake.locked_clocks(0) == (900, 900)
    fake.change(fault_unlock=None)
    actuators.restore_outstanding()
    assert (fake.locked_clocks(0), journals(run_dir)) == (None, [])


def test_a_process_that_is_ending_takes_no_more(fake, run_dir, monkeypatch):
    monkeypatch.setattr(guard._state, "ending", True)
    with pytest.raises(ActuatorError, match="the process is ending"), actuators.cap_power("gpu0", cap_w=300):
        pytest.fail("the body must not run")
    reached = []

    def late():
        with actuators.cap_power("gpu0", cap_w=300):
            reached.append(limit_w())

    thread = threading.Thread(target=late)
    thread.start()
    time.sleep(0.1)
    assert (reached, limit_w()) == ([], 700)
    monkeypatch.setattr(guard._state, "ending", False)
    thread.join(120)
    assert (reached, limit_w()) == ([300], 700)


# ---- what the dead leave


def dead(run_dir: Path, **changes) -> None:
    """A journal as a killed process leaves it."""
    run_dir.mkdir(mode=0o700, exist_ok=True)
    claim = Claim(id="x", owner="999-gone", pid=999, cap_w=300, clocks_mhz=(345, 900))
    made = {"uuid": UUID.format(0), "gpu": "gpu0", "vendor": "nvidia", "boot": boot_id(), "claims": (claim,)}
    journal.write_journal(Journal(**(made | changes)))


def test_the_next_schedule_heals(fake, run_dir):
    set_limit(300)
    dead(run_dir, limit=LimitChange(was_w=650, ours_w=(300,)))
    with actuators.cap_power("gpu0", cap_w=500) as hold:
        assert limit_w() == 500
    assert any("process 999 ended without releasing a cap of 300 W" in n for n in hold.notes)
    assert (limit_w(), journals(run_dir)) == (650, [])


@pytest.mark.parametrize("ours", [(300,), (650, 300), (300, 250)])
@pytest.mark.parametrize("now", [300, 650])
def test_killed_at_any_moment_of_a_change(fake, run_dir, ours, now):
    """Between the journal's lines the limit is either still what it was or already what was asked."""
    set_limit(now)
    dead(run_dir, limit=LimitChange(was_w=650, ours_w=ours))
    actuators.restore_outstanding()
    assert (limit_w(), journals(run_dir)) == (650, [])


@pytest.mark.parametrize("done", [True, False])
def test_killed_while_clocks_were_locked(fake, run_dir, done):
    nv.nvmlDeviceSetGpuLockedClocks(nv.nvmlDeviceGetHandleByIndex(0), 345, 900)
    dead(run_dir, clocks=ClockChange(was_mhz=None, ours_mhz=(345, 900), done=done))
    (healed,) = actuators.restore_outstanding()
    assert "unlocked" in healed.action
    assert (fake.locked_clocks(0), journals(run_dir)) == (None, [])


def test_the_dead_ones_clocks_that_were_never_set_are_set_for_the_living(fake, run_dir):
    dead(run_dir, clocks=ClockChange(was_mhz=None, ours_mhz=(345, 900)))
    with actuators.lock_clocks("gpu0", sm_mhz=(345, 900)):
        assert fake.locked_clocks(0) == (345, 900)
    assert fake.locked_clocks(0) is None


def test_a_reboot_voids_the_journal(fake, run_dir):
    set_limit(300)  # by the administrator, after the reboot
    dead(run_dir, boot="an earlier one", limit=LimitChange(was_w=650, ours_w=(300,)))
    assert "void" in actuators.list_outstanding()[0].action
    actuators.restore_outstanding()
    assert (limit_w(), journals(run_dir)) == (300, [])


def test_a_live_holder_is_not_healed(fake, run_dir):
    with actuators.cap_power("gpu0", cap_w=300):
        (found,) = actuators.list_outstanding()
        assert not found.needs_restore and found.holders == (f"process {os.getpid()}: a cap of 300 W",)
        assert actuators.restore_outstanding() == []
        assert limit_w() == 300


def test_a_journal_that_cannot_be_read(fake, run_dir):
    dead(run_dir)
    (run_dir / f"{UUID.format(0)}.json").write_text("{ not json")
    (found,) = actuators.list_outstanding()
    assert "cannot be read" in found.error and found.needs_restore
    assert actuators.restore_outstanding()[0].error
    with pytest.raises(ActuatorError, match="cannot be read"), actuators.cap_power("gpu0", cap_w=300):
        pass
    assert limit_w() == 700


@pytest.mark.parametrize(
    ("driver", "capabilities", "ok"),
    [(False, "0", None), (True, "000001ffffffffff", True), (True, "00000000a80425fb", False)],
)
def test_doctor_says_whether_limits_may_be_set(tmp_path, driver, capabilities, ok):
    status = tmp_path / "status"
    status.write_text(f"Name:\tpython\nCapEff:\t{capabilities}\n")
    check = power_control(tmp_path if driver else tmp_path / "none", status)
    assert check.ok is ok and check.detail
    assert (check.fix is not None) == (ok is False)


def test_looking_makes_no_folder(fake, run_dir):
    assert (actuators.list_outstanding(), actuators.restore_outstanding()) == ([], [])
    assert not run_dir.exists()


def test_who_is_alive(run_dir):
    mine = locks.owner_name()
    assert locks.is_alive(mine) and locks.owner_name() == mine
    assert not locks.is_alive("1-nobody")
    code = "import sys; from tessera.actuators import locks; print(locks.owner_name(), flush=True); sys.stdin.read()"
    other = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    name = other.stdout.readline().strip()
    assert locks.is_alive(name)
    other.kill()
    other.wait()
    other.stdin.close()
    other.stdout.close()
    assert not locks.is_alive(name)
    assert locks.is_alive(mine)


def test_a_lock_that_is_not_to_be_had(run_dir):
    with locks.lock_gpu("GPU-x"):
        failed = []

        def wait():
            try:
                with locks.lock_gpu("GPU-x", timeout_s=0.05):
                    pass
            except ActuatorError as exc:
                failed.append(exc)

        thread = threading.Thread(target=wait)
        thread.start()
        thread.join()
    assert "another process has kept it" in failed[0].why
    with locks.lock_gpu("GPU-x", timeout_s=0.05):
        pass


def test_claims_are_described():
    claim = Claim(id="x", owner="o", pid=1, cap_w=300, clocks_mhz=(345, 900))
    assert claims.describe_claim(claim) == "a cap of 300 W and clocks of 345 to 900 MHz"
    assert claims.tightest_limits([]) == (None, None)


# ---- the journal or its folder is removed while a limit is held


def remove(run_dir: Path, what: str) -> None:
    if what == "folder":
        shutil.rmtree(run_dir)
    elif what == "journal":
        (run_dir / f"{UUID.format(0)}.json").unlink()
    else:
        (run_dir / f"{UUID.format(0)}.json").write_text("{")


@pytest.mark.parametrize("what", ["folder", "journal", "half of it"])
def test_a_removed_journal_is_known_to_its_holder(fake, run_dir, what):
    set_limit(555)
    with actuators.hold_gpus("gpu0", cap_w=300, clocks_mhz=(345, 900)) as hold:
        remove(run_dir, what)
        hold.change(cap_w=280)
        remove(run_dir, what)
        assert limit_w() == 280
    assert (limit_w(), fake.locked_clocks(0), journals(run_dir)) == (555, None, [])


def test_a_holder_whose_folder_was_removed_is_alive(fake, run_dir):
    with actuators.cap_power("gpu0", cap_w=300) as hold:
        shutil.rmtree(run_dir)
        with actuators.cap_power("gpu0", cap_w=280):
            pass
        assert limit_w() == 300
        assert not any("ended without releasing" in note for note in hold.notes)
    assert limit_w() == 700


@pytest.mark.parametrize("first", ["ours", "theirs"])
def test_a_journal_written_anew_by_somebody_who_did_not_know_of_us(fake, run_dir, monkeypatch, first):
    """Their "what was" is our cap; in the end the limit is what it was before both."""
    with ExitStack() as ours, ExitStack() as theirs:
        ours.enter_context(actuators.cap_power("gpu0", cap_w=300))
        (run_dir / f"{UUID.format(0)}.json").unlink()
        other = Claim(id="theirs", owner=locks.owner_name(), pid=1, cap_w=250)
        text = Journal(
            uuid=UUID.format(0),
            gpu="gpu0",
            vendor="nvidia",
            boot=boot_id(),
            claims=(other,),
            limit=LimitChange(was_w=300, ours_w=(250,)),
        )
        (run_dir / f"{UUID.format(0)}.json").write_bytes(msgspec.json.encode(text))
        set_limit(250)
        theirs.callback(claims.remove_claim, actuators.find_gpu("gpu0"), "theirs")
        (ours if first == "ours" else theirs).close()
        assert limit_w() == (250 if first == "ours" else 300)
    assert (limit_w(), journals(run_dir)) == (700, [])


# ---- containers: other folders, the same device


@pytest.fixture
def node(monkeypatch, tmp_path):
    monkeypatch.setattr("tessera.actuators.nvml.NODE", str(tmp_path / "nvidia{}"))
    (tmp_path / "nvidia0").touch()
    return tmp_path / "nvidia0"


def test_processes_with_another_folder_do_not_control_a_held_gpu(world, run_dir, node):
    env, seen = world
    named = f"import tessera.actuators.nvml; tessera.actuators.nvml.NODE = {str(node.parent / 'nvidia{}')!r}; "
    elsewhere = env | {"TESSERA_RUNTIME_DIR": str(run_dir.parent / "other")}
    child = start(env, named + "hold()")
    try:
        code = named + "from tessera import actuators\nwith actuators.cap_power('gpu0', cap_w=250): pass"
        refused = subprocess.run(
            [sys.executable, "-c", code], env=elsewhere, capture_output=True, text=True, check=False
        )
        assert "another process of Tessera holds it" in refused.stderr and "TESSERA_RUNTIME_DIR" in refused.stderr
        assert seen()[0] == (300, 900)
        shared = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=False)
        assert shared.returncode == 0, shared.stderr
    finally:
        child.send_signal(signal.SIGTERM)
        finish(child)
    assert subprocess.run([sys.executable, "-c", code], env=elsewhere, check=False).returncode == 0
    assert seen() == [(700, 0)] * 2


def test_a_node_that_others_cannot_lock_needs_a_shared_folder(fake, run_dir, node, monkeypatch):
    monkeypatch.delenv("TESSERA_RUNTIME_DIR")
    monkeypatch.setattr(locks, "folder_path", lambda: run_dir)
    with pytest.raises(ActuatorError, match="belongs to this container alone"), actuators.cap_power("gpu0", cap_w=300):
        pytest.fail("the body must not run")
    assert (limit_w(), journals(run_dir)) == (700, [])
    device = node.stat().st_dev
    mounts = node.with_name("mountinfo")
    mounts.write_text(f"24 27 {os.major(device)}:{os.minor(device)} / /dev rw shared:1 - devtmpfs udev rw\n")
    monkeypatch.setattr(locks, "_MOUNTS", mounts)
    with actuators.cap_power("gpu0", cap_w=300):
        assert locks.is_node_locked(node)
    assert (limit_w(), locks.is_node_locked(node)) == (700, False)


def test_doctor_reports_a_limit_that_nobody_holds(fake, run_dir, node):
    assert actuators.check_limits() == []
    with actuators.cap_power("gpu0", cap_w=300):
        assert actuators.check_limits() == []
        shutil.rmtree(run_dir)
        monitored = journal._state.kept
        journal._state.kept = {}  # as another process sees it
        (held,) = actuators.check_limits()
        assert held.ok and "a process of Tessera holds it" in held.detail
        journal._state.kept = monitored
    set_limit(300)
    (left,) = actuators.check_limits()
    assert (left.name, left.ok) == ("gpu0 power limit", False)
    assert "300 W, and the default is 700 W: no process of Tessera holds it" in left.detail
    assert left.fix.endswith(f"sudo nvidia-smi -i {UUID.format(0)} -pl 700")


# ---- signals in this process


@pytest.fixture
def flags():
    """A SIGTERM handler of the program's own that comes back."""
    seen: list[tuple[int, float]] = []
    before = signal.signal(signal.SIGTERM, lambda signum, frame: seen.append((signum, limit_w())))
    yield seen
    signal.signal(signal.SIGTERM, before)


def test_a_handler_that_comes_back_sees_it_restored_and_the_cap_holds_again(fake, flags):
    theirs = signal.getsignal(signal.SIGTERM)
    with actuators.cap_power("gpu0", cap_w=300):
        assert signal.getsignal(signal.SIGTERM) is not theirs
        os.kill(os.getpid(), signal.SIGTERM)
        assert flags == [(signal.SIGTERM, 700)]
        assert limit_w() == 300
    assert limit_w() == 700
    assert signal.getsignal(signal.SIGTERM) is theirs


def test_a_signal_in_the_middle_of_a_change_waits(fake, flags):
    with actuators.cap_power("gpu0", cap_w=300):
        with guard.defer_signals():
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(0.01)
            assert flags == []
        assert [signum for signum, _ in flags] == [signal.SIGTERM]


def test_ctrl_c_raises_where_it_came_and_unwinds(fake):
    with pytest.raises(KeyboardInterrupt), actuators.cap_power("gpu0", cap_w=300):
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(1)
    assert limit_w() == 700
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_an_ignored_signal_stays_ignored(fake):
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with actuators.cap_power("gpu0", cap_w=300):
            assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_handler_put_over_ours_stays_and_may_call_ours(fake, flags):
    with actuators.cap_power("gpu0", cap_w=300):
        ours = signal.getsignal(signal.SIGTERM)

        def theirs(signum, frame):
            ours(signum, frame)

        signal.signal(signal.SIGTERM, theirs)
    assert signal.getsignal(signal.SIGTERM) is theirs
    with actuators.cap_power("gpu0", cap_w=300):
        os.kill(os.getpid(), signal.SIGTERM)
        assert [watts for _, watts in flags] == [700]
    assert limit_w() == 700


# ---- other processes


@pytest.fixture
def world(tmp_path):
    """An environment with a fake whose limits outlive processes, and a look at them."""
    state = tmp_path / "state"
    env = fake_env(Scenario(gpus=2, state_file=str(state))) | {"TESSERA_WATCHER": "0"}

    def seen() -> list[tuple[int, int]]:
        return [((c.limit_mw or 700_000) // 1000, c.lock_max_mhz) for c in control_state(state)[:2]]

    return env, seen


HOLD = """
import os, sys, threading, time
from tessera import actuators
held = threading.Event()
def hold():
    with actuators.hold_gpus(["gpu0", "gpu1"], cap_w=300, clocks_mhz=(345, 900)):
        print("held", flush=True)
        held.set()
        time.sleep(600)
"""


def start(env: dict[str, str], code: str) -> subprocess.Popen:
    child = subprocess.Popen([sys.executable, "-c", HOLD + code], env=env, stdout=subprocess.PIPE, text=True)
    assert child.stdout.readline() == "held\n"
    return child


def finish(child: subprocess.Popen) -> int:
    child.stdout.close()
    return child.wait(120)


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_a_signal_restores_and_ends_the_process_as_it_would_have(world, signum):
    env, seen = world
    child = start(env, "hold()")
    assert seen() == [(300, 900)] * 2
    child.send_signal(signum)
    assert finish(child) == -signum
    assert seen() == [(700, 0)] * 2


def test_a_hold_of_another_thread_is_restored_by_a_signal_after_one_of_the_main_thread(world):
    """While nothing is held for a moment the handlers stay: the other thread could not install them again."""
    env, seen = world
    code = """
first, go = threading.Event(), threading.Event()
def work():
    with actuators.cap_power("gpu0", cap_w=500):
        pass
    first.set()
    go.wait()
    hold()
threading.Thread(target=work, daemon=True).start()
first.wait()
with actuators.cap_power("gpu0", cap_w=400):
    pass
go.set()
while True:
    time.sleep(0.01)
"""
    child = start(env, code)
    assert seen() == [(300, 900)] * 2
    child.send_signal(signal.SIGTERM)
    assert finish(child) == -signal.SIGTERM
    assert seen() == [(700, 0)] * 2


def test_an_interrupt_does_not_come_while_gpus_are_sought(fake, run_dir, monkeypatch):
    """NVML's binding locks and unlocks by hand: a KeyboardInterrupt in between hung the next thread for ever."""
    found, seek = [], hold._find_all

    def interrupted(gpus):
        os.kill(os.getpid(), signal.SIGINT)
        found.append(seek(gpus))
        return found[-1]

    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with actuators.cap_power("gpu0", cap_w=400):
            monkeypatch.setattr(hold, "_find_all", interrupted)
            with pytest.raises(KeyboardInterrupt), actuators.cap_power("gpu0", cap_w=300):
                pytest.fail("the body must not run")
            assert len(found) == 1 and limit_w() == 400
    finally:
        signal.signal(signal.SIGINT, before)
    assert limit_w() == 700


def test_a_hold_of_another_thread_ends_with_the_program(world):
    env, seen = world
    code = "threading.Thread(target=hold, daemon=True).start(); held.wait()"
    assert finish(start(env, code)) == 0
    assert seen() == [(700, 0)] * 2


@pytest.mark.parametrize(
    ("code", "signum", "removed"),
    [
        ("hold()", signal.SIGKILL, False),
        ("hold()", signal.SIGKILL, True),
        ("threading.Thread(target=hold, daemon=True).start(); time.sleep(600)", signal.SIGTERM, False),
    ],
    ids=["kill -9", "kill -9, the folder removed", "SIGTERM, held on a thread where no handler can be set"],
)
def test_the_watcher_restores(world, run_dir, code, signum, removed):
    env, seen = world
    child = start(env | {"TESSERA_WATCHER": "1"}, code)
    if removed:
        shutil.rmtree(run_dir)
    child.send_signal(signum)
    assert finish(child) == -signum
    wait_until(lambda: (seen(), journals(run_dir)) == ([(700, 0)] * 2, []))


def test_two_processes_share_a_gpu(world, run_dir):
    env, seen = world
    loose = start(env, "hold()")
    tight = start(env, "with actuators.cap_power('gpu0', cap_w=250): hold()")
    assert seen() == [(250, 900), (300, 900)]
    loose.kill()  # nobody restores for it: the one that lives still holds the same
    finish(loose)
    assert seen() == [(250, 900), (300, 900)]
    tight.send_signal(signal.SIGTERM)
    assert finish(tight) == -signal.SIGTERM
    assert (seen(), journals(run_dir)) == ([(700, 0)] * 2, [])


def test_a_forked_child_restores_nothing(world):
    env, seen = world
    code = """
with actuators.hold_gpus("gpu0", cap_w=300):
    pid = os.fork()
    if pid == 0:
        print("held", flush=True)
        sys.exit(0)           # unwinds the block, and runs atexit
    os.waitpid(pid, 0)
    held = actuators.find_gpu("gpu0").power_limit().now_w
sys.exit(0 if held == 300 and actuators.find_gpu("gpu0").power_limit().now_w == 700 else 1)
"""
    assert finish(start(env, code)) == 0
    assert seen()[0] == (700, 0)


def test_doctor_after_kill_9(world, run_dir):
    env, seen = world
    alone = subprocess.Popen(["true"])
    child = start(env, "hold()")
    child.kill()
    finish(child)
    alone.wait()
    assert seen() == [(300, 900)] * 2, "without a watcher nobody put it back"

    def doctor(*arguments: str) -> subprocess.CompletedProcess:
        command = [sys.executable, "-m", "tessera", "doctor", "--sensor", "nvml", *arguments]
        return subprocess.run(command, env=env, capture_output=True, text=True, check=False)

    told = doctor().stdout
    assert f"left by process {child.pid}" in told and "doctor --restore" in told
    words = " ".join(told.split())  # lines are wrapped at the terminal's width
    assert "set the limit from 300 W to 700 W" in words and "unlock the clocks" in words
    assert seen() == [(300, 900)] * 2, "looking changes nothing"
    found = json.loads(doctor("--json").stdout)["control"]
    assert [c["needs_restore"] for c in found] == [True, True]
    refused = env | {"FAKE_NVML_SCENARIO": env["FAKE_NVML_SCENARIO"] + "\ncontrol=denied"}
    command = [sys.executable, "-m", "tessera", "doctor", "--sensor", "nvml", "--restore"]
    failed = subprocess.run(command, env=refused, capture_output=True, text=True, check=False)
    assert failed.returncode == 1 and "may not" in failed.stdout and "sudo" in failed.stdout
    restored = doctor("--restore")
    assert restored.returncode == 0 and "its limit is 700 W" in restored.stdout
    assert (seen(), journals(run_dir)) == ([(700, 0)] * 2, [])
    assert "nothing to put back" in doctor("--restore").stdout
