"""`dvfs=` as text and as decisions; `driver_limits.hold_limits`: opt-in, refusals said once, everything put back."""

from __future__ import annotations

import contextlib
import importlib
import threading
import warnings

import pynvml as nv
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from tessera.errors import ArgumentError
from tessera.profile import region
from tessera.runtime import driver_limits, dvfs
from tessera.runtime.dvfs import ClockRule, ClockShaper, Dvfs, parse_dvfs

from fakes.nvml import Scenario
from places import REPOSITORY
from waiting import wait_until

regions = importlib.import_module("tessera.profile.region")  # tessera.profile.region is the class

CLOCKS = tuple(range(1980, 344, -15))


# ---- text


@pytest.mark.parametrize(
    ("text", "parsed"),
    [
        (None, Dvfs()),
        ("auto", Dvfs(auto=True)),
        (
            "shape:sm_down_200MHz@flash_attention",
            Dvfs(rules=(ClockRule(rule="sm_down", clock_mhz=200, target="flash_attention"),)),
        ),
        (
            ["auto", "shape: sm_at_1.2GHz @ decode*; shape:sm_down_60MHz@a"],
            Dvfs(
                auto=True,
                rules=(
                    ClockRule(rule="sm_at", clock_mhz=1200, target="decode*"),
                    ClockRule(rule="sm_down", clock_mhz=60, target="a"),
                ),
            ),
        ),
    ],
)
def test_parse(text, parsed):
    assert parse_dvfs(text) == parsed


names = st.text("abcdefghij_*?[]/.", min_size=1, max_size=12)
rules = st.builds(ClockRule, rule=st.sampled_from(["sm_down", "sm_at"]), clock_mhz=st.integers(1, 5000), target=names)


@given(st.booleans(), st.lists(rules, max_size=4))
def test_what_is_written_is_read(auto, some):
    assume(auto or some)  # nothing has no text
    texts = [*(["auto"] if auto else []), *(f"shape:{rule}" for rule in some)]
    assert parse_dvfs(";".join(texts)) == parse_dvfs(texts) == Dvfs(auto=auto, rules=tuple(some))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("autp", "did you mean 'auto'"),
        ("shpae:sm_down_200MHz@x", "did you mean 'shape'"),
        ("shape:sm_dwn_200MHz@x", "did you mean 'sm_down'"),
        ("shape:sm_up_200MHz@x", "cannot be raised"),
        ("shape:sm_down_200MHz", "does not say where"),
        ("shape:sm_down_200MHz@ ", "does not say where"),
        ("shape:sm_down_200W@x", "200W"),
        ("shape:sm_down@x", "no rule"),
        ("shape:sm_at_0MHz@x", "0 MHz"),
        ("", "names nothing"),
        ("auto;", "names nothing"),
        ([], "names nothing"),
        ([3], "is not text"),
    ],
)
def test_what_cannot_be_read(text, said):
    with pytest.raises(ArgumentError) as caught:
        parse_dvfs(text)
    assert said in str(caught.value)
    assert "sm_down_200MHz@flash_attention" in caught.value.fix


@given(rules)
def test_a_ceiling_is_a_clock_there_is(shape):
    ceiling = shape.ceiling_mhz(CLOCKS)
    wanted = 1980 - shape.clock_mhz if shape.rule == "sm_down" else shape.clock_mhz
    assert ceiling in CLOCKS
    assert ceiling <= max(wanted, 345)
    assert ceiling > min(wanted, 1980) - 15 or ceiling == 345


@pytest.mark.parametrize(
    ("target", "name", "fits"),
    [
        ("flash_attention", "flash_attention", True),
        ("flash_attention", "scaled_dot_product_attention", True),
        ("decode", "step/decode", True),
        ("step/*", "step/decode", True),
        ("decode*", "decode_17", True),
        ("decode", "decoder", False),
        ("matmul", "linear", True),
    ],
)
def test_names(target, name, fits):
    assert ClockRule(rule="sm_at", clock_mhz=900, target=target).matches(name) == fits


# ---- decisions


@contextlib.contextmanager
def run_region(shaper, name):
    shaper.enter(name)
    try:
        yield
    finally:
        shaper.leave(name)


class World:
    """A clock of its own and the ceilings that were asked for."""

    def __init__(self, text: str) -> None:
        self.now_s = 0.0
        self.asked: list[int | None] = []
        self.shaper = ClockShaper(parse_dvfs(text).rules, CLOCKS, self.asked.append, now_s=lambda: self.now_s)

    def spend(self, seconds: float, name: str | None = None) -> None:
        if name:
            self.shaper.enter(name)
        self.now_s += seconds
        if name:
            self.shaper.leave(name)


def test_a_phase_lowers_the_clocks_and_its_end_raises_them():
    world = World("shape:sm_down_200MHz@decode")
    world.spend(0.1)
    assert world.shaper.decide() is None
    world.shaper.enter("decode")
    world.spend(0.1)
    assert world.shaper.decide() == 1770, "the highest there is at or below 1980 - 200"
    world.spend(0.1)
    world.shaper.decide()
    world.shaper.leave("decode")
    world.spend(0.1)
    assert world.shaper.decide() is None
    assert world.asked == [1770, None]


def test_short_operators_do_not_make_the_clocks_jump():
    world = World("shape:sm_at_900MHz@softmax")
    for _ in range(50):
        for _ in range(10):
            world.spend(0.008)
            world.spend(0.002, "softmax")
        world.shaper.decide()
    assert world.asked == []
    for _ in range(50):
        for _ in range(10):
            world.spend(0.002)
            world.spend(0.008, "softmax")
        world.shaper.decide()
    assert world.asked == [900], "most of the time, and one switch"


def test_the_lowest_of_those_that_hold():
    world = World("shape:sm_at_900MHz@inner;shape:sm_at_1200MHz@outer;shape:sm_at_1500MHz@o*")
    with run_region(world.shaper, "outer"):
        world.spend(0.1)
        assert world.shaper.decide() == 1200
        with run_region(world.shaper, "inner"):
            world.spend(0.1)
            assert world.shaper.decide() == 900
        world.spend(0.1)
        assert world.shaper.decide() == 1200


def test_what_began_before_the_shaper_is_nothing_to_it():
    world = World("shape:sm_at_900MHz@a")
    world.shaper.leave("a")
    world.spend(0.1)
    assert world.shaper.decide() is None


@given(st.lists(st.tuples(st.sampled_from(["a", "b", "c"]), st.floats(0, 0.3)), max_size=60))
def test_it_never_switches_more_often_than_it_decides(phases):
    world = World("shape:sm_at_900MHz@a;shape:sm_at_1200MHz@b")
    decisions = 0
    for name, seconds in phases:
        world.spend(seconds, name)
        if world.now_s >= 0.1 * (decisions + 1):
            decisions += 1
            world.shaper.decide()
    assert len(world.asked) == world.shaper.switches <= decisions
    assert all(one != other for one, other in zip(world.asked, world.asked[1:], strict=False))


def test_torchs_operators_are_names():
    world = World("shape:sm_at_900MHz@flash_attention;shape:sm_at_1200MHz@matmul")
    seen = []
    world.shaper.enter = seen.append  # type: ignore[method-assign]
    x = torch.ones(1, 2, 4, 8)
    with dvfs.follow_operators(world.shaper):
        torch.nn.functional.scaled_dot_product_attention(x, x, x)
        torch.nn.functional.linear(x, torch.ones(3, 8))
    assert {"scaled_dot_product_attention", "linear"} <= set(seen)


# ---- driver_limits.hold_limits on the fake


@pytest.fixture
def fake(fake_nvml, monkeypatch, tmp_path):
    monkeypatch.setenv("TESSERA_RUNTIME_DIR", str(tmp_path / "run"))
    monkeypatch.setenv("TESSERA_WATCHER", "0")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.delenv(driver_limits.VARIABLE, raising=False)
    driver_limits._warned.clear()
    fake_nvml.set(Scenario(gpus=2))
    nv.nvmlInit()
    yield fake_nvml
    wait_until(
        lambda: "tessera-linger" not in {t.name for t in threading.enumerate()}
    )  # it also closes what it held, a moment after the limit is back
    assert [limit_w(0), limit_w(1)] == [700, 700]
    assert [fake_nvml.locked_clocks(0), fake_nvml.locked_clocks(1)] == [None, None]
    nv.nvmlShutdown()


def limit_w(gpu: int = 0) -> float:
    return nv.nvmlDeviceGetPowerManagementLimit(nv.nvmlDeviceGetHandleByIndex(gpu)) / 1000


def test_nothing_asked_nothing_done(fake):
    with driver_limits.hold_limits() as held:
        assert (held.how, held.notes, held.actions) == (None, [], [])
    assert fake.calls("nvmlDeviceGetCount_v2") == 0


def test_without_opting_in_nothing_is_changed(fake):
    with driver_limits.hold_limits(["gpu0"], cap_w=300) as held:
        assert (held.how, limit_w()) == (None, 700)
        assert "opted in" in held.notes[0] and "TESSERA_CONTROL=1" in held.notes[0]
    assert fake.calls("nvmlDeviceSetPowerManagementLimit") == 0


def test_opted_in_the_driver_holds_the_cap(fake, monkeypatch):
    with driver_limits.hold_limits(cap_w=300, allow_control=True) as held:
        assert (held.how, held.cap_w, held.gpus) == ("driver", 300, ("gpu0", "gpu1"))
        assert (limit_w(0), limit_w(1)) == (300, 300)
    monkeypatch.setenv(driver_limits.VARIABLE, "1")
    with pytest.raises(KeyError), driver_limits.hold_limits([1], cap_w=400) as held:
        assert (limit_w(0), limit_w(1)) == (700, 400)
        raise KeyError
    with driver_limits.hold_limits([1], cap_w=400, allow_control=False) as held:
        assert held.how is None


def test_a_dry_run_says_and_does_nothing(fake):
    planned = driver_limits.plan_limits([0], cap_w=300, dvfs="shape:sm_down_200MHz@flash_attention")
    assert planned.how is None
    assert planned.actions == [
        "gpu0: set the power limit from 700 W to 300 W, and back",
        "gpu0: SM clock at most 1770 MHz in flash_attention (sm_down_200MHz@flash_attention)",
    ]
    assert fake.calls("nvmlDeviceSetPowerManagementLimit") == fake.calls("nvmlDeviceSetGpuLockedClocks") == 0


def test_without_permission_it_says_so_once_and_runs(fake):
    fake.change(control="denied")
    ran = 0
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for _ in range(3):
            with driver_limits.hold_limits([0], cap_w=300, allow_control=True) as held:
                ran += 1
                assert held.how is None and "may not" in held.notes[0]
    assert ran == 3
    assert len(told) == 1 and "sudo" in str(told[0].message)


def test_dvfs_without_opting_in_says_so_once_and_runs(fake):
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for _ in range(2):
            with driver_limits.hold_limits([0], dvfs="shape:sm_at_900MHz@x") as held:
                assert held.shaper is None
    assert ["clocks are not changed" in str(w.message) for w in told] == [True]


def test_a_cap_the_driver_cannot_hold_is_left_to_others(fake):
    with (
        pytest.warns(UserWarning, match="200 W to 700 W"),
        driver_limits.hold_limits([0], cap_w=100, allow_control=True) as held,
    ):
        assert held.how is None


def test_no_gpu_to_control_is_no_cap(fake, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with (
        pytest.warns(UserWarning, match="no GPU to control"),
        driver_limits.hold_limits(cap_w=300, dvfs="shape:sm_at_900MHz@x", allow_control=True) as held,
    ):
        assert (held.how, held.gpus, held.shaper) == (None, (), None)
    assert "no GPU to control" in driver_limits.plan_limits(cap_w=300, allow_control=True).notes[0]


def test_clocks_are_shaped_by_regions(fake):
    with driver_limits.hold_limits([0], cap_w=500, dvfs="shape:sm_at_900MHz@decode", allow_control=True) as held:
        assert (held.how, limit_w()) == ("driver", 500)
        assert fake.locked_clocks(0) == (345, 1980), "the whole range: no limit yet"
        with run_region(held.shaper, "step/decode"):
            wait_until(lambda: fake.locked_clocks(0) == (345, 900))
        assert limit_w() == 500


@pytest.mark.skipif(not hasattr(regions, "follow"), reason="regions tell nobody yet")
def test_the_profilers_regions_are_names(fake):
    @region("step/decode")
    def decode():
        wait_until(lambda: fake.locked_clocks(0) == (345, 900))

    with driver_limits.hold_limits([0], dvfs="shape:sm_at_900MHz@decode", allow_control=True):
        with region("step/decode"):
            wait_until(lambda: fake.locked_clocks(0) == (345, 900))
        wait_until(lambda: fake.locked_clocks(0) == (345, 1980))
        decode()
    assert regions._follower is None


def test_auto_follows_the_plans_hints(fake):
    with driver_limits.hold_limits([0], dvfs="auto", allow_control=True) as held:
        assert "no clock hints" in held.notes[0] and held.shaper is None
    with driver_limits.hold_limits([0], dvfs="auto;shape:sm_at_1200MHz@layer_norm", allow_control=True) as held:
        assert held.shaper.ceiling_mhz("layer_norm") == 1200
        assert held.shaper.ceiling_mhz("linear") is None


def test_clocks_refused_the_cap_stays(fake):
    fake.change(fault_lock="0:1000:4")
    with (
        pytest.warns(UserWarning, match="may not lock its clocks"),
        driver_limits.hold_limits([0], cap_w=300, dvfs="shape:sm_at_900MHz@x", allow_control=True) as held,
    ):
        assert (held.how, held.shaper, limit_w()) == ("driver", None, 300)


def test_a_clock_that_fails_later_does_not_stop_the_work(fake):
    fake.change(fault_lock="1:1000:999")
    with (
        warnings.catch_warnings(record=True) as told,
        driver_limits.hold_limits([0], dvfs="shape:sm_at_900MHz@x", allow_control=True) as held,
    ):
        warnings.simplefilter("always")
        with run_region(held.shaper, "x"):
            wait_until(lambda: told)
    assert "could not lock" in str(told[0].message)


# ---- lingering


def test_a_loop_sets_the_limit_once(fake):
    for _ in range(20):
        with driver_limits.hold_limits([0], cap_w=300, allow_control=True, linger_s=2.0) as held:
            assert (held.how, limit_w()) == ("driver", 300)
    assert fake.calls("nvmlDeviceSetPowerManagementLimit") == 1
    assert limit_w() == 300, "the next call may come"
    with driver_limits.hold_limits([0], cap_w=400, allow_control=True):
        assert limit_w() == 300, "the tightest, even while it lingers"
    wait_until(lambda: limit_w() == 700)


def test_what_lingers_is_for_one_at_a_time(fake):
    with driver_limits.hold_limits([0], cap_w=300, allow_control=True, linger_s=2.0) as one:
        with driver_limits.hold_limits([0], cap_w=300, allow_control=True, linger_s=2.0) as other:
            assert one is not other
        assert limit_w() == 300
    with driver_limits.hold_limits([0], cap_w=300, allow_control=True, linger_s=2.0) as again:
        assert again in (one, other)
    wait_until(lambda: limit_w() == 700)


def test_a_raise_lingers_too(fake):
    with pytest.raises(KeyError), driver_limits.hold_limits([0], cap_w=300, allow_control=True, linger_s=0.1):
        raise KeyError
    wait_until(lambda: limit_w() == 700)


# ---- the shared board


def test_the_scripts_for_the_shared_gpu_cannot_change_it():
    """They run as root there: whatever could set a limit, a clock or a mode must not be in them."""
    folder = REPOSITORY / "benchmarks" / "device"
    able = (
        "nvmlDeviceSet",
        "nvmlDeviceReset",
        "actuators",
        "allow_control",
        "cap_policy",
        "dvfs=",
        "hold_limits",
        "nvidia-smi -",
        'CONTROL"] = "1"',
        "-lgc",
        "heal(",
    )
    scripts = sorted(folder.glob("*.py"))
    assert len(scripts) > 10
    found = {(s.name, word) for s in scripts for word in able if word in s.read_text()}
    assert not found
    for name in ("schedule_caps.py", "schedule_tokens.py", "tune.py", "run_modes.py"):
        assert 'os.environ["TESSERA_CONTROL"] = "0"' in (folder / name).read_text()
