"""The end of an import in shards: every trajectory gets its id and its place, whoever read it and when. Each step may
be done again, because a worker may be lost between any two of them."""

import contextlib
import logging
from collections.abc import Callable, Iterator
from typing import Any

from django.db import transaction

from rollout_inspector.formats import Rejected
from rollout_inspector.streams.batches import batched
from rollouts.jobs.gap_reports import ask_for_gap
from rollouts.jobs.imports import import_shards, imports
from rollouts.jobs.imports.trajectory_ids import MAX_NAME, Named, NamedPart, Names, packed, resolve, unpacked
from rollouts.jobs.imports.uploads import drop_uploads
from rollouts.store.database import reload, save_columns
from rollouts.store.jobs.jobs import Beat, JobKind, JobLost, Sharing, close_shards, end_job, is_active
from rollouts.store.jobs.shards import is_cut, shards_of, unfinished_shards
from rollouts.store.models import Job, Run
from rollouts.store.outages import is_outage
from rollouts.store.runs.imports import (
    drop_all, drop_incomplete, drop_range, end_import, move_range, names_at, next_final_index, note_imported,
    rename_trajectories, set_rejections
)
from rollouts.store.runs.runs import delete_trajectories, find_run, recount, run_of_job

log = logging.getLogger(__name__)

Alive = Callable[[], object]
BATCH = 500


def join(job: Job, beat: Beat) -> None:
    """End an import whose shards have ended: it is done, or somebody has cancelled it."""
    run = run_of_job(job)
    if not is_active(run):
        end_job(job, run.status, run.error)
        return
    _put_together(run, job, beat)
    if run.cancel_requested or unfinished_shards(job):
        end_import(run, job, Run.Status.CANCELLED)
    elif run.n_trajectories:
        end_import(run, job, Run.Status.DONE)
    else:
        end_import(run, job, Run.Status.FAILED, imports.nothing_imported(run))
    drop_uploads(run.code)


def fail(job: Job, sentence: str, remedy: str) -> None:
    """End a job that could not be done, and its run. Files that were read stay; *Resume* reads what is left."""
    run = find_run(jobs=job)
    if run is None or not is_active(run):
        end_job(job, Job.Status.FAILED, sentence)
        return
    with contextlib.suppress(JobLost):
        _keep_complete(run, job, Beat(job))
        if is_cut(job) and run.cancel_requested:
            _end_cancelled(run, job)
        else:
            end_import(run, job, Run.Status.FAILED, sentence)


def cancel(job: Job) -> None:
    """End a taken job as cancelled, and its run."""
    run = find_run(jobs=job)
    if run is not None:
        with contextlib.suppress(JobLost):
            _keep_complete(run, job, Beat(job))
            _end_cancelled(run, job)


def _end_cancelled(run: Run, job: Job) -> None:
    end_import(run, job, Run.Status.CANCELLED)
    drop_uploads(run.code)


def _pieces(shard: Job) -> list[dict[str, Any]]:
    """The pieces that a shard which is done has read."""
    pieces: list[dict[str, Any]] = (shard.report or {})["pieces"]
    return pieces


def _placed(shard: Job) -> tuple[int, int]:
    """The key of the job that gave its trajectories their places, 0 = none has; and the index of the first one now."""
    key, start = (shard.report or {}).get("placed") or (0, shard.options["first"])
    return int(key), int(start)


def _write_report(shard: Job, **more: Any) -> None:
    """Write the pieces, and more keys, into the row."""
    shard.report = {**(shard.report or {}), **more}
    save_columns(shard, "report")


def _put_together(run: Run, job: Job, alive: Alive) -> None:
    """Bring what complete files hold into the order of the files; nothing stays of the others."""
    shards = _complete(run, job, alive)
    for shard in shards:
        _drop_refused(run, shard, alive)
    for shard in shards:
        _take_back(run, shard, job, alive)
    names = _names(run, shards, alive)
    _free_ids(run, shards, names, alive)
    for shard, (new_names, left_out) in zip(shards, _changes(shards, names), strict=True):
        if _placed(shard)[0] != job.pk:
            _place(run, shard, new_names, left_out, job, alive)
    pieces = [piece for shard in shards for piece in _pieces(shard)]
    refusals = _refusals(pieces)
    n_rejected = sum(piece["n_rejected"] for piece in pieces) + len(refusals)
    set_rejections(run, _rejections(pieces, refusals), n_rejected, alive)
    done = {
        "files": len({piece["file"] for piece in pieces}), "next_index": next_final_index(run),
        "formats": sorted({piece["format"] for piece in pieces if piece["file"] not in refusals}),
    }
    read = sum(piece["bytes"] for shard in shards for piece in shard.options["pieces"])
    is_whole = len(shards) == job.shards.count()
    note_imported(run, done, run.bytes_total if is_whole else read, alive)
    recount(run)
    reload(run)


def _keep_complete(run: Run, job: Job, alive: Alive) -> None:
    """The same for an import that ends before its end. Where even that fails, nothing is kept, so that it does end."""
    if not is_cut(job):
        drop_incomplete(run, alive)
        return
    close_shards(job)
    try:
        _put_together(run, job, alive)
    except Exception as error:
        if isinstance(error, JobLost) or is_outage(error):
            raise
        log.exception("parts of an import cannot be put together run=%s", run.code)
        drop_all(run, job, alive)


def _complete(run: Run, job: Job, alive: Alive) -> list[Job]:
    """The shards whose files are complete. The others wait for *Resume* with nothing stored."""
    shards = shards_of(job)
    open_files = {piece["file"] for row in shards if row.status != Job.Status.DONE for piece in row.options["pieces"]}
    complete = []
    for row in shards:
        if row.status == Job.Status.DONE and open_files.isdisjoint(piece["file"] for piece in row.options["pieces"]):
            complete.append(row)
            continue
        drop_range(run, row.options["first"], row.options["stop"] + 1, alive)
        if row.status == Job.Status.DONE:
            row.status, row.report = Job.Status.CANCELLED, None
            with transaction.atomic():
                alive()
                save_columns(row, "status", "report")
    refused = set(_refusals([piece for shard in complete for piece in _pieces(shard)]))
    for shard in complete:
        for piece in _pieces(shard):
            piece["is_refused"] = piece["file"] in refused
    return complete


def _refusals(pieces: list[dict[str, Any]]) -> dict[int, tuple[str, str]]:
    """File -> its name and why it is refused, as the first part that was refused says."""
    refusals: dict[int, tuple[str, str]] = {}
    for piece in pieces:
        if piece["refused"]:
            refusals.setdefault(piece["file"], (piece["name"], piece["refused"]))
    return refusals


def _drop_refused(run: Run, shard: Job, alive: Alive) -> None:
    """A file is whole or not at all: what other parts of a refused file hold goes."""
    if not any(piece["is_refused"] and (piece["n"] or piece["n_rejected"]) for piece in _pieces(shard)):
        return
    # Only a part of a file can be refused because of another part, and a shard holds no other piece then.
    drop_range(run, shard.options["first"], shard.options["stop"] + 1, alive)
    for piece in _pieces(shard):
        piece |= {"n": 0, "hashes": "", "lines": "", "held": [], "rejected": [], "n_rejected": 0}
    with transaction.atomic():
        alive()
        _write_report(shard)


def _take_back(run: Run, shard: Job, job: Job, alive: Alive) -> None:
    """An earlier try of the import gave the shard its place, and files before it were not read yet."""
    if _placed(shard)[0] in (0, job.pk):
        return
    with transaction.atomic():
        alive()
        first = _placed(shard)[1]
        move_range(run, first, first + sum(piece["n"] for piece in _pieces(shard)), shard.options["first"])
        _write_report(shard, placed=None)


def _parts(shards: list[Job]) -> list[NamedPart]:
    return [
        NamedPart(piece["name"], piece["file"], unpacked(piece["hashes"], "<u8"), unpacked(piece["lines"], "<u8"))
        for shard in shards
        for piece in _pieces(shard)
    ]


def _indices(shards: list[Job]) -> list[tuple[int, int, Job, dict[str, Any]]]:
    """Of each piece: the place of its first trajectory in the import, the index of that one, its shard, itself."""
    indices, place = [], 0
    for shard in shards:
        index = _placed(shard)[1]
        for piece in _pieces(shard):
            indices.append((place, index, shard, piece))
            place, index = place + piece["n"], index + piece["n"]
    return indices


def _located(shards: list[Job], places: list[int]) -> Iterator[tuple[int, int, Job, dict[str, Any], int]]:
    """(place, index, shard, piece, place in the piece) of places in ascending order."""
    pieces = [item for item in _indices(shards) if item[3]["n"]]
    n = 0
    for place in places:
        while n + 1 < len(pieces) and place >= pieces[n + 1][0]:
            n += 1
        start, index, shard, piece = pieces[n]
        yield place, index + place - start, shard, piece, place - start


def _names(run: Run, shards: list[Job], alive: Alive) -> Names:
    """The ids of all trajectories. What the files say is kept in the shards before anything is changed."""
    looked_at: set[int] = set()

    def load(places: list[int]) -> dict[int, Named]:
        looked_at.update(places)
        located = list(_located(shards, places))
        stored: dict[int, Named] = {}
        for some in batched([index for _, index, *_ in located], BATCH):
            stored |= {index: (name, group) for _, index, name, group in names_at(run, some)}
        recorded = {id(piece): {at: (name, group) for at, name, group in piece["held"]} for *_, piece, _ in located}
        return {place: recorded[id(piece)].get(at) or stored[index] for place, index, _, piece, at in located}

    renamed = [place + at for place, _, _, piece in _indices(shards) for at, *_ in piece["held"]]
    names = resolve(_parts(shards), renamed, load)
    changed: dict[int, Job] = {}
    of_pieces: dict[int, dict[int, Named]] = {}
    for place, _, shard, piece, at in _located(shards, sorted(looked_at)):
        recorded_of_piece = of_pieces.setdefault(id(piece), {n: (name, group) for n, name, group in piece["held"]})
        if at not in recorded_of_piece:
            recorded_of_piece[at] = names[0][place]
            piece["held"].append([at, *recorded_of_piece[at]])
            changed[shard.pk] = shard
    with transaction.atomic():
        alive()
        for shard in changed.values():
            _write_report(shard)
    return names


def _free_ids(run: Run, shards: list[Job], names: Names, alive: Alive) -> None:
    """Let go of every id that its trajectory will not keep, so that another one can have it."""
    recorded, final, _ = names
    located = list(_located(shards, sorted(recorded)))
    for some in batched(located, BATCH):
        final_ids = {index: final.get(place, ("", ""))[0] for place, index, *_ in some}
        with transaction.atomic():
            alive()
            rename_trajectories([
                (f"#{pk}:{name}"[:MAX_NAME], group, pk)
                for pk, index, name, group in names_at(run, final_ids)
                if name != final_ids[index]
            ])


Left = dict[int, tuple[dict[str, Any], int, Rejected]]
"""Index of a trajectory that is left out -> its piece, its place in the piece, and why."""


def _changes(shards: list[Job], names: Names) -> list[tuple[dict[int, Named], Left]]:
    """Of each shard: index -> id and group that a trajectory gets, and what is left out. No shard has its place yet."""
    recorded, final, rejected = names
    changes: dict[int, tuple[dict[int, Named], Left]] = {shard.pk: ({}, {}) for shard in shards}
    for place, index, shard, piece, at in _located(shards, sorted(recorded)):
        if place in final:
            changes[shard.pk][0][index] = final[place]
        else:
            changes[shard.pk][1][index] = piece, at, rejected[place]
    return list(changes.values())


def _place(run: Run, shard: Job, named: dict[int, Named], left_out: Left, job: Job, alive: Alive) -> None:
    """Give a shard's trajectories their ids, and the places behind those of the shard before."""
    first, stop = shard.options["first"], shard.options["stop"]
    with transaction.atomic():
        alive()
        for some in batched(list(left_out), BATCH):
            delete_trajectories([pk for pk, *_ in names_at(run, some)])
        for some in batched(list(named), BATCH):
            rename_trajectories([(*named[row[1]], row[0]) for row in names_at(run, some) if named[row[1]] != row[2:]])
        _leave_out(left_out)
        start = next_final_index(run)
        move_range(run, first, stop + 1, start)
        _write_report(shard, placed=[job.pk, start])


def _leave_out(trajectories: Left) -> None:
    """Take rejected trajectories out of the pieces that had them."""
    by_piece: dict[int, tuple[dict[str, Any], dict[int, Rejected]]] = {}
    for piece, at, why in trajectories.values():
        by_piece.setdefault(id(piece), (piece, {}))[1][at] = why
    for piece, left_out in by_piece.values():
        places = [at for at in range(piece["n"]) if at not in left_out]
        new_place = {at: n for n, at in enumerate(places)}
        for column in ("hashes", "lines"):
            values = unpacked(piece[column], "<u8")
            piece[column] = packed([values[at] for at in places], "<u8")
        piece["held"] = [[new_place[at], *name] for at, *name in piece["held"] if at in new_place]
        piece["rejected"] += [[why.line, why.reason] for why in left_out.values()]
        piece["n_rejected"] += len(left_out)
        piece["n"] = len(places)


def _rejections(
    pieces: list[dict[str, Any]], refusals: dict[int, tuple[str, str]]
) -> Iterator[tuple[str, int | None, str]]:
    """File, line and reason, in the order of the files; within a file those with a line come first."""
    by_file: dict[int, list[dict[str, Any]]] = {}
    for piece in pieces:
        by_file.setdefault(piece["file"], []).append(piece)
    for number, of_file in by_file.items():
        if number in refusals:
            name, reason = refusals[number]
            yield name, None, reason
            continue
        rejections = [(line, reason) for piece in of_file for line, reason in piece["rejected"]]
        for line, reason in sorted(rejections, key=lambda one: (one[0] is None, one[0] or 0)):
            yield of_file[0]["name"], line, reason


_SHARING = Sharing(import_shards.cut, import_shards.do_shard, join)
KIND = JobKind("import", "Import", imports.do_job, _SHARING, fail, follow=ask_for_gap)
"""The files that ``options`` name are read into a run. Its status and the audit log tell of the run instead."""
