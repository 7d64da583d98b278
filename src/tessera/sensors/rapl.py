"""CPU and DRAM energy from the RAPL counters, which Linux shows under /sys/class/powercap.

Each zone has a counter of microjoules that runs up to `max_energy_range_uj` and starts again at zero:

    energy_uj   /|  /|  /            two readings give the mean power between them, once it is known
               / | / | /             how often the counter wrapped. Every number of wraps whose power the
              /  |/  |/              zone could really draw is a candidate:
            ──●───────●──► time        none: the counter was reset         -> gap
              read    read             one:  that one, exactly             -> sample
                                       more: the one near the power before, if one clearly is; else a gap

AMD processors appear under the same names (intel-rapl:N, package and core).
"""

from __future__ import annotations

import math
import platform
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from ..clock import NS_PER_S, now_ns
from ..errors import SensorLost, SensorPermission, SensorUnavailable
from ..schema import Capability, Domain, Gap, Hold
from .base import Batch

POWERCAP_ROOT = Path("/sys/class/powercap")
# Intel SDM vol. 3B, "RAPL Interfaces": the energy status counters are updated about every 1 ms.
RESOLUTION_S = 0.001
DEFAULT_PERIOD_S = 0.1
# The most that a zone could draw if it does not say: twice the largest socket sold (500 W: Xeon 6980P, EPYC 9965
# datasheets); for psys, which is a whole platform, four such sockets. A generous bound is safe: it only tells a
# reset from a wrap, and a 262 kJ range (2^32 counts of 61 µJ, SDM) lasts minutes.
ASSUMED_MAX_W = {"psys": 4000.0}
ASSUMED_PACKAGE_MAX_W = 1000.0
# Assumed: turbo exceeds the limits for a while, and a limit may be raised during a run.
LIMIT_HEADROOM = 2.0
LEAST_MAX_W = 100.0
# Reads come at least this often per fastest possible wrap, so that a sampler that is twice as late sees every wrap.
READS_PER_WRAP = 4.0
# A read may be held up between the clock and the counter; without this allowance a late read would look like a jump.
READ_SLACK_S = 0.05
# A domain that draws anything moves its counter (61 µJ a count) within this time.
STALL_S = 1.0
# Relative 90% error of the level. Assumed: package readings agree with an external meter within a few percent (Khan
# et al., "RAPL in Action", 2018); DRAM within 20% (Desrochers et al., "A Validation of DRAM RAPL", 2016).
GAIN_ERROR = {"dram": 0.20}
PACKAGE_GAIN_ERROR = 0.05

PERMISSION_WHY = "Linux makes energy_uj readable by root only since CVE-2020-8694 (a power side channel)"
PERMISSION_FIX = (
    "sudo chmod a+r /sys/class/powercap/*/energy_uj   (until reboot; to keep it: "
    'echo \'SUBSYSTEM=="powercap", ACTION=="add", RUN+="/bin/chmod a+r /sys%p/energy_uj"\' '
    "| sudo tee /etc/udev/rules.d/70-powercap.rules)"
)

_ZONE = re.compile(r"(?P<control>intel-rapl(?:-mmio)?):(?P<index>\d+)(?::(?P<sub>\d+))?")
_PACKAGE = re.compile(r"package-(?P<package>\d+)(?:-die-(?P<die>\d+))?")
_PSYS = re.compile(r"psys(?:-(?P<index>\d+))?")
_NOTES = {
    "core": "inside the package domain, so not counted again",
    "uncore": "inside the package domain, so not counted again",
    "psys": "the whole platform: contains the package and DRAM domains, so not counted",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class EnergyDelta:
    """The joules between two readings of a counter, or the reason why they are unknown."""

    energy_j: float | None
    reason: str = ""
    guessed: bool = False


def counter_delta(
    before_uj: int, after_uj: int, *, range_uj: int, elapsed_s: float, max_power_w: float, previous_w: float | None
) -> EnergyDelta:
    """Return the joules that a wrapping counter counted between two readings, with any number of wraps in between.

    `max_power_w` bounds what is possible. If several numbers of wraps are possible, `previous_w` (the mean power of the
    interval before) decides, but only if one of them is clearly the nearest.
    """
    range_j = range_uj * 1e-6
    least_j = ((after_uj - before_uj) % range_uj) * 1e-6
    most_j = max_power_w * (elapsed_s + READ_SLACK_S)
    if least_j > most_j:
        way = "went backwards" if after_uj < before_uj else "jumped"
        why = "a reset (suspend, module reload), not a wrap"
        reason = f"the energy counter {way} by more than {max_power_w:g} W can explain: {why}"
        return EnergyDelta(energy_j=None, reason=reason)
    most_wraps = math.floor((most_j - least_j) / range_j)
    if most_wraps == 0:
        return EnergyDelta(energy_j=least_j)
    undecided = f"{elapsed_s:.1f} s between reads: the counter may have wrapped {most_wraps} times more than seen"
    if previous_w is None:
        return EnergyDelta(energy_j=None, reason=undecided)
    expected_j = previous_w * elapsed_s
    wraps = min(max(round((expected_j - least_j) / range_j), 0), most_wraps)
    energy_j = least_j + wraps * range_j
    # Within a quarter range of the expectation the next candidate is at least three times as far away.
    if abs(energy_j - expected_j) > range_j / 4:
        reason = f"{undecided}, and the power before ({previous_w:.1f} W) fits no number of wraps"
        return EnergyDelta(energy_j=None, reason=reason)
    return EnergyDelta(energy_j=energy_j, guessed=True)


@dataclass(slots=True, kw_only=True)
class RaplZone:
    """One counter, and the reading from which the next sample counts."""

    domain: Domain
    path: Path
    range_uj: int
    max_power_w: float
    energy_uj: int = 0
    time_ns: int = 0
    previous_w: float | None = None
    fresh: bool = True
    lost: bool = False
    stalled: bool = False
    guesses: int = 0

    def rebase(self, batch: Batch, time_ns: int, energy_uj: int) -> None:
        """Start counting from this reading; the energy before it is unknown."""
        batch.add(self.domain.name, time_ns, math.nan)
        self.energy_uj, self.time_ns, self.previous_w = energy_uj, time_ns, None
        self.lost = self.stalled = False

    def advance(self, batch: Batch, time_ns: int, energy_uj: int) -> None:
        """Turn one more reading into a sample, or into a gap with its reason."""
        if self.fresh:
            batch.add(self.domain.name, self.time_ns, math.nan)
            self.fresh = False
        if self.lost:
            self.rebase(batch, time_ns, energy_uj)
        elif not 0 <= energy_uj <= self.range_uj:
            self._add_gap(batch, f"the counter shows {energy_uj} µJ, outside its range", time_ns)
            self.rebase(batch, time_ns, energy_uj % self.range_uj)
        elif energy_uj == self.energy_uj and self._skip_unmoved(batch, time_ns):
            return
        elif self.stalled:
            # The counter moved at an unknown moment since the last read, so count from here.
            self.rebase(batch, time_ns, energy_uj)
        elif time_ns > self.time_ns:
            self._sample(batch, time_ns, energy_uj)

    def _skip_unmoved(self, batch: Batch, time_ns: int) -> bool:
        """Leave the interval open while the counter stands still (True); the next sample then covers it."""
        elapsed_s = (time_ns - self.time_ns) / NS_PER_S
        if self.max_power_w * elapsed_s >= self.range_uj * 1e-6:
            return False  # long enough to have gone all the way round
        if elapsed_s > STALL_S and not self.stalled:
            self.stalled = True
            self._add_gap(
                batch, f"the counter has not moved for {elapsed_s:.1f} s: the firmware does not update it", None
            )
        return True

    def _sample(self, batch: Batch, time_ns: int, energy_uj: int) -> None:
        elapsed_s = (time_ns - self.time_ns) / NS_PER_S
        delta = counter_delta(
            self.energy_uj,
            energy_uj,
            range_uj=self.range_uj,
            elapsed_s=elapsed_s,
            max_power_w=self.max_power_w,
            previous_w=self.previous_w,
        )
        if delta.energy_j is None:
            self._add_gap(batch, delta.reason, time_ns)
            self.rebase(batch, time_ns, energy_uj)
            return
        self.guesses += delta.guessed
        self.previous_w = delta.energy_j / elapsed_s
        batch.add(self.domain.name, time_ns, self.previous_w)
        self.energy_uj, self.time_ns = energy_uj, time_ns

    def _add_gap(self, batch: Batch, reason: str, end_ns: int | None) -> None:
        batch.gaps.append(Gap(domain=self.domain.name, start_ns=self.time_ns, end_ns=end_ns, reason=reason))

    def lose(self, batch: Batch, reason: str) -> None:
        """Report once that the zone no longer answers."""
        if not self.lost:
            self.lost = True
            self._add_gap(batch, reason, None)

    def describe(self) -> Domain:
        """Return the domain, with a note if wraps were inferred."""
        if not self.guesses:
            return self.domain
        note = f"{self.guesses} intervals had their wraps inferred from the power before"
        return replace(self.domain, note="; ".join(filter(None, (self.domain.note, note))))


def _find_zones(root: Path, text: Callable[[Path], str]) -> list[tuple[Domain, Path]]:
    """Return the zones with their domains, each domain once (MSR and MMIO show the same package)."""
    paths: dict[str, Path] = {}
    # Sub-zones appear beside their parent or inside it, depending on the kernel and on how /sys was mounted.
    for path in (*root.glob("intel-rapl*:*"), *root.glob("intel-rapl*:*/intel-rapl*:*")):
        paths.setdefault(path.name, path)
    keys = [
        (m["control"], int(m["index"]), int(m["sub"] or -1), name) for name in paths if (m := _ZONE.fullmatch(name))
    ]
    names: dict[str, str] = {}
    zones: dict[str, tuple[Domain, Path]] = {}
    for _, _, _, zone in sorted(keys):  # "intel-rapl" sorts before "intel-rapl-mmio": MSR wins
        try:
            names[zone] = text(paths[zone] / "name")
        except OSError:
            continue  # it went while we looked
        domain = _domain_name(names[zone], names.get(zone.rpartition(":")[0], ""))
        if domain is not None and domain not in zones:
            zones[domain] = (_describe(domain, f"{zone} {names[zone]}"), paths[zone])
    return list(zones.values())


def _domain_name(name: str, parent: str) -> str | None:
    """Return our name for a zone: package-0 -> cpu0, its dram -> dram0, its core -> cpu0.core, psys -> psys."""
    if match := _PSYS.fullmatch(name):
        return f"psys{match['index'] or ''}"
    match = _PACKAGE.fullmatch(name) or _PACKAGE.fullmatch(parent)
    if match is None:
        return None
    # A package of several dies has one zone for each die; they do not overlap.
    place = match["package"] + (f".die{match['die']}" if match["die"] else "")
    if _PACKAGE.fullmatch(name):
        return f"cpu{place}"
    if name == "dram":
        return f"dram{place}"
    return f"cpu{place}.{name}" if name in ("core", "uncore") else None


def _kind(domain: str) -> str:
    """Return the kind of a domain: "cpu", "dram", "core", "uncore" or "psys"."""
    last = domain.rpartition(".")[2]
    return last if last in ("core", "uncore") else domain.partition(".")[0].rstrip("0123456789")


def _describe(domain: str, label: str) -> Domain:
    kind = _kind(domain)
    return Domain(
        name=domain,
        source="rapl",
        resolution_s=RESOLUTION_S,
        gain_error=GAIN_ERROR.get(kind, PACKAGE_GAIN_ERROR),
        hold=Hold.MEAN,
        counted=kind in ("cpu", "dram"),
        label=label,
        note=_NOTES.get(kind, ""),
    )


class RaplSensor:
    """Reads package, DRAM, core, uncore and platform power from the RAPL counters of the powercap class.

    Packages and DRAM are counted. Core and uncore are part of a package, and psys contains everything.
    """

    name = "rapl"

    def __init__(
        self,
        *,
        root: Path = POWERCAP_ROOT,
        period_s: float = DEFAULT_PERIOD_S,
        clock_ns: Callable[[], int] = now_ns,
        read_text: Callable[[Path], str] = Path.read_text,
        machine: Callable[[], str] = platform.machine,
        cpuinfo: Path = Path("/proc/cpuinfo"),
    ) -> None:
        self._root = root
        self._wanted_period_s = period_s
        self._clock_ns = clock_ns
        self._read_text = read_text
        self._machine = machine
        self._cpuinfo = cpuinfo
        self._zones: list[RaplZone] = []
        self._capabilities: list[Capability] = []

    @property
    def period_s(self) -> float:
        """Return how often to read: the period asked for, or less if a counter would wrap too soon."""
        wraps_s = [z.range_uj * 1e-6 / z.max_power_w for z in self._zones]
        return min([self._wanted_period_s, *(w / READS_PER_WRAP for w in wraps_s)])

    def start(self) -> None:
        """Find the zones and take their first readings."""
        self._zones, self._capabilities = [], []
        denied = False
        for domain, path in _find_zones(self._root, self._text):
            reason = fix = None
            try:
                reason = self._open(domain, path)
            except PermissionError:
                denied, reason, fix = True, f"{path.name}: {PERMISSION_WHY}", PERMISSION_FIX
            except (OSError, ValueError) as error:
                reason = f"{path.name} cannot be read: {error}"
            self._capabilities.append(
                Capability(name=f"{domain.name}.power", available=reason is None, reason=reason, fix=fix)
            )
        if self._zones:
            return
        if denied:
            raise SensorPermission("no RAPL counter is readable", why=PERMISSION_WHY, fix=PERMISSION_FIX)
        raise SensorUnavailable(
            "no RAPL energy counter found", why=self._absence(), fix="measure the host, or do without CPU energy"
        )

    def _open(self, domain: Domain, path: Path) -> str | None:
        """Take a zone's first reading. Return the reason if the zone cannot be used."""
        time_ns, energy_uj = self._read_counter(path)
        range_uj = int(self._text(path / "max_energy_range_uj"))
        if range_uj <= 0:
            return f"{path.name} gives no counter range, so a wrap cannot be detected"
        max_power_w = self._max_power_w(domain, path)
        self._zones.append(
            RaplZone(
                domain=domain,
                path=path,
                range_uj=range_uj,
                max_power_w=max_power_w,
                energy_uj=energy_uj,
                time_ns=time_ns,
            )
        )
        return None

    def _read_counter(self, path: Path) -> tuple[int, int]:
        before_ns = self._clock_ns()
        energy_uj = int(self._text(path / "energy_uj"))
        return (before_ns + self._clock_ns()) // 2, energy_uj

    def _max_power_w(self, domain: Domain, path: Path) -> float:
        """Return the most that this zone could plausibly draw, from its limits if it has any."""
        most_w = ASSUMED_MAX_W.get(_kind(domain.name), ASSUMED_PACKAGE_MAX_W)
        limits_w = []
        for file in (*path.glob("constraint_*_max_power_uw"), *path.glob("constraint_*_power_limit_uw")):
            try:
                limits_w.append(int(self._text(file)) * 1e-6)
            except (OSError, ValueError):
                continue  # a limit that cannot be read does not count
        if not any(w > 0 for w in limits_w):
            return most_w
        # Firmware writes huge limits for "none", so no zone is believed above the assumed maximum.
        return min(max(LIMIT_HEADROOM * max(limits_w), LEAST_MAX_W), most_w)

    def _text(self, path: Path) -> str:
        return self._read_text(path).strip()

    def _absence(self) -> str:
        machine = self._machine().lower()
        if machine not in ("x86_64", "amd64", "i686", "i386"):
            return f"RAPL is an x86 feature and this is {machine}"
        try:
            virtual = "hypervisor" in self._text(self._cpuinfo)
        except OSError:
            virtual = False
        if virtual:
            return "this is a virtual machine, and hypervisors hide the counters"
        if not self._root.is_dir():
            return f"{self._root} does not exist: a container without /sys, or intel_rapl_msr is not loaded"
        return f"{self._root} has no intel-rapl zones: load intel_rapl_msr, or the processor has none"

    def domains(self) -> Sequence[Domain]:
        return [zone.describe() for zone in self._zones]

    def capabilities(self) -> Sequence[Capability]:
        """Return one capability per zone, readable or not."""
        return list(self._capabilities)

    def read(self) -> Batch:
        """Return the mean power of each zone since the last read."""
        batch = Batch()
        reason = "the sensor was not started"
        for zone in self._zones:
            try:
                time_ns, energy_uj = self._read_counter(zone.path)
            except (OSError, ValueError) as error:
                reason = f"{zone.path.name}/energy_uj can no longer be read: {error}"
                zone.lose(batch, reason)
            else:
                zone.advance(batch, time_ns, energy_uj)
        if all(zone.lost for zone in self._zones):
            raise SensorLost(
                "no RAPL counter answers any more", why=reason, fix="check that intel_rapl_msr is still loaded"
            )
        return batch

    def stop(self) -> None:
        """Do nothing: the sensor holds nothing open."""
