"""Layouts: sizes that fit together, meshes and jobs made of them."""

from __future__ import annotations

import pytest

from tessera.dist import Layout, ModelShape
from tessera.errors import ArgumentError

SMALL = ModelShape(hidden=512, layers=8, heads=8, ffn=2048, vocab=1000)


def test_a_mesh_of_a_layout_has_neighbours_in_the_order_of_its_placement() -> None:
    layout = Layout(tp=2, pp=2, dp=3)
    assert (layout.gpus, repr(layout.mesh())) == (12, "Mesh(pp=2, dp=3, cp=1, tp=2)")
    assert layout.mesh().groups("tp")[0] == (0, 1)
    assert layout.mesh().groups("pp")[0] == (0, 6)
    assert Layout(tp=2, pp=2, dp=3, placement=("tp", "cp", "pp", "dp")).mesh().groups("pp")[0] == (0, 2)


def test_a_layout_and_its_job_agree() -> None:
    layout = Layout(tp=2, pp=2, dp=2, vp=2, micro_batch=2, microbatches=4, sharding="zero1", recompute="full")
    job = layout.make_job(SMALL, on="h100", seq=1024, precision="fp8")
    assert (job.gpus, job.dp, job.microbatches, job.precision) == (8, 2, 4, "fp8")
    assert Layout.from_job(job) == layout
    assert Layout.from_dict(layout.to_dict()) == layout
    assert str(layout) == "tp2 pp2 vp2 dp2"


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"tp": 0}, "tp of at least 1"),
        ({"sharding": "zero4"}, "did you mean"),
        ({"schedule": "1f2b"}, "did you mean"),
        ({"offload": ("optimiser",)}, "did you mean 'optimizer'"),
        ({"vp": 2}, "several stages"),
        ({"vp": 2, "pp": 2, "schedule": "1f1b"}, "several stages"),
        ({"placement": ("tp", "dp")}, "each once"),
        ({"ep": 3, "dp": 4}, "does not divide"),
    ],
)
def test_a_layout_that_cannot_be_is_refused(settings: dict[str, object], words: str) -> None:
    with pytest.raises(ArgumentError, match=words):
        Layout(**settings)  # type: ignore[arg-type]
