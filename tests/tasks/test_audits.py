"""An audit on workers: the tables of this process, when a worker is lost too, and no file but those allowed."""

import subprocess
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from django.conf import settings

from rollout_inspector.guard.shard_audit import AuditSettings, AuditShard, audit, cut_files
from rollout_inspector.refusal import Refusal
from rollouts.worker import audits
from tests.guard.test_check import lines_of

Start = Callable[..., subprocess.Popen[bytes]]
PLAIN = AuditSettings()


@pytest.fixture
def shards(tmp_path: Path) -> dict[str, AuditShard]:
    path = tmp_path / "data" / "rollouts.jsonl"
    path.parent.mkdir()
    path.write_text(lines_of("clean", "observation_trained", "duplicate_call"))
    return {str(n): shard for n, shard in enumerate(cut_files([path], n_bytes=1).shards)}


def test_a_worker_makes_the_same_tables(
    celery_worker_process: Start, shards: dict[str, AuditShard], tmp_path: Path
) -> None:
    celery_worker_process("default", threads=1, env={"INSPECTOR_AUDIT_FOLDERS": str(tmp_path / "data")})
    found = dict(audits.on_celery(shards, PLAIN))
    assert len(shards) == 3 and all(found[key].equals(audit(shard, PLAIN)) for key, shard in shards.items())


def test_a_lost_worker_is_noticed(shards: dict[str, AuditShard], monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[Any] = []
    held: dict[str, Any] = {}

    def send(shard: AuditShard, compared: AuditSettings, answer: str) -> None:
        sent.append(shard)
        if len(sent) == 1:
            held[f"{answer}:beat"] = True  # a worker takes it, and is never heard of again
        else:
            held[answer] = audits._answer(shard, compared)

    def get_many(names: list[str]) -> dict[str, Any]:
        found = {name: held[name] for name in names if name in held}
        for name in [name for name in held if name.endswith(":beat")]:
            del held[name]
        return found

    monkeypatch.setattr(audits, "_send", send)
    monkeypatch.setattr(audits, "_processes", lambda: 2)
    monkeypatch.setattr(audits, "POLL_SECONDS", 0)
    monkeypatch.setattr(audits, "cache", type("Cache", (), {"get_many": staticmethod(get_many), "delete": held.pop}))
    monkeypatch.setattr(settings, "AUDIT_FOLDERS", [Path("/")], raising=False)
    found = dict(audits.on_celery(shards, PLAIN))
    assert sent.count(shards["0"]) == 2 and len(sent) == len(shards) + 1
    assert all(found[key].equals(audit(shard, PLAIN)) for key, shard in shards.items())


def test_no_worker_is_said(shards: dict[str, AuditShard], monkeypatch: pytest.MonkeyPatch) -> None:
    other = SimpleNamespace(active_queues=lambda: {"w": [{"name": "engine.demo"}]}, stats=lambda: {"w": {}})
    monkeypatch.setattr(audits.current_app.control, "inspect", lambda timeout: other)
    with pytest.raises(Refusal, match="No worker of the queue default answers"):
        next(audits.on_celery(shards, PLAIN))


def test_a_message_opens_only_files_of_the_folders(
    shards: dict[str, AuditShard], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(settings, "AUDIT_FOLDERS", [tmp_path / "other"], raising=False)
    assert "does not lie below INSPECTOR_AUDIT_FOLDERS" in str(audits._answer(shards["0"], PLAIN))
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "link.jsonl").symlink_to(shards["0"].pieces[0]["path"])
    piece = dict(shards["0"].pieces[0]) | {"path": str(tmp_path / "other" / "link.jsonl")}
    assert "does not lie below" in str(audits._answer(AuditShard((piece,)), PLAIN))
    monkeypatch.setattr(settings, "AUDIT_FOLDERS", [tmp_path], raising=False)
    assert isinstance(audits._answer(AuditShard((piece,)), PLAIN), bytes)
    outside = AuditSettings(tokenizer="/etc")
    assert "/etc does not lie below" in str(audits._answer(shards["0"], outside))
