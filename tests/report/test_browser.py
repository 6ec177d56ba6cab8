"""The page in a browser without a window: charts, tooltips, zoom, both themes, narrow and wide, hostile names."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pipecomp.report.page import write_report
from tests.limits import HANG_S, until
from tests.report.runs import make_run, slow

webdriver = pytest.importorskip("selenium.webdriver", reason="no selenium (pip install selenium)")
BROWSER = shutil.which("chromium") or shutil.which("chromium-browser")
DRIVER = shutil.which("chromedriver")
pytestmark = pytest.mark.skipif(
    BROWSER is None or DRIVER is None,
    reason="no Chromium with its driver (scripts/system_packages.sh installs them on Debian)",
)

FLAGS = (
    "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
    "--disable-component-update --disable-sync"
)
HOSTILE = '"></script><script>window.hacked=1</script><img src=x onerror="window.hacked=2"><b>bold</b>&lt;'
CHARTS = {"loss-steps", "loss-seconds", "bytes", "ranks", "hits", "time-0", "time-1"}


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    options = webdriver.ChromeOptions()
    options.binary_location = BROWSER
    for flag in [*FLAGS.split(), f"--user-data-dir={tmp_path_factory.mktemp('browser')}"]:
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(DRIVER))
    driver.set_script_timeout(HANG_S)
    yield driver
    driver.quit()


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Return pages of a run alone, and of two side by side, one of which has a hostile name."""
    folder = tmp_path_factory.mktemp("runs")
    make_run(folder / "alone", network=slow(), told=True)
    make_run(folder / "other", {"method": "none"}, network=slow(), told=True, name=HOSTILE, model=HOSTILE)
    both = [folder / "alone", folder / "other"]
    return {"one": write_report(both[:1], folder / "one.html"), "two": write_report(both, folder / "two.html")}


def show(browser: Any, page: Path, *, width: int = 1600, dark: bool = False) -> None:
    """Open a page in a window of this width, and wait until its charts are drawn."""
    theme(browser, dark=dark)
    size = {"width": width, "height": 1000, "deviceScaleFactor": 1, "mobile": False}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    browser.get(page.as_uri())
    until(lambda: browser.execute_script("return document.body.dataset.drawn"))


def theme(browser: Any, *, dark: bool) -> None:
    wanted = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [wanted]})


def complaints(browser: Any) -> list[str]:
    """Return the messages of the browser's console since the last call."""
    return [entry["message"] for entry in browser.get_log("browser") if entry["level"] in ("SEVERE", "WARNING")]


def mouse(browser: Any, kind: str, x: float, y: float) -> None:
    button = "none" if kind == "mouseMoved" else "left"
    event = {"type": kind, "x": x, "y": y, "button": button, "clickCount": 1}
    browser.execute_cdp_cmd("Input.dispatchMouseEvent", event)


def place(browser: Any, selector: str) -> dict[str, float]:
    """Return the place of an element, once it is in the middle of the window."""
    return browser.execute_script(
        "const e = document.querySelector(arguments[0]); e.scrollIntoView({block: 'center', behavior: 'instant'});"
        "return e.getBoundingClientRect().toJSON()",
        selector,
    )


@pytest.mark.parametrize(("width", "dark"), [(1600, False), (1600, True), (400, False), (400, True)])
def test_the_page_is_whole_and_readable(browser, pages, width, dark):
    show(browser, pages["two"], width=width, dark=dark)
    assert complaints(browser) == []
    drawn = browser.execute_script("return [...document.querySelectorAll('.chart')].map(e => [e.id, e.clientWidth])")
    assert {key for key, _ in drawn} == CHARTS
    assert browser.execute_script("return performance.getEntriesByType('resource').length") == 0
    assert browser.execute_script("return document.documentElement.scrollWidth") <= width
    for key, wide in drawn:
        assert wide > 0.7 * min(width, 700), key
        shapes = f"#{key} .trace path, #{key} .scatterlayer path"
        assert browser.execute_script("return document.querySelectorAll(arguments[0]).length", shapes) > 0, key
    text, page = browser.execute_script(
        "const s = getComputedStyle(document.body);"
        "return [s.color, s.backgroundColor].map(c => c.match(/\\d+/g).map(Number))"
    )
    assert abs(sum(text[:3]) - sum(page[:3])) > 450
    assert (sum(page[:3]) < 200) == dark
    fills, sizes = browser.execute_script(
        "const texts = [...document.querySelectorAll('.xtick text, .ytick text, .legendtext')];"
        "const s = texts.map(e => getComputedStyle(e));"
        "return [s.map(x => x.fill), s.map(x => parseFloat(x.fontSize))]"
    )
    assert set(fills) == {"rgb({}, {}, {})".format(*text[:3])}
    assert min(sizes) >= 10


@pytest.mark.parametrize(("width", "page"), [(1600, "one"), (1600, "two"), (700, "two"), (400, "two")])
def test_names_do_not_stand_under_the_toolbar_or_on_the_chart(browser, pages, width, page):
    show(browser, pages[page], width=width)
    found = browser.execute_script(
        "const box = (e) => e && e.getBoundingClientRect().toJSON();"
        "return [...document.querySelectorAll('.chart')].map(e => [e.id, box(e.querySelector('.modebar')),"
        "  box(e.querySelector('.legend')), box(e.querySelector('.nsewdrag'))])"
    )
    named = [(key, bar, legend, plot) for key, bar, legend, plot in found if legend]
    assert {key for key, *_ in named} >= {"ranks", "loss-steps", "time-0"}
    for key, bar, legend, plot in named:
        assert legend["bottom"] <= plot["top"] + 1, key
        if bar is None:
            assert width < 600, key
        else:
            apart = legend["top"] >= bar["bottom"] or legend["right"] <= bar["left"]
            assert apart, (key, legend, bar)


def test_charts_and_text_follow_a_change_of_the_theme(browser, pages):
    show(browser, pages["one"], dark=False)
    fill = "return getComputedStyle(document.querySelector('.xtick text')).fill"
    light = browser.execute_script(fill)
    theme(browser, dark=True)
    until(lambda: browser.execute_script(fill) != light)


def test_a_tooltip_says_what_a_bar_is(browser, pages):
    show(browser, pages["one"])
    box = place(browser, "#bytes .trace:last-child .point path")
    mouse(browser, "mouseMoved", box["x"] + box["width"] / 2 - 3, box["y"] + box["height"] / 2)
    mouse(browser, "mouseMoved", box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
    tip = "return document.querySelector('#bytes .hoverlayer .hovertext')?.textContent"
    assert "less" in until(lambda: browser.execute_script(tip))


def test_the_time_line_can_be_zoomed(browser, pages):
    show(browser, pages["one"])
    box = place(browser, "#time-0 .nsewdrag")
    width = "const r = document.getElementById('time-0').layout.xaxis.range; return r[1] - r[0]"
    before, middle = browser.execute_script(width), box["y"] + box["height"] / 2
    mouse(browser, "mousePressed", box["x"] + 0.25 * box["width"], middle)
    for share in (0.3, 0.4, 0.5):
        mouse(browser, "mouseMoved", box["x"] + share * box["width"], middle)
    mouse(browser, "mouseReleased", box["x"] + 0.5 * box["width"], middle)
    assert until(lambda: (now := browser.execute_script(width)) < 0.5 * before and now) > 0.1 * before


def test_a_hostile_name_is_only_text(browser, pages):
    show(browser, pages["two"])
    assert browser.execute_script("return [window.hacked ?? null, document.images.length]") == [None, 0]
    assert HOSTILE in browser.execute_script("return document.querySelector('.runs').textContent")
    assert browser.execute_script("return document.querySelectorAll('b').length") == 0
    legend = browser.execute_script("return [...document.querySelectorAll('.legendtext')].map(e => e.textContent)")
    assert any(text.startswith('"></script>') for text in legend)
    assert complaints(browser) == []


def test_what_is_missing_is_named(browser, tmp_path):
    make_run(tmp_path / "run", network=slow(), trace=False)
    show(browser, write_report([tmp_path / "run"]))
    assert "no time line" in browser.execute_script("return document.getElementById('missing').textContent")
    assert browser.execute_script("return document.getElementById('time-0')") is None
