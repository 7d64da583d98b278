"""Plans on disk, by what they hold for: $XDG_CACHE_HOME/tessera/plans/<digest>.json, readable by their owner only."""

from __future__ import annotations

import contextlib
import hashlib
import inspect
import json
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from ...errors import RecordingError
from .found import Reach
from .plan import Plan


def folder() -> Path:
    """Where plans are kept."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "tessera" / "plans"


def key_of(
    fn: Any, reach: Reach, args: tuple[Any, ...], kwargs: Mapping[str, Any], asked: Mapping[str, Any]
) -> dict[str, str]:
    """What a plan holds for: the machine, the libraries, the function, its modules, the shapes, and what was asked."""
    import torch

    device = reach.device
    on_cuda = device is not None and device.type == "cuda"
    return {
        "device": torch.cuda.get_device_name(device) if on_cuda else "cpu",
        "driver": _driver() if on_cuda else "",
        "torch": str(torch.__version__), "cuda": str(torch.version.cuda or ""), "triton": _version("triton"),
        "function": _digest(_code(fn)), "modules": _digest(_modules(reach)),
        "inputs": _shapes(torch, (args, dict(kwargs))), "asked": json.dumps(dict(asked), sort_keys=True, default=str),
    }  # fmt: skip


def find(key: Mapping[str, str]) -> Plan | None:
    """The plan kept for exactly this, if there is one that can be read."""
    path = _path(key)
    if not path.exists():
        return None
    try:
        plan = Plan.load(path)
    except RecordingError:
        return None
    return plan if plan.key == dict(key) else None


def keep(plan: Plan) -> Path | None:
    """Write a plan where the next process finds it; None where the disk does not let us."""
    target = _path(plan.key)
    try:
        target.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        handle, name = tempfile.mkstemp(dir=target.parent, suffix=".part")
        with os.fdopen(handle, "wb") as file:
            file.write(msgspec.json.format(msgspec.json.encode(plan), indent=1))
        Path(name).replace(target)
    except OSError:
        return None
    return target


def forget(key: Mapping[str, str]) -> None:
    """Drop a plan that turned out wrong."""
    with contextlib.suppress(OSError):
        _path(key).unlink()


def _path(key: Mapping[str, str]) -> Path:
    return folder() / f"{_digest(json.dumps(dict(key), sort_keys=True))}.json"


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:24]


def _code(fn: Any) -> str:
    """The function's own code and constants: an edited function is tuned again."""
    fn = inspect.unwrap(getattr(fn, "func", fn))
    code = getattr(getattr(fn, "__func__", fn), "__code__", None)
    if code is None:
        return f"{type(fn).__module__}.{type(fn).__qualname__}"
    return f"{getattr(fn, '__qualname__', '')}|{code.co_code.hex()}|{code.co_names}|{_constants(code)}"


def _constants(code: Any) -> str:
    return repr([c.co_code.hex() if inspect.iscode(c) else repr(c) for c in code.co_consts])


def _modules(reach: Reach) -> str:
    parts = [f"{type(m).__qualname__}:{m.training}" for m in reach.submodules()]
    parts += [f"{tuple(p.shape)}{p.dtype}{p.requires_grad}" for m in reach.modules for p in m.parameters()]
    return "|".join(parts + [type(o).__qualname__ for o in reach.optimizers])


def _shapes(torch: Any, given: Any) -> str:
    leaves = torch.utils._pytree.tree_leaves(given)
    shown = [f"{tuple(t.shape)}{t.dtype}" if torch.is_tensor(t) else repr(t)[:80] for t in leaves]
    return "; ".join(shown)


def _version(package: str) -> str:
    from importlib import metadata

    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""


def _driver() -> str:
    import pynvml

    try:
        pynvml.nvmlInit()
        return str(pynvml.nvmlSystemGetDriverVersion())
    except pynvml.NVMLError:
        return ""
