"""Fixtures for what a test cannot make itself: the corpus, a Redis, a browser, an engine, workers.

What is missing skips a test with the reason, unless CI=true: then it fails, so that nothing is skipped unseen.
The corpus is not in the repository: INSPECTOR_TEST_CORPUS=absent, which the workflow says, lets its tests be skipped
even then.
"""

import contextlib
import gc
import importlib.util
import json
import os
import shutil
import signal
import socketserver
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import hypothesis
import pytest

from tests.ports import HeldPort
from tests.s3 import S3Server

# An example may take as long as a busy machine needs; on CI Hypothesis still draws the same examples each time.
hypothesis.settings.register_profile(
    "patient", hypothesis.settings(), deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("patient")

# Servers of tests write head and body apart. Without this the second one waits 40 ms for the client's acknowledgement.
socketserver.StreamRequestHandler.disable_nagle_algorithm = True

ROOT = Path(__file__).resolve().parent.parent
# The folders whose tests start processes and wait for them.
WORK_FOLDERS = ("worker", "recorder", "gpu_proof", "ops")
# The folders whose tests are run a second time when the database is PostgreSQL.
DATABASE_FOLDERS = ("api", "storage", "worker", "web", "ops", "push", "recorder", "attack", "team", "machines")

# Those of them that are run in a part of their own, so that the two parts take about as long.
STORAGE_FOLDERS = ("storage", "worker", "recorder", "machines")


@pytest.fixture(autouse=True, scope="session")
def warm_tokenizers() -> Iterator[None]:
    """Processes of the tokenizers that hundreds of tests use stay: of the demo policy, of the corpus, of model setups.

    Registering a tokenizer ends the process that looked at it, and a server keeps eight. A large one takes two seconds
    of computing to load.
    """
    from rollout_inspector.text.tokenizers import limited
    from rollout_inspector.text.tokenizers.loaded import LoadedTokenizer

    real = LoadedTokenizer.close
    demo = ROOT / "rollouts" / "sampling" / "demo_policy"

    def close(tokenizer: Any) -> None:
        folder = tokenizer.path
        if demo not in folder.parents and folder.parts[-3:-1] != ("corpus", "tokenizers"):
            real(tokenizer)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LoadedTokenizer, "close", close)
        patch.setattr(limited, "MAX_PROCESSES", 20)
        yield


@pytest.fixture(autouse=True)
def pushes_in_this_process(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pushes are read by the test's process, which sees the test's transaction; see the fixture ``push_process``."""
    from rollouts.jobs import push_process

    if "push_process" not in request.fixturenames:
        monkeypatch.setattr(push_process, "ask", push_process.answer)


@pytest.fixture(autouse=True)
def window_of_a_test(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tries are counted in windows of five minutes. Here one begins with each test, so that none ends within it."""
    began = int(time.time())
    monkeypatch.setattr("django_ratelimit.core._get_window", lambda _, period: began + period)


@pytest.fixture(autouse=True)
def faulty_writes() -> Iterator[list[str]]:
    """A write beside an open cursor fails the test: SQLite refuses it as soon as somebody else writes."""
    from tests.open_cursors import watched_cursors  # needs settings, which commands that ask here for a folder lack

    with watched_cursors() as faults:
        yield faults
    assert not faults, faults[0]


@pytest.fixture
def push_process(transactional_db: None) -> Iterator[None]:
    """Pushes are read by a push process, as on a server."""
    from rollouts.jobs import push_process

    yield
    push_process.close()


def on_ci() -> bool:
    return os.environ.get("CI", "").lower() in ("1", "true", "yes")


def missing(reason: str) -> None:
    """Skip the test that lacks something, or fail it where nothing may be skipped."""
    if on_ci():
        pytest.fail(f"CI=true allows no skips, and {reason}", pytrace=False)
    pytest.skip(reason)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Browser tests come last: Playwright keeps an event loop running, in which nobody else's can start.

    INSPECTOR_TEST_PART names the part of them that tests/run.py wants; without it all are kept.
    """
    items.sort(key=lambda item: Path(item.path).is_relative_to(ROOT / "tests" / "browser"))
    part = os.environ.get("INSPECTOR_TEST_PART")
    if not part:
        for item in items:
            if item.get_closest_marker("postgres_only") and not os.environ.get("DATABASE_URL", "").startswith(
                "postgres"
            ):
                item.add_marker(pytest.mark.skip(reason="only where DATABASE_URL names a PostgreSQL"))
        return
    is_kept = PARTS[part]
    kept, others = [], []
    for item in items:
        (kept if is_kept(item) else others).append(item)
    config.hook.pytest_deselected(items=others)
    items[:] = kept


def pytest_collection_finish() -> None:
    """Let the collector of cycles look rarely: modules and vocabularies are millions of objects that last."""
    gc.freeze()
    gc.set_threshold(50_000, 20, 50)


def _needs_database(item: pytest.Item) -> bool:
    from django.test import TransactionTestCase

    asked = {"db", "transactional_db", "live_server", "client", "admin_client"} & set(getattr(item, "fixturenames", ()))
    cls = getattr(item, "cls", None)
    return bool(
        asked or item.get_closest_marker("django_db") or (cls is not None and issubclass(cls, TransactionTestCase))
    )


def _is_plain(item: pytest.Item) -> bool:
    return not (_needs_database(item) or item.get_closest_marker("vllm") or _folder(item) == "browser")


def _runs_on_sqlite(item: pytest.Item) -> bool:
    # Several machines cannot share a SQLite database.
    return not _is_plain(item) and not item.get_closest_marker("postgres_only")


def _may_differ_on_postgres(item: pytest.Item) -> bool:
    # What vLLM does is the same on any database, and it is slow to start.
    same = item.get_closest_marker("sqlite_only") or item.get_closest_marker("vllm")
    return _folder(item) in DATABASE_FOLDERS and not same and _needs_database(item)


def _folder(item: pytest.Item) -> str:
    return Path(item.path).relative_to(ROOT / "tests").parts[0]


PARTS: dict[str, Callable[[pytest.Item], bool]] = {
    "work": lambda item: _folder(item) in WORK_FOLDERS and _runs_on_sqlite(item),
    "pages": lambda item: _folder(item) not in WORK_FOLDERS and _runs_on_sqlite(item),
    "plain": _is_plain,
    "corpus": lambda item: "corpus" in getattr(item, "fixturenames", ()),
    "storage again": lambda item: _folder(item) in STORAGE_FOLDERS and _may_differ_on_postgres(item),
    "pages again": lambda item: _folder(item) not in STORAGE_FOLDERS and _may_differ_on_postgres(item),
}


@pytest.fixture(scope="session")
def django_db_modify_db_settings() -> None:
    """Empty the tables of a PostgreSQL row by row after a test that commits.

    TRUNCATE, as Django does it, makes the files of each table and index anew and takes a second for our tables. The
    foreign keys are looked at when the transaction ends, so that the order does not matter.
    """
    from django.db import connection

    if connection.vendor == "postgresql":
        connection.ops.sql_flush = lambda style, tables, **_: [f'DELETE FROM "{table}"' for table in tables]


@pytest.fixture
def admin_client(admin_client: Any) -> Any:
    """Logged in as an admin of the server, which has a project: tests that flush the database take it away."""
    from rollouts.store.models import default_project

    default_project()
    return admin_client


@pytest.fixture(scope="session")
def corpus() -> Path:
    """Real trajectories, templates and tokenizers."""
    return corpus_folder()


def corpus_folder() -> Path:
    """INSPECTOR_CORPUS, or shared/corpus beside the checkout. Where it may be absent, the test that asks is skipped."""
    named = os.environ.get("INSPECTOR_CORPUS")
    places = [Path(named)] if named else [ROOT / "shared" / "corpus", ROOT.parent / "shared" / "corpus"]
    for place in places:
        if place.is_dir():
            return place
    if os.environ.get("INSPECTOR_TEST_CORPUS") == "absent":
        pytest.skip("INSPECTOR_TEST_CORPUS says that the corpus is absent")
    missing(
        f"the corpus is in none of: {', '.join(map(str, places))} (INSPECTOR_CORPUS names another place; "
        "INSPECTOR_TEST_CORPUS=absent does without it)"
    )
    raise AssertionError


@pytest.fixture(scope="session")
def tiny_tokenizer() -> Path:
    """The demo policy's own tokenizer folder."""
    folder = ROOT / "rollouts" / "sampling" / "demo_policy" / "model"
    if not (folder / "tokenizer.json").exists():
        missing("the demo policy has not been trained (manage.py train_demo_policy)")
    return folder


@pytest.fixture(scope="module")
def engines(tiny_tokenizer: Path) -> Iterator[None]:
    """Engines that tests start in this process end with their file."""
    from rollouts.worker.run_rollouts import close_engines

    yield
    close_engines()


@pytest.fixture
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine that ended is started again at once."""
    monkeypatch.setattr("rollouts.sampling.engines.engine_owner.PAUSES", (0.01,) * 5)


@pytest.fixture(scope="module")
def places(django_db_setup: None, django_db_blocker: Any, tiny_tokenizer: Path) -> Iterator[Any]:
    """Each place of the site, and who asks for it."""
    from tests.samples.places import stored_places

    with django_db_blocker.unblock(), stored_places(tiny_tokenizer) as dataset:
        yield dataset


def _answers(url: str) -> bool:
    import redis

    try:
        connection = redis.Redis.from_url(url, socket_connect_timeout=5, socket_timeout=5)
        try:
            return bool(connection.ping())
        finally:
            connection.close()
    except redis.RedisError:
        return False


Take = Callable[[Callable[[str, int], object]], None]


@pytest.fixture
def broker(monkeypatch: pytest.MonkeyPatch) -> Take:
    """`broker(take)`: every order to a worker goes to `take(queue, key)` instead of a broker."""
    from inspector.celery import app

    def use(take: Callable[[str, int], object]) -> None:
        monkeypatch.setattr(app, "send_task", lambda _, args, queue: take(queue or "default", args[0]))

    return use


@pytest.fixture
def sent(broker: Take) -> list[int]:
    """The keys of the jobs and runs that workers were sent for; nothing is done."""
    keys: list[int] = []
    broker(lambda _, key: keys.append(key))
    return keys


@pytest.fixture
def no_broker(broker: Take) -> None:
    """A broker that does not answer."""

    def refuse(*_: object) -> None:
        raise ConnectionError("no Redis")

    broker(refuse)


@pytest.fixture
def answered(broker: Take) -> None:
    """A worker that does each job at once."""
    from rollouts.worker.jobs import do_job

    broker(lambda _, key: do_job(key))


@pytest.fixture(scope="session")
def redis_url() -> Iterator[str]:
    """A real Redis: the embedded one, or INSPECTOR_TEST_REDIS, which the tests empty.

    Never REDIS_URL nor whatever listens on the standard port: that may hold somebody's queue.
    """
    named = os.environ.get("INSPECTOR_TEST_REDIS", "")
    if named:
        if not _answers(named):
            missing(f"no Redis answers at INSPECTOR_TEST_REDIS ({named})")
        yield named
        return
    from inspector.server.redis_process import redis_binary, redis_command

    try:
        redis_binary()
    except FileNotFoundError as error:
        missing(str(error))
    folder = Path(tempfile.mkdtemp(prefix="inspector-redis-"))
    socket = folder / "redis.sock"
    process = subprocess.Popen(redis_command(socket, folder), stdout=subprocess.DEVNULL, stderr=subprocess.STDOUT)
    url = f"unix://{socket}?db=0"
    try:
        wait_until(lambda: _answers(url), 60, "the embedded Redis answers")
        yield url
    finally:
        process.terminate()
        process.wait(60)
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def port() -> Iterator[HeldPort]:
    """A port at which nobody listens but who is told it."""
    with HeldPort() as held:
        yield held


@pytest.fixture(scope="session")
def s3() -> Iterator[S3Server]:
    """An S3 server on loopback."""
    server = S3Server()
    yield server
    server.close()


@pytest.fixture
def bucket(s3: S3Server) -> str:
    """INSPECTOR_FILES of an empty bucket."""
    return s3.new_bucket()


@pytest.fixture
def live_redis(redis_url: str, settings: object) -> Iterator[str]:
    """An emptied real Redis behind Django's cache and the Celery application, for the length of one test."""
    import redis

    connection = redis.Redis.from_url(redis_url)
    connection.flushdb()
    with redis_at(redis_url, settings):
        yield redis_url
    connection.flushdb()
    connection.close()


@pytest.fixture
def absent_redis(settings: object, tmp_path: Path) -> Iterator[None]:
    """A Redis that is away, behind Django's cache and the Celery application."""
    with redis_at(f"unix://{tmp_path}/none.sock?db=0", settings):
        yield


@contextlib.contextmanager
def redis_at(redis_url: str, settings: object) -> Iterator[None]:
    """Have Django's cache and the Celery application ask this Redis."""
    from inspector.celery import app
    from inspector.server.paths import broker_url

    settings.REDIS_URL = redis_url  # type: ignore[attr-defined]
    settings.CACHES = {  # type: ignore[attr-defined]
        **settings.CACHES,  # type: ignore[attr-defined]
        "default": {
            "BACKEND": "django.core.cache.backends.redis.RedisCache",
            "LOCATION": redis_url,
            "KEY_PREFIX": "inspector",
            "OPTIONS": {"serializer": "inspector.server.page_cache.MsgpackSerializer"},
        }
    }
    previous = app.conf.broker_url

    def point_celery_at(url: str) -> None:
        app.conf.broker_url = app.conf.broker_write_url = app.conf.broker_read_url = url
        app._after_fork()  # forgets its pools of connections, without closing what others hold
        app.__dict__.pop("control", None)

    point_celery_at(broker_url(redis_url))
    app.set_current()
    try:
        yield
    finally:
        point_celery_at(previous)


def database_url() -> str:
    """DATABASE_URL of the test's own database, for a process that is to use it too."""
    from django.db import connection

    database = connection.settings_dict
    if connection.vendor == "sqlite":
        return f"sqlite:///{database['NAME']}"
    login = f"{database['USER']}:{database['PASSWORD']}@" if database["PASSWORD"] else f"{database['USER']}@"
    return f"postgres://{login}{database['HOST']}:{database['PORT'] or 5432}/{database['NAME']}"


@pytest.fixture
def celery_worker_process(
    live_redis: str, transactional_db: None, tmp_path: Path
) -> Iterator[Callable[..., subprocess.Popen[bytes]]]:
    """Start real workers over the real Redis and the test's own database: `start("engine.demo", threads=4)`.

    Each call returns once the worker has announced itself; its log is tmp_path/worker-N.log. All end with the test.
    """
    from django.conf import settings
    from django.core.cache import cache

    from inspector.server.health import heartbeat_key

    started: list[subprocess.Popen[bytes]] = []
    environment = {
        **os.environ,
        "DJANGO_SETTINGS_MODULE": "inspector.settings",
        "DATABASE_URL": database_url(),
        "REDIS_URL": live_redis,
        "INSPECTOR_DATA": str(settings.INSPECTOR_DATA),
        "CELERY_SKIP_CHECKS": "1",  # half a second of each start
    }

    def start(queue: str, *, threads: int = 4, pool: str = "threads", env: dict[str, str] | None = None,
              timeout: float = 240) -> subprocess.Popen[bytes]:
        cache.delete(heartbeat_key(queue))
        log = tmp_path / f"worker-{len(started)}.log"
        command = [sys.executable, "-m", "celery", "-A", "inspector", "worker", "-P", pool, "-c", str(threads),
                   "-Q", queue, "--prefetch-multiplier=1", "-n", f"{queue}-{len(started)}@test", "--loglevel=INFO",
                   "--without-gossip", "--without-mingle"]
        with log.open("wb") as file:
            process = subprocess.Popen(
                command, cwd=ROOT, env={**environment, **(env or {})}, stdout=file, stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        started.append(process)
        wait_until(
            lambda: cache.get(heartbeat_key(queue)) is not None or process.poll() is not None,
            timeout,
            f"the worker of {queue} is ready",
        )
        if process.poll() is not None:
            pytest.fail(f"the worker of {queue} ended:\n{log.read_text(errors='replace')[-4000:]}")
        return process

    yield start
    for process in started:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
    for process in started:
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            pass
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait(60)
    for log in sorted(tmp_path.glob("worker-*.log")):  # shown where the test failed
        print(f"--- {log.name}\n{log.read_text(errors='replace')[-4000:]}", file=sys.stderr)


class ModelGate:
    """What the completions of the slow model pass one by one. A test that holds it knows how far a run has come."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._room, self._seconds = float("inf"), 0.2
        self.n_waiting = 0
        """Requests that are held."""

    def hold(self, after: int = 0) -> None:
        """Let so many completions pass and keep the others."""
        with self._changed:
            self._room = after

    def open(self, seconds: float = 0.0) -> None:
        """Let all of them pass. Each takes so long from now on."""
        with self._changed:
            self._room, self._seconds = float("inf"), seconds
            self._changed.notify_all()

    def pass_through(self) -> None:
        with self._changed:
            self.n_waiting += 1
            self._changed.wait_for(lambda: self._room > 0)
            self.n_waiting -= 1
            self._room -= 1
        time.sleep(self._seconds)


@pytest.fixture
def model_gate() -> Iterator[ModelGate]:
    gate = ModelGate()
    yield gate
    gate.open()


@pytest.fixture
def slow_model(tiny_tokenizer: Path, settings: object, model_gate: ModelGate) -> Iterator[dict[str, str]]:
    """The model `demo` on a server of this process: each completion takes 0.2 s and hardly any computing.

    A worker asks it for eight at once. Each trajectory calls the calculator and then answers. `model_gate` holds its
    run where a test wants it. Gives the environment of the workers.
    """
    from rollout_inspector.text.tokenizers import load

    codec = load(tiny_tokenizer)
    call = '<tool_call>\n{"name": "calculator", "arguments": {"expression": "6*7"}}\n</tool_call><|im_end|>'

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            models = {"data": [{"id": "demo", "max_model_len": 2048}]}
            self.answer({"/version": {"version": "0"}, "/v1/models": models}.get(self.path))

        def do_POST(self) -> None:
            asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            if self.path != "/v1/completions":
                return self.answer(None)
            model_gate.pass_through()
            has_called = "<tool_response>" in codec.decode(asked["prompt"])
            ids = codec.encode("The answer is 42.<|im_end|>" if has_called else call).tolist()
            self.answer({"choices": [{"token_ids": ids, "logprobs": {"token_logprobs": [-0.5] * len(ids)},
                                      "finish_reason": "stop", "stop_reason": ids[-1]}]})

        def answer(self, value: object) -> None:
            body = json.dumps(value).encode()
            with contextlib.suppress(OSError):  # a worker that was killed
                self.send_response(404 if value is None else 200)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        server.daemon_threads, server.block_on_close = True, False
        threading.Thread(target=server.serve_forever, daemon=True).start()
        options = {"url": f"http://127.0.0.1:{server.server_port}", "model": "demo", "max_live": 8}
        models = {"demo": {"engine": "vllm_server", "path": str(tiny_tokenizer), "options": options}}
        settings.INSPECTOR_MODELS = models  # type: ignore[attr-defined]
        yield {"INSPECTOR_MODELS": json.dumps(models)}
        server.shutdown()


def wait_until(condition: Callable[[], bool], seconds: float, what: str | Callable[[], str]) -> None:
    """Poll until the condition holds; fail the test with `what` when it does not in time.

    The pauses grow to a quarter of a second: most conditions ask the database, and what they wait for needs the cores.
    """
    deadline, pause = time.monotonic() + seconds, 0.02
    while not condition():
        if time.monotonic() > deadline:
            pytest.fail(f"after {seconds:g} s it was still not so that {what() if callable(what) else what}")
        time.sleep(pause)
        pause = min(pause * 1.2, 0.25)


@pytest.fixture(scope="session")
def chromium() -> str:
    """The path of a Chromium."""
    for name in (os.environ.get("CHROMIUM", ""), "chromium", "chromium-browser", "google-chrome"):
        found = shutil.which(name) if name else None
        if found:
            return found
    missing("no Chromium is installed (apt-get install chromium, or set CHROMIUM to its path)")
    raise AssertionError


@pytest.fixture(scope="session")
def vllm_available() -> bool:
    """True where vLLM is installed; the test is skipped (or fails, on CI) where it is not."""
    if importlib.util.find_spec("vllm") is None:
        missing("vLLM is not installed (`make test` installs the CPU build)")
    return True
