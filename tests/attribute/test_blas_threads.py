"""OpenBLAS with one thread while joules are attributed."""

from __future__ import annotations

import pytest

from tessera.attribute import blas_threads
from tessera.attribute.blas_threads import one_blas_thread


def test_the_number_of_threads_is_put_back() -> None:
    calls = blas_threads._find_calls()
    if calls is None:
        pytest.skip("numpy here does not use OpenBLAS")
    get, put = calls
    before = get()
    put(2)
    try:
        with pytest.raises(ZeroDivisionError), one_blas_thread():
            assert get() == 1
            _ = 1 / 0
        assert get() == 2
    finally:
        put(before)


def test_another_library_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = blas_threads._find_calls()
    monkeypatch.setattr(blas_threads, "_find_calls", lambda: None)
    before = calls[0]() if calls else None
    with one_blas_thread():
        inside = calls[0]() if calls else None
    assert inside == before
