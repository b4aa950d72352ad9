"""Start the pages, the workers and all they need, and print the address.

Ctrl-C stops all of it.
"""

import contextlib
import errno
import hashlib
import http.client
import os
import signal
import socket
import sys
import time
from pathlib import Path
from typing import Any

from django.conf import settings
from django.core.management import call_command
from django.core.management.base import BaseCommand, CommandError
from django.db import connection
from django.db.migrations.executor import MigrationExecutor

from inspector.server.paths import AlreadyRunning, ServerLock, embedded_redis_socket, private_folder, write_privately
from inspector.server.redis_process import redis_command
from inspector.server.starting_page import SERVER as STARTING, StartingPage
from inspector.server.supervisor import Child, Supervisor, die_with_parent
from inspector.server.team_checks import UnsafeTeamServer, is_public, refuse_unsafe_team
from inspector.web.login import make_token
from rollouts.store.database import refusal_of_old_database
from rollouts.store.people.accounts import has_server_admin

PORTS_TRIED = 50


class Command(BaseCommand):
    help = __doc__

    def add_arguments(self, parser: Any) -> None:
        parser.add_argument("--port", type=int, default=8000, help="the first port to try (8000)")
        parser.add_argument("--host", default="127.0.0.1", help="the address to listen on (127.0.0.1)")
        parser.add_argument("--no-workers", action="store_true", help="web server and Redis only")

    def handle(self, *args: Any, **options: Any) -> None:
        if not 0 < options["port"] < 65536:
            raise CommandError(f"{options['port']} is no port; choose one between 1 and 65535.")
        if os.environ.get("MAKELEVEL"):
            die_with_parent(signal.SIGTERM)  # a killed `make` leaves no server behind
        try:
            refuse_unsafe_team(options["host"])
        except UnsafeTeamServer as unsafe:
            raise CommandError(str(unsafe)) from None
        write_privately()
        data = private_folder(settings.INSPECTOR_DATA)
        lock = ServerLock(data)
        try:
            lock.take()
        except AlreadyRunning as running:
            known_name = running.pid and not settings.TEAM_MODE
            link = f" Log in with {running.url}/login?token={make_token()} ." if known_name else ""
            raise CommandError(
                f"{running}{link} To run a second server, give it a data folder of its own: INSPECTOR_DATA=./data2."
            ) from None
        supervisor = Supervisor(self.say)
        supervisor.catch_signals()
        try:
            listener = self.listen(options["host"], options["port"])
            starting_page = StartingPage(listener)
            starting_page.open()
            self.prepare()
            host, port = options["host"], listener.getsockname()[1]
            url = f"http://{'127.0.0.1' if host in ('0.0.0.0', '::') else host}:{port}"
            lock.announce(url)
            self.start_children(supervisor, listener, starting_page, with_workers=not options["no_workers"])
            if self.wait_for_web(supervisor, listener):
                self.say(f"Rollout Inspector is ready: {self.way_in(url)}")
                if not settings.TEAM_MODE and is_public(host):
                    self.say(
                        "Other machines may reach this server, which runs in local mode: whoever has the link owns "
                        "everything. For more than one person set INSPECTOR_TEAM=1."
                    )
            supervisor.run()
        finally:
            if supervisor.children:
                self.say("Stopping ...")
            supervisor.stop()
            lock.release()
            if settings.REDIS_IS_EMBEDDED:
                embedded_redis_socket(data).unlink(missing_ok=True)

    def say(self, sentence: str) -> None:
        with contextlib.suppress(OSError):  # with a closed terminal, the children are stopped all the same
            self.stdout.write(sentence)
            self.stdout.flush()

    def way_in(self, url: str) -> str:
        """What is printed when the server is ready. In team mode no link is printed: a log may keep this line."""
        if not settings.TEAM_MODE:
            return f"{url}/login?token={make_token()}"
        first = "" if has_server_admin() else " There is no account yet: manage.py createsuperuser makes the first one."
        return f"{url}/login . People log in with their names.{first}"

    def prepare(self) -> None:
        """Bring the tables of the database and the static files up to date."""
        if sentence := refusal_of_old_database():
            raise CommandError(sentence)
        executor = MigrationExecutor(connection)
        plan = executor.migration_plan(executor.loader.graph.leaf_nodes())
        if plan:
            call_command("migrate", interactive=False, verbosity=0)
        self.register_models()
        connection.close()
        if not settings.DEBUG:
            stamp, state = settings.STATIC_ROOT / ".stamp", static_state()
            if not stamp.exists() or stamp.read_text() != state:
                call_command("collectstatic", interactive=False, clear=True, verbosity=0)
                stamp.parent.mkdir(parents=True, exist_ok=True)
                stamp.write_text(state)

    def register_models(self) -> None:
        """Have the served models' tokenizers in every form of the default project before the first launch."""
        from rollouts.jobs.launch import model_tokenizer, served_models
        from rollouts.management.arguments import project_named

        project = project_named("")
        for model in served_models().values():
            try:
                model_tokenizer(model, project)
            except (OSError, ValueError) as error:
                self.say(f"The tokenizer of the served model {model.name} cannot be used: {error}")

    def listen(self, host: str, port: int) -> socket.socket:
        """A listening socket on the first free port at or above `port`; gunicorn inherits it."""
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        for candidate in range(port, min(port + PORTS_TRIED, 65536)):
            listener = socket.socket(family, socket.SOCK_STREAM)
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                listener.bind((host, candidate))
                listener.listen(128)
                return listener
            except OSError as error:
                listener.close()
                if error.errno == errno.EADDRINUSE:
                    self.say(f"Port {candidate} is taken by another program; trying {candidate + 1}.")
                elif error.errno == errno.EACCES:
                    raise CommandError(
                        f"Port {candidate} is not allowed to this user; choose one above 1023."
                    ) from None
                else:
                    raise CommandError(f"{host} is no address of this machine ({error.strerror}).") from None
        raise CommandError(f"No port from {port} to {candidate} is free; choose another with --port.")

    def start_children(
        self, supervisor: Supervisor, listener: socket.socket, starting_page: StartingPage, *, with_workers: bool
    ) -> None:
        """Start Redis, then the web server, then the workers, so that a page answers while the workers load."""
        data: Path = settings.INSPECTOR_DATA
        logs = data / "logs"
        offline = {} if settings.HUB_ALLOWED else {"HF_HUB_OFFLINE": "1"}
        shared = {"DJANGO_SETTINGS_MODULE": "inspector.settings", "INSPECTOR_DATA": str(data), **offline}
        os.chdir(settings.BASE_DIR)
        if settings.REDIS_IS_EMBEDDED:
            redis_socket = embedded_redis_socket(data)
            command = redis_command(redis_socket, data / "redis")
            supervisor.start(Child(
                "The embedded Redis", command, logs / "redis.log",
                before_start=lambda: redis_socket.unlink(missing_ok=True),
            ))
        python = sys.executable
        web = [python, "-m", "gunicorn", "-c", "python:inspector.server.gunicorn_conf", "inspector.wsgi:application"]
        supervisor.start(Child(
            "The web server", web, logs / "web.log", env={**shared, "BIND": f"fd://{listener.fileno()}"},
            pass_fds=[listener.fileno()], orphan_signal=signal.SIGTERM,
            before_start=starting_page.close, after_end=starting_page.open,
        ))
        if not with_workers:
            return
        worker = [python, "-m", "celery", "-A", "inspector", "worker", "--prefetch-multiplier=1", "--loglevel=INFO"]
        worker += ["--without-gossip", "--without-mingle"]
        for name, title, pool, count, queues in [
            ("engine", "The engine worker", "threads", settings.ENGINE_WORKER_THREADS, settings.ENGINE_QUEUES),
            ("default", "The worker", "prefork", settings.JOBS_PER_USER + 1, ["default"]),
        ]:
            if not queues:
                continue
            command = [*worker, "-n", f"{name}-{os.getpid()}@%h", "-P", pool, "-c", str(count), "-Q", ",".join(queues)]
            # On one machine pages go first: somebody waits for them.
            command = ["nice", "-n", "5", *command] if name == "default" else command
            supervisor.start(Child(title, command, logs / f"worker-{name}.log", env=shared))

    def wait_for_web(self, supervisor: Supervisor, listener: socket.socket) -> bool:
        """Wait until the web server answers. Returns False when a signal asked to stop before."""
        host, port = listener.getsockname()[:2]
        host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
        warned, started = False, time.monotonic()
        while not supervisor.stop_requests:
            supervisor.watch_once()
            request = http.client.HTTPConnection(host, port, timeout=1)
            try:
                request.request("GET", "/health", headers={"Host": "127.0.0.1"})
                answer = request.getresponse()
                answer.read()
                if answer.getheader("Server") != STARTING:
                    return True
            except (OSError, http.client.HTTPException):
                pass
            finally:
                request.close()
            time.sleep(0.05)
            if not warned and time.monotonic() - started > 30:
                warned = True
                self.say(f"The web server has not answered for 30 s; its log: {settings.INSPECTOR_DATA}/logs/web.log")
        return False


def static_state() -> str:
    """A digest that changes with the static files and the programs that serve them."""
    digest = hashlib.sha256()
    for package in ("django", "django_htmx", "whitenoise"):
        digest.update(f"{package}={getattr(sys.modules.get(package), '__version__', '')};".encode())
    for folder in settings.STATICFILES_DIRS:
        for path in sorted(Path(folder).rglob("*")):
            if path.is_file():
                entry = path.stat()
                digest.update(f"{path.relative_to(folder)}:{entry.st_size}:{entry.st_mtime_ns};".encode())
    return digest.hexdigest()
