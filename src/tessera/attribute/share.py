"""`Share`: the joules of one device, solved to watts by class."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..integral import Floats, Ints
from ..schema import DeviceId, Domain
from .activity import Activity
from .fit import PowerFit

HOST = DeviceId("", "cpu", 0)
"""The device of operators where nothing ran on an accelerator."""
# Idle gaps shorter than this are the device waiting for the next launch, longer ones the program doing other things.
_SHORT_GAP_NS = 2_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """What one device's joules were solved to: intervals (those of `activity`, then its gaps) with watts by class."""

    device: DeviceId
    domain: Domain
    activity: Activity
    gap_start_ns: Ints
    gap_end_ns: Ints
    gap_cls: Ints
    watts: Floats
    covariance: Floats
    group: Ints
    joules: float
    error_j: float
    coverage: float
    fit: PowerFit

    @property
    def on_host(self) -> bool:
        """Whether operators of the host are what ran, not kernels."""
        return self.device == HOST

    @property
    def seconds(self) -> Floats:
        """What each row counts for: its share of the device, times its relative power."""
        return self.activity.share_s * self.activity.weight

    @property
    def row_j(self) -> Floats:
        """Joules of each row of the activity."""
        return self.seconds * self.watts[self.activity.cls]

    @property
    def gap_j(self) -> Floats:
        """Joules of each gap."""
        return (self.gap_end_ns - self.gap_start_ns) * 1e-9 * self.watts[self.gap_cls]


def idle_class(start_ns: Ints, end_ns: Ints, classes: int) -> Ints:
    """The class of each gap, after those of what ran: short ones, then long ones."""
    return (classes + ((end_ns - start_ns) >= _SHORT_GAP_NS)).astype(np.int64)
