"""Test a gateway that captures tokens; exit status 0: no property is broken, 1: one is, 2: not decided.

A scripted engine stands behind the gateway and a scripted harness before it. See docs/gauntlet.md.
"""

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from argparse import ArgumentParser, Namespace
from pathlib import Path

from rollout_inspector.commands.main import ROOT
from rollout_inspector.formats import FORMATS
from rollout_inspector.gauntlet.captured import Evidence, read_captured
from rollout_inspector.gauntlet.engine import GauntletEngine
from rollout_inspector.gauntlet.gateway import command_of, started
from rollout_inspector.gauntlet.harness import GauntletHarness
from rollout_inspector.gauntlet.play import play
from rollout_inspector.gauntlet.properties import as_json, as_junit, as_text, decide, n_broken
from rollout_inspector.guard.text_files import check_place, write_whole
from rollout_inspector.refusal import Refusal

POLL_SECONDS = 0.2
BROKEN, UNDECIDED = 1, 2


def add_options(parser: ArgumentParser) -> None:
    """Adds the options of this subcommand."""
    gateway = parser.add_mutually_exclusive_group(required=True)
    gateway.add_argument("url", nargs="?", default="", metavar="URL",
                         help="the base URL of a gateway that runs, with {session} where it holds the session's name")
    gateway.add_argument("--start", default="", metavar="CMD",
                         help="start this gateway, with {engine} for the engine's address and {port} for its own port")
    gateway.add_argument("--own", action="store_true", help="start our own recorder, in a temporary data folder")
    parser.add_argument("--captured", default="", metavar="PATH", help="the file or folder that the gateway writes")
    parser.add_argument("--format", default="auto", metavar="NAME", help="its format (default: recognised)")
    parser.add_argument("--path", default="/v1", metavar="PATH",
                        help="with --start: of its base URL, such as /session/{session}/v1 (default: /v1)")
    parser.add_argument("--engine-port", type=int, default=8199, metavar="N",
                        help="with URL: where the scripted engine listens (default: 8199)")
    parser.add_argument("--settle", type=float, default=10.0, metavar="SECONDS",
                        help="with URL: how long the gateway may take to write (default: 10)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--junit", default="", metavar="FILE", help="also write JUnit XML there")


def run(options: Namespace) -> int:
    """Drive the gateway, and print the verdict of each property."""
    if not (options.own or options.captured):
        raise Refusal("--captured PATH is missing: without what the gateway wrote nothing can be decided.")
    if options.format not in ("auto", *FORMATS):
        raise Refusal(f"--format {options.format}: there are auto, {', '.join(FORMATS)}.")
    if options.url and not options.url.startswith("http://"):
        raise Refusal(f"{options.url} is no address of a gateway: write http://HOST:PORT/v1.")
    if options.junit:
        check_place(options.junit, "--junit")
    port = options.engine_port if options.url else 0
    try:
        engine = GauntletEngine(port)
    except (OSError, OverflowError) as error:
        raise Refusal(f"The scripted engine cannot listen on 127.0.0.1:{port} ({error}). Name another --engine-port, "
                      "and point the gateway at it.") from error
    with contextlib.closing(engine):
        harness = GauntletHarness(options.url, engine)
        verdicts = decide(
            (_of_recorder if options.own else _of_started if options.start else _of_running)(harness, options)
        )
    if options.junit:
        write_whole(options.junit, as_junit(verdicts).encode(), "The report")
    print(as_json(verdicts) if options.json else as_text(verdicts), end="")
    if n_broken(verdicts):
        return BROKEN
    return UNDECIDED if any(verdict.is_undecided for verdict in verdicts) else 0


def _of_started(harness: GauntletHarness, options: Namespace) -> Evidence:
    with started(command_of(options.start), harness.engine.url) as (port, _):
        harness.url = f"http://127.0.0.1:{port}{options.path}"
        play(harness)
    return read_captured(options.captured, harness, options.format)


def _of_running(harness: GauntletHarness, options: Namespace) -> Evidence:
    """Of a gateway that runs: it is given time to write, and goes on to run."""
    play(harness)
    stop_at = time.monotonic() + options.settle
    calls = [call for call in harness.engine.calls if call.is_served]
    serials = {sampled.serial for call in calls for sampled in call.choices}
    while time.monotonic() < stop_at:
        with contextlib.suppress(Refusal):
            evidence = read_captured(options.captured, harness, options.format)
            if serials <= {step.serial for step in evidence.captured}:
                break
        time.sleep(POLL_SECONDS)
    return read_captured(options.captured, harness, options.format)


def _of_recorder(harness: GauntletHarness, _: Namespace) -> Evidence:
    """Of our recorder: a data folder is made, the recorder started, and its run exported."""
    manage = [sys.executable, "-m", "rollout_inspector.commands", "manage"]
    with tempfile.TemporaryDirectory(prefix="gauntlet-data-") as folder:
        environment = {
            **os.environ, "INSPECTOR_DATA": folder, "DATABASE_URL": f"sqlite:///{folder}/inspector.sqlite3",
            "DJANGO_SETTINGS_MODULE": "inspector.settings", "INSPECTOR_RECORDER_TOKEN": "", "INSPECTOR_FILES": "",
            "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")])),
        }

        def run_command(*arguments: str) -> None:
            ran = subprocess.run(
                [*manage, *arguments], env=environment, capture_output=True, text=True, errors="replace"
            )
            if ran.returncode:
                raise Refusal(f"`manage {arguments[0]}` ended with {ran.returncode}: {ran.stderr.strip()[-400:]}")

        run_command("migrate", "--verbosity", "0")
        record = [*manage, "record", "--upstream", "{engine}", "--port", "{port}", "--logprobs", "--json",
                  "--idle-seconds", "600", "--run", "gauntlet"]
        with started(record, harness.engine.url, environment) as (port, output):
            harness.url = f"http://127.0.0.1:{port}/v1"
            play(harness)
            lines = output.read_text(errors="replace").splitlines()
        code = next(json.loads(line)["run"] for line in lines if line.startswith('{"run"'))
        file = Path(folder, "captured.jsonl")
        run_command("export_rollouts", code, "--output", str(file))
        return read_captured(file, harness)
