"""Groups of gloo's collectives: Kineto's rows beside the calls of torch's flight recorder."""

from __future__ import annotations

import numpy as np

from tessera.profile.flight_record import FlightCall, name_groups
from tessera.profile.ranks.align_gloo import host_lines
from tessera.timeline.columns import NONE, Builder, Timeline
from tessera.timeline.transfers import collective_algorithm, group_label

T0, MS = 1_790_000_000_000_000_000, 1_000_000
DP, TP = ("1", "mesh_dp"), ("3", "mesh_tp")


def call(group: tuple[str, str], number: int, at_ms: float, size: int = 8, kind: str = "all_reduce") -> FlightCall:
    return FlightCall(
        profiling_name=f"gloo:{kind}", process_group=group, collective_seq_id=number,
        time_created_ns=T0 + round(at_ms * MS), input_sizes=[[size]], input_dtypes=["Float"],
        output_sizes=[[2, size] if kind == "all_gather" else [size]], output_dtypes=["Float"],
    )  # fmt: skip


def timeline(*rows: tuple[str, int, float, int]) -> Timeline:
    """(kind, elements, start in ms, thread)."""
    builder = Builder()
    builder.add("op", "aten::mm", T0, T0 + MS, thread=1)
    for kind, size, at_ms, thread in rows:
        start = T0 + round(at_ms * MS)
        builder.add("op", f"gloo:{kind}", start, start + MS, thread=thread, shapes=builder.intern(f"[{size}]f32"))
    return builder.build()


def named(lines: Timeline) -> list[tuple[str | None, int]]:
    found = []
    for row in range(1, len(lines)):
        launch = int(lines["launch"][row])
        found.append((lines.launches[launch].group_label if launch != NONE else None, int(lines["correlation"][row])))
    return found


def test_rows_of_one_size_are_told_apart_by_their_threads() -> None:
    """Threads 7 and 8 serve one group each; what only one group does tells which."""
    lines = timeline(("all_gather", 4, 1, 7), ("broadcast", 4, 1, 8), ("all_reduce", 8, 5, 8), ("all_reduce", 8, 6, 7))
    calls = [
        call(DP, 1, 0.9, 4, "all_gather"), call(TP, 1, 0.9, 4, "broadcast"),
        call(DP, 2, 4.0), call(TP, 2, 4.5),  # asked for in the other order than they began
    ]  # fmt: skip
    name_groups(lines, calls, {"1": 2, "3": 4})
    assert named(lines) == [("dp", 1), ("tp", 1), ("tp", 2), ("dp", 2)]
    gathered = lines.launches[int(lines["launch"][1])]
    assert (gathered.collective_type, gathered.collective_bytes, gathered.group_size) == ("all_gather", 32, 2)
    groups = {key: found.numbers.tolist() for key, found in host_lines(lines, {}).items() if found.numbers is not None}
    assert groups == {("gloo:", "1"): [1, 2], ("gloo:", "3"): [1, 2]}


def test_calls_before_the_trace_and_rows_without_a_call_are_left_alone() -> None:
    lines = timeline(("all_reduce", 8, 1, 7), ("all_reduce", 8, 9, 7))
    name_groups(lines, [call(DP, 1, -500), call(DP, 2, 8.9)])
    assert named(lines) == [(None, NONE), ("dp", 2)], "the first row began before its only call was made"
    before = lines["launch"].copy()
    name_groups(lines, [])
    assert np.array_equal(lines["launch"], before)


def test_names_of_groups_and_algorithms() -> None:
    assert [group_label(d) for d in ("mesh_dp", "default_pg", "undefined", "", None, "experts")] == [
        "dp", "world", None, None, None, "experts",
    ]  # fmt: skip
    assert collective_algorithm("ncclDevKernel_AllReduce_Sum_f32_RING_LL128(ncclDevKernelArgsStorage<4096ul>)") == (
        "ring LL128"
    )
    assert collective_algorithm("ncclDevKernel_AllReduce_Sum_bf16_NVLS_TREE_SIMPLE(x)") == "nvls tree SIMPLE"
    assert collective_algorithm("ncclDevKernel_Generic_4(ncclDevKernelArgsStorage<4096ul>)") is None
