"""An audit on a Ray cluster of two nodes, one of which dies: the tables are those of this process."""

import os
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from rollout_inspector.guard.audit_runners import on_ray
from rollout_inspector.guard.audit_settings import AuditSettings
from rollout_inspector.guard.shard_audit import audit, cut_files
from rollout_inspector.refusal import Refusal
from rollouts.gallery import BUNDLE
from tests.conftest import ROOT, missing

SETTINGS = AuditSettings()


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    try:
        import ray
        from ray.cluster_utils import Cluster
    except ImportError:
        missing("the extra ray is not installed")

    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]))
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    node = {"num_cpus": 1, "object_store_memory": 80 << 20, "include_dashboard": False}
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
