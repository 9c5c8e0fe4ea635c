"""Take the pictures of a report that the docs show: `python docs/screenshots.py runs/default/report.html`.

It needs Debian's chromium, or another that CHROMIUM names.
"""

import os
import sys
from pathlib import Path

from playwright.sync_api import sync_playwright

DOCS = Path(__file__).parent
SHOWN = ("centralized", "fedavg", "fedproc", "fedcir")
"""Of many methods, those that stay: few enough to show the bands."""


def main() -> None:
    address = Path(sys.argv[1]).resolve().as_uri()
    with sync_playwright() as playwright:
        found = os.environ.get("CHROMIUM", "/usr/bin/chromium")
        browser = playwright.chromium.launch(executable_path=found, args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 1280, "height": 900}, color_scheme="light")
        page.goto(address)
        methods = page.locator(".methods button")
        for name in methods.all_inner_texts():
            if methods.count() > len(SHOWN) and name not in SHOWN:
                methods.get_by_text(name, exact=True).click()
        page.get_by_role("heading", name="Training").evaluate("(node) => scrollTo(0, node.offsetTop - 70)")
        chart = page.locator("figure.chart svg").filter(has=page.locator("polyline")).first.bounding_box()
        page.mouse.move(chart["x"] + 0.4 * chart["width"], chart["y"] + 120)
        page.screenshot(path=DOCS / "report.png")
        phone = browser.new_page(viewport={"width": 390, "height": 844}, color_scheme="dark", device_scale_factor=1.5)
        phone.goto(address)
        distances = phone.locator("figure.chart").filter(has_text="Proxy A-distance").first
        distances.evaluate("(node) => scrollTo(0, node.getBoundingClientRect().top + scrollY - 70)")
        phone.wait_for_timeout(300)
        phone.screenshot(path=DOCS / "report-phone.png")
        browser.close()


if __name__ == "__main__":
    main()
