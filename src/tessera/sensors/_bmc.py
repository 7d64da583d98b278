"""What Redfish and IPMI share: what a management controller's (BMC's) log means for power."""

from __future__ import annotations

import re

_OVER_CURRENT = re.compile(r"over[- ]?current|\bocp\b|current (?:limit|threshold) exceeded|\boverload", re.I)
_BREAKER_TRIPPED = re.compile(r"breaker\b.*\btrip(?:ped)?\b|\btripped\b.*breaker", re.I)
_BREAKER_NEAR = re.compile(r"breaker\b.*(?:\bnear|warning|threshold|high load|approach)", re.I)
_SUPPLY = re.compile(r"power suppl|\bpsu ?\d*\b|\bps\d+\b", re.I)
_FAULT = re.compile(r"fail|fault|\blost\b|\bloss\b|out[- ]of[- ]range|critical|error|shut ?down", re.I)
_OVER = re.compile(r"current\b.*upper (?:critical|non-recoverable) going high", re.I)
_RECOVERED = re.compile(
    r"de-?assert|restored|cleared|recovered|\b(?:back|return\w*) to normal|\bno (?:longer|faults?)\b", re.I
)


def classify(text: str) -> str | None:
    """Return the kind of power event a log line tells of; None for recoveries and for anything else."""
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
