"""Importing a NeMo Gym file, all checks and storing included. Ratios in one run, printed, never timed tests.

Seconds are processor seconds of all threads, here and in the processes of tokenizers: those of the clock say little on
a machine that others use too.
"""

import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from django.db.models import F

from benchmarks.gym_file import rollout, write_gym_file
from benchmarks.processes import family, processor_seconds, sums
from rollout_inspector.text.tokenizers import load
from rollout_inspector.text.tokenizers.loaded import LoadedTokenizer
from rollout_inspector.text.tokenizers.worker.encoders import Reference, fast_encoder, sample_texts
from rollouts.jobs.imports import imports
from rollouts.store.bulk import insert_values
from rollouts.store.chat_templates.tokenizers import find_tokenizer, load_tokenizer
from rollouts.store.models import Content, Run, StoredStep, StoredTrajectory
from rollouts.store.runs.runs import create_run, delete_run
from rollouts.store.trajectories.contents import Contents
from tests.conftest import ROOT
from tests.tokenizers.oracles import read_definition

pytestmark = [pytest.mark.bench, pytest.mark.django_db(transaction=True)]

MB = 1_000_000
TINY = [int(n) for n in os.environ.get("BENCH_IMPORT_TINY", "50000,100000,200000").split(",")]
SIZE = int(os.environ.get("BENCH_IMPORT_MB", "100")) * MB


def tokenizer_folders(corpus: Path, tiny_tokenizer: Path) -> list[Path]:
    return [tiny_tokenizer, corpus / "tokenizers" / "qwen2.5"]


# -- the loop of source 5: json, validate_token_continuity, and a round trip of what was sampled


def turns_of(rollout: dict[str, Any]) -> list[dict[str, Any]]:
    return [item for item in rollout["response"]["output"] if "generation_token_ids" in item]


def is_continuous(turns: Sequence[dict[str, Any]]) -> bool:
    seen: list[int] = []
    for turn in turns:
        if seen and turn["prompt_token_ids"][: len(seen)] != seen:
            return False
        seen = turn["prompt_token_ids"] + turn["generation_token_ids"]
    return True


Verdicts = list[tuple[bool, bool]]


def loop(path: Path, tokenizer: Any, whole: bool) -> Verdicts:
    """For each rollout: is it continuous, is what was sampled canonical.

    ``whole``: each turn's prompt and completion go through the tokenizer; else its completion alone.
    """
    verdicts = []
    with path.open() as file:
        for line in file:
            turns = turns_of(json.loads(line))
            canonical = True
            for turn in turns:
                ids = turn["generation_token_ids"]
                start = 0
                if whole:
                    start, ids = len(turn["prompt_token_ids"]), turn["prompt_token_ids"] + ids
                again = tokenizer.encode(tokenizer.decode(ids), add_special_tokens=False)
                canonical &= again[start:] == ids[start:]
            verdicts.append((is_continuous(turns), canonical))
    return verdicts


def floor(path: Path, codec: LoadedTokenizer, whole: bool) -> tuple[float, int]:
    """Seconds of msgspec's decoding and the native encoder's work on the same data, and how many tokens that is.

    The texts are made beforehand: nothing but the two is timed.
    """
    definition = read_definition(codec.path)
    reference = Reference(definition.text)
    fast: Any = fast_encoder(definition.text, sample_texts(definition.tokenizer), reference) or reference
    decoder = msgspec.json.Decoder()
    took, n = 0.0, 0
    with path.open("rb") as file:
        for line in file:
            began = time.process_time()
            value = decoder.decode(line)
            took += time.process_time() - began
            texts = [
                codec.decode(turn["prompt_token_ids"] * whole + turn["generation_token_ids"])
                for turn in turns_of(value)
            ]
            began = time.process_time()
            encoded = fast.raw.encode_batch(texts)
            took += time.process_time() - began
            n += sum(len(one.ids) for one in encoded)
    return took, n


def our_verdicts(run: Run) -> Verdicts:
    broken = set(
        StoredStep.objects.filter(trajectory__run=run, shared_length__lt=F("parent_length")).values_list(
            "trajectory_id", flat=True
        )
    )
    drifting = {"noncanonical_sampling", "boundary_merge", "invalid_utf8"}
    drifts = set(run.findings.filter(kind__in=drifting).values_list("trajectory_id", flat=True))
    keys = run.trajectories.order_by("index").values_list("pk", flat=True)
    return [(key not in broken, key not in drifts) for key in keys]


def memory_of_an_import(path: Path, tokenizer: Path, data: Path) -> tuple[int, int]:
    """Peak memory of a process that imports a file, MB; and what it holds at the end that is not a mapped file.

    SQLite maps up to 134 MB of the database.
    """
    environment = {**os.environ, "INSPECTOR_DATA": str(data), "DJANGO_SETTINGS_MODULE": "inspector.settings"}
    code = (
        "import django; django.setup(); from django.core.management import call_command\n"
        "call_command('migrate', verbosity=0)\n"
        f"call_command('import_rollouts', {str(path)!r}, tokenizer={str(tokenizer)!r})\n"
        "held = dict(line.split(':', 1) for line in open('/proc/self/status'))\n"
        "print(*[held[name].split()[0] for name in ('VmHWM', 'RssAnon')])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env=environment, capture_output=True, text=True, check=True
    )
    peak, own = done.stdout.splitlines()[-1].split()
    return int(peak) // 1000, int(own) // 1000


def seconds(call: Callable[[], Any]) -> tuple[float, Any]:
    began = time.process_time() + _in_children()
    result = call()
    return time.process_time() + _in_children() - began, result


def _in_children() -> float:
    """Processor seconds of the processes that hold tokenizers."""
    found = sums(processor_seconds, {pid: name for pid, name in family().items() if pid != os.getpid()})
    return sum(found.values())


def import_file(path: Path, folder: Path) -> Run:
    run = create_run(Run.Kind.IMPORT, path.name, tokenizer=find_tokenizer(str(folder)))
    imports.import_files(run, [path])
    assert run.status == Run.Status.DONE and not run.n_rejected, run.error
    return run


def test_import_with_all_checks(corpus: Path, tiny_tokenizer: Path, tmp_path: Path) -> None:
    for folder in tokenizer_folders(corpus, tiny_tokenizer):
        codec = load_tokenizer(find_tokenizer(str(folder)).files_sha256)
        path = tmp_path / f"{folder.name}.jsonl"
        n = write_gym_file(path, codec, SIZE)
        ours = []
        for k in range(3):
            took, run = seconds(lambda: import_file(path, folder))  # noqa: B023
            ours.append(took)
            if k < 2:
                delete_run(run)
        completions, verdicts = seconds(lambda: loop(path, codec.hf, whole=False))  # noqa: B023
        whole, _ = seconds(lambda: loop(path, codec.hf, whole=True))  # noqa: B023
        assert our_verdicts(run) == verdicts
        new, n_new = floor(path, codec, whole=False)
        every, n_every = floor(path, codec, whole=True)
        best = min(ours)
        print(
            f"\n{folder.name}, {codec.fastest()}: {path.stat().st_size / MB:.0f} MB, {n:,} rollouts, "
            f"{run.n_steps:,} calls"
            f"\n  import with all checks and storing   {best:6.2f} s  (of {', '.join(f'{s:.2f}' for s in ours)})"
            f"\n  loop, round trip of completions      {completions:6.2f} s  {completions / best:5.1f}x ours"
            f"\n  loop, round trip of whole streams    {whole:6.2f} s  {whole / best:5.1f}x ours"
            f"\n  msgspec + {codec.encoder}, completions  {new:6.2f} s  ours is {best / new:4.2f}x  ({n_new:,} tokens)"
            f"\n  msgspec + {codec.encoder}, everything   {every:6.2f} s  ours is {best / every:4.2f}x"
            f"  ({n_every:,} tokens)"
        )
        delete_run(run)
        path.unlink()


def test_memory_does_not_grow_with_the_file(tiny_tokenizer: Path, tmp_path: Path) -> None:
    part = tmp_path / "part.jsonl"
    write_gym_file(part, load(tiny_tokenizer), 25 * MB)
    lines = part.read_bytes().splitlines()
    print("\n  MB  peak memory of the importing process, MB")
    for size in (25, 50, 100, 200):
        path = tmp_path / f"{size}.jsonl"
        with path.open("wb") as file:
            for k in range(size // 25):
                file.writelines(
                    line.replace(b'"_ng_task_index": ', b'"_ng_task_index": %d' % (k + 1)) + b"\n" for line in lines
                )
        peak, own = memory_of_an_import(path, tiny_tokenizer, tmp_path / f"data-{size}")
        print(f"{size:4d}  {peak} ({own} its own)")
        path.unlink()


def test_a_rollout_costs_its_new_tokens(tiny_tokenizer: Path, tmp_path: Path) -> None:
    """Files of about as many new tokens, in rollouts of 1 to 64 calls: what a new token costs."""
    codec = load_tokenizer(find_tokenizer(str(tiny_tokenizer)).files_sha256)
    import_file(_curve_file(tmp_path, codec, 2, 20), tiny_tokenizer)
    print("\ncalls  file MB  new tokens  us a new token  us a token of the file")
    for calls in (1, 2, 4, 8, 16, 32, 64):
        path = _curve_file(tmp_path, codec, calls, 2048 // calls)
        took, run = min((seconds(lambda: import_file(path, tiny_tokenizer)) for _ in range(2)), key=lambda r: r[0])  # noqa: B023
        every = sum(run.trajectories.values_list("steps__prompt_length", flat=True)) + run.n_sampled
        print(
            f"{calls:5d}  {path.stat().st_size / MB:7.1f}  {run.n_tokens:10,}  {took / run.n_tokens * 1e6:14.2f}"
            f"  {took / every * 1e6:22.3f}"
        )


def _curve_file(folder: Path, codec: LoadedTokenizer, calls: int, rollouts: int) -> Path:
    path = folder / f"{calls}.jsonl"
    rng, noise = random.Random(3), np.random.default_rng(3)
    lines = [json.dumps(rollout(n, rng, noise, codec, calls)) for n in range(rollouts)]
    path.write_text("\n".join(lines))
    return path


def write_tiny_file(path: Path, n: int) -> Path:
    item = {
        "type": "message",
        "content": "a",
        "prompt_token_ids": [5, 6],
        "generation_token_ids": [7],
        "generation_log_probs": [-0.1],
    }
    with path.open("w") as file:
        for k in range(n):
            file.write(json.dumps({"id": f"t{k}", "response": {"output": [item]}, "reward": 1.0}) + "\n")
    return path


def test_many_tiny_trajectories(tiny_tokenizer: Path, tmp_path: Path) -> None:
    """What a trajectory costs besides its tokens. Each of these gets a finding too."""
    n = 20_000
    took, run = seconds(lambda: import_file(write_tiny_file(tmp_path / "tiny.jsonl", n), tiny_tokenizer))
    assert StoredTrajectory.objects.filter(run=run).count() == n
    print(f"\n{n:,} trajectories of one call: {took:.1f} s, {took / n * 1e6:.0f} us each")


def test_memory_does_not_grow_with_the_number_of_trajectories(tiny_tokenizer: Path, tmp_path: Path) -> None:
    print("\ntrajectories  peak memory of the importing process, MB")
    for n in TINY:
        path = write_tiny_file(tmp_path / f"{n}.jsonl", n)
        peak, own = memory_of_an_import(path, tiny_tokenizer, tmp_path / f"data-{n}")
        print(f"{n:12,}  {peak} ({own} its own)")


def test_bodies_that_are_held(tiny_tokenizer: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On PostgreSQL: what an import costs that holds the bodies it names, by one that does not, by the clock."""

    def not_held(contents: Contents) -> None:
        insert_values(Content, sorted(contents._bodies.items()), ignore_conflicts=True)
        contents._bodies = {}

    codec = load_tokenizer(find_tokenizer(str(tiny_tokenizer)).files_sha256)
    paths = [write_tiny_file(tmp_path / "tiny.jsonl", 4000), tmp_path / "gym.jsonl"]
    write_gym_file(paths[1], codec, 25 * MB)
    print("\nfile  held s  not held s  ratio of the least")
    for path in paths:
        took: dict[str, list[float]] = {"held": [], "not held": []}
        delete_run(import_file(path, tiny_tokenizer))
        for _ in range(3):
            for name, of_one in took.items():
                with monkeypatch.context() as patched:
                    if name == "not held":
                        patched.setattr(Contents, "save", not_held)
                    began = time.perf_counter()
                    run = import_file(path, tiny_tokenizer)
                    of_one.append(time.perf_counter() - began)
                delete_run(run)
        held, plain = took.values()
        print(path.name, *(f"{min(of_one):.2f}" for of_one in (held, plain)), f"{min(held) / min(plain):.3f}")
