"""Check whether the ranks of a group can do a collective, and all call the same one.

Gloo ends the process if the sizes of two ranks differ. So each rank first sends a line that says what it is about to
do, or why it refuses, and all ranks raise an error if the lines differ. NCCL's ranks do not wait for each other on the
host: there, only collectives that exchange sizes anyway compare the lines, and the timeout finds the rest.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as c10d

from ..errors import ArgumentError
from .groups import resolve_group
from .liveness import CollectiveError, explain_failure
from .reduction import gather_into, is_dry

LINE = 120
SIZE_BYTES = 8


def is_connected() -> bool:
    """Return whether a process group exists."""
    return bool(c10d.is_available() and c10d.is_initialized())


def count_ranks(group: Any = None) -> int:
    """Return how many ranks a group has; 1 if no process group exists. Launched but unconnected ranks are an error."""
    if not is_connected():
        world = os.environ.get("WORLD_SIZE", "1")
        if world.isdigit() and int(world) > 1:  # set by a launcher: it would go unnoticed that nothing is reduced
            raise ArgumentError(
                f"{world} ranks were launched, and none of them is connected",
                fix="torch.distributed.init_process_group() first",
            )
        return 1
    ranks = int(c10d.get_world_size(group))
    if ranks < 1:
        raise ArgumentError("this rank is not in the group", fix="call it on the group's ranks only")
    return ranks


def check_device(x: torch.Tensor, group: Any) -> None:
    """Raise for a tensor that the group's backend cannot move."""
    reached = {device.type for device in resolve_group(group)._device_types}
    if x.device.type not in reached and c10d.get_backend(group) != "fake":
        raise ArgumentError(
            f"x is on {x.device}, and the group connects {' and '.join(sorted(reached))} only",
            fix=f'x.to("{min(reached)}"), or a group with another backend',
        )


def _is_gloo(group: Any, *devices: torch.device) -> bool:
    return all(resolve_group(group)._get_backend(device).name() == "gloo" for device in devices)


def describe_call(kind: str, x: torch.Tensor, *how: str, any_first: bool = False) -> str:
    """Return the line of a call: what must be equal on all ranks. With `any_first`, the first size may differ."""
    shape = ["*" if any_first and not i else str(size) for i, size in enumerate(x.shape)]
    return " ".join([kind, f"{str(x.dtype).removeprefix('torch.')}[{', '.join(shape)}]", *filter(None, how)])


def agree(line: str, size: int, group: Any, device: torch.device, *, sizes_needed: bool = False) -> list[int]:
    """Compare the lines of all ranks, and return the size that each one sent; raise on every rank if lines differ.

    If sizes are not needed, only Gloo's ranks do this, and the list is empty.
    """
    if not sizes_needed and not _is_gloo(group, device):
        return []
    text = line.encode()
    if len(text) > LINE:
        text = text[: LINE - 9] + b" " + hashlib.sha256(text).hexdigest()[:8].encode()
    own = torch.frombuffer(bytearray(size.to_bytes(SIZE_BYTES, "little") + text.ljust(LINE)), dtype=torch.uint8)
    own = own.to(device)
    whole = own.new_empty(c10d.get_world_size(group) * own.numel())
    gather_into(whole, own, group)
    if is_dry():  # a dry run has no other rank: all call what this one does
        return [size] * c10d.get_world_size(group)
    messages = [bytes(part) for part in whole.cpu().view(-1, SIZE_BYTES + LINE).numpy()]
    lines = [message[SIZE_BYTES:].decode(errors="replace").rstrip() for message in messages]
    if len(set(lines)) > 1:
        ranks = c10d.get_process_group_ranks(resolve_group(group))
        raise CollectiveError(
            f"{line.split(maxsplit=1)[0]} on rank {c10d.get_rank()}: the ranks do not call the same",
            why="; ".join(f"rank {rank}: {said}" for rank, said in list(zip(ranks, lines, strict=True))[:8]),
            fix="let all ranks call the same collective, with tensors of one shape and type",
        )
    return [int.from_bytes(message[:SIZE_BYTES], "little") for message in messages]


@contextlib.contextmanager
def tell_refusal(kind: str, group: Any) -> Iterator[None]:
    """Let the other ranks know that this one refuses its arguments: otherwise they would wait for it."""
    try:
        yield
    except ArgumentError as exc:
        if is_connected() and c10d.get_world_size(group) > 1 and _is_gloo(group, *resolve_group(group)._device_types):
            with contextlib.suppress(CollectiveError), explain_failure(kind, group):
                agree(f"{kind} refused: {str(exc).splitlines()[0]}", 0, group, torch.device("cpu"))
        raise
