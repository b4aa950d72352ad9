"""``import_audit``: only what an audit flagged is read again and stored, and it is found as it was audited."""

import json
from functools import partial
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from django.core.management import CommandError, call_command

from rollout_inspector.commands.main import main
from rollout_inspector.guard import shard_audit
from rollouts.store import models
from rollouts.store.trajectories.trajectories import load_trajectories
from tests.samples.guard import in_this_process, lines_of

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.fixture
def audited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of an audit of two files: one clean, one with two flagged trajectories of three."""
    monkeypatch.setattr("rollout_inspector.commands.audit.on_processes", in_this_process)
    monkeypatch.setattr("rollout_inspector.commands.audit.cut_files", partial(shard_audit.cut_files, n_bytes=1))
    (tmp_path / "files").mkdir()
    (tmp_path / "files" / "clean.jsonl").write_text(lines_of("clean"))
    (tmp_path / "files" / "broken.jsonl").write_text(lines_of("observation_trained", "clean", "duplicate_call"))
    assert main(["audit", str(tmp_path / "files"), "--output", str(tmp_path / "audit")]) == 0
    return tmp_path / "audit"


def imported(folder: Path, *options: str) -> Any:
    out = StringIO()
    call_command("import_audit", str(folder), "--json", *options, stdout=out)
    return json.loads(out.getvalue())


def test_only_flagged_trajectories_are_read_and_stored(audited: Path, no_broker: None) -> None:
    (audited.parent / "files" / "clean.jsonl").unlink()  # nothing of it was flagged, so nobody opens it
    found = imported(audited)
    run = models.Run.objects.get(code=found["run"])
    assert found["page"] == f"/runs/{run.code}" and found["left_out"] == 0
    assert [one["external_id"] for one in found["trajectories"]] == ["observation_trained", "duplicate_call"]
    kinds = json.loads((audited / "audit.json").read_text())["kinds"]
    found["findings"].pop("not_decidable")  # an audit writes findings alone
    assert found["findings"] == {kind: one["findings"] for kind, one in kinds.items()}
    (first, _) = load_trajectories(list(run.trajectories.order_by("index")))
    assert first.extra["audited"] == {"file": str(audited.parent / "files" / "broken.jsonl"), "line": 1}
    only = imported(audited, "--kind", "duplicate_call")
    assert [one["external_id"] for one in only["trajectories"]] == ["duplicate_call"]
    worst = imported(audited, "--limit", "1")
    assert [one["external_id"] for one in worst["trajectories"]] == ["observation_trained"] and worst["left_out"] == 1


def test_what_cannot_be_imported_is_said(audited: Path, tmp_path: Path, no_broker: None) -> None:
    with pytest.raises(CommandError, match="no finding of the kind 'branch'"):
        call_command("import_audit", str(audited), "--kind", "branch")
    with pytest.raises(CommandError, match="holds no whole audit"):
        call_command("import_audit", str(tmp_path / "files"))
    with pytest.raises(CommandError, match="--limit must be"):
        call_command("import_audit", str(audited), "--limit", "0")
    with pytest.raises(SystemExit):  # the same by the command on the path
        main(["import-audit", str(audited), "--kind", "branch"])
    path = tmp_path / "files" / "broken.jsonl"
    path.write_text(lines_of("clean"))
    with pytest.raises(CommandError, match="changed"):
        call_command("import_audit", str(audited))
    assert not models.Run.objects.exists() and not (audited / "flagged.jsonl").exists()
