"""The work that bench_faults.py disturbs: how each kind is asked for, when it has ended, whether it is right."""

import hashlib
import http.client
import json
import threading
import time
import urllib.error
import urllib.request
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

from django.core.files.uploadedfile import SimpleUploadedFile
from django.db import connection

from rollout_inspector.client.client import Client
from rollouts.jobs import template_checks
from rollouts.jobs.broker import send_job
from rollouts.jobs.exports import exports
from rollouts.jobs.imports import imports
from rollouts.jobs.launch import LaunchSettings, launch, resume
from rollouts.store import files
from rollouts.store.chat_templates.chat_templates import register_chat_template
from rollouts.store.chat_templates.tokenizers import load_tokenizer
from rollouts.store.jobs.jobs import ask_job
from rollouts.store.models import ACTIVE, ApiToken, ChatTemplate, Job, Run, TemplateCheck, Tokenizer
from rollouts.store.people.accounts import local_user
from rollouts.store.people.shares import create_api_key
from rollouts.store.runs.runs import create_run
from rollouts.store.trajectories.save_trajectories import DIAGNOSED_TO
from rollouts.store.trajectories.trajectories import load_trajectory

Digest = dict[str, tuple[str, ...]]
"""External id of a trajectory -> the hash of each step's ids."""


@dataclass(frozen=True)
class Verdict:
    """What a piece of work left behind."""

    is_whole: bool
    lost: int = 0
    """Trajectories that are missing or hold other ids than those of the undisturbed work."""
    doubled: int = 0
    why: str = ""


def digest_of(run: Run) -> tuple[Digest, int]:
    """What a run stores, and how many trajectories or steps it stores twice or with a gap."""
    found: Digest = {}
    doubled = 0
    for record in run.trajectories.filter(status="done").order_by("index"):
        value = load_trajectory(record)
        doubled += record.external_id in found
        doubled += list(record.steps.order_by("index").values_list("index", flat=True)) != list(range(record.n_steps))
        found[record.external_id] = tuple(hashlib.sha256(step.stream.tobytes()).hexdigest() for step in value.steps)
    doubled += sum(found[key] != () for key in found) != len(found)
    return found, doubled


def verdict_on(run: Run, expected: Digest | None, n_findings: int) -> Verdict:
    """``expected``: the undisturbed run's; None while that one is made."""
    run.refresh_from_db()
    found, doubled = digest_of(run)
    wrong = [key for key in expected or {} if found.get(key) != (expected or {})[key]]
    more = len(found.keys() - expected.keys()) if expected is not None else 0
    totals = (run.n_steps, run.n_finished) == (sum(map(len, found.values())), len(found))
    why = "" if totals else f"the totals of the run say {run.n_steps} steps of {run.n_finished} trajectories. "
    held = sum(run.finding_counts.values())
    if expected is not None and held != n_findings:
        why += f"{held} findings, not {n_findings}. "
    if run.status != Run.Status.DONE:
        why += f"{run.status}: {run.error[:200]} "
    return Verdict(not (wrong or more or doubled or why), len(wrong), doubled + more, why)


class Work(ABC):
    """One kind of work. ``ask`` begins a piece of it; the piece that ``keep`` takes is what later ones must equal."""

    kind = ""

    def __init__(self, files: dict[str, bytes], url: str, token: str) -> None:
        self.files, self.url, self.token = files, url, token

    @abstractmethod
    def ask(self, n: int) -> None: ...

    @abstractmethod
    def has_ended(self) -> bool: ...

    @abstractmethod
    def verdict(self) -> Verdict: ...

    @abstractmethod
    def resume(self) -> None:
        """What a person would press, or a trainer do, when it has ended without a result."""

    @abstractmethod
    def keep(self) -> None: ...


class RunWork(Work):
    run: Run
    expected: Digest | None = None
    n_findings = 0

    def has_ended(self) -> bool:
        self.run.refresh_from_db()
        return self.run.status not in ACTIVE

    def verdict(self) -> Verdict:
        return verdict_on(self.run, self.expected, self.n_findings)

    def keep(self) -> None:
        self.expected, _ = digest_of(self.run)
        self.n_findings = sum(self.run.finding_counts.values())


class Launched(RunWork):
    kind = "launch"

    def ask(self, n: int) -> None:
        self.run = launch(LaunchSettings(prompts=40, group=4, seed=7), f"launch {n}")

    def resume(self) -> None:
        resume(self.run)


class Imported(RunWork):
    kind = "import"

    def ask(self, n: int) -> None:
        tokenizer = Tokenizer.objects.get(name="demo")
        self.run = create_run(
            Run.Kind.IMPORT, f"import {n}", tokenizer=tokenizer, chat_template=tokenizer.chat_template
        )
        uploads = [SimpleUploadedFile(name, body) for name, body in self.files.items()]
        imports.send_import(self.run, imports.ask_for_uploads(self.run, uploads, "auto", False))

    def resume(self) -> None:
        imports.resume(self.run)


class Pushed(RunWork):
    kind = "push"
    BATCH = 20

    def ask(self, n: int) -> None:
        self.client = Client(self.url, self.token)
        self.name = f"push {n}"
        self.error = ""
        self._begin()

    def _begin(self) -> None:
        self._thread = threading.Thread(target=self._push, daemon=True)
        self._thread.start()

    def _push(self) -> None:
        try:
            if self.client.run is None:
                self.client.create_run(self.name, tokenizer="demo")
            lines = [line for body in self.files.values() for line in body.splitlines()]
            for n in range(0, len(lines), self.BATCH):
                self.client.push(lines[n : n + self.BATCH], prefix="")
            self.error = ""
        except Exception as error:
            self.error = f"{type(error).__name__}: {error}"
        finally:
            connection.close()

    def has_ended(self) -> bool:
        if self._thread.is_alive():
            return False
        if self.error:
            return True
        self.run = Run.objects.get(code=self.client.run)
        return self.run.status not in ACTIVE and not self.run.jobs.filter(status__in=ACTIVE).exists()

    def verdict(self) -> Verdict:
        if self.error:
            return Verdict(False, why=self.error)
        last = self.run.trajectories.order_by("-pk").values_list("pk", flat=True).first()
        if self.run.settings.get(DIAGNOSED_TO) != last:
            said = self.run.jobs.values_list("error", flat=True).first()
            return Verdict(False, why=f"it is not diagnosed to its end: {said}")
        return super().verdict()

    def resume(self) -> None:
        if self.error:
            self._begin()
            return
        job, is_new = ask_job(self.run, "diagnose_pushed")
        if is_new:
            send_job(job)


class JobWork(Work):
    job: Job
    expected: Any = None

    def has_ended(self) -> bool:
        self.job.refresh_from_db()
        return self.job.status not in ACTIVE

    def verdict(self) -> Verdict:
        if self.job.status != Job.Status.DONE:
            return Verdict(False, why=f"{self.job.status}: {self.job.error[:200]}")
        found = self.result()
        if self.expected is not None and found != self.expected:
            return Verdict(False, 1, why="its result is another one")
        return Verdict(True)

    @abstractmethod
    def result(self) -> Any: ...

    def keep(self) -> None:
        self.expected = self.result()


class OfRun(JobWork):
    """A job of the run that the undisturbed import made."""

    source: Run
    options: Mapping[str, Any] = {}

    def ask(self, n: int) -> None:
        self.job, is_new = ask_job(self.source, self.kind, self.options)
        assert is_new
        send_job(self.job)

    def result(self) -> Any:
        return self.job.report

    def resume(self) -> None:
        self.ask(0)


class Replayed(OfRun):
    kind = "replay"


class Weighed(OfRun):
    kind = "loss_weights"
    options = {"strategies": True}


class Exported(OfRun):
    kind = "export"
    options = exports.ExportOptions().as_options()

    def result(self) -> list[str]:
        with files.open_file(exports.key_of(self.job)) as file:
            lines = [json.loads(line) for line in file]
        parts = list(files.listed(exports.prefix_of(self.job.code)))
        assert len(parts) == 1, parts
        return [hashlib.sha256(json.dumps(line, sort_keys=True).encode()).hexdigest() for line in lines]


class Searched(Work):
    """Searches over the API in the run of the import, one after another. A search that was refused is asked again."""

    kind = "search"
    source: Run
    expected: list[str] | None = None
    TIMES = 2

    def ask(self, n: int) -> None:
        self.found: list[str] = []
        self.error = ""
        self._thread = threading.Thread(target=self._search, daemon=True)
        self._thread.start()

    def _search(self) -> None:
        try:
            for _ in range(self.TIMES):
                cursor = ""
                while cursor is not None:
                    asked = urlencode({"by": "text", "q": "the", "run": self.source.code, "cursor": cursor})
                    part = self._get(f"/api/v1/search?{asked}")
                    self.found += [json.dumps(line, sort_keys=True) for line in part["results"]]
                    cursor = part["next_results"]
        except Exception as error:
            self.error = f"{type(error).__name__}: {error}"

    def _get(self, path: str) -> Any:
        request = urllib.request.Request(self.url + path, headers={"Authorization": f"Bearer {self.token}"})
        until = time.monotonic() + 120
        while True:
            try:
                with urllib.request.urlopen(request, timeout=120) as answer:
                    return json.load(answer)
            except (OSError, http.client.HTTPException) as error:
                refused = isinstance(error, urllib.error.HTTPError) and error.code not in (429, 502, 503)
                if refused or time.monotonic() > until:
                    raise
                time.sleep(1)

    def has_ended(self) -> bool:
        return not self._thread.is_alive()

    def verdict(self) -> Verdict:
        if self.error:
            return Verdict(False, why=self.error)
        lost = len(set(self.expected or ()) - set(self.found))
        return Verdict(self.found == (self.expected or self.found) and bool(self.found), lost)

    def resume(self) -> None:
        self.ask(0)

    def keep(self) -> None:
        self.expected = self.found


class Checked(JobWork):
    kind = "check"
    check: TemplateCheck

    def ask(self, n: int) -> None:
        self.number = n
        tokenizer = Tokenizer.objects.get(name="demo")
        assert tokenizer.chat_template is not None
        # Each question is new, and a template that breaks has a repair that is searched for.
        text = tokenizer.chat_template.text + "{# " + str(n) + " #}"
        template: ChatTemplate = register_chat_template(text)
        self.check, to_do = template_checks.ask(tokenizer, template)
        self.job = self.check.job
        if to_do:
            send_job(self.job)

    def result(self) -> Any:
        self.check.refresh_from_db()
        return self.check.cells

    def resume(self) -> None:
        self.ask(self.number)


KINDS: tuple[type[Work], ...] = (Launched, Imported, Pushed, Exported, Checked, Replayed, Weighed, Searched)


def token_for_pushes() -> str:
    """A token of the local user that also reads."""
    scopes = (ApiToken.Scope.PUSH, ApiToken.Scope.READ)
    return create_api_key(local_user(), "faults", scopes=scopes)[1]


def gym_files(folder: Path, size: int) -> dict[str, bytes]:
    """Two files of trajectories of the demo tokenizer, with different ids: name -> body."""
    from benchmarks.gym_file import write_gym_file

    tokenizer = Tokenizer.objects.get(name="demo")
    path = folder / "part.jsonl"
    write_gym_file(path, load_tokenizer(tokenizer.files_sha256), size)
    lines = path.read_bytes().splitlines(keepends=True)
    return {"a.jsonl": b"".join(lines[: len(lines) // 2]), "b.jsonl": b"".join(lines[len(lines) // 2 :])}
