"""The page in a real browser. ``make browser`` installs one."""

from __future__ import annotations

import itertools
import json
import re
import shutil
from base64 import b64decode
from collections.abc import Iterator
from io import BytesIO
from pathlib import Path
from typing import Any
from unicodedata import normalize

import pytest
from pypdf import PdfReader

from mergestream import OPCM, Average, Ledger, Store
from mergestream.report.facts import Facts
from mergestream.report.render import render_html
from mergestream.report.tables import MAX_NAME, short_name
from tests.report.conftest import EXPERTS, SCORES, make_store

webdriver = pytest.importorskip("selenium.webdriver")
from selenium.webdriver.chrome.service import Service  # noqa: E402
from selenium.webdriver.common.by import By  # noqa: E402
from selenium.webdriver.support.ui import WebDriverWait  # noqa: E402

FLAGS = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--disable-dev-shm-usage",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--window-size=1400,1000",
)
MATRICES = ("scores", "shares")


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    chromium, driver = shutil.which("chromium"), shutil.which("chromedriver")
    if not chromium or not driver:
        pytest.skip("no chromium and chromedriver here; make browser installs them")
    options = webdriver.ChromeOptions()
    options.binary_location = chromium
    for flag in (*FLAGS, f"--user-data-dir={tmp_path_factory.mktemp('profile')}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    started = webdriver.Chrome(options=options, service=Service(driver))
    yield started
    started.quit()


class Page:
    """A report that is open in the browser."""

    def __init__(self, browser: Any, path: Path, store: Store) -> None:
        self.browser = browser
        path.write_text(render_html(Facts.of(store)), encoding="utf-8")
        self.address = path.as_uri()
        browser.get("about:blank")  # the browser's own start page has much to load
        browser.get_log("browser"), browser.get_log("performance")
        browser.get(self.address)
        self.wait("return document.documentElement.dataset.ready === 'yes'")

    def wait(self, condition: str) -> None:
        WebDriverWait(self.browser, 30).until(lambda browser: browser.execute_script(condition))

    def find(self, selector: str) -> Any:
        return self.browser.find_element(By.CSS_SELECTOR, selector)

    def all(self, selector: str) -> list[Any]:
        found: list[Any] = self.browser.find_elements(By.CSS_SELECTOR, selector)
        return found

    def texts(self, selector: str) -> list[str]:
        script = "return [...document.querySelectorAll(arguments[0])].map(e => e.textContent)"
        found: list[str] = self.browser.execute_script(script, selector)
        return found

    def click(self, selector: str) -> None:
        element = self.find(selector)
        self.browser.execute_script("arguments[0].scrollIntoView({block: 'center', behavior: 'instant'})", element)
        element.click()

    def theme(self) -> str:
        return str(self.browser.execute_script("return document.documentElement.dataset.theme"))

    def requests(self) -> list[str]:
        """The address of everything that the browser has asked for since the page was opened."""
        events = (json.loads(entry["message"])["message"] for entry in self.browser.get_log("performance"))
        sent = (event for event in events if event["method"] == "Network.requestWillBeSent")
        ours = (event["params"] for event in sent if event["params"]["documentURL"] == self.address)
        return [event["request"]["url"] for event in ours]


@pytest.fixture(scope="module")
def report(browser: Any, scored: Store, tmp_path_factory: pytest.TempPathFactory) -> Page:
    return Page(browser, tmp_path_factory.mktemp("page") / "report.html", scored)


def test_it_loads_without_errors_or_requests(report: Page) -> None:
    assert [url for url in report.requests() if not url.startswith(("data:", "blob:"))] == [report.address]
    assert report.browser.get_log("browser") == []


def test_nothing_from_outside_is_loaded_and_no_other_script_runs(report: Page) -> None:
    """Not even one that somebody got into the page."""
    policy = report.find("meta[http-equiv=Content-Security-Policy]").get_attribute("content")
    rules = dict(rule.split(" ", 1) for rule in policy.split("; "))
    assert rules["default-src"] == rules["base-uri"] == rules["form-action"] == "'none'"
    assert re.fullmatch(r"'sha256-[\w+/]{43}='", rules["script-src"])
    assert not re.search(r"https?:|\*|eval", policy)
    report.browser.execute_script(
        "const script = document.createElement('script'); script.textContent = 'document.title = \"hacked\"';"
        "document.body.append(script);"
    )
    assert report.browser.title != "hacked"
    assert any("Content Security Policy" in entry["message"] for entry in report.browser.get_log("browser"))


@pytest.mark.parametrize("key", MATRICES)
def test_every_matrix_is_a_table_with_shades(report: Page, key: str) -> None:
    assert report.find(f"#{key} table").size["width"] > 200 and len(report.find(f"#{key} .caption").text) > 40
    script = "return [...document.querySelectorAll(arguments[0])].map(e => getComputedStyle(e).backgroundColor)"
    shades = report.browser.execute_script(script, f"#{key} .matrix :is(.above, .below)")
    assert len(set(shades)) > 1 and not any("rgb(0, 0, 0)" in shade for shade in shades)


def shares(report: Page, column: int) -> list[float]:
    cells = report.texts(f"#tensor-table tbody tr:not([hidden]) > :nth-child({column})")
    return [float(cell.rstrip("%")) for cell in cells if cell != "–"]


def test_the_tensors_can_be_sorted(report: Page) -> None:
    header = "#tensor-table th:nth-child(8)"
    report.click(f"{header} button")
    assert report.find(header).get_attribute("aria-sort") == "ascending"
    ascending = shares(report, 8)
    assert ascending == sorted(ascending) and len(set(ascending)) > 2
    report.click(f"{header} button")
    assert report.find(header).get_attribute("aria-sort") == "descending"
    assert shares(report, 8) == sorted(ascending, reverse=True)
    report.click("#tensor-table th:nth-child(1) button")
    names = report.texts("#tensor-table tbody th")
    assert names.index("encoder.layer.2.up.weight") < names.index("encoder.layer.10.up.weight")


def test_the_tensors_can_be_searched(report: Page) -> None:
    box = report.find("#search")
    box.send_keys("layer.10 linear")
    assert report.texts("#tensor-table tbody tr:not([hidden]) th") == [
        "encoder.layer.10.down.weight",
        "encoder.layer.10.up.weight",
    ]
    assert report.find("#count").text == "2 of 12 tensors"
    box.clear()
    box.send_keys(" ")
    assert report.find("#count").text == "12 of 12 tensors"


def test_the_experts_can_be_sorted(report: Page) -> None:
    report.click("#experts th:nth-child(1) button")
    report.click("#experts th:nth-child(1) button")
    assert report.texts("#experts tbody th") == ["pets", "digits", "cars"]
    report.click("#experts th:nth-child(2) button")
    assert report.texts("#experts tbody th") == list(EXPERTS)


def test_light_and_dark(report: Page) -> None:
    def background() -> str:
        return str(report.browser.execute_script("return getComputedStyle(document.body).backgroundColor"))

    def ink() -> str:
        script = "return getComputedStyle(document.querySelector('#shares td')).color"
        return str(report.browser.execute_script(script))

    assert report.theme() == "light"
    light = background(), ink()
    report.click("#theme")
    report.wait("return document.documentElement.dataset.theme === 'dark'")
    assert background() != light[0] and ink() != light[1]
    report.browser.execute_script("dispatchEvent(new Event('beforeprint'))")
    assert report.theme() == "light"
    report.browser.execute_script("dispatchEvent(new Event('afterprint'))")
    assert report.theme() == "dark"
    report.click("#theme")
    assert (report.theme(), background()) == ("light", light[0])


def test_the_system_chooses_the_colours(report: Page) -> None:
    def prefer(scheme: str) -> None:
        features = {"features": [{"name": "prefers-color-scheme", "value": scheme}]}
        report.browser.execute_cdp_cmd("Emulation.setEmulatedMedia", features)

    try:
        prefer("dark")
        report.browser.refresh()
        report.wait("return document.documentElement.dataset.ready === 'yes'")
        assert report.theme() == "dark"
        prefer("light")
        report.wait("return document.documentElement.dataset.theme === 'light'")
    finally:
        prefer("light")


def printed(report: Page) -> list[str]:
    """The text of each sheet of paper, without spaces: a PDF knows but where letters are."""
    found = report.browser.execute_cdp_cmd("Page.printToPDF", {"preferCSSPageSize": True})
    sheets = PdfReader(BytesIO(b64decode(found["data"]))).pages
    return ["".join(normalize("NFKC", sheet.extract_text()).split()) for sheet in sheets]  # a font has ﬂ for fl


def test_no_table_is_cut_by_the_end_of_a_page(report: Page) -> None:
    sheets = printed(report)
    assert 1 < len(sheets) < 10
    for number, sheet in enumerate(sheets, 1):
        assert f"{number}/{len(sheets)}" in sheet and "mergestreamreport" in sheet
    assert "3expertsmergedbyopcm" in sheets[0]
    for key in MATRICES:
        title, caption = (
            "".join(normalize("NFKC", report.texts(f"#{key} {part}")[0]).split()) for part in ("h2", ".caption")
        )
        assert any(title in sheet and caption in sheet for sheet in sheets), f"{key} is cut"


def test_paper_shows_no_buttons(report: Page) -> None:
    report.browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": "print"})
    try:
        assert not report.find("#theme").is_displayed() and not report.find("#search").is_displayed()
    finally:
        report.browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": ""})


def test_a_phone_shows_long_names_without_scrolling_the_page(browser: Any, models: Path, tmp_path: Path) -> None:
    store = Store.create(tmp_path / "store", models / "base", Ledger())
    names = [f"{name}-{'a-very-long-name-of-a-run' * 4}" for name in EXPERTS]
    for name, expert in zip(names, EXPERTS, strict=True):
        store.add(models / expert, name)
    store.attach_scores(names, SCORES, experts=[0.95, 0.97, 0.9])
    metrics = {"width": 360, "height": 800, "deviceScaleFactor": 1, "mobile": False}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
    try:
        opened = Page(browser, tmp_path / "phone.html", store)
        beyond = "const page = document.documentElement; return page.scrollWidth - page.clientWidth"
        assert browser.execute_script(beyond) == 0
        table = "document.querySelector('#shares table')"
        scrolls = f"const box = {table}.parentElement; return box.scrollWidth - box.clientWidth"
        assert browser.execute_script(scrolls) > 0
        label = (
            "return getComputedStyle(document.querySelector('#expert-table td[data-label=damage]'), '::before').content"
        )
        assert browser.execute_script(label) == '"damage"'
        assert all(len(text) <= MAX_NAME for text in opened.texts("#similarity tbody th"))
    finally:
        browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})


def test_no_cell_of_the_first_table_is_printed_over_the_next(browser: Any, models: Path, tmp_path: Path) -> None:
    store = Store.create(tmp_path / "store", models / "base", Ledger())
    for name in EXPERTS:
        store.add(models / name, f"{name}-{'x' * (24 - len(name))}")
    metrics = {"width": 1280, "height": 800, "deviceScaleFactor": 1, "mobile": False}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
    try:
        opened = Page(browser, tmp_path / "wide.html", store)
        over = (
            "return [...document.querySelectorAll('#expert-table :is(th, td)')]"
            ".filter(cell => cell.scrollWidth > cell.clientWidth + 1).map(cell => cell.textContent)"
        )
        assert opened.browser.execute_script(over) == []
        boxes = [(cell.rect["x"], cell.rect["width"]) for cell in opened.all("#expert-table tbody tr:first-child > *")]
        assert all(x + width <= after + 1 for (x, width), (after, _) in itertools.pairwise(boxes))
    finally:
        browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})


def test_an_empty_store_has_a_page_too(browser: Any, models: Path, tmp_path: Path) -> None:
    opened = Page(browser, tmp_path / "empty.html", Store.create(tmp_path / "store", models / "base"))
    assert len(opened.all("#tensor-table tbody tr")) == 12
    assert browser.get_log("browser") == []


def test_one_expert_has_no_similarity(browser: Any, models: Path, tmp_path: Path) -> None:
    opened = Page(browser, tmp_path / "one.html", make_store(tmp_path / "store", models, EXPERTS[:1]))
    assert [section.get_attribute("id") for section in opened.all(".sections > section")] == [
        "experts",
        "shares",
    ]
    assert browser.get_log("browser") == []


def test_a_method_that_projects_nothing(browser: Any, models: Path, tmp_path: Path) -> None:
    store = Store.create(tmp_path / "store", models / "base", Average())
    for name in EXPERTS:
        store.add(models / name)
    opened = Page(browser, tmp_path / "average.html", store)
    assert set(opened.texts("#shares tbody td")) == {"100.0%"}
    assert browser.get_log("browser") == []


def test_names_are_text_and_never_markup(
    browser: Any, models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = """</script><img src=x onerror="document.title='hacked'">&amp;"""
    store = Store.create(tmp_path / "store", models / "base", OPCM())
    with monkeypatch.context() as patch:  # `add` refuses it, a store of somebody else may have it
        patch.setattr("mergestream.store.add.free_name", lambda name, *_: name)
        store.add(models / "cars", name)
    store.add(models / "pets")
    opened = Page(browser, tmp_path / "names.html", store)
    assert opened.texts("#experts tbody th")[0] == short_name(name)
    assert browser.title == "store · mergestream"
    assert opened.all("img[src=x]") == []
    assert browser.get_log("browser") == []
