"""A trajectory as one file: inert, complete or honest about what it lacks, and small."""

import io
import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from django.core.management import CommandError, call_command
from django.test import Client

from inspector.trajectories import offline_page
from inspector.trajectories.offline_page import offline_file
from inspector.trajectories.place import View
from rollout_inspector.diagnose.finding import Axis, Finding, Severity
from rollouts.jobs import gallery
from rollouts.store import models
from rollouts.store.models import StoredTrajectory
from rollouts.store.trajectories.comments import add_comment
from rollouts.store.trajectories.trajectories import find_trajectory
from tests.samples.pages import share
from tests.web.long_rows import long_trajectory
from tests.web.trajectory_samples import HOSTILE, Maker

pytestmark = [pytest.mark.django_db, pytest.mark.sqlite_only]  # its queries are those of other pages

INERT = {
    "a", "article", "b", "bdi", "body", "circle", "code", "dd", "del", "details", "div", "dl", "dt", "em", "footer",
    "h1", "h2", "h3", "head", "header", "html", "i", "ins", "li", "main", "meta", "ol", "p", "path", "section", "small",
    "span", "strong", "style", "summary", "svg", "time", "title", "u", "ul",
}
POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"


class Saved(HTMLParser):
    """The elements of a file, its ids and links, and the text of its token panes."""

    def __init__(self, html: str) -> None:
        super().__init__(convert_charrefs=True)
        self.tags: set[str] = set()
        self.attributes: list[tuple[str, str | None]] = []
        self.ids: list[str] = []
        self.links: set[str] = set()
        self.text, self.depth, self.style = "", 0, ""
        self.in_style = False
        self.feed(html)
        self.close()

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        named = dict(attrs)
        self.tags.add(tag)
        self.attributes += attrs
        self.ids += [named["id"]] if "id" in named else []
        self.links |= {named["href"]} if "href" in named else set()
        self.in_style = tag == "style"
        if tag == "div":
            self.depth = self.depth + 1 if self.depth else int("blk" in (named.get("class") or ""))

    def handle_endtag(self, tag: str) -> None:
        self.in_style = False
        self.depth -= tag == "div" and self.depth > 0

    def handle_data(self, data: str) -> None:
        if self.in_style:
            self.style += data
        elif self.depth:
            self.text += data


def is_inert(html: str) -> Saved:
    """The file, after what holds of every file."""
    saved = Saved(html)
    assert saved.tags <= INERT, saved.tags - INERT
    assert not [name for name, _ in saved.attributes if name.startswith("on") or name in ("src", "srcset", "style")]
    assert "url(" not in saved.style and "@import" not in saved.style and len(saved.style) > 20_000
    assert html.index(f'content="{POLICY}') < html.index("<style>")
    assert all(link.startswith("#") for link in saved.links), saved.links
    assert len(set(saved.ids)) == len(saved.ids)
    assert {link[1:] for link in saved.links} <= set(saved.ids)
    return saved


def of(run: models.Run) -> StoredTrajectory:
    found = find_trajectory(run.trajectories.get().code)
    assert found is not None
    return found


@pytest.mark.parametrize("view", View)
def test_a_file_of_20k_tokens_holds_them_all_in_two_megabytes(make: Maker, view: View) -> None:
    trajectory = long_trajectory(lambda text: make.ids(text.replace(" the ", HOSTILE)), 20_000)
    made = offline_file(of(make.run([trajectory])), {"view": view})
    saved = is_inert(made.html)
    ((_, start, stop, n_tokens),) = made.rows
    assert made.is_whole and (start, stop) == (0, n_tokens) and n_tokens >= 20_000
    assert HOSTILE.split("\r")[0] in saved.text and len(saved.text) > 20_000
    assert (made.html.count("<i") >= 20_000) == (view == View.TOKENS)
    size = len(made.html.encode())
    print(f"{view}: {size:,} bytes")
    assert size < 2_000_000


def test_every_fault_of_the_gallery_is_saved_with_its_findings_and_both_sides() -> None:
    run = gallery.load()
    kinds = set()
    for one in run.trajectories.all():
        trajectory = find_trajectory(one.code)
        assert trajectory is not None
        made = offline_file(trajectory, {})
        is_inert(made.html)
        assert made.findings == list(range(1, trajectory.n_findings + 1))
        assert len(made.rows) == trajectory.n_rows and "What was checked" in made.html
        kinds |= set(re.findall(r"<code>(\w+)</code>", made.html))
    assert len(kinds) >= 39
    merged = run.trajectories.get(external_id="boundary_merge")
    html = offline_file(merged, {}).html
    version = merged.findings.get(kind="boundary_merge").version
    said = ("Encode the text between", "A merged token stands", "no sampled token lost", f"version {version}", run.name)
    for part in (
        *said,
        merged.code,
        run.tokenizer.sha256,
        'id=place-1 href="#finding-1"',
        "read next",
        "underline: tr",
    ):
        assert part in html, part


def test_a_tokenizer_is_named_by_its_hub_id_or_its_hash_and_no_path_is_told(make: Maker) -> None:
    run = make.run([make.conversation("t")], model="/data/secret/models/qwen")
    folder = "/data/secret/tokenizers/ours"
    make.record.name = make.record.source = folder
    make.record.save()
    html = offline_file(of(run), {}).html
    assert make.record.sha256 in html and "/data/" not in html and "secret" not in html and "qwen" in html
    make.record.source, make.record.revision = "Qwen/Qwen3-0.6B", "abc123"
    make.record.save()
    html = offline_file(of(run), {}).html
    assert "Qwen/Qwen3-0.6B" in html and "revision abc123" in html


def test_what_does_not_fit_is_left_out_around_the_finding_and_named(
    make: Maker, monkeypatch: pytest.MonkeyPatch
) -> None:
    trajectory = make.conversation("t", turns=6, size=100)
    at = len(trajectory.steps[4].prompt_ids) + 10
    fault = Finding(Axis.STREAM, "noncanonical_sampling", Severity.WARNING, step=4, start=at, stop=at + 2, evidence="E")
    broken, breaks = make.broken("b")
    run = make.run([trajectory, broken], [[fault], breaks])
    long, two = (find_trajectory(one.code) for one in run.trajectories.order_by("index"))
    assert long is not None and two is not None
    monkeypatch.setattr(offline_page, "MAX_FILE_TOKENS", {View.RUNS: 200, View.TOKENS: 200})
    made = offline_file(long, {})
    ((_, start, stop, n_tokens),) = made.rows
    assert stop - start == 200 and start < at < stop and not made.is_whole
    assert f"tokens {start:,}-{stop:,} of {n_tokens:,}" in made.html and 'href="#place-1"' in made.html
    monkeypatch.setattr(offline_page, "MAX_FILE_TOKENS", {View.RUNS: 70, View.TOKENS: 70})
    made = offline_file(two, {})
    ((row, *_),) = made.rows
    assert "Not in this file:" in made.html and f"row {1 - row} (" in made.html and not made.is_whole
    monkeypatch.setattr(offline_page, "AROUND_FINDING", 50)
    made = offline_file(long, {"finding": "1"})
    assert made.rows[0][2] - made.rows[0][1] == 50 and made.name == f"trajectory-{long.code}-finding-1.html"
    is_inert(made.html)


def test_the_command_writes_the_file_and_says_what_is_in_it(make: Maker, tmp_path: Path) -> None:
    broken, findings = make.broken("b")
    trajectory = of(make.run([broken], [findings]))
    out, target = io.StringIO(), tmp_path / "t.html"
    call_command("export_page", trajectory.code, "-o", str(target), "--json", stdout=out)
    said = json.loads(out.getvalue())
    assert said["bytes"] == target.stat().st_size and said["complete"] and said["findings"] == [1]
    assert [row["row"] for row in said["rows"]] == [0, 1] and said["trajectory"] == trajectory.code
    is_inert(target.read_text())
    for wrong in (["--row", "2"], ["--finding", "9"], ["--row", "x"]):
        with pytest.raises(CommandError, match="This trajectory has no"):
            call_command("export_page", trajectory.code, "-o", str(target), *wrong)
    with pytest.raises(CommandError, match="there is no such folder"):
        call_command("export_page", trajectory.code, "-o", str(tmp_path / "no" / "t.html"))
    with pytest.raises(CommandError, match="no trajectory with the code"):
        call_command("export_page", "zzzzzzzzzzzz", "-o", str(target))
    assert list(tmp_path.iterdir()) == [target]


def test_the_page_leads_to_the_file_and_a_link_opens_no_other(
    make: Maker, web: Client, visitor: Client, django_assert_max_num_queries: Any
) -> None:
    broken, findings = make.broken("b")
    run = make.run([broken, make.conversation("other")], [findings, []])
    shared, other = (f"/trajectories/{one.code}" for one in run.trajectories.order_by("index"))
    page = web.get(shared).content.decode()
    assert f'href="{shared}/file.html?view=runs"' in page and f'href="{shared}/file.html?finding=1"' in page
    with django_assert_max_num_queries(30):
        answer = web.get(f"{shared}/file.html?finding=1")
    assert answer["Content-Disposition"] == f'attachment; filename="trajectory-{shared[14:]}-finding-1.html"'
    assert "place-1" in answer.content.decode()
    wrong = web.get(f"{shared}/file.html?finding=7")
    assert wrong.status_code == 404 and "numbered from 1 to 1" in wrong.content.decode()
    tokens_alone = share(web, "trajectory", shared[14:], query="t=3-5", only="1")
    assert visitor.get(tokens_alone).status_code == 200
    assert visitor.get(f"{shared}/file.html").status_code == 302
    visitor.get(share(web, "trajectory", shared[14:]))
    assert visitor.get(f"{shared}/file.html").status_code == 200
    assert visitor.get(f"{other}/file.html").status_code == 302


def test_a_file_holds_lanes_and_comments_and_leaves_comments_out_when_asked(
    make: Maker, web: Client, visitor: Client, member: Any, tmp_path: Path
) -> None:
    broken, findings = make.broken("b")
    trajectory = of(make.run([broken], [findings]))
    add_comment(trajectory, member, "<b>Who saw</b> this?")
    on_tokens = add_comment(trajectory, member, "It begins here.", (1, 3, 5))
    html = web.get(f"/trajectories/{trajectory.code}/file.html").content.decode()
    is_inert(html)
    assert "&lt;b&gt;Who saw&lt;/b&gt; this?" in html and 'href="#row-1">row 1, tokens 3-5</a>' in html
    assert f'class="gap said" href="#comment-{on_tokens.code}"' in html and "<form" not in html
    assert "2 engine calls made 2 rows" in html and len(re.findall(r'<a href="#row-[01]" data-keeps-lens>', html)) == 2
    alone = web.get(f"/trajectories/{trajectory.code}/file.html?row=0").content.decode()
    is_inert(alone)
    assert "Who saw" in alone and "It begins here" not in alone and 'class="lanes"' not in alone
    bare = web.get(f"/trajectories/{trajectory.code}/file.html?comments=no").content.decode()
    assert "Who saw" not in bare and 'class="comments"' not in bare and 'class="gap said"' not in bare
    visitor.get(share(web, "trajectory", trajectory.code))
    assert "Who saw" not in visitor.get(f"/trajectories/{trajectory.code}/file.html").content.decode()
    for more, is_held in (([], True), (["--no-comments"], False)):
        call_command("export_page", trajectory.code, "-o", str(tmp_path / "t.html"), *more, stdout=io.StringIO())
        assert ("It begins here" in (tmp_path / "t.html").read_text()) == is_held
