"""Screenshots of a report for the site, made by the browser of the tests.

    gatelens demo
    python docs/screenshots.py runs/demo/ioi/report/index.html

writes docs/images/page.png, page-dark.png and page-narrow.png.
"""

from __future__ import annotations

import argparse
import base64
import shutil
from pathlib import Path

from selenium import webdriver
from selenium.webdriver.support.ui import WebDriverWait

IMAGES = Path(__file__).parent / "images"
SHOTS = {"page": (1280, 1500, "light"), "page-dark": (1280, 900, "dark"), "page-narrow": (420, 900, "light")}
DRAWN = "return document.querySelectorAll('.plot-container').length > 0 && document.fonts.status === 'loaded'"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("page", type=Path, help="the index.html of a report")
    page = parser.parse_args().page.resolve()
    options = webdriver.ChromeOptions()
    options.binary_location = shutil.which("chromium") or "chromium"
    for argument in ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"):
        options.add_argument(argument)
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(shutil.which("chromedriver")))
    IMAGES.mkdir(exist_ok=True)
    try:
        for name, (width, height, scheme) in SHOTS.items():
            feature = {"name": "prefers-color-scheme", "value": scheme}
            driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [feature]})
            size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
            driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
            driver.get(page.as_uri())
            WebDriverWait(driver, 60).until(lambda browser: browser.execute_script(DRAWN))
            shot = driver.execute_cdp_cmd("Page.captureScreenshot", {"format": "png"})
            (IMAGES / f"{name}.png").write_bytes(base64.b64decode(shot["data"]))
    finally:
        driver.quit()


if __name__ == "__main__":
    main()
