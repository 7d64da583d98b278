"""What a collective takes before it runs: latency, bytes over the links, and the ramp between the two.

    time = a + b S + ramp sqrt(a b S)      a: latency; b: bytes sent for each byte of S, over the link's useful speed

The first term is the time of the smallest message, the second dominates for the largest, and the third is lost while
pipelines fill. Inside a node, the figures are fitted to NCCL on A100, H100, B200 (NVLink) and L40S (PCIe) by
benchmarks/fit/fit_collectives.py. Ramp and efficiency are nearly the same on all NVLink systems, so a chip without data
uses their mean and its own link. Between nodes, each algorithm has its own bytes and hops, as in NCCL's own model
(NVIDIA/nccl, src/graph/tuning.cc): a ring visits every rank, a tree climbs and descends the nodes. NCCL takes the
cheaper one.
"""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import resources
from typing import Any

from ..device import Device, Link
from ..errors import ArgumentError, check_choice
from ..hardware import lookup

KINDS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")
ALGORITHMS = ("ring", "tree", "two_step", "hierarchical")
_HALVES = ("reduce_scatter", "all_gather")
# 90% of single timings are within these relative errors: ERROR_FITTED for sizes kept out of the fit, ERROR_OTHER for an
# NVLink system kept out of it (benchmarks/results/fit_collectives.json).
ERROR_FITTED, ERROR_OTHER = 0.20, 0.45
_LINKS = ("nvlink", "xgmi", "xe_link", "pcie")
_SAME_LINK = 0.05  # chips whose link speeds differ by less than this share have the same generation of link
# Between nodes: share of the cards' line rate that is reached, ramp, and seconds of one hop. nccl-tests on two nodes
# with EFA fit 0.62 (H100) and 0.82 (A100) of the line rate (fit_collectives.json) and hops of 28 and 80 us; over
# InfiniBand, a hop is about 9 us (NVIDIA/nccl issue 949: 39 us for 8 bytes on two nodes; NCCL's own table has 9.6 us
# for a ring).
NETWORK_EFFICIENCY, NETWORK_RAMP, NETWORK_HOP_S = 0.72, 1.0, 10e-6
ERROR_NODES = 0.45
_LINK_HOP_S = 1.9e-6  # seconds between neighbours of a ring inside a node (NCCL's table: NVLink, LL128)
# Boxes without NVLink, as shares of PCIe's rate. Through the host, without peer access: all pairs share what one pair
# reaches, 10 of 31.5 GB/s (A40, NVIDIA/nccl-tests issue 74: 20 GB/s both ways with P2P disabled); eight GPUs are on two
# sockets, between which less goes (40 instead of 50 GB/s, same issue). Through switches or well tuned host bridges: 35
# of 63 GB/s on four GPUs, 28 on eight (RTX 5090, NVIDIA/nccl issue 1639). The form of the first was chosen with the
# L40S in view.
PATHS = ("host", "switch")
_PCIE_SHARE = {"host": {4: 0.32 / 2, 8: 0.8 * 0.32 / 4}, "switch": {4: 35 / 63, 8: 28 / 63}}
ERROR_PCIE = 0.6
# Gb/s of network per GPU in the usual servers: DGX A100 200, HGX H100 to B200 400, B300 and GB300 800 (ConnectX-8).
_CARD_GBIT = {"v100": 50, "a100": 200, "a100-40gb-sxm": 200, "a800": 200, "b300": 800, "gb300": 800}


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveCost:
    """Predicted seconds of one collective with the half-width of a 90% interval, and the bytes each rank sends.

    `network_bytes` is the part of these bytes that leaves the node.
    """

    time_s: float
    error_s: float
    sent_bytes: float
    network_bytes: float
    link: str
    algorithm: str
    source: str


def sent_share(kind: str, ranks: float) -> float:
    """Return the bytes that each rank sends for each byte of the whole buffer, by the most frugal algorithm."""
    return (2.0 if kind == "all_reduce" else 1.0) * (ranks - 1) / ranks


def collective_cost(
    kind: str,
    nbytes: float,
    ranks: int,
    *,
    on: str | Device,
    nodes: int = 1,
    network_bytes_per_s: float | None = None,
    network_hop_s: float = NETWORK_HOP_S,
    algorithm: str | None = None,
    path: str | None = None,
) -> CollectiveCost:
    """Return what a collective takes over `ranks` GPUs of one node, or spread evenly over several.

    `nbytes` is the whole buffer (of all_gather: the result); `network_bytes_per_s` is the line rate of one GPU's card,
    one way. Without `algorithm`, NCCL's choice is assumed: "ring" or, for an all_reduce between nodes, "tree".
    "two_step" and "hierarchical" are those of `dist.all_reduce`. `path` says how GPUs that have only PCIe reach each
    other: through the "host" (assumed if nothing is measured) or a "switch".
    """
    check_choice("kind", kind, KINDS)
    for what, word, known in (("algorithm", algorithm, ALGORITHMS), ("path", path, PATHS)):
        if word is not None:
            check_choice(what, word, known)
    if nodes < 1 or ranks < nodes:
        raise ArgumentError(f"{ranks} ranks do not fill {nodes} nodes")
    if ranks < 2:
        why = "one rank sends nothing"
        return CollectiveCost(
            time_s=0.0, error_s=0.0, sent_bytes=0.0, network_bytes=0.0, link="", algorithm="", source=why
        )
    device = lookup(on) if isinstance(on, str) else on
    name, link = find_link(device)
    system = _find_system(device.id, name, link.one_way_bytes_per_s) if path is None else None
    path = (path or "host") if name == "pcie" else None
    source = f"NCCL on {system}" if system is not None else "mean of NVLink systems, scaled to this link"
    error = ERROR_FITTED if system is not None else ERROR_PCIE if path else ERROR_OTHER
    team = _Team(kind, nbytes, ranks, nodes, path, system, link.one_way_bytes_per_s)
    if nodes == 1:
        time_s = team.inside_s(kind, nbytes, ranks)
        if algorithm in ("two_step", "hierarchical") and kind == "all_reduce":
            time_s = sum(team.inside_s(half, nbytes, ranks) for half in _HALVES)
        chosen, leaves = algorithm or "ring", 0.0
    else:
        rate = network_bytes_per_s or card_bytes_per_s(device)
        times = team.times_between(rate * NETWORK_EFFICIENCY, network_hop_s)
        chosen = algorithm if algorithm in times else min(_NCCL_CHOOSES & times.keys(), key=lambda a: times[a][0])
        (time_s, leaves), error = times[chosen], ERROR_NODES
        source += f"; {nodes} nodes with cards of {rate * 8e-9:.0f} Gb/s"
    return CollectiveCost(
        time_s=time_s,
        error_s=time_s * error,
        sent_bytes=nbytes * sent_share(kind, ranks),
        network_bytes=leaves,
        link=name,
        algorithm=chosen,
        source=source,
    )


def choose_all_reduce(
    nbytes: float, ranks: int, *, on: str | Device, nodes: int = 1, network_bytes_per_s: float | None = None
) -> CollectiveCost:
    """Return the cheapest all_reduce: the backend's own ("ring" or "tree"), "two_step" or "hierarchical"."""
    return min(
        (
            collective_cost(
                "all_reduce",
                nbytes,
                ranks,
                on=on,
                nodes=nodes,
                network_bytes_per_s=network_bytes_per_s,
                algorithm=algorithm,
            )
            for algorithm in (None, "two_step", "hierarchical")
        ),
        key=lambda cost: cost.time_s,
    )


def card_bytes_per_s(device: Device) -> float:
    """Return the rate of one GPU's network card in the usual server with this chip, one way."""
    return _CARD_GBIT.get(device.id, 400) * 1e9 / 8


_NCCL_CHOOSES = {"ring", "tree"}


@dataclass(frozen=True, slots=True)
class _Team:
    """The ranks of one collective and where they are."""

    kind: str
    nbytes: float
    ranks: int
    nodes: int
    path: str | None
    system: str | None
    link: float

    def inside_s(self, kind: str, nbytes: float, ranks: int) -> float:
        """Return the seconds of a collective inside one node."""
        if ranks < 2:
            return 0.0
        latency_s, efficiency, ramp = _figures(self.system, kind, ranks, self.path)
        per_byte_s = sent_share(kind, ranks) / (efficiency * self.link)
        return latency_s + per_byte_s * nbytes + ramp * math.sqrt(latency_s * per_byte_s * nbytes)

    def times_between(self, card: float, hop_s: float) -> dict[str, tuple[float, float]]:
        """Return, by algorithm, the seconds over several nodes and the bytes of a rank that leave its node."""
        kind, nbytes, nodes = self.kind, self.nbytes, self.nodes
        here = -(-self.ranks // nodes)  # ranks of a node
        inside = self.inside_s(kind, nbytes, here)
        start = self.inside_s(kind, 0.0, here)
        turns = 2 if kind == "all_reduce" else 1
        found = {}
        # All cards of a node share the bytes of the rings that cross it; a ring visits every rank.
        leaves = nbytes * sent_share(kind, self.ranks) / here
        hops = turns * ((self.ranks - nodes) * _LINK_HOP_S + (nodes - 1) * hop_s)
        if kind == "all_to_all":  # every rank sends to all others at once, each from a buffer of its own
            leaves, hops = nbytes * sent_share(kind, nodes), hop_s * math.log2(2 * nodes)
        found["ring"] = (_join(start, hops, leaves / card, inside - start), leaves)
        if kind == "all_reduce":
            leaves = nbytes * sent_share(kind, nodes) / here
            hops = 2.0 * hop_s * math.log2(nodes)
            found["tree"] = (_join(start, hops, leaves / card, inside - start), leaves)
            # Scatter inside a node; every rank reduces its part with its peers of other nodes; gather inside.
            across = _join(0.0, 2.0 * (nodes - 1) * hop_s, leaves / card, 0.0)
            halves = sum(self.inside_s(half, nbytes, here) for half in _HALVES)
            found["hierarchical"] = (halves + across, leaves)
            steps = [replace(self, kind=half).times_between(card, hop_s)["ring"] for half in _HALVES]
            found["two_step"] = (sum(seconds for seconds, _ in steps), sum(leaving for _, leaving in steps))
        return found


def _join(start_s: float, hops_s: float, network_s: float, inside_s: float) -> float:
    """Return the seconds of a pipeline through links and network: the slower of both, after the start, with ramp."""
    slowest = max(network_s, inside_s)
    return start_s + hops_s + slowest + NETWORK_RAMP * math.sqrt((start_s + min(hops_s, start_s)) * slowest)


def find_link(device: Device) -> tuple[str, Link]:
    """Return the fastest link between chips in a catalogue entry, and its name."""
    for name in _LINKS:
        if name in device.interconnect:
            return name, device.interconnect[name]
    raise ArgumentError(
        f"{device.name} has no link between chips in the catalogue",
        fix="add [interconnect] to its file (docs/howto/hardware.md)",
    )


@functools.cache
def _read_fits() -> dict[str, Any]:
    text = resources.files("tessera.dist").joinpath("data/nccl.json").read_text()
    systems: dict[str, Any] = json.loads(text)["systems"]
    return systems


@functools.cache
def _find_system(chip: str, name: str, rate: float) -> str | None:
    """Return the measured system with this chip, or with the same link."""
    systems = _read_fits()
    if chip in systems:
        return chip
    for system in systems:
        other_name, other = find_link(lookup(system))
        if other_name == name and abs(other.one_way_bytes_per_s / rate - 1) < _SAME_LINK:
            return system
    return None


@functools.cache
def _figures(system: str | None, kind: str, ranks: int, path: str | None) -> Sequence[float]:
    """Return (latency, efficiency, ramp) of a system; without a system, the means of the others."""
    systems = _read_fits()
    if system is not None:
        return _interpolate({int(n): figures for n, figures in systems[system][kind].items()}, ranks)
    figures = mean_figures({name: table[kind] for name, table in systems.items()})
    return _interpolate(share_pcie(figures, path) if path else figures, ranks)


def share_pcie(figures: Mapping[int, Sequence[float]], path: str) -> dict[int, list[float]]:
    """Return the figures over PCIe: a pair reaches as much of its link as other systems do; more GPUs share a path."""
    return {n: [f[0], _PCIE_SHARE[path].get(n, f[1]), f[2]] for n, f in figures.items()}


def mean_figures(tables: Mapping[str, Mapping[str, Sequence[float]]]) -> dict[int, list[float]]:
    """Return geometric means: the latency of all systems, which is the software's; the rest of those with NVLink."""
    fast = [t for name, t in tables.items() if find_link(lookup(name))[0] == "nvlink"]
    used = [list(tables.values()), fast, fast]
    return {
        int(ranks): [math.exp(math.fsum(math.log(t[ranks][i]) for t in use) / len(use)) for i, use in enumerate(used)]
        for ranks in fast[0]
    }


def _interpolate(figures: Mapping[int, Sequence[float]], ranks: int) -> list[float]:
    """Interpolate in logarithms between measured numbers of GPUs; beyond them, latency goes on as at the end."""
    known = sorted(figures)
    low = max((n for n in known[:-1] if n <= ranks), default=known[0])
    high = known[known.index(low) + 1]
    part = (math.log(ranks) - math.log(low)) / (math.log(high) - math.log(low))
    inside = min(part, 1.0)
    steps = [part, inside, inside]  # beyond the largest, efficiency and ramp stay the same
    return [a * (b / a) ** p for a, b, p in zip(figures[low], figures[high], steps, strict=True)]
