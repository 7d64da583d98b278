"""What is kept of how a board's sensor responds."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tessera.schema import Domain
from tessera.sensors import response_store
from tessera.sensors.response_store import COMMON_ERROR_S, KEPT_FITS, ResponseFit, combine, find, keep

BOARD = Domain(name="gpu0", source="nvml-samples", resolution_s=0.02, label="NVIDIA A100", driver="550.1")


@pytest.fixture(autouse=True)
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    yield tmp_path / "tessera" / "sensors"


def fit(start_ns: int = 1, lag_s: float = 0.008, error_s: float = 0.001, idle_w: float | None = 90.0) -> ResponseFit:
    return ResponseFit(
        start_ns=start_ns, seconds=20.0, lag_s=lag_s, lag_error_s=error_s, blur_s=0.006, blur_error_s=0.001,
        idle_w=idle_w, idle_error_w=None if idle_w is None else 3.0,
    )  # fmt: skip


def test_what_one_run_has_learnt_the_next_one_uses() -> None:
    assert find(BOARD) is None
    keep(BOARD, fit())
    found = find(BOARD)
    assert found is not None
    domain = found.apply(BOARD)
    assert (domain.lag_s, domain.blur_s) == (0.008, 0.006)
    assert domain.lag_error_s >= 0.001
    assert (found.idle_w, found.seconds, found.runs) == (90.0, 20.0, 1)


def test_another_driver_or_board_has_its_own_response() -> None:
    keep(BOARD, fit())
    for other in ({"driver": "560.2"}, {"label": "NVIDIA A100-PCIE"}, {"source": "nvml-instant"}):
        assert find(Domain(**{**_fields(BOARD), **other})) is None


def test_without_a_driver_nothing_is_kept(config: Path) -> None:
    assert keep(Domain(name="gpu0", source="csv", resolution_s=0.02, label="NVIDIA A100"), fit()) is None
    assert not config.exists()


def test_a_run_counts_once() -> None:
    keep(BOARD, fit(lag_s=0.008))
    kept = keep(BOARD, fit(lag_s=0.010))
    assert kept is not None
    assert (kept.runs, kept.lag_s) == (1, 0.010)


def test_runs_that_agree_make_it_more_certain_down_to_what_they_share() -> None:
    one, many = combine([fit()]), combine([fit(start_ns=i) for i in range(30)])
    assert many.lag_error_s < one.lag_error_s
    assert many.lag_error_s >= COMMON_ERROR_S


def test_runs_that_disagree_do_not_make_it_more_certain() -> None:
    both = combine([fit(lag_s=0.008), fit(start_ns=2, lag_s=0.018)])
    assert both.lag_s == pytest.approx(0.013)
    assert both.lag_error_s > 0.005


def test_the_more_precise_run_counts_more() -> None:
    both = combine([fit(lag_s=0.0080, error_s=0.0005), fit(start_ns=2, lag_s=0.0090, error_s=0.0020)])
    assert both.lag_s < 0.0082


def test_old_runs_are_forgotten(config: Path) -> None:
    for start_ns in range(KEPT_FITS + 5):
        keep(BOARD, fit(start_ns))
    (file,) = config.iterdir()
    starts = [f["start_ns"] for f in json.loads(file.read_text())["fits"]]
    assert starts == list(range(5, KEPT_FITS + 5))


@pytest.mark.parametrize(
    "text",
    [
        b"", b"{", b"\xff\xfe", b"[]", b'{"board": "NVIDIA A100"}', b"[" * 100_000, b"0" * 200_000,
        b'{"board":"NVIDIA A100","driver":"550.1","source":"nvml-samples","fits":[{"start_ns":1,"seconds":20,'
        b'"lag_s":1e9,"lag_error_s":1,"blur_s":1,"blur_error_s":1}]}',
        b'{"board":"another","driver":"550.1","source":"nvml-samples","fits":[]}',
    ],
)  # fmt: skip
def test_a_damaged_file_is_as_none_and_is_replaced(config: Path, text: bytes) -> None:
    path = response_store.path_of(BOARD)
    assert path is not None
    path.parent.mkdir(parents=True)
    path.write_bytes(text)
    assert find(BOARD) is None
    assert keep(BOARD, fit()) is not None
    assert find(BOARD) is not None


def test_a_name_of_a_board_stays_in_the_folder(config: Path) -> None:
    odd = Domain(**{**_fields(BOARD), "label": "../../etc/passwd", "driver": "x" * 500})
    path = response_store.path_of(odd)
    assert path is not None
    assert path.parent == config
    assert len(path.name) < 200


def test_a_home_that_cannot_be_written_is_no_error(config: Path) -> None:
    config.parent.parent.mkdir(parents=True, exist_ok=True)
    config.parent.write_text("a file where the folder should be")
    assert keep(BOARD, fit()) is None


@pytest.mark.parametrize("wrong", [{"lag_error_s": 0.0}, {"blur_s": float("nan")}, {"idle_w": -5.0}, {"seconds": 1e12}])
def test_figures_of_no_sensor_are_refused(wrong: dict[str, float]) -> None:
    figures = {
        "start_ns": 1,
        "seconds": 20.0,
        "lag_s": 0.01,
        "lag_error_s": 0.001,
        "blur_s": 0.01,
        "blur_error_s": 0.001,
    }
    with pytest.raises(ValueError, match="no "):
        ResponseFit(**{**figures, "idle_w": 90.0, "idle_error_w": 3.0, **wrong})


def _fields(domain: Domain) -> dict[str, object]:
    return {name: getattr(domain, name) for name in ("name", "source", "resolution_s", "label", "driver")}
