"""`Cluster`: nodes of one kind, the links in and between them, and what the host draws; each figure with its source.

The package's `clusters/*.toml` hold the usual ones. A user's own file (TOML, YAML or JSON) has the same keys; a plain
number has that file as its source.
"""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from ..device import Device, Figure
from ..errors import ArgumentError, BadDevice, did_you_mean, is_integer, is_number
from ..hardware import lookup
from ..hardware.load import bad, check_keys, expand_sources, read_figure
from ..read_limits import TOML_BYTES, parse_toml, parse_yaml, quote_value

# Shares that are really reached: of the line rate to the host (50-55 of 63 GB/s, PCIe 5), and of the memory bandwidth
# in a CPU's update.
_HOST_LINK, _HOST_MEMORY = 0.8, 0.8
_TEXTS = ("id", "name", "chip", "link", "host_link")
_FIGURES = (
    "node_gpus",
    "domain_gpus",
    "network_bytes_per_s",
    "host_memory_bytes",
    "host_memory_bytes_per_s",
    "host_w",
    "host_cpu_w",
)
_HOST_LINKS = ("c2c", "pcie")
_NEEDED = ("chip", "node_gpus")
_ENDINGS = (".toml", ".yaml", ".yml", ".json")


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """Equal nodes. Speeds are one way and of one GPU; `host_...` figures are those of a node; None: not known.

    The fast `link` joins `domain_gpus` GPUs (None: all of a node). `host_w` is what the node draws besides its GPUs
    while they train, `host_cpu_w` what its CPUs draw in addition while they compute.
    """

    id: str
    name: str
    device: Device
    nodes: int
    link: str
    host_link: str
    node_gpus: Figure
    domain_gpus: Figure | None = None
    network_bytes_per_s: Figure | None = None
    host_memory_bytes: Figure | None = None
    host_memory_bytes_per_s: Figure | None = None
    host_w: Figure | None = None
    host_cpu_w: Figure | None = None

    @property
    def gpus(self) -> int:
        """Return the number of GPUs of all nodes."""
        return self.nodes * round(self.node_gpus.value)

    @property
    def domain(self) -> int:
        """Return the number of GPUs that the fast link joins."""
        return round((self.domain_gpus or self.node_gpus).value)

    def list_figures(self) -> dict[str, Figure]:
        """Return the figures that are known, by name."""
        known = {name: getattr(self, name) for name in _FIGURES}
        return {name: figure for name, figure in known.items() if figure is not None}

    def job_options(self) -> dict[str, Any]:
        """Return the options of a `TrainingJob` that the cluster gives."""
        options: dict[str, Any] = {"on": self.device, "node_gpus": round(self.node_gpus.value)}
        options["domain_gpus"] = self.domain
        if self.network_bytes_per_s is not None:
            options["network_bytes_per_s"] = self.network_bytes_per_s.value
        if self.can_offload:
            assert self.host_memory_bytes_per_s is not None
            options["host_bytes_per_s"] = _HOST_LINK * self.device.interconnect[self.host_link].one_way_bytes_per_s
            memory = self.host_memory_bytes_per_s.value / self.node_gpus.value
            options["host_memory_bytes_per_s"] = _HOST_MEMORY * memory
            if self.host_cpu_w is not None:
                options["host_w"] = self.host_cpu_w.value / self.node_gpus.value
        return options

    @property
    def can_offload(self) -> bool:
        """Return whether the speeds of the host are known."""
        return self.host_memory_bytes_per_s is not None and self.host_link in self.device.interconnect

    def to_dict(self) -> dict[str, Any]:
        """Return plain values with their sources, for JSON."""
        texts = {"id": self.id, "name": self.name, "chip": self.device.id, "nodes": self.nodes, "gpus": self.gpus}
        return {**texts, "figures": {name: dataclasses.asdict(f) for name, f in self.list_figures().items()}}


def load_cluster(name: str) -> Cluster:
    """Load the cluster "dgx-h200" (one node), "dgx-h200:4" (four), or a user's file: "my.yaml", "my.toml:16"."""
    wanted, _, count = name.strip().rpartition(":") if name.strip().rpartition(":")[2].isdecimal() else (name, "", "1")
    wanted = wanted.strip()
    if len(count) > 6 or not int(count):
        raise ArgumentError(f"no cluster of {count[:20]} nodes", fix=f"{wanted}:4")
    if wanted.lower().endswith(_ENDINGS):
        return _build_cluster(_read_file(Path(wanted)), wanted, int(count), own=True)
    tables = list_clusters()
    for key, table in tables.items():
        if wanted.lower() in (key, *table.get("aliases", [])):
            return _build_cluster(table, f"{key}.toml", int(count), own=False)
    names = [n for key, table in tables.items() for n in (key, *table.get("aliases", []))]
    raise ArgumentError(
        f"no cluster {wanted!r}{did_you_mean(wanted.lower(), names)}",
        fix=f"one of: {', '.join(tables)}; `:4` after it for four nodes; or the path of a file (.toml, .yaml, .json)",
    )


@functools.cache
def list_clusters() -> Mapping[str, dict[str, Any]]:
    """Return the tables of the package's clusters by id."""
    folder = resources.files(__package__) / "clusters"
    files = sorted((f for f in folder.iterdir() if f.name.endswith(".toml")), key=lambda f: f.name)
    tables = [parse_toml(f.read_bytes()) for f in files]
    return {table["id"]: table for table in tables}


def _read_file(path: Path) -> dict[str, Any]:
    try:
        with path.open("rb") as file:
            data = file.read(TOML_BYTES + 1)
    except OSError as error:
        fix = "give the path of a file, or a name of `tessera plan --cluster list`"
        raise ArgumentError(f"cannot read the cluster {str(path)!r}", why=error.strerror, fix=fix) from None
    if len(data) > TOML_BYTES:
        raise bad(str(path), "", f"is longer than {TOML_BYTES:,} bytes", fix=_EXAMPLE)
    try:
        table = _parse(path, data)
    except (ValueError, RecursionError) as error:
        raise bad(str(path), "", f"cannot be read: {error}", fix=_EXAMPLE) from None
    if not isinstance(table, dict):
        raise bad(str(path), "", "is not a table of figures", fix=_EXAMPLE)
    return table


_EXAMPLE = "for example: chip = 'h200', node_gpus = 8, network_bytes_per_s = 50e9, host_w = 1450"


def _parse(path: Path, data: bytes) -> Any:
    ending = path.suffix.lower()
    if ending == ".toml":
        return parse_toml(data)
    return json.loads(data) if ending == ".json" else parse_yaml(data)


def _build_cluster(raw: Mapping[str, Any], file: str, nodes: int, *, own: bool) -> Cluster:
    check_keys(raw, (*_TEXTS, "nodes", "aliases", *_FIGURES, "sources"), file, "")
    table = dict(raw)
    if own:
        for key in _FIGURES:
            if isinstance(table.get(key), str):
                table[key] = _read_number(table[key], file, key)
            if is_number(table.get(key)):
                table[key] = {"value": table[key], "source": f"given in {file}"}
        given = table.get("nodes", 1)
        if not is_integer(given) or given < 1:
            raise bad(file, "nodes", "must be a whole number of at least 1", fix=_EXAMPLE)
        nodes *= given
    sources = table.pop("sources", {})
    table = expand_sources(table, sources if isinstance(sources, dict) else {}, file, "")
    for key in _NEEDED:
        if key not in table:
            raise bad(file, key, "is missing", fix=_EXAMPLE)
    for key in _TEXTS:
        if not isinstance(table.get(key, ""), str):
            raise bad(file, key, "must be text", fix=_EXAMPLE)
    device = lookup(table["chip"])
    link, host_link = _find_links(table, device, file)
    # Keep only the link that joins the GPUs and the link to the host: in the catalogue, an H100 PCIe has NVLink for a
    # bridge.
    kept = {name: device.interconnect[name] for name in (link, host_link) if name}
    return Cluster(
        id=table.get("id") or Path(file).stem,
        name=table.get("name") or Path(file).stem,
        device=dataclasses.replace(device, interconnect=kept),
        nodes=nodes,
        link=link,
        host_link=host_link,
        **_read_figures(table, file),
    )


def _read_number(text: str, file: str, key: str) -> float:
    """Return a number that YAML reads as text: it reads 50e+9 as a number, and 50e9 as a word."""
    try:
        return float(text)
    except ValueError:
        raise bad(file, key, f"must be a number in SI units, not {quote_value(text)}", fix=_EXAMPLE) from None


def _find_links(table: Mapping[str, Any], device: Device, file: str) -> tuple[str, str]:
    """Return the names of the link between GPUs and of the link to the host."""
    known = list(device.interconnect)
    if not known:
        fix = "take another chip, or add [interconnect] to its file (docs/howto/hardware.md)"
        raise bad(file, "chip", f"{device.id} has no link between chips in the catalogue", fix=fix)
    link = table.get("link", known[0])
    to_host = next((name for name in _HOST_LINKS if name in known), "")
    links = {"link": link, "host_link": table.get("host_link", to_host)}
    for key, value in links.items():
        if value and value not in known:
            problem = f"{device.id} has no link {value!r}{did_you_mean(value, known)}"
            raise bad(file, key, problem, fix=f"one of: {', '.join(known)}")
    return links["link"], links["host_link"]


def _read_figures(table: dict[str, Any], file: str) -> dict[str, Any]:
    try:
        figures = {key: read_figure(table, key, file, key) for key in _FIGURES}
    except BadDevice as error:
        raise BadDevice(error.what, fix=_EXAMPLE) from None
    for key in ("node_gpus", "domain_gpus"):
        figure = figures[key]
        if figure is not None and figure.value != round(figure.value):
            raise bad(file, key, "must be a whole number", fix=_EXAMPLE)
    return figures
