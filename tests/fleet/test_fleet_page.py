"""The live page of a fleet in a real browser: it draws, updates itself, follows the theme, and asks only its server.

Skipped where there is no Chromium; TESSERA_BROWSER=require makes that a failure. Screenshots are in runs/screens.
"""

from __future__ import annotations

import dataclasses
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from fleet.test_status import FLEET, READINGS, FakeGovernor
from tessera.fleet.node_metrics import NodeReading
from tessera.fleet.placement_file import load_fleet
from tessera.fleet.status import FleetPoller
from tessera.report import fleet_metrics, metrics
from tessera.report.fleet_page import StatusFeed, fleet_app, fleet_page

from browser import Browser, chromium

EVIL = "<script>alert(1)</script>"


class Live:
    """A page that is served from readings which the test changes."""

    def __init__(self, address: str, readings: dict[str, NodeReading]) -> None:
        self.address, self.readings = address, readings


@pytest.fixture
def live(tmp_path: Path) -> Iterator[Live]:
    path = tmp_path / "fleet.yaml"
    path.write_text(FLEET)
    readings = dict(READINGS)
    readings["n1"] = dataclasses.replace(readings["n1"], throttled=(EVIL,))
    poller = FleetPoller(
        load_fleet(path),
        FakeGovernor(),
        ask=lambda url: readings[url.removeprefix("http://").partition(":")[0]],
    )
    with metrics.bind(socket.AF_INET, ("127.0.0.1", 0)) as server, StatusFeed(poller, 0.1) as feed:
        scrape = metrics.import_client().make_wsgi_app(metrics.registry(fleet_metrics.FleetCollector(feed.newest)))
        with metrics.serve_app(server, fleet_app(feed, fleet_page(0.2), scrape)):
            yield Live(f"http://127.0.0.1:{server.server_port}", readings)


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as found:
        yield found


DRAWN = "document.querySelectorAll('.cell').length === 3 && document.querySelectorAll('#chart path').length"


def test_the_page_draws_updates_itself_and_asks_only_its_server(browser: Browser, live: Live) -> None:
    browser.scheme("light")
    browser.open(f"{live.address}/", DRAWN)
    text = browser.js("return document.body.innerText")
    for wanted in (
        "11.0 kW", "88 °C", "12.0 kW of 16.0 kW", "Emergency: feed lost, to 1 W", "connection refused", "train",
        "1 kW above its lease", "nodes above their lease", "2 of 3",
    ):  # fmt: skip
        assert wanted in text, text
    assert browser.js("return document.querySelector('.load i').className") == "bad"  # 92% of the feed
    assert EVIL in text and browser.js("return document.querySelectorAll('script').length") == 1
    live.readings["n1"] = dataclasses.replace(
        live.readings["n1"], power_w=9000.0, events={"over_current": 4, "breaker_tripped": 1}
    )
    browser.wait("document.querySelector('#tiles').innerText.includes('13.0 kW')")
    browser.wait("document.querySelectorAll('#events tbody tr').length === 2")
    assert "breaker tripped" in browser.js("return document.querySelector('#events').innerText")
    assert browser.js("return document.querySelector('#chart path').getAttribute('d').split('L').length") > 1
    browser.open(f"{live.address}/", DRAWN)  # a page that is opened later has the past, too
    assert browser.js("return document.querySelector('#chart path').getAttribute('d').split('L').length") > 1
    browser.shot("fleet-light")
    assert browser.console() == []
    asked = {a.removeprefix(live.address) for a in browser.requests() if not a.startswith("data:")}
    assert asked == {"/", "/fleet.json", "/history.json"}


def test_light_and_dark_differ_and_the_button_switches(browser: Browser, live: Live) -> None:
    paper = "return getComputedStyle(document.body).backgroundColor"
    browser.scheme("light")
    browser.open(f"{live.address}/", DRAWN)
    light = browser.js(paper)
    browser.scheme("dark")
    browser.wait(f"(() => {{ {paper} }})() !== '{light}'")
    browser.shot("fleet-dark")
    browser.js("document.querySelector('#theme').click()")
    assert browser.js(paper) == light


def test_a_server_that_is_gone_is_told(browser: Browser, live: Live) -> None:
    browser.open(f"{live.address}/", DRAWN)
    browser.js("window.fetch = () => Promise.reject(new Error('gone'))")
    browser.wait("!document.querySelector('#lost').hidden")
    assert "may be old" in browser.js("return document.querySelector('#lost').innerText")


def test_it_is_readable_on_a_phone(browser: Browser, live: Live) -> None:
    browser.driver.set_window_size(500, 900)
    try:
        browser.open(f"{live.address}/", DRAWN)
        assert browser.js("return document.documentElement.scrollWidth <= window.innerWidth")
        browser.shot("fleet-phone")
    finally:
        browser.driver.set_window_size(1300, 1000)
