"""A rack in simulated time under lost, late, doubled and reordered messages, with daemons and governors that die."""

from __future__ import annotations

from message_storm import MessageStorm


def test_the_limit_holds_in_a_storm_and_every_job_gets_its_turn() -> None:
    storm = MessageStorm(events=50_000, jobs=500, seed=7)
    result = storm.run()
    assert result.problems == []
    assert result.events >= 50_000
    assert result.counts["governor killed"] > 5
    assert result.counts["daemon killed"] > 20
    assert result.highest_share > 0.5  # the rack was used
    assert len(storm.jobs) == 500
    assert all(job.done for job in storm.jobs.values())
    assert result.jobs_ended > 400


def test_above_saturation_the_limit_holds_and_nobody_starves() -> None:
    """Jobs need more than twice what there is while they come: the queue grows, and all get their turn."""
    storm = MessageStorm(events=12_000, jobs=120, seed=8, load=2.2)
    result = storm.run()
    assert result.problems == []
    assert result.highest_share > 0.99
    assert all(job.done for job in storm.jobs.values())
    assert result.longest_wait_s > 60.0
