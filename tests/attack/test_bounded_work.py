"""Work that strangers' texts and archives ask for is bounded, and what was left out is said."""

import io
import json
import os
import random
import struct
import subprocess
import sys
import tracemalloc
import zipfile
from dataclasses import replace
from difflib import SequenceMatcher, unified_diff
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from django.core.files.uploadedfile import SimpleUploadedFile
from django.test import Client

from rollout_inspector.diagnose import examine
from rollout_inspector.formats import limits
from rollout_inspector.formats.containers.parquet import group_sizes
from rollout_inspector.formats.containers.refusals import TooLarge
from rollout_inspector.formats.containers.source import Source
from rollout_inspector.streams.align import MAX_WORK, align_ids
from rollout_inspector.text.chat_templates.repair.search import unified_diff as repair_diff
from rollout_inspector.text.chat_templates.sandbox import client
from rollout_inspector.text.line_diffs import CUT, MAX_LINES, ROUGH, LineDiffs
from rollout_inspector.text.processes import Faults
from rollout_inspector.text.tokenizers import TokenizerUnusable, check_folder, unpack_zip
from rollouts.jobs.diagnosis import diagnosis_for
from rollouts.store.chat_templates.chat_templates import register_chat_template
from rollouts.store.models import Project, Run
from tests.conftest import ROOT
from tests.web.trajectory_samples import Maker

# -- texts compared line by line


@pytest.fixture
def looked_at(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The pairs of equal lines that the library looked at, comparison by comparison."""
    pairs: list[int] = []
    find = SequenceMatcher.find_longest_match

    def counted(self: Any, alo: int = 0, ahi: Any = None, blo: int = 0, bhi: Any = None) -> Any:
        pairs.append(sum(len(self.b2j.get(item, ())) for item in self.a[alo:ahi]))
        return find(self, alo, ahi, blo, bhi)

    monkeypatch.setattr(SequenceMatcher, "find_longest_match", counted)
    return pairs


SLOW = {
    "each line just under 1 %": lambda n: ([n_th % 120 for n_th in range(n)], [-n_th % 120 for n_th in range(n)]),
    "few kinds of lines": lambda n: ([n_th % 2 for n_th in range(n)], [n_th * n_th % 3 % 2 for n_th in range(n)]),
    "shuffled": lambda n: (
        random.Random(1).choices(range(130), k=n), random.Random(2).choices(range(130), k=n)
    ),
    "one against many": lambda n: ([0] * n, [1, *[0] * n, 2]),
    "backwards": lambda n: ([n_th // 3 for n_th in range(n)], [n_th // 3 for n_th in range(n)][::-1]),
}


@pytest.mark.parametrize("shape", SLOW.values(), ids=SLOW)
def test_any_comparison_of_lines_takes_bounded_work(shape: Any, looked_at: list[int]) -> None:
    before, after = ("".join(f"{line}\n" for line in lines) for lines in shape(20_000))
    diffs = LineDiffs()
    shown = diffs.shown(before, after)
    again = diffs.shown(before, after)
    assert sum(looked_at) <= MAX_WORK and len(shown) + len(again) <= MAX_LINES + 4
    assert again[-1] == ROUGH if diffs.work < 0 else ROUGH not in again
    looked_at.clear()
    patch = repair_diff(before, after)
    assert sum(looked_at) <= MAX_WORK and ROUGH not in patch
    assert [line[1:] for line in patch.splitlines()[2:] if line[0] in " -" and line[:2] != "--"]


def test_tokens_are_aligned_within_the_bound(looked_at: list[int]) -> None:
    left, right = (np.random.default_rng(seed).integers(0, 3, 900).astype(np.int32) for seed in (1, 2))
    groups = align_ids(left, right)
    assert sum(looked_at) <= 1_000_000
    assert groups[-1].left_stop == groups[-1].right_stop == 900


def test_an_ordinary_diff_is_that_of_the_library() -> None:
    numbers = random.Random(7)
    for _ in range(300):
        before, after = (numbers.choices("abcdef", k=numbers.randrange(30)) for _ in "ab")
        expected = list(unified_diff(before, after, "x", "y", lineterm=""))
        assert LineDiffs().shown("\n".join(before), "\n".join(after), ("x", "y")) == expected


def test_a_rough_diff_still_makes_one_text_of_the_other() -> None:
    before, after = ([str(line) for line in lines] for lines in SLOW["each line just under 1 %"](4000))
    diffs = LineDiffs(work=1000)
    lines = list(diffs.unified(before, after, context=10_000))[1:]
    assert diffs.work < 0
    assert [line[1:] for line in lines if line[0] in " -"] == before
    assert [line[1:] for line in lines if line[0] in " +"] == after


@pytest.mark.django_db
def test_the_page_of_two_templates_says_where_it_is_cut(member: Client, looked_at: list[int]) -> None:
    project = Project.objects.get()
    texts = ["\n".join(str(line) for line in lines) for lines in SLOW["each line just under 1 %"](9000)]
    a, b = (register_chat_template(text, name, project) for text, name in zip(texts, "ab", strict=True))
    answer = member.get(f"/templates/compare.json?a={a.sha256}&b={b.sha256}")
    assert answer.status_code == 200 and sum(looked_at) <= MAX_WORK
    diff = answer.json()["diff"].splitlines()
    assert diff[-2:] == [CUT.format(MAX_LINES), ROUGH] and len(diff) == MAX_LINES + 2
    assert "at most 5,000 lines" in member.get(f"/templates/compare?a={a.sha256}&b={b.sha256}").text


# -- archives


def directory(n: int, claimed: int, zip64: bool = False, name: bytes = b"a") -> bytes:
    """A zip of ``n`` empty entries whose end record claims another number."""
    head = struct.pack("<HHHHHIIIHH", 20, 0, 0, 0, 33, 0, 0, 0, len(name), 0)
    local = b"PK\x03\x04" + head + name
    entry = b"PK\x01\x02" + struct.pack("<H", 20) + head + bytes(14) + name
    entries = entry * n
    end = struct.pack("<HHHHIIH", 0, 0, min(claimed, 0xFFFF), min(claimed, 0xFFFF), len(entries), len(local), 0)
    if not zip64:
        return local + entries + b"PK\x05\x06" + end
    wide = struct.pack("<QHHIIQQQQ", 44, 45, 45, 0, 0, claimed, claimed, len(entries), len(local))
    locator = b"PK\x06\x07" + struct.pack("<IQI", 0, len(local) + len(entries), 1)
    none = struct.pack("<HHHHIIH", 0, 0, 0xFFFF, 0xFFFF, 0xFFFFFFFF, 0xFFFFFFFF, 0)
    return local + entries + b"PK\x06\x06" + wide + locator + b"PK\x05\x06" + none


@pytest.mark.parametrize("zip64", [False, True])
@pytest.mark.parametrize("claimed", [300_000, 1, 0])
def test_the_table_of_contents_of_a_zip_is_not_parsed_beyond_its_bound(
    claimed: int, zip64: bool, tmp_path: Path
) -> None:
    archive = tmp_path / "many.zip"
    archive.write_bytes(directory(300_000, claimed, zip64))
    tracemalloc.start()
    try:
        (problem,) = check_folder(archive)
        assert "table of contents has more than 128 kB" in problem
        assert tracemalloc.get_traced_memory()[1] < 2 << 20
    finally:
        tracemalloc.stop()


def test_one_long_name_or_a_few_hundred_entries_are_refused_too(tmp_path: Path) -> None:
    archive = tmp_path / "few.zip"
    archive.write_bytes(directory(201, 201))
    assert check_folder(archive) == ["The zip holds 201 files; a tokenizer has a handful (at most 200)."]
    archive.write_bytes(directory(3, 3, name=b"a" * 60_000))
    assert "more than 128 kB" in check_folder(archive)[0]


@pytest.mark.parametrize("method", [zipfile.ZIP_LZMA, zipfile.ZIP_BZIP2])
def test_a_zip_of_another_method_is_refused_unopened(method: int, tmp_path: Path) -> None:
    """The head of LZMA says how much memory its reader takes."""
    with zipfile.ZipFile(tmp_path / "a.zip", "w", method) as archive:
        archive.writestr("tokenizer.json", "{}")
    with pytest.raises(TokenizerUnusable, match="cannot be unpacked: it is not packed by deflate"):
        unpack_zip(tmp_path / "a.zip", tmp_path / "out")


@pytest.mark.django_db
def test_a_large_upload_of_a_tokenizer_is_refused_before_it_is_copied(member: Client) -> None:
    upload = SimpleUploadedFile("t.zip", b"PK\x03\x04" + bytes(100 << 20))
    answer = member.post("/tokenizers.json", {"upload": upload, "name": "large"})
    assert answer.status_code == 422 and "larger than 100 MB" in answer.text


def test_the_footer_of_a_parquet_file_is_bounded_before_it_is_parsed() -> None:
    table = pyarrow.table({f"column {n}": pyarrow.array([1], pyarrow.int8()) for n in range(300)})
    file = io.BytesIO()
    with pyarrow.parquet.ParquetWriter(file, table.schema) as writer:
        for _ in range(20):
            writer.write_table(table)
    data = file.getvalue()
    n_bytes = int.from_bytes(data[-8:-4], "little")
    lying = data[:-8] + (1 << 30).to_bytes(4, "little") + data[-4:]
    for body, most in ((data, n_bytes - 1), (lying, limits.IMPORT.parquet_footer_bytes)):
        with limits.reading(replace(limits.IMPORT, parquet_footer_bytes=most)):
            with pytest.raises(TooLarge, match="fewer row groups and columns"):
                list(Source.of_bytes(body).lines())
            with pytest.raises(ValueError, match="describes itself in"):
                group_sizes(io.BytesIO(body))
    with limits.reading(replace(limits.IMPORT, parquet_footer_bytes=n_bytes)):
        assert len(list(Source.of_bytes(data).lines())) == 20 == len(group_sizes(io.BytesIO(data)))


# -- a template that never ends


NEVER_ENDS = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% if '12 * 7' in m.content %}"
    "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}{% endif %}{% endfor %}"
)


@pytest.mark.django_db
def test_a_template_that_never_ends_is_not_rendered_again_and_again(
    tiny_tokenizer: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run says that it was not checked; another run with the same template is rendered."""
    monkeypatch.setattr(client, "CPU_SECONDS", 0)
    monkeypatch.setattr(client, "WALL_SECONDS", 1.2)
    renders: list[str] = []
    render = client.render

    def counted(template: str, jobs: Any) -> Any:
        outcomes = render(template, jobs)
        renders.append(outcomes[0].kind)
        return outcomes

    monkeypatch.setattr(client, "render", counted)
    make = Maker(tiny_tokenizer)
    template = register_chat_template(NEVER_ENDS, "never", make.record.project)
    values = [make.conversation(f"t{n}") for n in range(6)]
    run, other = (make.run(values, chat_template=template) for _ in "ab")
    diagnoses = [diagnosis_for(value, run) for value in values]
    assert renders.count("time") == Faults.MAX == 3
    for diagnosis in diagnoses:
        notes = [finding for finding in diagnosis.findings if finding.missing == "chat template that renders in time"]
        assert len(notes) == 1 and "That happened 3 times, so it is not tried again for 5 minutes." in notes[0].evidence
        for name in ("first_prompt", "delta"):
            assert isinstance(diagnosis.checks[name], list), name
    renders.clear()
    diagnosis_for(make.conversation("healthy"), Run.objects.get(pk=other.pk))
    assert renders
    assert examine(values[0], make.tokenizer, lambda _: None).checks["delta"] == ["chat template"]


RENDER = """
import json, sys
import django
django.setup()
from rollout_inspector.text.chat_templates.sandbox import client
from rollout_inspector.streams.interfaces import Conversation
from rollout_inspector.text.chat_templates import renderer
from rollouts.store.chat_templates.chat_templates import faults_in
client.CPU_SECONDS, client.WALL_SECONDS, run, n = 0, 1.2, int(sys.argv[1]), int(sys.argv[2])
rendered, render = [], client.render
client.render = lambda *of: rendered.append(1) or render(*of)
rendering = renderer(None, sys.argv[3], faults=faults_in(run, sys.argv[3]))
for _ in range(n):
    outcome = rendering.render_many([Conversation(({"role": "user", "content": "12 * 7"},), None, {}, True)])[0]
print(json.dumps([len(rendered), outcome.error]))
"""


def test_workers_share_what_a_template_cost_them(live_redis: str) -> None:
    """Each process of a worker paid three limits for the same template of the same run."""

    def rendered(run: int, n: int, redis_url: str = live_redis) -> list[Any]:
        environment = {**os.environ, "REDIS_URL": redis_url, "DJANGO_SETTINGS_MODULE": "inspector.settings"}
        command = [sys.executable, "-c", RENDER, str(run), str(n), NEVER_ENDS]
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=True)
        answer: list[Any] = json.loads(done.stdout)
        return answer

    assert rendered(1, Faults.MAX - 1)[0] == Faults.MAX - 1
    n, sentence = rendered(1, 3)
    assert n == 1 and "not tried again" in sentence
    n, sentence = rendered(1, 3)
    assert n == 0 and "time" in sentence and "not tried again" in sentence
    assert rendered(2, 1)[0] == 1, "another run pays for itself"
    assert rendered(1, 5, "redis://127.0.0.1:1/0")[0] == Faults.MAX, "without Redis each process counts alone"
