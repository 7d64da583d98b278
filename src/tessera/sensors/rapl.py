"""CPU and DRAM energy from the RAPL counters, as Linux shows them under /sys/class/powercap.

Each zone has a counter of microjoules that runs up to `max_energy_range_uj` and starts again at zero; how its
wraps are told is in `_rapl_zone`.

AMD processors appear under the same names (intel-rapl:N, package and core).
"""

from __future__ import annotations

import platform
import re
from collections.abc import Callable, Sequence
from pathlib import Path

from ..clock import now_ns
from ..errors import SensorLost, SensorPermission, SensorUnavailable
from ..schema import Capability, Domain, Hold
from ._rapl_zone import Zone
from .base import Batch

POWERCAP_ROOT = Path("/sys/class/powercap")

# Intel SDM vol. 3B, "RAPL Interfaces": the energy status counters are updated about every 1 ms.
RESOLUTION_S = 0.001

DEFAULT_PERIOD_S = 0.1

# What a zone could draw at most when it does not say: twice the largest socket sold (500 W: Xeon 6980P, EPYC
# 9965 datasheets), and for psys, which is a whole platform, four such sockets' worth. Being generous is safe:
# the bound only tells a reset from a wrap, and a 262 kJ range (2^32 counts of 61 µJ, SDM) lasts minutes.
ASSUMED_MAX_W = {"psys": 4000.0}
ASSUMED_PACKAGE_MAX_W = 1000.0
# Assumed: turbo exceeds the limits for a while, and a limit may be raised mid-run.
LIMIT_HEADROOM = 2.0
LEAST_MAX_W = 100.0
# Reads come at least four times per fastest possible wrap, so that a sampler twice as late still sees each.
READS_PER_WRAP = 4.0

# Relative 90% error of the level. Assumed: package readings follow an external meter within percents (Khan
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


def _find_zones(root: Path, text: Callable[[Path], str]) -> list[tuple[Domain, Path]]:
    """List the zones with their domains, each domain once (MSR and MMIO show the same package)."""
    paths: dict[str, Path] = {}
    # Sub-zones appear beside their parent and inside it, depending on the kernel and on how /sys was mounted.
    for path in (*root.glob("intel-rapl*:*"), *root.glob("intel-rapl*:*/intel-rapl*:*")):
        paths.setdefault(path.name, path)
    keys = [
        (m["control"], int(m["index"]), int(m["sub"] or -1), name) for name in paths if (m := _ZONE.fullmatch(name))
    ]
    names: dict[str, str] = {}
    found: dict[str, tuple[Domain, Path]] = {}
    for _, _, _, zone in sorted(keys):  # "intel-rapl" sorts before "intel-rapl-mmio": MSR wins
        try:
            names[zone] = text(paths[zone] / "name")
        except OSError:
            continue  # it went while we looked
        domain = _domain_name(names[zone], names.get(zone.rpartition(":")[0], ""))
        if domain is not None and domain not in found:
            found[domain] = (_describe(domain, f"{zone} {names[zone]}"), paths[zone])
    return list(found.values())


def _domain_name(name: str, parent: str) -> str | None:
    """Our name for a zone: package-0 -> cpu0, its dram -> dram0, its core -> cpu0.core, psys -> psys."""
    if match := _PSYS.fullmatch(name):
        return f"psys{match['index'] or ''}"
    match = _PACKAGE.fullmatch(name) or _PACKAGE.fullmatch(parent)
    if match is None:
        return None
    # A package of several dies has a zone for each; they do not overlap.
    place = match["package"] + (f".die{match['die']}" if match["die"] else "")
    if _PACKAGE.fullmatch(name):
        return f"cpu{place}"
    if name == "dram":
        return f"dram{place}"
    return f"cpu{place}.{name}" if name in ("core", "uncore") else None


def _kind(domain: str) -> str:
    """Tell what a domain is: "cpu", "dram", "core", "uncore" or "psys"."""
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
    """Package, DRAM, core, uncore and platform power from the RAPL counters of the powercap class.

    Packages and DRAM are counted; core and uncore lie inside a package and psys contains everything.
    """

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
        self._zones: list[Zone] = []
        self._capabilities: list[Capability] = []

    @property
    def name(self) -> str:
        """Short name of the sensor."""
        return "rapl"

    @property
    def period_s(self) -> float:
        """How often to read: the period asked for, or less where a counter would wrap too soon."""
        wraps_s = [z.range_uj * 1e-6 / z.max_power_w for z in self._zones]
        return min([self._wanted_period_s, *(w / READS_PER_WRAP for w in wraps_s)])

    def start(self) -> None:
        """Find the zones and take their first readings."""
        self._zones, self._capabilities = [], []
        denied = 0
        for domain, path in _find_zones(self._root, self._text):
            denied += not self._open(domain, path)
        if self._zones:
            return
        if denied:
            raise SensorPermission("no RAPL counter is readable", why=PERMISSION_WHY, fix=PERMISSION_FIX)
        raise SensorUnavailable(
            "no RAPL energy counter found",
            why=self._absence(),
            fix="measure the host, or do without CPU energy",
        )

    def _open(self, domain: Domain, path: Path) -> bool:
        """Take a zone's first reading; False if this user may not."""
        try:
            before_ns = self._clock_ns()
            energy_uj = int(self._text(path / "energy_uj"))
            time_ns = (before_ns + self._clock_ns()) // 2
            range_uj = int(self._text(path / "max_energy_range_uj"))
        except PermissionError:
            self._tell(domain, reason=f"{path.name}: {PERMISSION_WHY}", fix=PERMISSION_FIX)
            return False
        except (OSError, ValueError) as error:
            self._tell(domain, reason=f"{path.name} cannot be read: {error}")
            return True
        if range_uj <= 0:
            self._tell(domain, reason=f"{path.name} gives no counter range, so a wrap cannot be told")
            return True
        self._tell(domain)
        self._zones.append(
            Zone(
                domain=domain,
                path=path,
                range_uj=range_uj,
                max_power_w=self._max_power_w(domain, path),
                energy_uj=energy_uj,
                time_ns=time_ns,
            )
        )
        return True

    def _tell(self, domain: Domain, *, reason: str | None = None, fix: str | None = None) -> None:
        self._capabilities.append(
            Capability(name=f"{domain.name}.power", available=reason is None, reason=reason, fix=fix)
        )

    def _max_power_w(self, domain: Domain, path: Path) -> float:
        """Return the most this zone could plausibly draw, from its limits where it has any."""
        most_w = ASSUMED_MAX_W.get(_kind(domain.name), ASSUMED_PACKAGE_MAX_W)
        limits_w = []
        for file in (*path.glob("constraint_*_max_power_uw"), *path.glob("constraint_*_power_limit_uw")):
            try:
                limits_w.append(int(self._text(file)) * 1e-6)
            except (OSError, ValueError):
                continue  # a limit that cannot be read says nothing
        if not any(w > 0 for w in limits_w):
            return most_w
        # Firmware writes huge limits for "none"; no zone is believed beyond the assumption.
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
            return f"{self._root} is not there: a container without /sys, or intel_rapl_msr is not loaded"
        return f"{self._root} has no intel-rapl zones: load intel_rapl_msr, or the processor has none"

    def domains(self) -> Sequence[Domain]:
        """Return the zones that can be read."""
        return [zone.described() for zone in self._zones]

    def capabilities(self) -> Sequence[Capability]:
        """One per zone found, readable or not."""
        return list(self._capabilities)

    def read(self) -> Batch:
        """Return the mean power of each zone since the read before."""
        batch = Batch()
        reason = "the sensor was not started"
        for zone in self._zones:
            try:
                before_ns = self._clock_ns()
                energy_uj = int(self._text(zone.path / "energy_uj"))
                time_ns = (before_ns + self._clock_ns()) // 2
            except (OSError, ValueError) as error:
                reason = f"{zone.path.name}/energy_uj can no longer be read: {error}"
                zone.lose(batch, reason)
            else:
                zone.advance(batch, time_ns, energy_uj)
        if all(zone.lost for zone in self._zones):
            raise SensorLost(
                "no RAPL counter answers any more",
                why=reason,
                fix="check that intel_rapl_msr is still loaded",
            )
        return batch

    def stop(self) -> None:
        """Nothing is held open."""
