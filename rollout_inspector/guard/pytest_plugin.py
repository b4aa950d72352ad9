"""The pytest plugin: files of rollouts and locked chat templates as tests, named in the configuration of pytest. Every
run of pytest imports this module, so it loads the guard when a test of these kinds runs."""

from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import pytest

from rollout_inspector.outputs import line_of, plain


def pytest_addoption(parser: pytest.Parser) -> None:
    """Adds the settings ``tito_*``."""
    parser.addini("tito_files", "patterns of rollout files, from the root, by white space; each is a test", type="args")
    parser.addini("tito_locks", "patterns of lock files of chat templates; each template is a test", type="args")
    parser.addini("tito_tokenizer", "the folder of the tokenizer, from the root", default="")
    parser.addini("tito_fail_on", "what fails a file: as --fail-on of rollout-inspector check", default="error")


def pytest_collect_file(file_path: Path, parent: pytest.Collector) -> pytest.Collector | None:
    """A file that a pattern names, as a collector of its tests."""
    config = parent.config
    place = file_path.relative_to(config.rootpath) if file_path.is_relative_to(config.rootpath) else file_path
    for setting, kind in (("tito_files", RolloutFile), ("tito_locks", LockFile)):
        if any(fnmatch(place.as_posix(), pattern) for pattern in config.getini(setting)):
            return kind.from_parent(parent, path=file_path, nodeid=line_of(place.as_posix()))
    return None


def _tokenizer(config: pytest.Config) -> str | None:
    tokenizer: str = config.getini("tito_tokenizer")
    return str(config.rootpath / tokenizer) if tokenizer else None


class GuardTest(pytest.Item):
    """A test that the guard makes. Its failure is the report of the check, without a traceback."""

    def repr_failure(self, excinfo: pytest.ExceptionInfo[BaseException], style: Any = None) -> Any:
        """The report, or the sentence that says what cannot be used."""
        if isinstance(excinfo.value, AssertionError | ValueError):
            return plain(str(excinfo.value).strip())
        return super().repr_failure(excinfo, style)

    def reportinfo(self) -> tuple[Path, int | None, str]:
        """Where the test stands."""
        return self.path, None, f"{line_of(self.path.name)}::{self.name}"


class RolloutFile(pytest.File):
    """A file of rollouts: one test."""

    def collect(self) -> Iterator[pytest.Item]:
        """Its test."""
        yield RolloutTest.from_parent(self, name="tito")


class RolloutTest(GuardTest):
    """Whether a file of rollouts can be trained on."""

    def runtest(self) -> None:
        """Check the file."""
        from rollout_inspector.guard.assertions import assert_tito

        assert_tito(self.path, _tokenizer(self.config), fail_on=self.config.getini("tito_fail_on"))


class LockFile(pytest.File):
    """A lock file: a test for each template."""

    def collect(self) -> Iterator[pytest.Item]:
        """Its tests."""
        from rollout_inspector.guard.template_lock import read_lock

        try:
            templates = read_lock(self.path).templates
        except ValueError as error:
            raise self.CollectError(plain(str(error))) from error
        for name in templates:
            yield LockedTemplateTest.from_parent(self, name=line_of(name), template=name)


class LockedTemplateTest(GuardTest):
    """Whether a chat template is what was locked."""

    def __init__(self, template: str, **more: Any) -> None:
        super().__init__(**more)
        self.template = template

    def runtest(self) -> None:
        """Compare the template with the lock."""
        from rollout_inspector.guard.assertions import assert_template_safe

        place = self.path.parent / self.template
        is_file = place.is_file()
        tokenizer = _tokenizer(self.config) if is_file else str(place)  # None: the lock names it
        assert_template_safe(tokenizer, place if is_file else None, lock=self.path, name=self.template)
