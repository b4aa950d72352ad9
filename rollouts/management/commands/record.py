"""Stand between an agent harness and a vLLM server, and store what passes.

The harness changes its base URL, and every call is stored as a step of a live trajectory. See docs/recorder.md.
"""

import asyncio
import contextlib
import json
import signal
import sys
from argparse import ArgumentParser
from pathlib import Path
from typing import Any

from aiohttp import ClientError, ClientSession, ClientTimeout, web
from django.conf import settings
from django.core.management.base import CommandError

from rollouts.management import TerminalCommand
from rollouts.management.arguments import add_project_option, project_named
from rollouts.recorder.access import token_problem
from rollouts.recorder.proxy import Recorder
from rollouts.recorder.writer import Writer
from rollouts.sampling.engines import EngineError
from rollouts.sampling.engines.http import check_host
from rollouts.store.chat_templates.tokenizers import tokenizer_named, tokenizer_names
from rollouts.store.models import Project, Run
from rollouts.store.runs.runs import ask_to_stop, create_run, delete_run, find_run, start_run

TOKEN_IS_ASKED = "Each call must name the token: in the header X-Recorder-Token, or as the base URL .../token/TOKEN/v1."
NO_TOKEN = "No token is set: every program of this machine may call, and no other machine."
GRACE_SECONDS = 30.0  # How long calls under way may take after the recorder is stopped.


class Command(TerminalCommand):
    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument("--upstream", required=True, metavar="URL", help="the server, e.g. http://127.0.0.1:8000")
        parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default: %(default)s)")
        parser.add_argument("--port", type=int, default=8100, help="0 = any free port (default: %(default)s)")
        parser.add_argument(
            "--run", default="", metavar="NAME", help="name of the new run, or code of a run to continue"
        )
        parser.add_argument(
            "--tokenizer", default="", metavar="NAME", help="registered tokenizer, for text and findings"
        )
        add_project_option(parser)
        parser.add_argument("--logprobs", action="store_true", help="ask for logprobs too, unseen by the client")
        parser.add_argument(
            "--idle-seconds", type=float, default=60.0, metavar="S",
            help="close and diagnose a trajectory without a call for so long (default: %(default)s)",
        )
        parser.add_argument(
            "--token", default=settings.RECORDER_TOKEN,
            help="what each client must name; better set INSPECTOR_RECORDER_TOKEN, because other users of this machine "
            "see the arguments of a command (default: none, and then only this machine may call)",
        )
        parser.add_argument("--json", action="store_true", help="print one JSON object at the start and one at the end")

    def handle(self, *_: Any, **options: Any) -> None:
        try:
            upstream = check_host(options["upstream"], settings.ENGINE_HOSTS)
        except EngineError as error:
            raise CommandError(str(error)) from error
        if not 0 <= options["port"] < 65536 or not options["idle_seconds"] > 0:
            raise CommandError("--port must lie between 0 and 65535, and --idle-seconds above 0.")
        if problem := token_problem(options["token"], options["host"]):
            raise CommandError(problem)
        run = _run_of(options["run"], options["tokenizer"], project_named(options["project"]))
        # The writer computes while requests pass; they must not wait long for the interpreter.
        sys.setswitchinterval(0.0005)
        asyncio.run(self._serve(run, upstream, options))

    async def _serve(self, run: Run, upstream: str, options: dict[str, Any]) -> None:
        recorder = Recorder(upstream, options["logprobs"], options["token"])
        runner = recorder.runner(GRACE_SECONDS)
        stop = asyncio.Event()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, stop.set)
        engine = await _version(recorder.upstream)
        writer = Writer(
            run, Path(settings.INSPECTOR_DATA) / "recordings", recorder.upstream, engine, options["idle_seconds"],
            recorder.stored,
        )
        recorder.writer = writer  # before the first request can arrive
        await runner.setup()
        site = web.TCPSite(runner, options["host"], options["port"])
        try:
            await site.start()
        except OSError as error:
            await runner.cleanup()
            if run.n_trajectories == 0 and run.started_at is None:
                await asyncio.to_thread(delete_run, run)
            raise CommandError(
                f"{options['host']}:{options['port']} cannot be listened on ({error.strerror}). Choose another --port."
            ) from error
        await asyncio.to_thread(start_run, run)
        port = runner.addresses[0][1]
        host = f"[{options['host']}]" if ":" in options["host"] else options["host"]
        url = f"http://{host}:{port}/v1"
        writer.start()
        try:
            self.print_result(
                options["json"],
                {"run": run.code, "url": url, "upstream": recorder.upstream, "engine": engine},
                f"Recording {recorder.upstream} ({engine or 'it does not answer yet'}) as run {run.code}.\n"
                f"Set the harness's base URL to {url} and send an X-Session-Id for each trajectory; Ctrl-C ends it.\n"
                + (TOKEN_IS_ASKED if options["token"] else NO_TOKEN),
            )
            await stop.wait()
        finally:
            await runner.cleanup()
            await asyncio.to_thread(writer.close)
        counts = writer.state()
        sentence = f"Recorded {counts['stored']} of {counts['calls']} calls as run {run.code}."
        if counts["without_ids"]:
            sentence += f" {counts['without_ids']} came back without token ids."
        if counts["not_recorded"]:
            sentence += f" {sum(counts['not_recorded'].values())} calls of other addresses passed and are not recorded."
        if counts["rescued"]:
            sentence += f" The database did not take {counts['rescued']}: import {writer.rescue_file}."
        self.print_result(options["json"], {"run": run.code, **counts}, sentence)


def _run_of(name: str, tokenizer_name: str, project: Project) -> Run:
    """A new run in a project, or the run with this code. Raises :class:`CommandError`."""
    tokenizer = tokenizer_named(project, tokenizer_name) if tokenizer_name else None
    if tokenizer_name and tokenizer is None:
        names = ", ".join(tokenizer_names(project)) or "none"
        raise CommandError(
            f"No tokenizer is registered as {tokenizer_name!r}. Registered: {names}. "
            "`manage.py register_tokenizer DIR` adds one."
        )
    run = find_run(templates=True, code=name) if name else None
    if run is not None:
        if run.kind != Run.Kind.IMPORT or run.engine != "recorder":
            raise CommandError(f"The run {name} was not recorded, so it cannot be continued. Name another --run.")
        ask_to_stop(run, False)
        return run
    return create_run(
        Run.Kind.IMPORT, name or "recorded", tokenizer=tokenizer, engine="recorder", format="recorded_calls",
        chat_template=tokenizer.chat_template if tokenizer else None, project=project,
    )


async def _version(upstream: str) -> str:
    """Name and version of the server, e.g. `vllm 0.32.0`; empty when the server does not report them."""
    with contextlib.suppress(ClientError, TimeoutError, OSError, ValueError, KeyError, TypeError):
        timeout = ClientTimeout(total=5)
        async with (
            ClientSession(timeout=timeout, trust_env=False) as session,
            session.get(f"{upstream}/version", allow_redirects=False) as answer,
        ):
            return f"vllm {json.loads(await answer.content.read(10_000))['version']}"[:60]
    return ""
