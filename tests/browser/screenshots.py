"""`make screenshots`: start everything on a fresh data folder, make a run, and photograph each page.

Without arguments docs/screenshot.png alone; `python -m tests.browser.screenshots FOLDER` writes every page, light and
dark, 1400 and 700 pixels wide.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from playwright.sync_api import Browser, sync_playwright

ROOT = Path(__file__).resolve().parent.parent.parent
README_IMAGE = ROOT / "docs" / "screenshot.png"


def manage(data: Path, *arguments: str) -> str:
    environment = {**os.environ, "INSPECTOR_DATA": str(data)}
    command = [sys.executable, "manage.py", *arguments]
    return subprocess.run(command, cwd=ROOT, env=environment, check=True, capture_output=True, text=True).stdout


def start(data: Path) -> tuple[subprocess.Popen[str], str]:
    """The server, and its login link."""
    environment = {**os.environ, "INSPECTOR_DATA": str(data)}
    command = [sys.executable, "manage.py", "serve", "--port", "8700"]
    server = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True)
    assert server.stdout is not None
    for line in server.stdout:
        if found := re.search(r"http://\S+/login\?token=\S+", line):
            return server, found[0]
    raise SystemExit("The server ended before it was ready.")


def main() -> None:
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else None
    chromium = os.environ.get("CHROMIUM") or shutil.which("chromium") or shutil.which("google-chrome")
    data = Path(tempfile.mkdtemp(prefix="inspector-screenshots-"))
    server, link = start(data)
    try:
        # Messages that are rendered and encoded anew each turn: the way that breaks streams, for something to see.
        options = ["--prompts", "16", "--group", "4", "--seed", "5", "--wait", "--json"]
        broken = json.loads(manage(data, "launch_rollouts", "--strategy", "retokenize", *options))["run"]
        findings = json.loads(manage(data, "findings", broken, "--json"))
        worst = next(one for one in findings if one["axis"] == "stream" and one["severity"] == "error")
        kept = json.loads(manage(data, "launch_rollouts", "--strategy", "tool_delta", *options))["run"]
        shown = max(json.loads(manage(data, "findings", kept, "--json")), key=lambda one: one["step"])
        with sync_playwright() as playwright:
            browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
            address = link.split("/login")[0]
            state = log_in(browser, link)
            place = f"/trajectories/{worst['trajectory']}"
            readme = f"{address}/trajectories/{shown['trajectory']}?view=tokens&lens=logprob"
            shoot(browser, state, readme, README_IMAGE, "light", 1400)
            pages = {"runs": "/", "new": "/runs/new", "run": f"/runs/{broken}", "import": "/import", "help": "/help",
                     "tokens": place, "window": f"{place}?view=tokens&lens=logprob", "compare": f"{place}/compare",
                     "deltas": f"{place}/deltas", "mask": f"{place}/mask", "templates": "/templates",
                     "tokenizers": "/tokenizers", "workers": "/workers", "shares": "/shares"}
            for name, path in pages.items() if folder else ():
                for scheme in ("light", "dark"):
                    for width in (1400, 700):
                        assert folder is not None
                        target = folder / f"{name}-{scheme}-{width}.png"
                        shoot(browser, state, address + path, target, scheme, width, whole=True)
            browser.close()
    finally:
        server.send_signal(signal.SIGTERM)
        server.wait(30)
        shutil.rmtree(data, ignore_errors=True)


def log_in(browser: Browser, link: str) -> Any:
    context = browser.new_context()
    context.new_page().goto(link)
    state = context.storage_state()
    context.close()
    return state


def shoot(
    browser: Browser, state: Any, url: str, target: Path, color_scheme: Any, width: int, whole: bool = False
) -> None:
    context = browser.new_context(
        viewport={"width": width, "height": 860}, color_scheme=color_scheme, storage_state=state
    )
    page = context.new_page()
    page.goto(url)
    page.wait_for_load_state("networkidle")
    target.parent.mkdir(parents=True, exist_ok=True)
    page.screenshot(path=target, full_page=whole)
    print(target)
    context.close()


if __name__ == "__main__":
    main()
