"""Copies on a stream: `memcpy.async_(dst=x_dev, src=x_host, stream=s)`; pinned memory kept for use again; prefetch.

::

    for x, y in memcpy.prefetch(loader, device="cuda"):      # the next two batches are copied while this one is used
        ...
    x_host = memcpy.pinned((256, 3, 224, 224), torch.uint8)
    memcpy.async_(dst=x_dev, src=x_host, stream=h2d).wait(compute, x_dev)

`async` is a keyword of Python, so `memcpy.async(...)` cannot be written: the name is `async_`, and
`getattr(memcpy, "async")` is the same function. On a CPU copies are made at once, and arguments checked all the same.
"""

from .ahead import prefetch as prefetch
from .copies import async_ as async_
from .pool import PinnedStats as PinnedStats
from .pool import limit as limit
from .pool import pinned as pinned
from .pool import stats as stats

__all__ = ["PinnedStats", "async_", "limit", "pinned", "prefetch", "stats"]

globals()["async"] = async_
