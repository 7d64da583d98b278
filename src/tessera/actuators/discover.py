"""From a name ("gpu0", a UUID, 0) to the actuator of that GPU."""

from __future__ import annotations

import re

from ..errors import ActuatorError, did_you_mean
from .base import Actuator

_NAME = re.compile(r"(?:gpu|cuda:)?(\d+)$")


def visible() -> dict[str, str]:
    """UUIDs by name of the GPUs this process may control, in the order of CUDA's (or HIP's) device numbers.

    Names are the machine's ("gpu3" may be cuda:0), as the sensors have them. Boards cut into MIG slices are left out:
    a limit of the board would hit the other tenants.
    """
    return {name: uuid for name, (uuid, _) in _found().items()}


def find(gpu: str | int) -> Actuator:
    """The actuator of a GPU: "gpu0" (the machine's number, as the sensors have it), 0, or its UUID."""
    found = _found()
    text = str(gpu)
    match = _NAME.match(text)
    name = f"gpu{match[1]}" if match else next((n for n, (uuid, _) in found.items() if uuid == text), text)
    if name not in found:
        raise ActuatorError(
            f"no GPU {text!r} to control{did_you_mean(name, found)}",
            why=f"this process may use {', '.join(found) or 'none'} (without those cut into MIG slices)",
            fix="a name as in `tessera doctor`; check CUDA_VISIBLE_DEVICES and ROCR_VISIBLE_DEVICES",
        )
    uuid, vendor = found[name]
    return open_uuid(uuid, vendor, name)


def open_uuid(uuid: str, vendor: str, gpu: str | None = None) -> Actuator:
    """The actuator of a GPU that need not be visible to this process: for `heal`."""
    if vendor == "amd":
        from .amd import AmdActuator

        return AmdActuator(uuid, gpu=gpu)
    from .nvml import NvmlActuator

    return NvmlActuator(uuid, gpu=gpu)


def _found() -> dict[str, tuple[str, str]]:
    """(UUID, vendor) by name. Raises ActuatorError when there is neither vendor's library."""
    from . import amd, nvml

    try:
        return {f"gpu{v.board.index}": (v.board.uuid, "nvidia") for v in nvml.boards() if not _sliced(v)}
    except ActuatorError as no_nvml:
        try:
            return {name: (uuid, "amd") for name, uuid in amd.boards().items()}
        except ActuatorError as no_amd:
            raise ActuatorError(
                "no GPU here can be controlled", why=f"{no_nvml.what}; {no_amd.what}", fix=no_nvml.fix
            ) from no_nvml


def _sliced(visible_board: object) -> bool:
    from ..sensors._visible import Visible

    assert isinstance(visible_board, Visible)
    return bool(visible_board.mig or visible_board.board.mig_uuids)
