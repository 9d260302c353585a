"""A real headless Chromium for the tests of the page, and what it noticed while a page was open."""

from __future__ import annotations

import json
import shutil
import time
from pathlib import Path
from typing import Any

import pytest
from selenium import webdriver
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.common.by import By
from selenium.webdriver.remote.webelement import WebElement

_ARGUMENTS = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-dev-shm-usage",
)


class Browser:
    """One Chromium. Every method acts on the page that ``open`` opened last.

    Args:
        driver: the driver of a Chromium that logs console messages and network events.
    """

    def __init__(self, driver: webdriver.Chrome) -> None:
        self.driver = driver

    def open(self, path: Path, *, width: int = 1440, dark: bool = False, fragment: str = "") -> None:
        """Open a file in a window of this width, the system being light or dark, and wait until its script is done."""
        self.set_dark(dark)
        metrics = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 600}
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
        self.driver.get("about:blank")
        self.forget()
        self.driver.get(path.as_uri() + fragment)
        self.wait("document.documentElement.dataset.ready === 'yes'")

    def set_dark(self, dark: bool) -> None:
        """What the system prefers."""
        feature = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [feature]})

    def js(self, expression: str, *arguments: Any) -> Any:
        """The value of a JavaScript expression; ``arguments`` are its ``arguments``."""
        return self.driver.execute_script(f"return ({expression})", *arguments)

    def wait(self, expression: str, seconds: float = 30.0) -> None:
        """Wait until a JavaScript expression holds; fails the test if it never does."""
        end = time.monotonic() + seconds
        while not self.js(expression):
            assert time.monotonic() < end, f"never came true: {expression}"
            time.sleep(0.02)

    def find(self, selector: str) -> WebElement:
        """The first element that a CSS selector matches."""
        return self.driver.find_element(By.CSS_SELECTOR, selector)

    def all(self, selector: str) -> list[WebElement]:
        """Every element that a CSS selector matches."""
        return self.driver.find_elements(By.CSS_SELECTOR, selector)

    def draw_everything(self) -> None:
        """Draw the charts that wait until they come near the screen."""
        self.js("drawn.forEach((_, element) => draw(element))")

    def console(self) -> list[str]:
        """What the console said since it was asked last."""
        entries: list[dict[str, Any]] = self.driver.get_log("browser")  # type: ignore[no-untyped-call]
        return [str(entry["message"]) for entry in entries]

    def requests(self) -> list[str]:
        """The addresses the page asked for since they were asked for last, but for itself and what it holds."""
        entries: list[dict[str, Any]] = self.driver.get_log("performance")  # type: ignore[no-untyped-call]
        messages = [json.loads(entry["message"])["message"] for entry in entries]
        sent = [m["params"]["request"]["url"] for m in messages if m["method"] == "Network.requestWillBeSent"]
        return [url for url in sent if not url.startswith(("file:", "data:", "about:"))]

    def forget(self) -> None:
        """Forget what was noticed so far."""
        self.console()
        self.requests()


def start() -> Browser:
    """A new Chromium; skips the test where there is none."""
    chromium = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    driver = shutil.which("chromedriver")
    if not chromium or not driver:
        pytest.skip("Chromium and chromedriver are not installed (Debian: apt-get install chromium-driver)")
    options = webdriver.ChromeOptions()
    options.binary_location = chromium
    for argument in _ARGUMENTS:
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    return Browser(webdriver.Chrome(options=options, service=Service(driver)))


def opens_silently_and_fits(browser: Browser, page: Path, width: int, dark: bool) -> None:
    """Assert that a page gives no console message and no request, and that nothing reaches out of the window."""
    browser.open(page, width=width, dark=dark)
    browser.draw_everything()
    assert browser.console() == []
    assert browser.requests() == []
    assert browser.js("document.documentElement.scrollWidth") <= width
    outside = browser.js(
        "[...document.querySelectorAll('.main-svg text')].filter((text) => {"
        " const box = text.getBoundingClientRect();"
        " return box.width && (box.left < -1 || box.right > innerWidth + 1); }).map((text) => text.textContent)"
    )
    assert outside == []
