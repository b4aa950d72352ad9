"""``manage.py train_demo_policy``."""

from io import StringIO
from pathlib import Path

import pytest
from django.core.management import CommandError, call_command


def test_two_steps_write_a_folder(tmp_path: Path) -> None:
    out = StringIO()
    call_command("train_demo_policy", output=tmp_path / "policy", steps=2, threads=1, stdout=out)
    assert "step 2/2" in out.getvalue()
    assert (tmp_path / "policy" / "model.safetensors").stat().st_size <= 8 * 2**20


@pytest.mark.parametrize("option", ["steps", "threads"])
def test_nothing_to_do_is_said_plainly(tmp_path: Path, option: str) -> None:
    with pytest.raises(CommandError, match=f"--{option} must be at least 1"):
        call_command("train_demo_policy", output=tmp_path / "policy", **{option: 0})
    assert not (tmp_path / "policy").exists()
