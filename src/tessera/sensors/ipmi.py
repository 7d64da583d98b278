"""Power of the whole node by IPMI: `ipmitool dcmi power reading`, and power events from the system event log.

It is for machines whose BMC does not speak Redfish, or can be reached only from inside (/dev/ipmi0). A call takes tens
of milliseconds, sometimes seconds, so it must run on a background thread.
"""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from ..clock import NS_PER_S, now_ns
from ..errors import SensorError, SensorLost, SensorPermission, SensorUnavailable
from ..schema import Capability, Domain, PowerEvent
from ._meters import PolledPower
from .base import Batch

DOMAIN = "node"
TIMEOUT_S = 5.0
# DCMI ("Get Power Reading") gives whole watts and no accuracy. Assumed: supplies meter their input within about 3%.
GAIN_ERROR = 0.03
# The event log is read record by record over a slow bus, which takes seconds if the log is full.
EVENTS_PERIOD_S = 10.0
# How many failures in a row mean that the sensor is lost. One lost answer is common while a BMC is busy.
FAILURES_TO_LOSE = 3
# DCMI's watts are a 16-bit field. Assumed: all ones means that the BMC has no reading, not 65 kW.
NO_READING_W = 65535

_WATTS = re.compile(r"^\s*Instantaneous power reading:\s*(\d+)\s*Watts", re.M)
_STATE = re.compile(r"^\s*Power reading state is:\s*(\w+)", re.M)
_STAMP = re.compile(r"^\s*IPMI timestamp:\s*(\S.*?)\s*$", re.M)
_SEL_LINE = re.compile(r"^\s*[0-9a-fA-F]+ \|.*\|.*\|")
# Words about power in a management controller's log.
_OVER_CURRENT = re.compile(r"over[- ]?current|\bocp\b|current (?:limit|threshold) exceeded|\boverload", re.I)
_BREAKER_TRIPPED = re.compile(r"breaker\b.*\btrip(?:ped)?\b|\btripped\b.*breaker", re.I)
_BREAKER_NEAR = re.compile(r"breaker\b.*(?:\bnear|warning|threshold|high load|approach)", re.I)
_SUPPLY = re.compile(r"power suppl|\bpsu ?\d*\b|\bps\d+\b", re.I)
_FAULT = re.compile(r"fail|fault|\blost\b|\bloss\b|out[- ]of[- ]range|critical|error|shut ?down", re.I)
_OVER = re.compile(r"current\b.*upper (?:critical|non-recoverable) going high", re.I)
_RECOVERED = re.compile(
    r"de-?assert|restored|cleared|recovered|\b(?:back|return\w*) to normal|\bno (?:longer|faults?)\b", re.I
)


Runner = Callable[[Sequence[str]], "subprocess.CompletedProcess[str]"]
"""Runs a command; raises OSError or subprocess.TimeoutExpired."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PowerReading:
    """One DCMI power reading: the watts now, and the BMC's time of it."""

    power_w: float
    stamp: str | None


def run_command(command: Sequence[str]) -> subprocess.CompletedProcess[str]:
    """Run a command without input, in the C locale, and collect its output."""
    return subprocess.run(
        command,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        errors="replace",
        timeout=TIMEOUT_S,
        check=False,
        env={**os.environ, "LC_ALL": "C"},
    )


def parse_power_reading(text: str) -> PowerReading:
    """Parse the output of `ipmitool dcmi power reading`. Raises ValueError with what is wrong."""
    state = _STATE.search(text)
    if state is not None and state[1].lower() != "activated":
        raise ValueError(f"the BMC's power measurement is {state[1].lower()}")
    watts = _WATTS.search(text)
    if watts is None:
        raise ValueError(f"the answer has no power reading: {text.strip()[:80]!r}")
    power_w = int(watts[1])
    if power_w >= NO_READING_W:
        raise ValueError(f"{power_w} W means that the BMC has no reading")
    stamp = _STAMP.search(text)
    # Some BMCs never set the stamp (1970). Such a stamp does not show whether the reading is new.
    own_time = stamp[1] if stamp is not None and "1970" not in stamp[1] else None
    return PowerReading(power_w=float(power_w), stamp=own_time)


def classify_event(text: str) -> str | None:
    """Return the kind of power event that a log line reports; None for recoveries and for anything else."""
    words = re.sub(r"(?<=[a-z])(?=[A-Z])", " ", text)  # MessageIds are CamelCase: PowerSupplyFailed
    if _RECOVERED.search(words):
        return None
    if _BREAKER_NEAR.search(words):
        return "breaker_near_trip"
    if _BREAKER_TRIPPED.search(words):
        return "breaker_tripped"
    if _OVER_CURRENT.search(words) or _OVER.search(words):
        return "over_current"
    return "psu_fault" if _SUPPLY.search(words) and _FAULT.search(words) else None


class IpmiSensor:
    """Reads node power and power-supply events through ipmitool and the local BMC."""

    name = "ipmi"
    period_s = 1.0  # BMCs have something new about once a second

    def __init__(
        self,
        *,
        runner: Runner = run_command,
        clock_ns: Callable[[], int] = now_ns,
        device: Path = Path("/dev/ipmi0"),
        readable: Callable[[Path], bool] = lambda path: os.access(path, os.R_OK | os.W_OK),
        events_period_s: float = EVENTS_PERIOD_S,
    ) -> None:
        self._runner = runner
        self._clock_ns = clock_ns
        self._device = device
        self._readable = readable
        self._events_period_s = events_period_s
        self._power: PolledPower | None = None
        self._capabilities: list[Capability] = []
        self._failures = 0
        self._seen: set[str] | None = None
        self._events_at_ns = 0

    def start(self) -> None:
        """Take a first reading, and note which log entries are old."""
        try:
            parse_power_reading(self._ask("dcmi", "power", "reading"))
        except ValueError as error:
            raise SensorUnavailable(
                "the BMC gives no DCMI power reading",
                why=str(error),
                fix="try Redfish, or `ipmitool sdr type current`: not every BMC implements DCMI power",
            ) from error
        self._power = PolledPower(DOMAIN, started_ns=self._clock_ns())
        self._failures = 0
        self._capabilities = [Capability(name=f"{DOMAIN}.power", available=True), self._note_old_events()]

    def _note_old_events(self) -> Capability:
        try:
            self._seen = set(self._log_lines())
        except (SensorError, ValueError) as error:
            self._seen = None
            return Capability(name="events", available=False, reason=f"`ipmitool sel elist`: {error}")
        self._events_at_ns = self._clock_ns()
        return Capability(name="events", available=True)

    def domains(self) -> Sequence[Domain]:
        if self._power is None:
            return []
        assumed = "" if self._power.refresh_seen else "; refresh period assumed, not yet seen"
        return [
            Domain(
                name=DOMAIN,
                source="ipmi",
                resolution_s=self._power.resolution_s,
                gain_error=GAIN_ERROR,
                counted=False,
                label="node power (DCMI)",
                note=f"the whole machine: contains GPUs, CPUs and DRAM, so not counted{assumed}",
            )
        ]

    def capabilities(self) -> Sequence[Capability]:
        return list(self._capabilities)

    def read(self) -> Batch:
        """Return the power now if it is new, and the power events logged since the last read."""
        if self._power is None:
            raise SensorLost("the IPMI sensor was not started", fix="call start() first")
        batch = Batch()
        before_ns = self._clock_ns()
        try:
            reading = parse_power_reading(self._ask("dcmi", "power", "reading"))
        except (SensorError, ValueError) as error:
            self._fail(batch, self._power, before_ns, error)
            return batch
        self._failures = 0
        time_ns = (before_ns + self._clock_ns()) // 2
        self._power.observe(batch, power_w=reading.power_w, time_ns=time_ns, stamp=reading.stamp)
        self._read_events(batch)
        return batch

    def _fail(self, batch: Batch, power: PolledPower, time_ns: int, error: SensorError | ValueError) -> None:
        self._failures += 1
        what = error.what if isinstance(error, SensorError) else str(error)
        if self._failures >= FAILURES_TO_LOSE:
            raise SensorLost(
                f"the BMC failed to answer {self._failures} times in a row",
                why=str(error),
                fix="try `ipmitool dcmi power reading`; `ipmitool mc reset cold` restarts a hung BMC",
            ) from error
        power.fail(batch, time_ns, what)

    def _read_events(self, batch: Batch) -> None:
        now = self._clock_ns()
        if self._seen is None or now - self._events_at_ns < self._events_period_s * NS_PER_S:
            return
        since_ns, self._events_at_ns = self._events_at_ns, now
        try:
            lines = self._log_lines()
        except (SensorError, ValueError):
            return  # the log is not power data: the next round sees what this one missed
        for line in lines:
            kind = None if line in self._seen else classify_event(line)
            if kind is not None:
                # The BMC's clock has no zone and is often wrong: the event gets the time at which it was seen, its
                # own time stays in the message.
                event = PowerEvent(time_ns=now, since_ns=since_ns, domain=DOMAIN, kind=kind, message=line)
                batch.events.append(event)
        self._seen = set(lines)

    def _log_lines(self) -> list[str]:
        text = self._ask("sel", "elist")
        lines = [" ".join(line.split()) for line in text.splitlines() if _SEL_LINE.match(line)]
        if not lines and text.strip() and "no entries" not in text.lower():
            raise ValueError(f"not an event log: {text.strip()[:80]!r}")
        return lines

    def _ask(self, *arguments: str) -> str:
        """Run ipmitool, and turn its failures into our errors."""
        try:
            result = self._runner(("ipmitool", *arguments))
        except FileNotFoundError as error:
            raise SensorUnavailable(
                "ipmitool is not installed", why="IPMI is read through it", fix="sudo apt install ipmitool"
            ) from error
        except subprocess.TimeoutExpired as error:
            raise SensorUnavailable(
                f"ipmitool did not answer within {TIMEOUT_S:g} s",
                why="the BMC is busy or hung",
                fix="restart the BMC: ipmitool mc reset cold",
            ) from error
        except OSError as error:
            raise SensorUnavailable(
                "ipmitool cannot be run", why=str(error), fix="check the file's permissions"
            ) from error
        if result.returncode != 0:
            raise self._refusal(result)
        return result.stdout

    def _refusal(self, result: subprocess.CompletedProcess[str]) -> SensorError:
        answer = " ".join((result.stderr or result.stdout).split())[:200]
        # ipmitool tries three device names and reports the last one's error, so a device that we may not open gives
        # "No such file or directory". So look at the device itself.
        barred = self._device.exists() and not self._readable(self._device)
        if barred or "permission denied" in answer.lower():
            return SensorPermission(
                f"{self._device} may not be opened",
                why="only root may talk to the BMC",
                fix=f"run as root, or: sudo chgrp $(id -gn) {self._device} && sudo chmod g+rw {self._device}",
            )
        if "could not open device" in answer.lower():
            return SensorUnavailable(
                "there is no local BMC device",
                why=answer,
                fix="sudo modprobe ipmi_si ipmi_devintf; virtual machines and most desktops have no BMC",
            )
        return SensorUnavailable(
            f"ipmitool failed with status {result.returncode}",
            why=answer or "it printed nothing",
            fix="try Redfish instead",
        )

    def stop(self) -> None:
        """Do nothing: the sensor holds nothing open."""
