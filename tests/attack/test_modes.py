"""L15: what the processes write can be read by its owner alone, however they are started."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from inspector.server import paths
from inspector.server.system_checks import check_data_folder
from tests.conftest import ROOT

WRITE = "import django.conf, pathlib; (pathlib.Path(django.conf.settings.INSPECTOR_DATA) / 'written').write_text('x')"
STARTS = {
    "gunicorn": f"import inspector.wsgi; {WRITE}",
    "celery": "from inspector.celery import app; from celery.apps.worker import Worker; "
    f"Worker(app=app, pool='solo', queues='witness').on_before_init(quiet=True); {WRITE}",
}


@pytest.mark.parametrize("start", STARTS.values(), ids=STARTS)
def test_l15_a_process_started_by_hand_writes_privately(start: str, tmp_path: Path) -> None:
    data = tmp_path / "data"
    data.mkdir(mode=0o755)
    data.chmod(0o755)
    environment = {**os.environ, "INSPECTOR_DATA": str(data), "DJANGO_SETTINGS_MODULE": "inspector.settings"}
    environment.pop("DATABASE_URL", None)
    command = [sys.executable, "-c", start]
    subprocess.run(command, cwd=ROOT, env=environment, umask=0o022, check=True, timeout=120)
    assert (data / "written").is_file()
    for path in (data, *data.rglob("*")):
        assert path.stat().st_mode & 0o077 == 0, path


def test_l15_a_command_closes_the_data_folder(tmp_path: Path) -> None:
    """A command keeps the umask of its user, because it may write elsewhere. The folder of its database is closed."""
    data = tmp_path / "data"
    environment = {**os.environ, "INSPECTOR_DATA": str(data), "DJANGO_SETTINGS_MODULE": "inspector.settings"}
    environment.pop("DATABASE_URL", None)
    command = [sys.executable, "manage.py", "check"]
    subprocess.run(command, cwd=ROOT, env=environment, umask=0o022, check=True, timeout=120, stdout=subprocess.DEVNULL)
    assert data.stat().st_mode & 0o777 == 0o700
    assert (data / "secret_key").stat().st_mode & 0o777 == 0o600


def test_l15_a_folder_of_somebody_else_is_named(tmp_path: Path, settings: Any) -> None:
    settings.INSPECTOR_DATA = tmp_path / "data"
    paths.private_folder(settings.INSPECTOR_DATA)
    assert not [one for one in check_data_folder() if one.id == "inspector.W009"]
    settings.INSPECTOR_DATA.chmod(0o755)
    (said,) = [one for one in check_data_folder() if one.id == "inspector.W009"]
    assert "0755" in said.msg and "chmod 700" in str(said.hint)
