"""CUDA_VISIBLE_DEVICES as CUDA reads it: tried on one H200 (driver 580) as far as one GPU can show it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tessera.sensors._visible import GpuBoard, visible_boards

BOARDS = [
    GpuBoard(0, "GPU-aa694fa2-111c-4524-7ac7-efa2ec117766"),
    GpuBoard(1, "GPU-aa69bbbb-111c-4524-7ac7-000000000001"),
    GpuBoard(2, "GPU-cc000000-111c-4524-7ac7-000000000002", ("MIG-11110000-aaaa", "MIG-11112222-bbbb")),
    GpuBoard(3, "GPU-dd000000-111c-4524-7ac7-000000000003", ("MIG-33330000-cccc",)),
]


def seen(text: str | None) -> list[int]:
    return [v.board.index for v in visible_boards(BOARDS, text)]


def test_not_set_shows_all_and_empty_none():
    assert seen(None) == [0, 1, 2, 3]
    assert seen("") == []


@pytest.mark.parametrize(
    ("text", "indices"),
    [
        ("0", [0]),
        ("2,0", [2, 0]),
        (" 1", [1]),
        ("0, 1 ,2", [0, 1, 2]),
        ("+1", [1]),
        ("01", [1]),
        ("-0", [0]),
        ("1gpu,2ampere", [1, 2]),
        ("0x1", [0]),
        ("0;1", [0]),
        ("0.5", [0]),
    ],
)
def test_indices_are_read_as_strtoul_does_and_keep_their_order(text, indices):
    assert seen(text) == indices


@pytest.mark.parametrize(
    ("text", "indices"),
    [
        ("-1", []),
        ("-1,0", []),
        ("0,-1,1", [0]),
        ("0,9,1", [0]),
        ("9,0", []),
        ("0,,1", [0]),
        (",0", []),
        ("0,abc,1", [0]),
        ("NoDevFiles", []),
        ("all", []),
        ("none", []),
        ("++0", []),
        ('"0"', []),
        ("²", []),
        ("٠", []),
        ("18446744073709551616", []),
    ],
)
def test_the_list_ends_at_the_first_entry_that_names_no_device(text, indices):
    assert seen(text) == indices


@pytest.mark.parametrize(
    "text", ["0,0", "0, 0", "1,0,1", "0,00", "GPU-aa694,GPU-aa694fa2-111c-4524-7ac7-efa2ec117766", "GPU-c,GPU-c"]
)
def test_a_device_named_twice_hides_all(text):
    assert seen(text) == []


def test_a_repetition_behind_the_end_of_the_list_does_not_count():
    assert seen("0,9,0") == [0]


@pytest.mark.parametrize(
    ("text", "indices"),
    [
        ("GPU-aa694fa2-111c-4524-7ac7-efa2ec117766", [0]),
        ("GPU-AA694FA2-111C-4524-7AC7-EFA2EC117766", [0]),
        ("GPU-c", [2]),
        ("GPU-dd,GPU-aa694", [3, 0]),
        ("GPU-cc000000 ", [2]),
        ("GPU-aa69", []),  # two boards
        ("GPU-", []),
        ("GPU", []),
        ("gpu-cc000000", []),
        (" GPU-cc000000", []),
        ("GPU-cc,GPU-zz,GPU-dd", [2]),
    ],
)
def test_uuids_whole_or_shortened(text, indices):
    assert seen(text) == indices


def test_a_bare_prefix_names_nothing_even_with_one_gpu():
    assert visible_boards(BOARDS[:1], "GPU-") == []
    assert visible_boards(BOARDS[3:], "MIG-") == []


@pytest.mark.parametrize(("text", "indices"), [("0,GPU-cc", [0]), ("GPU-cc,0", [2]), ("GPU-cc,MIG-3333", [2])])
def test_the_list_ends_where_its_kind_changes(text, indices):
    assert seen(text) == indices


def test_slices_show_their_board_once_and_are_named():
    (only,) = visible_boards(BOARDS, "MIG-11110000-aaaa,MIG-11112222-bbbb")
    assert only.board.index == 2
    assert len(only.mig) == 2
    assert [(v.board.index, len(v.mig)) for v in visible_boards(BOARDS, "MIG-3333,MIG-11112")] == [(3, 1), (2, 1)]


def test_whole_boards_have_no_slices():
    assert [(v.board.index, v.mig) for v in visible_boards(BOARDS, "2,3")] == [(2, ()), (3, ())]


@pytest.mark.parametrize("text", ["MIG-1111", "MIG-9999", "MIG-3333,MIG-33330000"])
def test_ambiguous_unknown_and_repeated_slices(text):
    assert seen(text) == []


def test_slices_as_drivers_before_470_name_them():
    old = "MIG-GPU-cc000000-111c-4524-7ac7-000000000002"
    (only,) = visible_boards(BOARDS, f"{old}/1/0,{old}/2/0")
    assert (only.board.index, len(only.mig)) == (2, 2)
    assert seen("MIG-GPU-ee000000-111c-4524-7ac7-000000000002/1/0") == []


@given(st.text(st.sampled_from("0123,+- ²GPUMIaacdg/x1"), max_size=16))
def test_any_text_shows_some_boards_each_once(text):
    indices = seen(text)
    assert len(set(indices)) == len(indices)
    assert set(indices) <= {0, 1, 2, 3}


@given(st.permutations([0, 1, 2, 3]), st.integers(min_value=0, max_value=4))
def test_any_choice_is_kept_in_order(order, count):
    chosen = order[:count]
    assert seen(",".join(map(str, chosen))) == chosen
    assert seen(",".join(BOARDS[i].uuid for i in chosen)) == chosen
