"""Make a picture of a report for docs/: python scripts/screenshot.py demo-out/report.html docs/demo.png [HEIGHT]

Needs Chromium with its driver (scripts/system_packages.sh) and selenium. The picture is 1400 pixels wide, from the
page's top.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
from pathlib import Path

FLAGS = "--headless --no-sandbox --disable-gpu --no-first-run --disable-background-networking --disable-sync"
DRAWN = """
const done = arguments[0], charts = document.querySelectorAll(".chart").length;
(function wait() {
  const ready = document.querySelectorAll(".chart .main-svg").length >= charts;
  setTimeout(ready ? done : wait, ready ? 1000 : 200);
})();
"""


def main(page: str, picture: str, height: str = "1000") -> None:
    """Open the page in a browser without a window, wait until its charts are drawn, and save what is seen."""
    from selenium import webdriver

    options = webdriver.ChromeOptions()
    options.binary_location = shutil.which("chromium") or shutil.which("chromium-browser") or ""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        for flag in [*FLAGS.split(), f"--user-data-dir={folder}"]:
            options.add_argument(flag)
        browser = webdriver.Chrome(options=options, service=webdriver.ChromeService(shutil.which("chromedriver")))
        try:
            size = {"width": 1400, "height": int(height), "deviceScaleFactor": 1, "mobile": False}
            browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
            browser.set_script_timeout(300)
            browser.get(Path(page).resolve().as_uri())
            browser.execute_async_script(DRAWN)
            browser.save_screenshot(picture)
        finally:
            browser.quit()


if __name__ == "__main__":
    if not 3 <= len(sys.argv) <= 4:
        raise SystemExit(__doc__)
    main(*sys.argv[1:])
