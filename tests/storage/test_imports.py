"""Imports: each file whole or not at all, told how far, stopped when asked, taken up again after a crash."""

import copy
import gc
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from django.db import connection

from rollout_inspector.diagnose import Diagnosis
from rollout_inspector.diagnose.finding import Axis, Finding, Severity
from rollout_inspector.formats import Source
from rollout_inspector.streams.trajectory import Trajectory
from rollouts.jobs.imports import imports
from rollouts.store import models
from rollouts.store.chat_templates.tokenizers import load_tokenizer, register_tokenizer
from rollouts.store.runs import imports as stored_imports
from rollouts.store.runs.runs import cancel_run, create_run
from rollouts.store.trajectories.rows import row_window
from rollouts.store.trajectories.trajectories import load_trajectory
from tests.samples.formats import CALL, GYM, TRAIN, changed, jsonl, own_line

pytestmark = pytest.mark.django_db


def calls(n: int, start: int = 0) -> list[dict[str, Any]]:
    return [changed(CALL, "session_id", to=f"s{k}") for k in range(start, start + n)]


def diagnose(trajectory: Trajectory, run: models.Run) -> Diagnosis:
    return Diagnosis((Finding(Axis.STREAM, "branch", Severity.INFO, step=0),))


def read(run: models.Run, files: list[Any], find: Callable[[Trajectory, models.Run], Diagnosis]) -> None:
    """Import files with another diagnosis."""
    with mock.patch.object(imports, "diagnosis_for", find):
        imports.import_files(run, files)


def nothing_is_left_of(run: models.Run) -> bool:
    run.refresh_from_db()
    tables = (
        models.StoredTrajectory,
        models.StoredStep,
        models.StepTokens,
        models.StoredRow,
        models.StoredFinding,
        models.Content,
    )
    return not any(table.objects.exists() for table in tables) and run.n_tokens == run.n_trajectories == 0


def test_files_of_several_formats_make_one_run(run: models.Run) -> None:
    files = [Source.of_bytes(jsonl(*calls(3), b"{"), "a.jsonl"), Source.of_bytes(jsonl(GYM, TRAIN), "b.jsonl.gz")]
    read(run, files, diagnose)
    assert (run.status, run.n_trajectories, run.format) == ("done", 4, "nemo_gym, recorded_calls")
    assert run.finding_counts == {"branch": 4} and run.bytes_done == run.bytes_total > 0
    assert list(run.rejections.values_list("file", "line")) == [("a.jsonl", 4), ("b.jsonl.gz", 2)]
    assert run.n_rejected == 2


def test_a_file_that_breaks_off_leaves_nothing_and_the_others_stay(
    run: models.Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    import gzip

    monkeypatch.setattr(imports, "BATCH_TRAJECTORIES", 5)
    whole = Source.of_bytes(jsonl(changed(GYM, "_ng_task_index", to=77)), "whole.jsonl")
    lines = jsonl(*[changed(GYM, "_ng_task_index", to=n) for n in range(3000)])
    broken = Source.of_bytes(gzip.compress(lines, 1)[:-3000], "broken.jsonl.gz")
    stored: list[int] = []

    def watch(trajectory: Trajectory, run: models.Run) -> Diagnosis:
        stored.append(models.StoredTrajectory.objects.count())
        return diagnose(trajectory, run)

    read(run, [whole, broken], watch)
    assert max(stored) > 100  # parts of it had been stored
    assert (run.status, run.n_trajectories, run.n_steps) == ("done", 1, 2)
    assert run.finding_counts == {"branch": 1} and models.StoredFinding.objects.count() == 1
    (rejection,) = run.rejections.all()
    assert rejection.file == "broken.jsonl.gz" and "cut off" in rejection.reason


def test_when_nothing_can_be_read_the_run_fails_and_says_why(run: models.Run) -> None:
    imports.import_files(run, [Source.of_bytes(b"\x80\x04abc", "x.pt"), Source.of_bytes(b"", "y")])
    assert run.status == "failed" and run.n_rejected == 2
    assert "Nothing was imported. x.pt is a pickle" in run.error
    assert nothing_is_left_of(run)


def test_a_cancelled_import_leaves_nothing_of_the_file_it_was_at(
    run: models.Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(imports, "BATCH_TRAJECTORIES", 5)
    monkeypatch.setattr(imports, "BEAT_SECONDS", 0)
    n = 0

    def cancel(trajectory: Trajectory, run: models.Run) -> Diagnosis:
        nonlocal n
        n += 1
        if n == 12:
            cancel_run(models.Run.objects.get(pk=run.pk))
        return diagnose(trajectory, run)

    read(run, [Source.of_bytes(jsonl(*calls(50)))], cancel)
    assert (n, run.status) == (12, "cancelled")
    assert nothing_is_left_of(run) and run.finding_counts == {}


def test_an_import_whose_worker_died_goes_on_at_the_file_it_was_at(
    run: models.Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(imports, "BATCH_TRAJECTORIES", 5)
    files = [Source.of_bytes(jsonl(*calls(7)), "a"), Source.of_bytes(jsonl(*calls(9, 100)), "b")]
    n = 0

    class Killed(BaseException):
        """Not caught by anybody, as a kill is not."""

    def die(trajectory: Trajectory, run: models.Run) -> Diagnosis:
        nonlocal n
        n += 1
        if n == 14:
            raise Killed
        return diagnose(trajectory, run)

    with pytest.raises(Killed):
        read(run, files, die)
    assert models.StoredTrajectory.objects.count() == 12
    read(models.Run.objects.get(pk=run.pk), files, die)
    run.refresh_from_db()
    assert (run.status, run.n_trajectories, n) == ("done", 16, 14 + 9)
    assert sorted(run.trajectories.values_list("index", flat=True)) == list(range(16))
    assert run.finding_counts == {"branch": 16}


def test_long_texts_are_stored_a_few_at_a_time(run: models.Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(imports, "BATCH_BYTES", 100_000)
    stored: list[int] = []

    def look(trajectory: Trajectory, run: models.Run) -> Diagnosis:
        stored.append(models.StoredTrajectory.objects.count())
        return Diagnosis()

    lines = [
        {"messages": [{"role": "user", "content": f"{n} " + "x" * 30_000}, {"role": "assistant", "content": "y"}]}
        for n in range(12)
    ]
    read(run, [Source.of_bytes(jsonl(*lines))], look)
    assert run.n_trajectories == 12 and sorted(set(stored)) == [0, 4, 8]


def test_progress_is_written_while_a_file_is_read(run: models.Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(imports, "BEAT_SECONDS", 0)
    monkeypatch.setattr(imports, "BATCH_TRAJECTORIES", 100)
    seen: list[int] = []

    def look(trajectory: Trajectory, run: models.Run) -> Diagnosis:
        seen.append(models.Run.objects.get(pk=run.pk).bytes_done)
        return Diagnosis()

    lines = jsonl(*[changed(GYM, "_ng_task_index", to=n) for n in range(500)])
    read(run, [Source.of_bytes(lines)], look)
    assert 0 < seen[0] < seen[-1] <= run.bytes_total == len(lines)


def test_the_collector_is_left_as_it_was(run: models.Run) -> None:
    before, during = gc.get_threshold(), set()

    def look(trajectory: Trajectory, run: models.Run) -> Diagnosis:
        during.add(gc.get_threshold()[0])
        return Diagnosis()

    read(run, [Source.of_bytes(jsonl(GYM))], look)
    assert during == {imports.GC_THRESHOLD} and gc.get_threshold() == before


def test_the_same_ids_in_two_files_are_told_apart_by_the_file(run: models.Run) -> None:
    files = [Source.of_bytes(jsonl(TRAIN), name) for name in ("rank_0.jsonl", "rank_1.jsonl", "rank_1.jsonl")]
    imports.import_files(run, files)
    assert list(run.trajectories.order_by("index").values_list("external_id", flat=True)) == ["7", "rank_1.jsonl:7"]
    assert run.n_rejected == 1 and "is in this run already" in run.rejections.get().reason


def test_files_of_one_name_are_told_apart_by_their_folders(run: models.Run, tmp_path: Path) -> None:
    """Steps of training: the same names, ids and groups in each folder."""
    files = [tmp_path / f"step_{n}" / "rank_0.jsonl" for n in range(4)]
    for n, file in enumerate(files):
        file.parent.mkdir()
        file.write_bytes(jsonl(GYM) if n < 3 else b"nonsense")
    imports.import_files(run, files)
    found = list(run.trajectories.order_by("index").values_list("external_id", "group"))
    later = [(f"step_{n}/rank_0.jsonl:0-2", f"step_{n}/rank_0.jsonl:0") for n in (1, 2)]
    assert found == [("0-2", "0"), *later]
    assert [one.file for one in run.rejections.all()] == ["step_3/rank_0.jsonl"]


def test_only_so_many_rejections_are_kept_and_all_are_counted(run: models.Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stored_imports, "MAX_REJECTIONS", 10)
    imports.import_files(run, [Source.of_bytes(jsonl(CALL, *[b"{"] * 250))])
    assert (run.n_rejected, run.rejections.count(), run.n_trajectories) == (250, 10, 1)


def test_the_recorded_tokenizer_is_taken_when_one_of_that_name_is_registered(
    run: models.Run, tiny_tokenizer: Path
) -> None:
    registered = register_tokenizer(tiny_tokenizer, name="qwen3")
    imports.import_files(run, [Source.of_bytes(jsonl(CALL))])
    assert run.tokenizer == registered and run.chat_template == registered.chat_template
    other = create_run(models.Run.Kind.IMPORT, "ids only")
    imports.import_files(other, [Source.of_bytes(jsonl(CALL))], use_recorded_tokenizer=False)
    assert other.tokenizer is None


def test_origins_between_completions_are_found_with_a_tokenizer(run: models.Run, tiny_tokenizer: Path) -> None:
    from rollout_inspector.streams.trajectory import Origin

    run.tokenizer = registered = register_tokenizer(tiny_tokenizer)
    loaded = load_tokenizer(run.tokenizer.files_sha256)
    messages = [
        {"role": "user", "content": "2+2?"},
        {"role": "assistant", "content": "x"},
        {"role": "tool", "content": "44"},
    ]
    prompt = loaded.encode("<|im_start|>user\n2+2?<|im_end|>\n<|im_start|>assistant\n").tolist()
    reply = loaded.encode("x<|im_end|>").tolist()
    delta = loaded.encode("\n<|im_start|>tool\n44<|im_end|>\n<|im_start|>assistant\n").tolist()
    first = changed(CALL, "response", "prompt_token_ids", to=prompt)
    first["response"]["choices"][0].update(token_ids=reply, logprobs=None)
    second = changed(first, "response", "prompt_token_ids", to=prompt + reply + delta)
    second["request"]["messages"] = messages
    imports.import_files(run, [Source.of_bytes(jsonl(first, second))])
    trajectory = run.trajectories.get()
    assert models.Retokenized.objects.get().trajectory == trajectory
    window = row_window(trajectory, 0, 0, 10**6)
    pieces = {
        origin: b"".join(
            piece for piece, code in zip(loaded.token_bytes(window.ids), window.origin, strict=True) if code == origin
        )
        for origin in Origin
    }
    assert pieces[Origin.OBSERVATION] == b"44"
    assert pieces[Origin.TEMPLATE] == b"\n<|im_start|>tool\n<|im_end|>\n<|im_start|>assistant\n"
    # A run whose tokenizer is chosen later gains the same.
    from rollouts.jobs.diagnosis import diagnose_run

    later = create_run(models.Run.Kind.IMPORT, "later")
    imports.import_files(later, [Source.of_bytes(jsonl(first, second))])
    assert load_trajectory(later.trajectories.get()).steps[1].delta_origin is None
    later.tokenizer = registered
    later.save()
    assert sum(map(len, diagnose_run(later))) == 1
    same = row_window(later.trajectories.get(), 0, 0, 10**6)
    assert same.origin.tolist() == window.origin.tolist()
    assert load_trajectory(later.trajectories.get()).steps[1].delta_origin is not None


def mutations(n: int, seed: int) -> Callable[[], Any]:
    """Files with one or more bytes, tokens or values changed."""
    import random

    rng = random.Random(seed)
    odd: list[Any] = [
        None, -1, 2**31, 2**70, 1.5, True, "", "\0", "x" * 300, [], {}, [[]], {"a": []}, "\ud800", 1e308, -0.0, [None],
        ["1"], [-5], [1, [2]], "token_id:x",
    ]
    from tests.storage.build import chain

    own = json.loads(own_line(chain(hostile="")))

    def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
        found = [path] if path else []
        items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
        for key, item in items:
            found += places(item, (*path, key))
        return found

    def make() -> bytes:
        base = rng.choice([CALL, GYM, own, TRAIN])
        lines = []
        for k in range(rng.randint(1, 3)):
            value = json.loads(json.dumps(base))
            value.update({key: f"id{k}" for key in ("session_id", "external_id") if key in value})
            for _ in range(rng.randint(0, 2)):
                path = rng.choice(places(value))
                place = value
                for key in path[:-1]:
                    place = place[key]
                action = rng.random()
                if action < 0.2 and isinstance(place, dict):
                    del place[path[-1]]
                elif action < 0.3 and isinstance(place, list):
                    place.append(copy.deepcopy(rng.choice(odd)))
                else:
                    place[path[-1]] = copy.deepcopy(rng.choice(odd))
                if not places(value):
                    break
            lines.append(value)
        data = bytearray(jsonl(*lines))
        for _ in range(rng.choice([0, 0, 1, 3])):
            at = rng.randrange(len(data))
            action = rng.random()
            if action < 0.3:
                del data[at : at + rng.randint(1, 40)]
            elif action < 0.6:
                data[at] = rng.randrange(256)
            elif action < 0.8:
                data[at:at] = bytes(rng.randrange(256) for _ in range(rng.randint(1, 5)))
            else:
                data[at:at] = data[: rng.randint(0, 200)]
            if not data:
                break
        return bytes(data)

    return make


@pytest.mark.sqlite_only  # test_bad_files.py does the same on any database
def test_a_thousand_mutations_raise_nothing_and_store_nothing_by_halves(db: None) -> None:

    n = 250 if connection.vendor == "postgresql" else 1000  # what the reader makes of them is the same
    make = mutations(1000, seed=20)
    n_imported = n_refused = 0
    for _ in range(n):
        data = make()
        run = create_run(models.Run.Kind.IMPORT, "m")
        imports.import_files(run, [Source.of_bytes(data)])
        assert run.status in ("done", "failed"), data
        assert (run.status == "done") == (run.n_trajectories > 0)
        if run.status == "failed":
            assert (run.error.startswith("Nothing was imported. ") and run.n_rejected) or "no trajectories" in run.error
            assert not run.trajectories.exists()
            n_refused += 1
        for rejection in run.rejections.all():
            assert rejection.reason.endswith((".", "FILE > FILE.json")), rejection.reason
        for record in run.trajectories.all():
            value = load_trajectory(record)
            assert (
                record.n_steps == len(value.steps) == models.StepTokens.objects.filter(step__trajectory=record).count()
            )
            assert all((step.prompt_ids >= 0).all() and (step.completion_ids >= 0).all() for step in value.steps)
            n_imported += 1
    assert n_imported > n / 5 and n_refused > n / 5
