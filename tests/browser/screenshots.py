"""`make screenshots`: start everything on a fresh data folder, make runs, make the pictures of README and docs.

`python -m tests.browser.screenshots FOLDER` writes every page besides, light and dark, 1400 and 700 pixels wide.
Beside the pictures lies `made.json`, a sample of the lines of the templates and styles that drew them.
"""

import hashlib
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
MADE = ROOT / "docs" / "pictures" / "made.json"
SHELL = ("templates/base.html", "static/css/base.css", "static/css/pages.css")
TRAJECTORY = (*SHELL, "templates/trajectories/*.html", "static/css/trajectory.css", "static/css/tokens.css",
              "static/css/diff.css")
PICTURES = {
    "docs/screenshot.png": ("/trajectories/{shown}?view=tokens&lens=logprob", 860, TRAJECTORY),
    "docs/pictures/gallery.png": ("/gallery", 620, (*SHELL, "templates/gallery.html", "static/css/tokens.css")),
    "docs/pictures/run.png": ("/runs/{broken}", 700, (*SHELL, "templates/runs/detail.html", "templates/runs/_*.html")),
    "docs/pictures/trajectory.png": ("/trajectories/{worst}", 800, TRAJECTORY),
}
"""Picture -> the page, the height of the window, and the files that draw the page."""
ONE_IN = 16
"""How many lines stand for one in a sample."""


def sample_of(files: tuple[str, ...]) -> list[str]:
    """About one in :data:`ONE_IN` of the different lines of files, as hashes: the same lines are chosen each time."""
    paths = [path for pattern in files for path in ROOT.glob(pattern)]
    lines = {line.strip() for path in paths for line in path.read_text("utf-8").splitlines()}
    hashes = (hashlib.blake2s(line.encode(), digest_size=4).hexdigest() for line in lines)
    return sorted(found for found in hashes if int(found, 16) % ONE_IN == 0)


def share_kept(before: list[str], now: list[str]) -> float:
    """The share of lines that two samples have in common, 0 to 1."""
    return len({*before} & {*now}) / len({*before} | {*now})


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
        manage(data, "load_gallery")
        names = {"shown": shown["trajectory"], "broken": broken, "worst": worst["trajectory"]}
        with sync_playwright() as playwright:
            browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
            address = link.split("/login")[0]
            state = log_in(browser, link)
            for picture, (path, height, _) in PICTURES.items():
                shoot(browser, state, address + path.format(**names), ROOT / picture, "light", 1400, height)
            MADE.write_text(json.dumps({name: sample_of(files) for name, (*_, files) in PICTURES.items()}) + "\n")
            place = f"/trajectories/{worst['trajectory']}"
            pages = {"runs": "/", "new": "/runs/new", "run": f"/runs/{broken}", "import": "/import", "help": "/help",
                     "tokens": place, "window": f"{place}?view=tokens&lens=logprob", "compare": f"{place}/compare",
                     "deltas": f"{place}/deltas", "mask": f"{place}/mask", "templates": "/templates",
                     "tokenizers": "/tokenizers", "workers": "/workers", "shares": "/shares", "docs": "/docs/guard"}
            for name, path in pages.items() if folder else ():
                for scheme in ("light", "dark"):
                    for width in (1400, 700):
                        assert folder is not None
                        target = folder / f"{name}-{scheme}-{width}.png"
                        shoot(browser, state, address + path, target, scheme, width, whole=True)
            browser.close()
    finally:
        server.send_signal(signal.SIGTERM)
        server.wait(60)
        shutil.rmtree(data, ignore_errors=True)


def log_in(browser: Browser, link: str) -> Any:
    context = browser.new_context()
    context.new_page().goto(link)
    state = context.storage_state()
    context.close()
    return state


def shoot(
    browser: Browser, state: Any, url: str, target: Path, color_scheme: Any, width: int, height: int = 860,
    whole: bool = False,
) -> None:
    context = browser.new_context(
        viewport={"width": width, "height": height}, color_scheme=color_scheme, storage_state=state
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
