"""`make case-studies`: load the bundled runs of training, let a worker name the causes, and photograph what is named.

The images of docs/case-studies.md: the causes of each run, and the chart of the gap of all five over training.
"""

import json
import os
import shutil
import signal
import tempfile
from pathlib import Path

from playwright.sync_api import Browser, Page, sync_playwright

from rollouts.gallery import TRAINING_RUNS
from tests.browser.screenshots import ROOT, manage, start

FOLDER = ROOT / "docs" / "case-studies"
WIDTH = 1000
CHARTS = {"gap-0": "gap-mean"}
"""Charts of *Compare runs* that the page shows, and their files."""


def main() -> None:
    data = Path(tempfile.mkdtemp(prefix="inspector-case-studies-"))
    server, link = start(data)
    try:
        codes = json.loads(manage(data, "load_gallery", "--training", "--json"))
        chromium = os.environ.get("CHROMIUM") or shutil.which("chromium") or shutil.which("google-chrome")
        with sync_playwright() as playwright:
            browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
            shoot_all(browser, link, codes)
            browser.close()
    finally:
        server.send_signal(signal.SIGTERM)
        server.wait(60)
        shutil.rmtree(data, ignore_errors=True)


def shoot_all(browser: Browser, link: str, codes: dict[str, str]) -> None:
    """``codes``: the name of a bundled run -> the code of the run that it became."""
    page = browser.new_context(viewport={"width": WIDTH, "height": 900}, color_scheme="light").new_page()
    page.goto(link)
    address, runs = link.split("/login")[0], [codes[one.name] for one in TRAINING_RUNS]
    FOLDER.mkdir(exist_ok=True)
    for one in TRAINING_RUNS:
        page.goto(f"{address}/runs/{codes[one.name]}/gap")
        if page.locator("#causes-title").count() == 0:
            page.get_by_role("button", name="Name the causes of the gap").click()
            page.wait_for_selector("#causes-title", timeout=120_000)
        shoot_card(page, "#causes-title", one.name)
    page.goto(f"{address}/runs/compare?" + "&".join(f"run={code}" for code in runs))
    page.wait_for_load_state("networkidle")
    for chart, name in CHARTS.items():
        shoot_card(page, f"#{chart}-title", name)


def shoot_card(page: Page, heading: str, name: str) -> None:
    """Photograph the card that has this heading."""
    card = page.locator(f"section.card:has({heading})")
    card.scroll_into_view_if_needed()
    card.screenshot(path=FOLDER / f"{name}.png")
    print(FOLDER / f"{name}.png")


if __name__ == "__main__":
    main()
