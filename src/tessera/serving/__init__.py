"""What a served language model takes: seconds to the first token and to each further one, joules, watts, memory."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..lazy_names import load_lazily

if TYPE_CHECKING:
    from .deployment import Deployment as Deployment
    from .estimate import Quantity as Quantity
    from .estimate import ServingReport as ServingReport
    from .estimate import estimate_serving as estimate_serving
    from .served_model import ServedModel as ServedModel
    from .served_model import read_served_model as read_served_model

load_lazily(
    __name__,
    {
        "deployment": "Deployment",
        "estimate": "Quantity ServingReport estimate_serving",
        "served_model": "ServedModel read_served_model",
    },
)
