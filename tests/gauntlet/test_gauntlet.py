"""The gauntlet against a reference proxy: no property is broken without a fault, and each fault breaks its own."""

from collections import Counter
from pathlib import Path

import pytest

from rollout_inspector.gauntlet.properties import PROPERTIES
from tests.gauntlet.faults import FAULTS
from tests.gauntlet.proxy import Fault, verdicts


def test_no_property_is_broken_without_a_fault(tmp_path: Path) -> None:
    assert {name: verdict.evidence for name, verdict in verdicts(tmp_path, Fault()).items()
            if verdict.outcome != "held"} == {}


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: f"{fault.breaks}-{fault.name}".replace(" ", "-"))
def test_no_fault_survives(tmp_path: Path, fault: Fault) -> None:
    verdict = verdicts(tmp_path, fault)[fault.breaks]
    assert verdict.outcome == "broken", verdict.evidence


def test_there_are_four_faults_for_each_property() -> None:
    assert Counter(fault.breaks for fault in FAULTS) == dict.fromkeys((one.name for one in PROPERTIES), 4)
    assert len({fault.name for fault in FAULTS}) == len(FAULTS) == 60
