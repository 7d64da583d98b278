"""Reads which kernels a CUDA graph gets while it is captured, and gives each to the call that launched it."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from ..timeline.columns import Launch, Timeline
from .demangle import demangle

_LAUNCHES = ("cudaLaunchKernel", "cudaLaunchCooperativeKernel", "cuLaunchKernel", "cuLaunchCooperativeKernel")
_KERNEL_NODE = 0  # CUgraphNodeType


class CapturedKernel(NamedTuple):
    """A kernel of a captured graph: its name and its launch size."""

    name: str
    launch: Launch


def tie_captured(timeline: Timeline, captured: Sequence[CapturedKernel]) -> bool:
    """Write the captured kernels beside the launch calls of a timeline; the timeline has all calls of that capture.

    Calls whose kernel ran were not captured, and a call inside another launched nothing of its own. Without as many
    calls as kernels nobody knows which belongs to which: nothing is written then, and False is returned.
    """
    names = timeline["name"]
    launches = [i for i, text in enumerate(timeline.names) if text.startswith(_LAUNCHES)]
    calls = timeline.rows("runtime")
    calls = calls[np.isin(names[calls], launches)]
    calls = calls[~np.isin(timeline["correlation"][calls], timeline["correlation"][timeline.device_rows])]
    thread, start_ns, end_ns = (timeline[column][calls] for column in ("thread", "start_ns", "end_ns"))
    order = np.lexsort((-end_ns, start_ns, thread))
    inside = np.zeros(len(calls), bool)
    inside[1:] = (np.diff(thread[order]) == 0) & (end_ns[order][1:] <= end_ns[order][:-1])
    calls = np.sort(calls[order[~inside]])
    calls = calls[np.argsort(timeline["start_ns"][calls], kind="stable")]
    if len(calls) != len(captured):
        return False
    number = {text: i for i, text in enumerate(timeline.names)}
    shapes = {launch: i for i, launch in enumerate(timeline.launches)}
    columns = {column: np.array(timeline[column]) for column in ("captured", "launch")}
    columns["captured"][calls] = [number.setdefault(kernel.name, len(number)) for kernel in captured]
    columns["launch"][calls] = [shapes.setdefault(kernel.launch, len(shapes)) for kernel in captured]
    timeline.columns |= columns
    timeline.names[:], timeline.launches[:] = number, shapes
    return True


# -- the driver's own list of what a graph holds ----------------------------------------------------------------------


class _KernelNode(ctypes.Structure):
    """CUDA_KERNEL_NODE_PARAMS_v2 (CUDA 12 and 13)."""

    _fields_ = (
        ("func", ctypes.c_void_p),
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared_bytes", ctypes.c_uint),
        ("params", ctypes.c_void_p),
        ("extra", ctypes.c_void_p),
        ("kern", ctypes.c_void_p),
        ("context", ctypes.c_void_p),
    )


def read_captured(stream: int, cuda: Any = None) -> list[CapturedKernel]:
    """List the kernels of the graph that a stream is being captured into, in order; empty if there is no capture."""
    cuda = cuda or ctypes.CDLL("libcuda.so.1")
    graph = _find_graph(cuda, stream)
    if not graph:
        return []
    count = ctypes.c_size_t()
    _check(cuda.cuGraphGetNodes(graph, None, ctypes.byref(count)), "cuGraphGetNodes")
    if not count.value:  # nothing was launched; the driver refuses to fill an empty list
        return []
    nodes = (ctypes.c_void_p * count.value)()
    _check(cuda.cuGraphGetNodes(graph, nodes, ctypes.byref(count)), "cuGraphGetNodes")
    found: list[CapturedKernel] = []
    names: dict[tuple[int | None, int | None], str] = {}
    for node in nodes:
        kind, params = ctypes.c_int(), _KernelNode()
        _check(cuda.cuGraphNodeGetType(ctypes.c_void_p(node), ctypes.byref(kind)), "cuGraphNodeGetType")
        if kind.value != _KERNEL_NODE:
            continue
        status = cuda.cuGraphKernelNodeGetParams_v2(ctypes.c_void_p(node), ctypes.byref(params))
        _check(status, "cuGraphKernelNodeGetParams")
        which = (params.kern, params.func)
        if which not in names:
            names[which] = demangle(_name_kernel(cuda, *which))
        found.append(CapturedKernel(names[which], Launch(grid=tuple(params.grid), block=tuple(params.block))))
    return found


def _find_graph(cuda: Any, stream: int) -> ctypes.c_void_p | None:
    status, number, graph = ctypes.c_int(), ctypes.c_uint64(), ctypes.c_void_p()
    out = (ctypes.byref(status), ctypes.byref(number), ctypes.byref(graph), None, None)
    if hasattr(cuda, "cuStreamGetCaptureInfo_v2"):
        failed = cuda.cuStreamGetCaptureInfo_v2(ctypes.c_void_p(stream), *out)
    else:  # has the data of edges, too
        failed = cuda.cuStreamGetCaptureInfo_v3(ctypes.c_void_p(stream), *out, None)
    _check(failed, "cuStreamGetCaptureInfo")
    return graph if graph.value else None


def _name_kernel(cuda: Any, kernel: int | None, function: int | None) -> str:
    """Return a name by the kernel's handle (lazily loaded modules) or by the function's, as CUDA 12.3 and later can."""
    text = ctypes.c_char_p()
    for call, handle in (("cuKernelGetName", kernel), ("cuFuncGetName", function)):
        if handle and getattr(cuda, call)(ctypes.byref(text), ctypes.c_void_p(handle)) == 0 and text.value:
            return text.value.decode(errors="replace")
    raise ValueError("the driver does not name a graph's kernels")


def _check(status: int, call: str) -> None:
    if status:
        raise ValueError(f"{call} failed with {status}")
