"""How the program is set up: the warnings of Django, the embedded Redis, the pins."""

import os
import re
import subprocess
import sys
from pathlib import Path

from inspector.server.redis_process import redis_binary
from tests.conftest import ROOT


def test_l19_a_deployment_behind_https_has_no_warning(tmp_path: Path) -> None:
    environment = {
        **os.environ, "INSPECTOR_DATA": str(tmp_path / "data"), "DJANGO_SETTINGS_MODULE": "inspector.settings",
        "INSPECTOR_HTTPS": "1", "ALLOWED_HOSTS": "inspector.example", "CSRF_TRUSTED_ORIGINS": "https://inspector.example",
        "INSPECTOR_TEAM": "1", "SECRET_KEY": "k" * 10 + "0123456789" * 5,
    }
    for name in ("DATABASE_URL", "DJANGO_ALLOW_ASYNC_UNSAFE"):
        environment.pop(name, None)
    command = [sys.executable, "manage.py", "check", "--deploy", "--fail-level", "WARNING"]
    ended = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert ended.returncode == 0, ended.stderr


def test_l16_the_embedded_redis_is_a_server_that_gets_fixes() -> None:
    said = subprocess.run([redis_binary(), "--version"], capture_output=True, text=True, check=True).stdout
    found = re.search(r"(Valkey|Redis) server v=(\d+)", said)
    assert found is not None and (found[1] == "Valkey" or int(found[2]) >= 7), said


def test_l16_every_package_has_one_version() -> None:
    for name in ("requirements.txt", "requirements-dev.txt", "requirements-gpu.txt"):
        lines = [line.partition("#")[0].strip() for line in (ROOT / name).read_text().splitlines()]
        loose = [line for line in lines if line and not line.startswith("-") and "==" not in line]
        assert loose == [], name
