"""An audit on a Ray cluster of two nodes, one of which dies: the tables are those of this process."""

import os
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rollout_inspector.commands import audit as command
from rollout_inspector.commands.main import main
from rollout_inspector.guard import audit_runners
from rollout_inspector.guard.audit_folder import SCHEMAS, SUMMARY, AuditFolder
from rollout_inspector.guard.audit_runners import on_ray
from rollout_inspector.guard.audit_settings import AuditSettings
from rollout_inspector.guard.shard_audit import audit, cut_files
from rollout_inspector.refusal import Refusal
from rollouts.gallery import BUNDLE
from tests.conftest import ROOT, missing

SETTINGS = AuditSettings()


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Iterator[Any]:
    """A cluster of one node; the parameter = its processors."""
    try:
        import ray
        from ray.cluster_utils import Cluster
    except ImportError:
        missing("the extra ray is not installed")

    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]))
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    monkeypatch.setenv("RAY_raylet_start_wait_time_s", "300")  # of a busy machine
    node = {"num_cpus": getattr(request, "param", 1), "object_store_memory": 80 << 20, "include_dashboard": False}
    found = Cluster(initialize_head=True, head_node_args=node)
    yield found
    ray.shutdown()
    found.shutdown()


def test_a_lost_node_costs_only_its_shards(cluster: Any) -> None:
    lost = cluster.add_node(num_cpus=1, object_store_memory=80 << 20)
    shards = {str(n): shard for n, shard in enumerate(cut_files([BUNDLE], n_bytes=20_000).shards)}
    assert len(shards) > 5
    found = {}
    for key, table in on_ray(shards, SETTINGS, cluster.address):
        if not found:
            cluster.remove_node(lost, allow_graceful=False)
        found[key] = table
    assert found.keys() == shards.keys()
    assert all(found[key].equals(audit(shard, SETTINGS)) for key, shard in shards.items())


@pytest.mark.parametrize("cluster", [0], indirect=True)
def test_the_command_ends_whole_or_with_a_sentence_when_nodes_are_lost(
    cluster: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The first node has no processor, so that the audit has none when the two others are lost."""
    monkeypatch.setattr(command, "cut_files", partial(cut_files, n_bytes=20_000))
    monkeypatch.setattr(audit_runners, "LOOK_SECONDS", 5.0)

    def audited(name: str, lost: Any = None) -> int:
        out, save = tmp_path / name, AuditFolder.save

        def save_and_lose(*of: Any) -> None:
            if not list(out.glob("shards/*.parquet")):
                cluster.remove_node(lost, allow_graceful=False)
            save(*of)

        where = ["--on", "ray", "--ray-address", cluster.address] if lost else ["--processes", "1"]
        with monkeypatch.context() as patch:
            if lost:
                patch.setattr(AuditFolder, "save", save_and_lose)
            return main(["audit", str(BUNDLE), "--output", str(out), *where])

    first, last = (cluster.add_node(num_cpus=1, object_store_memory=80 << 20) for _ in range(2))
    status = audited("alone")
    assert len(list((tmp_path / "alone").glob("shards/*.parquet"))) > 5
    assert audited("ray", first) == status
    for name in (*SCHEMAS, SUMMARY):
        assert (tmp_path / "ray" / name).read_bytes() == (tmp_path / "alone" / name).read_bytes(), name
    assert audited("lost", last) == 2
    said = capsys.readouterr().err
    assert "No node is left in the Ray cluster." in said and "The same command reads them again" in said
    assert not (tmp_path / "lost" / SUMMARY).exists() and not list(tmp_path.rglob("*.part"))


def test_no_cluster_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(Refusal, match=r"pip install 'rollout-inspector\[ray\]'"):
        next(on_ray({}, SETTINGS))


def test_a_cluster_that_does_not_answer_is_said_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray itself waits for a minute and more, and then ends the process without an exception."""
    ray = SimpleNamespace(is_initialized=lambda: False, init=lambda **_: pytest.fail("Ray was asked"))
    monkeypatch.setitem(sys.modules, "ray", ray)
    for address in ("127.0.0.1:1", "ray://127.0.0.1:1", "nowhere.invalid:1", "127.0.0.1:99999"):
        with pytest.raises(Refusal, match="No Ray cluster answers"):
            next(on_ray({}, SETTINGS, address))
