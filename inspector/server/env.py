"""Typed reading of environment variables. A wrong value never raises. The default is used instead, and `system_checks`
turns each of its `problems` into a sentence. So `manage.py check` names all mistakes at once."""

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass
class EnvironmentReader:
    """The process environment, read with types; wrong values are collected in `problems`."""

    values: Mapping[str, str] = field(default_factory=lambda: os.environ)
    problems: list[tuple[str, str]] = field(default_factory=list)  # What is wrong, and the way out.

    def text(self, name: str, default: str = "") -> str:
        """The value without surrounding blanks; an empty value counts as unset."""
        return self.values.get(name, "").strip() or default

    def flag(self, name: str, default: bool) -> bool:
        """True for 1, true, yes, on; False for 0, false, no, off; upper case is fine too."""
        value = self.text(name).lower()
        if value in ("1", "true", "yes", "on", "0", "false", "no", "off"):
            return value in ("1", "true", "yes", "on")
        if value:
            self.problem(f"{name} is {value!r}, which is neither yes nor no.", f"Set {name}=1 or {name}=0.")
        return default

    def whole(self, name: str, default: int, *, least: int = 0, most: int | None = None) -> int:
        """A whole number in [least, most]."""
        value = self.text(name)
        if not value:
            return default
        try:
            number = int(value)
        except ValueError:
            self.problem(f"{name} is {value!r}, which is not a whole number.", f"Set it to a number, e.g. {default}.")
            return default
        if number < least or (most is not None and number > most):
            bounds = f"at least {least}" if most is None else f"between {least} and {most}"
            self.problem(f"{name} is {number}; it must be {bounds}.", f"Leave it unset for the default, {default}.")
            return default
        return number

    def listed(self, name: str, default: Sequence[str] = ()) -> list[str]:
        """Comma-separated values, blanks around each removed."""
        value = self.text(name)
        return [part.strip() for part in value.split(",") if part.strip()] if value else list(default)

    def folders(self, name: str, default: Sequence[Path] = ()) -> list[Path]:
        """Comma-separated absolute paths, apart from the root of the file system."""
        folders = [Path(os.path.expanduser(part)) for part in self.listed(name)] or list(default)
        if any(not path.is_absolute() or path.resolve() == Path("/") for path in folders) and self.text(name):
            self.problem(
                f"{name} holds a path that does not begin at the root, or is the root itself.",
                f"List folders, separated by commas: {name}=/models,/srv/checkpoints.",
            )
        return [path for path in folders if path.is_absolute() and path.resolve() != Path("/")]

    def choice(self, name: str, default: str, choices: Sequence[str]) -> str:
        """One of `choices`."""
        value = self.text(name, default)
        if value not in choices:
            self.problem(f"{name} is {value!r}, which is not known.", f"Set it to one of: {', '.join(choices)}.")
            return default
        return value

    def models(self, name: str) -> dict[str, dict[str, Any]]:
        """A JSON object: model name -> {"engine": ..., "path": ..., "options": {...}}."""
        value = self.text(name)
        if not value:
            return {}
        try:
            models = json.loads(value)
        except ValueError:
            models = None
        if not isinstance(models, dict) or not all(
            isinstance(entry, dict)
            and isinstance(entry.get("engine"), str)
            and isinstance(entry.get("path"), str)
            and isinstance(entry.get("options", {}), dict)
            for entry in models.values()
        ):
            self.problem(
                f"{name} cannot be read.",
                'Write JSON such as {"qwen": {"engine": "vllm", "path": "/models/qwen"}}, or leave it unset.',
            )
            return {}
        return models

    def problem(self, message: str, hint: str) -> None:
        self.problems.append((message, hint))
