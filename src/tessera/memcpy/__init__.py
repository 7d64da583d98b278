"""Copies on a stream: `memcpy.async_(dst=x_dev, src=x_host, stream=s)`; pinned memory; prefetch.

::

    for x, y in memcpy.prefetch(loader, device="cuda"):      # the next two batches are copied while this one is used
        ...
    x_host = memcpy.empty_pinned((256, 3, 224, 224), torch.uint8)
    memcpy.async_(dst=x_dev, src=x_host, stream=h2d).wait(compute, x_dev)

`async` is a keyword of Python, so `memcpy.async(...)` cannot be written: the name is `async_`, and
`getattr(memcpy, "async")` is the same function. On a CPU copies are made at once; arguments are checked the same way.
"""

from .async_copy import async_ as async_
from .loader import prefetch as prefetch
from .pinned_memory import PinnedStats as PinnedStats
from .pinned_memory import empty_pinned as empty_pinned
from .pinned_memory import limit as limit
from .pinned_memory import stats as stats

__all__ = ["PinnedStats", "async_", "empty_pinned", "limit", "prefetch", "stats"]

globals()["async"] = async_
