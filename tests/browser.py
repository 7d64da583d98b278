"""Chromium for the tests: found, started without a network, and asked what it logged and fetched."""

from __future__ import annotations

import json
import os
import shutil
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

CHROMIUM = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
HOW = "make browser (or: apt-get install chromium chromium-driver; pip install selenium)"
SHOTS = Path(__file__).parent.parent / "runs" / "screens"


def needed(what: str) -> None:
    """Skip, or fail where a browser was promised: CI sets TESSERA_BROWSER=require."""
    said = f"{what}: {HOW}"
    if os.environ.get("TESSERA_BROWSER") == "require":
        pytest.fail(said)
    pytest.skip(said)


class Browser:
    """A window. `console` is what it complained of, `requests` the addresses it asked for."""

    def __init__(self, driver: Any) -> None:
        self.driver = driver
        self._log: list[dict[str, Any]] = []

    def js(self, code: str, *args: Any) -> Any:
        return self.driver.execute_script(code, *args)

    def open(self, address: str | Path, ready: str = "true", seconds: float = 30.0) -> None:
        """Load a page, and wait until an expression is true in it."""
        self.driver.get_log("browser")
        self.driver.get_log("performance")
        self.driver.get(address.absolute().as_uri() if isinstance(address, Path) else address)
        self.wait(ready, seconds)

    def wait(self, expression: str, seconds: float = 30.0) -> None:
        from selenium.webdriver.support.ui import WebDriverWait

        WebDriverWait(self.driver, seconds, poll_frequency=0.05).until(
            lambda d: d.execute_script(f"return !!({expression})"), f"never came true: {expression}"
        )

    def console(self) -> list[str]:
        """Errors and warnings, but for the one that our own reading of a canvas gives."""
        said = [e["message"] for e in self.driver.get_log("browser") if e["level"] in ("SEVERE", "WARNING")]
        return [line for line in said if "willReadFrequently" not in line]

    def requests(self) -> list[str]:
        events = [json.loads(e["message"])["message"] for e in self.driver.get_log("performance")]
        sent = [e for e in events if e["method"] == "Network.requestWillBeSent"]
        return [str(e["params"]["request"]["url"]) for e in sent]

    def scheme(self, name: str) -> None:
        """What the system prefers: light or dark."""
        feature = {"name": "prefers-color-scheme", "value": name}
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [feature]})

    def keys(self, *keys: str) -> None:
        from selenium.webdriver.common.action_chains import ActionChains

        ActionChains(self.driver).send_keys(*keys).perform()

    def shot(self, name: str) -> Path:
        """A screenshot to look at, in runs/screens."""
        SHOTS.mkdir(parents=True, exist_ok=True)
        path = SHOTS / f"{name}.png"
        self.driver.save_screenshot(str(path))
        return path


@contextmanager
def chromium(width: int = 1300, height: int = 1000) -> Iterator[Browser]:
    """A headless Chromium that resolves no names: a page that asks for something of the network shows it."""
    binary = next((found for name in CHROMIUM if (found := shutil.which(name))), None)
    driver_path = shutil.which("chromedriver")
    if binary is None or driver_path is None:
        needed(f"no {'Chromium' if binary is None else 'chromedriver'} on this machine")
    try:
        from selenium import webdriver
        from selenium.webdriver.chrome.options import Options
        from selenium.webdriver.chrome.service import Service
    except ImportError:
        needed("selenium is not installed")
    options = Options()
    options.binary_location = str(binary)
    for argument in (
        "--headless=new", "--no-sandbox", "--disable-dev-shm-usage", "--disable-gpu", "--hide-scrollbars",
        f"--window-size={width},{height}", "--force-device-scale-factor=1", "--disable-background-networking",
        "--disable-component-update", "--no-first-run", "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",
    ):  # fmt: skip
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # selenium's own, about sockets it closes late
        driver = webdriver.Chrome(options=options, service=Service(driver_path))
        driver.set_window_size(width, height)
        try:
            yield Browser(driver)
        finally:
            driver.quit()
