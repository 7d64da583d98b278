"""The one thing to do: drawn from evidence, and silent on a healthy run."""

from __future__ import annotations

import pytest

from tessera.analyze.rules_host import advise_measurement
from tessera.schema import Basis, Energy, EnergyReport, Gap, Telemetry


def report(joules: float = 4000.0, seconds: float = 10.0, **kwargs: object) -> EnergyReport:
    basis: Basis = kwargs.pop("basis", "measured")  # type: ignore[assignment]
    coverage = float(kwargs.pop("coverage", 1.0))  # type: ignore[arg-type]
    total = Energy(energy_j=joules, error_j=1.0, time_s=seconds, source="x", basis=basis, coverage=coverage)
    return EnergyReport(name="r", total=total, by_domain={"gpu0": total}, **kwargs)  # type: ignore[arg-type]


def telemetry(**kwargs: object) -> dict[str, list[Telemetry]]:
    return {"gpu0": [Telemetry(time_ns=i, domain="gpu0", **kwargs) for i in range(10)]}  # type: ignore[arg-type]


def test_a_healthy_run_gets_no_advice() -> None:
    assert advise_measurement(report(idle_w=80.0), telemetry(throttle=(), utilization_pct=97.0)) is None


@pytest.mark.parametrize(
    ("r", "t", "words"),
    [
        (report(basis="modelled"), {}, "doctor"),
        (
            report(coverage=0.5, gaps=[Gap(domain="gpu0", start_ns=0, end_ns=1, reason="GPU is lost")]),
            {},
            "GPU is lost",
        ),
        (report(idle_w=200.0), telemetry(utilization_pct=20.0), "50% of the joules (2000 J)"),
        (report(idle_w=399.0), {}, "right command"),
        (report(idle_w=80.0), telemetry(throttle=("power cap",)), "power limit in 100%"),
        (report(idle_w=80.0), telemetry(throttle=("thermal (hardware)",)), "cooling"),
        (report(), telemetry(throttle=("power cap",)), "power limit"),
    ],
)
def test_each_finding_has_its_evidence(r: EnergyReport, t: dict[str, list[Telemetry]], words: str) -> None:
    assert words in (advise_measurement(r, t) or "")
