"""The program as data: capture, cost, partition."""

from .ir import Graph as Graph
from .ir import Op as Op
from .ir import Storage as Storage
from .ir import TensorSpec as TensorSpec
