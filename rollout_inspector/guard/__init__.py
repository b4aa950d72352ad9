"""Checks that run where the work happens: in a pull request and in a trainer. No server and no database. The names are
loaded at first use, so that ``import rollout_inspector.guard`` costs a trainer nothing."""

from importlib import import_module
from typing import Any

_NAMES = {
    "assertions": ("assert_template_safe", "assert_tito"),
    "checked_files": ("CheckedFiles", "check_files"),
    "checked_templates": ("PURPOSES", "CheckedTemplate", "check_template"),
    "fail_rules": ("FailRule", "fail_rule", "read_baseline", "verdict_on"),
    "mended_file": ("MendRefused", "mend_file"),
    "mended_trajectory": ("mend_trajectory",),
    "report_formats": ("REPORTS",),
    "shard_audit": ("AuditSettings", "audit", "cut_files"),
    "template_lock": ("compare_with_lock", "lock_text", "read_lock"),
    "trainer_guard": ("Guard", "GuardFailed"),
}
_HOME = {name: module for module, names in _NAMES.items() for name in names}
__all__ = sorted(_HOME)


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
