"""Work that a browser asks several machines for."""

from typing import Any

from tests.machines.conftest import Browser


def has_ended(page: Any) -> bool:
    return page["run"]["status"] not in ("queued", "running")


def jobs_done(page: Any) -> bool:
    return all(job["status"] not in ("queued", "running") for job in page["jobs"])


def launched(browser: Browser, **changes: str) -> str:
    """The code of a run that the launch form made."""
    fields = browser.ask("/runs/new.json")["fields"]
    values = {name: field["default"] for name, field in fields.items() if field["default"] is not None}
    return str(browser.press("/runs/new.json", values | {"prompts": "2", "group": "2"} | changes).json()["code"])
