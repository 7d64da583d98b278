"""The page of a run in a real browser: that it draws, sorts, filters, zooms, prints, and asks nobody for anything.

Skipped where there is no Chromium; TESSERA_BROWSER=require makes that a failure. Screenshots are in runs/screens.
"""

from __future__ import annotations

import base64
import dataclasses
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from recordings import with_table
from tessera import analyze
from tessera.estimate.search import Sweep, SweepRow
from tessera.report.diff_html import page as diff_page
from tessera.report.predict_html import page as predict_page
from tessera.report.run_html import page
from tessera.schema import Energy, EnergyReport, Work

from browser import SHOTS, Browser, chromium
from synthetic_run import EVIL, make, results

PLOTTED = "performance.getEntriesByName('tessera-first-plot').length"
# Pixels of the canvas that have any colour, and how many colours there are.
PIXELS = """
const c = document.querySelector('#timeline'), d = c.getContext('2d').getImageData(0, 0, c.width, c.height).data;
const seen = new Set(); let painted = 0, sum = 0;
for (let i = 0; i < d.length; i += 4) if (d[i + 3]) {
  painted++; seen.add(d[i] << 16 | d[i + 1] << 8 | d[i + 2]);
  sum = (sum * 31 + d[i] + 7 * d[i + 1] + 13 * d[i + 2]) % 1e9;
}
return {share: painted / (d.length / 4), colours: seen.size, sum};
"""


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("page")
    made = make(steps=12, data_ms=16.0, evil=True)
    with made.write(folder / "train.tessera", work={"token": 12 * 8192}) as run:
        (folder / "train.html").write_text(page(with_table(run, made.table), results=results(made)))
    return folder / "train.html"


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as found:
        yield found


@pytest.fixture
def window(browser: Browser, file: Path) -> Iterator[Browser]:
    browser.scheme("light")
    browser.open(file, PLOTTED)
    yield browser
    assert browser.console() == []


def pixels(window: Browser) -> dict[str, Any]:
    window.js("window.frame = 0; requestAnimationFrame(() => requestAnimationFrame(() => { window.frame = 1; }))")
    window.wait("window.frame")
    found: dict[str, Any] = window.js(PIXELS)
    return found


def shown(window: Browser, table: str = "#panel-ops") -> list[str]:
    rows: list[str] = window.js(
        "return [...document.querySelectorAll(arguments[0] + ' tbody tr')].filter(r => r.offsetParent)"
        ".map(r => r.cells[0].textContent)",
        table,
    )
    return rows


def test_it_loads_and_asks_for_nothing(window: Browser, file: Path) -> None:
    assert window.requests() == [file.absolute().as_uri()]
    assert window.console() == []
    assert window.js("return window.hacked") is None
    assert EVIL in window.js("return document.body.textContent")


def test_the_answer_is_painted_before_the_plot(window: Browser) -> None:
    at = window.js(
        "return [performance.getEntriesByName('first-contentful-paint')[0].startTime,"
        " performance.getEntriesByName('tessera-first-plot')[0].startTime]"
    )
    assert at[0] < at[1]
    assert window.js("return document.querySelector('.tile b').getBoundingClientRect().bottom < innerHeight")


def test_the_plots_have_data(window: Browser) -> None:
    found = pixels(window)
    assert found["share"] > 0.05
    assert found["colours"] > 20
    boxes = window.js("return [...document.querySelectorAll('.roof circle')].map(c => c.getBoundingClientRect().width)")
    assert len(boxes) >= 10
    assert min(boxes) > 3
    assert window.js("return document.querySelectorAll('.heat rect').length") >= 3
    assert window.js("return document.querySelectorAll('#stalls .stack i').length") >= 6
    assert window.shot("page_light").exists()
    window.js("document.querySelector('#roofline').scrollIntoView()")
    assert window.shot("page_analyses").stat().st_size > 20_000


def test_where_nobody_sampled_there_is_no_curve(browser: Browser, tmp_path: Path) -> None:
    made = make(steps=12, data_ms=16.0)
    watts = np.where(np.arange(len(made.watts)) * 4 < len(made.watts), np.nan, made.watts)
    watts[len(watts) // 2 : len(watts) * 3 // 4] = np.nan
    late = dataclasses.replace(made, watts=watts)
    with late.write(tmp_path / "late.tessera") as run:
        (tmp_path / "late.html").write_text(page(with_table(run, made.table)))
    browser.open(tmp_path / "late.html", PLOTTED)
    browser.js("document.querySelector('#zoom-all').click()")
    pixels(browser)
    # Of 20 columns of the power track, those that have the curve's reddish fill anywhere.
    found = browser.js(
        """
        const c = document.querySelector('#timeline'), k = c.width / c.clientWidth, x = c.getContext('2d');
        return [...Array(20).keys()].map(i => {
          const at = Math.round((86 + (i + .5) / 20 * (c.clientWidth - 94)) * k);
          const d = x.getImageData(at, Math.round(30 * k), 1, Math.round(140 * k)).data;
          for (let j = 0; j < d.length; j += 4) if (d[j + 3] && d[j] > d[j + 2] + 60) return 1;
          return 0;
        });
        """
    )
    assert found[:4] == [0] * 4 and found[6:9] == [1] * 3  # nothing before the first sample, then an area
    assert found[11:14] == [0] * 3 and found[16:19] == [1] * 3  # a gap in the middle is one too


LABELS = """
const c = document.querySelector('#timeline'), x = c.getContext('2d'), said = [];
x.clearRect = function (...all) {  // drawn anew: what counts is the last time
  said.length = 0;
  Object.getPrototypeOf(this).clearRect.apply(this, all);
};
x.fillText = function (text, at, y) {
  if (/^(step_)?\\d+$/.test(text)) said.push([text, at, at + this.measureText(text).width, y]);
  Object.getPrototypeOf(this).fillText.call(this, text, at, y);
};
window.said = said;
document.querySelector('#zoom-all').click();
"""


@pytest.mark.parametrize("steps", [3, 12, 40, 150])
def test_labels_of_steps_do_not_touch(browser: Browser, tmp_path: Path, steps: int) -> None:
    made = make(steps=steps, layers=2)
    with made.write(tmp_path / "many.tessera") as run:
        (tmp_path / "many.html").write_text(page(with_table(run, made.table)))
    browser.open(tmp_path / "many.html", PLOTTED)
    browser.js(LABELS)
    pixels(browser)
    labels = browser.js("return window.said")
    assert len(labels) >= min(steps, 4), "some are named"
    for (_, _, end, y), (_, start, _, next_y) in itertools.pairwise(labels):
        assert y == next_y and start > end + 2
    assert len({name.startswith("step_") for name, *_ in labels}) == 1, "all by name, or all by number"
    assert browser.console() == []


def test_tables_sort(window: Browser) -> None:
    by = "document.querySelectorAll('#panel-ops th button')"
    before = shown(window)
    window.js(f"{by}[0].click()")
    names = shown(window)
    assert names == window.js("return [...arguments[0]].sort((a, b) => a.localeCompare(b))", before)
    assert names != before
    window.js(f"{by}[1].click()")
    assert shown(window) == before  # by energy again
    window.js(f"{by}[1].click()")
    assert shown(window) == before[::-1]
    assert window.js("return document.querySelectorAll('#panel-ops th')[1].ariaSort") == "ascending"


def test_tables_filter(window: Browser) -> None:
    field = window.driver.find_element("css selector", "#panel-ops input")
    field.send_keys("attention BACK")
    assert shown(window) == ["aten::_scaled_dot_product_cudnn_attention_backward"]
    assert window.js("return document.querySelector('#panel-ops [role=status]').textContent").startswith("1 of")
    field.clear()
    field.send_keys("no such thing")
    assert shown(window) == []


def test_zoom_and_pan(window: Browser) -> None:
    start = pixels(window)["sum"]
    window.driver.find_element("id", "zoom-in").click()
    near = pixels(window)["sum"]
    assert near != start
    window.driver.find_element("id", "zoom-one").click()
    assert pixels(window)["sum"] not in (start, near)
    window.driver.find_element("id", "zoom-all").click()
    whole = pixels(window)["sum"]
    window.driver.find_element("id", "zoom-in").click()
    window.driver.find_element("id", "zoom-out").click()
    assert pixels(window)["sum"] == whole


def test_the_pointer_tells_what_ran(window: Browser) -> None:
    window.driver.find_element("id", "zoom-one").click()
    pixels(window)
    window.js(
        "const c = document.querySelector('#timeline'); c.scrollIntoView(); const b = c.getBoundingClientRect();"
        "window.said = new Set(); for (let x = 100; x < b.width; x += 9) for (let y = 30; y < b.height; y += 8) {"
        "c.dispatchEvent(new PointerEvent('pointermove', {clientX: b.left + x, clientY: b.top + y, bubbles: true}));"
        "if (!document.querySelector('#tip').hidden) window.said.add(document.querySelector('#tip b').textContent); }"
    )
    said = " ".join(window.js("return [...window.said]"))
    for expected in ("at ", "step_", "backward", "nvjet_sm90"):
        assert expected in said


def test_the_keyboard_does_it_all(window: Browser) -> None:
    from selenium.webdriver.common.keys import Keys

    window.js("document.querySelector('#timeline').focus()")
    start = pixels(window)["sum"]
    window.keys("+", "+")
    near = pixels(window)["sum"]
    assert near != start
    window.keys(Keys.ARROW_RIGHT)
    assert pixels(window)["sum"] not in (start, near)
    window.keys("0")
    window.js("document.querySelector('#tab-ops').focus()")
    window.keys(Keys.ARROW_RIGHT)
    assert window.js("return document.activeElement.id") == "tab-kernels"
    assert window.js("return getComputedStyle(document.querySelector('#panel-kernels')).display") != "none"
    assert shown(window) == []
    window.js("document.querySelector('.roof').focus()")
    window.keys(Keys.ARROW_RIGHT)
    assert window.js("return document.querySelectorAll('.roof circle.on').length") == 1
    assert not window.js("return document.querySelector('#tip').hidden")
    window.keys(Keys.ENTER)
    assert window.js("return document.activeElement.id") == "roof-0"
    assert window.js("return document.querySelector('.rows').open")
    reached = set()
    window.js("document.querySelector('#theme').focus()")
    for _ in range(8):
        window.keys(Keys.TAB)
        reached.add(window.js("return document.activeElement.id || document.activeElement.getAttribute('class')"))
    assert {"zoom-in", "zoom-out", "zoom-all", "zoom-one", "timeline"} <= reached


def test_a_point_leads_to_its_row(window: Browser) -> None:
    point = window.driver.find_element("css selector", ".roof circle")
    to = point.get_attribute("data-to")
    window.js("arguments[0].dispatchEvent(new MouseEvent('click', {bubbles: true}))", point)
    assert window.js("return document.querySelector('tr.hit').id") == to
    assert window.js("return document.querySelector('tr.hit td').title") == point.get_attribute("data-n")


CONTRAST = """
const lum = c => { const v = c.map(x => (x /= 255) <= .03928 ? x / 12.92 : ((x + .055) / 1.055) ** 2.4);
  return .2126 * v[0] + .7152 * v[1] + .0722 * v[2]; };
const rgb = text => text.match(/[\\d.]+/g).slice(0, 3).map(Number);
const paper = rgb(getComputedStyle(document.body).backgroundColor);
return [...document.querySelectorAll('h1, h2, th, td, .tile b, .tile span, .dim, dt, dd, text')].map(e => {
  const style = getComputedStyle(e); let opacity = 1;
  for (let at = e; at; at = at.parentElement) opacity *= Number(getComputedStyle(at).opacity);
  const own = rgb(e.tagName === 'text' ? style.fill : style.color);
  const ink = own.map((x, i) => x * opacity + paper[i] * (1 - opacity));
  const [low, high] = [lum(ink), lum(paper)].sort((a, b) => a - b);
  return [(high + .05) / (low + .05), `${e.tagName} ${e.className} ${e.textContent}`.slice(0, 60)];
}).sort((a, b) => a[0] - b[0])[0];
"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_text_of_every_page_can_be_read(browser: Browser, tmp_path: Path, scheme: str) -> None:
    """WCAG's least contrast for text, 4.5 to 1, on the pages of a run, a comparison, a prediction and a sweep."""
    made = make(steps=3, layers=3)
    run = made.write(tmp_path / "x.tessera").recording()
    total = Energy(energy_j=1.0, error_j=0.1, time_s=1.0, source="x")
    report = EnergyReport(name="x", total=total, by_domain={"gpu0": total}, work=[Work(amount=8, unit="sample")])
    rows = [SweepRow(on=chip, precision=None, batch=8, time_s=1e-3, error_s=1e-4, energy_j=j, error_j=0.1,
                     compute_energy_j=j / 2, memory_energy_j=j / 4, static_energy_j=j / 4, average_power_w=9.0)
            for chip, j in (("h200", 1.0), ("a100", 2.0))]  # fmt: skip
    sweep = Sweep(name="x", mode="infer", launch="eager", rows=rows)
    pages = {"run": page(run), "diff": diff_page(analyze.diff(report, report))}
    pages |= {"predict": predict_page(report), "sweep": predict_page(sweep)}
    browser.scheme(scheme)
    for name, text in pages.items():
        (tmp_path / f"{name}.html").write_text(text)
        browser.open(tmp_path / f"{name}.html")
        contrast, where = browser.js(CONTRAST)
        assert contrast >= 4.5, (name, where, contrast)


def test_dark_mode(window: Browser) -> None:
    paper = "return getComputedStyle(document.body).backgroundColor"
    assert window.js(paper) == "rgb(255, 255, 255)"
    light = pixels(window)["sum"]
    window.scheme("dark")
    assert window.js(paper) == "rgb(20, 23, 27)"
    assert pixels(window)["sum"] != light  # the canvas is drawn anew
    window.shot("page_dark")
    window.driver.find_element("id", "theme").click()
    assert window.js(paper) == "rgb(255, 255, 255)"
    assert pixels(window)["sum"] == light


def test_it_prints(window: Browser) -> None:
    window.scheme("dark")
    printed = window.driver.execute_cdp_cmd("Page.printToPDF", {"printBackground": False, "preferCSSPageSize": True})
    data = base64.b64decode(printed["data"])
    (SHOTS / "page.pdf").write_bytes(data)
    assert data.startswith(b"%PDF")
    assert 2 <= data.count(b"/Type /Page\n") <= 12
    assert window.js("return getComputedStyle(document.body).backgroundColor") == "rgb(20, 23, 27)"  # as it was


def test_a_narrow_screen_does_not_scroll_sideways(window: Browser) -> None:
    metrics = {"width": 390, "height": 844, "deviceScaleFactor": 1, "mobile": True}
    window.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
    try:
        assert window.js("return document.documentElement.scrollWidth") <= 390
        window.shot("page_narrow")
    finally:
        window.driver.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})


def test_tables_and_plots_have_names(window: Browser) -> None:
    assert window.js("return [...document.querySelectorAll('table')].every(t => t.caption && t.caption.textContent)")
    plots = "canvas, svg"
    assert window.js(f"return [...document.querySelectorAll('{plots}')].every(p => p.getAttribute('aria-label'))")
    assert window.js("return [...document.querySelectorAll('th')].every(t => t.scope)")
