"""torchvision beside a CPU build of torch."""

from __future__ import annotations

import torch

_made: list[torch.library.Library] = []  # kept: a library goes with its operators


def importable() -> None:
    """Declare two operators that torchvision's wheel, built for CUDA, misses beside a CPU torch; nothing calls them.

    Beside a CUDA build they come with torchvision itself, and declaring them before ends the process.
    """
    if torch.version.cuda is None and not _made:
        _made.append(torch.library.Library("torchvision", "DEF"))
        for name in ("nms", "qnms"):
            _made[0].define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
