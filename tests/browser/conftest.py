"""A headless Chromium that notices what a person at the console would: errors, and requests to somebody else."""

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from selenium import webdriver
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.common.action_chains import ActionChains
from selenium.webdriver.common.by import By
from selenium.webdriver.remote.webelement import WebElement
from selenium.webdriver.support.wait import WebDriverWait
from tests.browser.served_site import Site

PATIENCE_SECONDS = 60.0  # for anything to appear; nothing is asserted about how long it takes
FLAGS = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-background-networking",
    "--disable-component-update",
    "--no-first-run",
    "--window-size=1280,900",
)


class Browser:
    """One tab."""

    def __init__(self, driver: webdriver.Chrome) -> None:
        self.driver = driver
        self.expected: list[str] = []  # words of messages at the console that a test brings about
        self.machine = ["ERR_NETWORK_CHANGED"]  # an interface came or went, as in tests with namespaces: Chromium's way

    def find(self, css: str) -> WebElement:
        """Once it is there: a page is drawn a moment after what changes it."""
        first: WebElement = self.until(lambda: self.all(css), f"an element {css}")[0]
        return first

    def all(self, css: str) -> list[WebElement]:
        return self.driver.find_elements(By.CSS_SELECTOR, css)

    def text(self, css: str) -> str:
        """As the page has it, also where it is hidden; elements that are just being replaced count as empty."""
        script = "const e = document.querySelector(arguments[0]); return e ? e.textContent : ''"
        return str(self.driver.execute_script(script, css))

    def run(self, script: str, *args: Any) -> Any:
        return self.driver.execute_script(script, *args)

    def keys(self, *written: str) -> None:
        ActionChains(self.driver).send_keys(*written).perform()

    def until(self, there: Callable[[], Any], what: str) -> Any:
        """Waits until it is so; fails with `what`, the visible text and the console."""
        waiting = WebDriverWait(self.driver, PATIENCE_SECONDS, poll_frequency=0.1)
        try:
            return waiting.until(lambda _: there(), what)
        except Exception as error:
            seen = self.run("return document.body.innerText")
            raise AssertionError(f"waited in vain for {what}; the page says:\n{seen}\n{self.complaints()}") from error

    def reads(self, css: str, words: str) -> None:
        self.until(lambda: words in self.text(css), f"{words!r} in {css}")

    def is_live(self) -> None:
        self.until(lambda: self.find("#link").get_attribute("data-state") == "live", "a live connection")

    def screen(self, width: int, height: int) -> None:
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 500}
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)

    def prefers(self, **features: str) -> None:
        """prefers(color_scheme="dark", reduced_motion="reduce")"""
        plain = [{"name": f"prefers-{name.replace('_', '-')}", "value": value} for name, value in features.items()]
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": plain})

    def block(self, *urls: str) -> None:
        """From now on these can not be loaded, and no others."""
        self.driver.execute_cdp_cmd("Network.enable", {})
        self.driver.execute_cdp_cmd("Network.setBlockedURLs", {"urls": list(urls)})

    def spoken(self) -> list[tuple[str, str]]:
        """Role and name of everything that a screen reader meets."""
        nodes = self.driver.execute_cdp_cmd("Accessibility.getFullAXTree", {})["nodes"]
        return [(n["role"]["value"], n.get("name", {}).get("value", "")) for n in nodes if not n["ignored"]]

    def complaints(self) -> list[str]:
        logged = [str(entry["message"]) for entry in self.driver.get_log("browser") if entry["level"] != "INFO"]
        return [said for said in logged if not any(words in said for words in self.expected + self.machine)]

    def hosts(self) -> set[str]:
        """Everybody that the page has asked for something."""
        messages = [json.loads(entry["message"])["message"] for entry in self.driver.get_log("performance")]
        sent = [m["params"]["request"]["url"] for m in messages if m["method"] == "Network.requestWillBeSent"]
        return {urlsplit(url).netloc for url in sent if urlsplit(url).scheme not in ("data", "blob", "about")}


@pytest.fixture
def browser() -> Iterator[Browser]:
    """Whatever a test does, the console stays clean and nobody but 127.0.0.1 is asked."""
    chromium, driver = shutil.which("chromium"), shutil.which("chromedriver")
    if chromium is None or driver is None:
        pytest.skip("chromium and chromedriver are not installed; `make tools` does it as root (apt)")
    options = webdriver.ChromeOptions()
    options.binary_location = chromium
    for flag in FLAGS:
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    tab = Browser(webdriver.Chrome(options=options, service=Service(driver)))
    try:
        yield tab
        assert tab.complaints() == []
        assert {host.partition(":")[0] for host in tab.hosts()} <= {"127.0.0.1"}
    finally:
        tab.driver.quit()


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    served = Site(tmp_path)
    try:
        yield served
    finally:
        served.end()
