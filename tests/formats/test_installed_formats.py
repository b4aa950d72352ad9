"""Formats that other packages bring, by the entry point group ``rollout_inspector.formats``."""

import subprocess
import sys
from pathlib import Path

MODULE = """
from rollout_inspector.formats.registry import having, line_format
from rollout_inspector.streams.trajectory import Trajectory

def trajectory_of(value, number):
    return Trajectory(value["who"])

FORMAT = line_format("ours_not", "of the test", having("who"), trajectory_of)
TAKEN = line_format("own_jsonl", "a name that is taken", having("who"), trajectory_of)
NO_FORMAT = 7
"""
ENTRIES = """
[rollout_inspector.formats]
a = fake_trainer:FORMAT
b = fake_trainer:TAKEN
c = fake_trainer:NO_FORMAT
d = fake_trainer:MISSING
"""
READ = """
from rollout_inspector import formats
chosen, items = formats.read(formats.Source.of_bytes(b'{"who": "x"}\\n'))
print(chosen.name, [item.external_id for item in items], formats.FORMATS["own_jsonl"].title)
"""


def test_a_format_of_another_package_is_read_and_its_faults_stop_nothing(tmp_path: Path) -> None:
    (tmp_path / "fake_trainer.py").write_text(MODULE)
    info = tmp_path / "fake_trainer-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: fake-trainer\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(ENTRIES)
    code = f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n{READ}"
    root = Path(__file__).resolve().parents[2]
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, cwd=root)
    assert done.stdout.startswith("ours_not ['x'] ") and "a name that is taken" not in done.stdout, done.stderr
    assert "fake_trainer:NO_FORMAT, which is no Format" in done.stderr
    assert "The format d cannot be loaded from fake_trainer:MISSING" in done.stderr
