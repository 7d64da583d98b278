"""Process groups: the one that None stands for, their timeouts, and new groups with the timeout of another one."""

from __future__ import annotations

import datetime
from typing import Any

import torch.distributed as c10d


def resolve_group(group: Any) -> Any:
    """Return a group; for None, that of the whole job."""
    return group if group is not None else c10d.group.WORLD


def read_timeout(group: Any) -> datetime.timedelta | None:
    """Return how long a group's collectives may take; None if its backend does not tell."""
    group = resolve_group(group)
    options = getattr(group._get_backend(group._device_types[0]), "options", None)
    timeout: datetime.timedelta | None = getattr(options, "_timeout", None)
    return timeout


def make_group(ranks: list[int], *, like: Any) -> Any:
    """Make a process group of some ranks, which alone call this, with another group's timeout (torch's is 30 min)."""
    return c10d.new_group(ranks, timeout=read_timeout(like), use_local_synchronization=True)
