"""Checks that run where the work happens: in a pull request and in a trainer. No server and no database. The names are
loaded at first use, so that ``import rollout_inspector.guard`` costs a trainer nothing."""

from importlib import import_module
from typing import Any

_HOME = {
    "Guard": "trainer_guard",
    "GuardFailed": "trainer_guard",
    "AuditSettings": "shard_audit",
    "AuditShard": "shard_audit",
    "CheckedFiles": "checked_files",
    "assert_template_safe": "assertions",
    "assert_tito": "assertions",
    "audit": "shard_audit",
    "check_files": "checked_files",
    "cut_files": "shard_audit",
    "FailRule": "fail_rules",
    "fail_rule": "fail_rules",
    "mend_file": "mended_file",
    "MendOptions": "mended_file",
    "MendRefused": "mended_file",
    "mend_trajectory": "mended_trajectory",
    "read_baseline": "fail_rules",
    "verdict_on": "fail_rules",
    "REPORTS": "report_formats",
    "CheckedTemplate": "checked_templates",
    "NamedTemplate": "checked_templates",
    "PURPOSES": "checked_templates",
    "check_template": "checked_templates",
    "compare_with_lock": "template_lock",
    "lock_text": "template_lock",
    "read_lock": "template_lock",
}
__all__ = sorted(_HOME)


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
