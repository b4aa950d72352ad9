"""The product's settings, with the data of a test run in a folder of its own that is removed at the end."""

import atexit
import os
import shutil
import tempfile
from pathlib import Path

if "INSPECTOR_TEST_DATA" not in os.environ:
    _data = tempfile.mkdtemp(prefix="inspector-test-")
    os.environ["INSPECTOR_TEST_DATA"] = _data
    atexit.register(shutil.rmtree, _data, True)
os.environ["INSPECTOR_DATA"] = os.environ["INSPECTOR_TEST_DATA"]
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("DJANGO_ALLOW_ASYNC_UNSAFE", "1")  # Playwright runs its own event loop in the test's thread

from inspector.server.env import EnvironmentReader
from inspector.server.file_storage import file_storage
from inspector.settings import *  # noqa: F403
from inspector.settings import BASE_DIR, CACHES, DATABASES, INSPECTOR_DATA

DEBUG = False
TOKENIZER_FOLDERS = [Path(tempfile.gettempdir()), BASE_DIR]
ALLOWED_HOSTS = ["localhost", "127.0.0.1", "testserver"]
WEBHOOK_HOSTS = ["hooks.example"]
PASSWORD_HASHERS = ["django.contrib.auth.hashers.MD5PasswordHasher"]
Path(INSPECTOR_DATA, "tmp").mkdir(exist_ok=True)

# A file and not memory: workers and browsers of a test open the same database from other processes and threads.
if DATABASES["default"]["ENGINE"].endswith("sqlite3"):
    DATABASES["default"]["NAME"] = INSPECTOR_DATA / "inspector.sqlite3"
    DATABASES["default"]["TEST"] = {"NAME": INSPECTOR_DATA / "test.sqlite3"}
else:
    # A name of its own, so that two test runs on one server do not drop each other's database.
    DATABASES["default"]["TEST"] = {"NAME": f"test_inspector_{os.getpid()}"}
DATABASES["default"]["CONN_MAX_AGE"] = 0

# Tests that need a real Redis ask for the `redis_url` or `live_redis` fixture.
CACHES = {**CACHES, "default": {"BACKEND": "django.core.cache.backends.locmem.LocMemCache"}}
STORAGES = {
    "default": file_storage(EnvironmentReader()),
    "staticfiles": {"BACKEND": "django.contrib.staticfiles.storage.StaticFilesStorage"},
}
STATIC_ROOT = INSPECTOR_DATA / "static"
STATICFILES_DIRS = [BASE_DIR / "static"] if (BASE_DIR / "static").is_dir() else []
WHITENOISE_USE_FINDERS = True
WHITENOISE_AUTOREFRESH = True
