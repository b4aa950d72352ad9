"""Comments on trajectories: who reads and writes them, where they stand, and what a wrong one is answered."""

import re
from typing import Any

import pytest
from django.contrib.auth import get_user_model
from django.test import Client

from rollouts.store.models import AuditEvent, Comment, Role, Run, StoredTrajectory
from rollouts.store.people.shares import create_share
from rollouts.store.runs.runs import delete_run
from rollouts.store.trajectories.comments import (
    MAX_TEXT, CommentMoved, add_comment, delete_comment, edit_comment, find_comment, reopen_comment, resolve_comment
)
from tests.people import make_member
from tests.web.samples import one_line
from tests.web.trajectory_samples import HOSTILE, Maker

pytestmark = pytest.mark.django_db


@pytest.fixture
def stored(make: Maker) -> StoredTrajectory:
    return make.run([make.conversation("a"), make.conversation("b")]).trajectories.get(external_id="a")


def browser(user: Any) -> Client:
    client = Client()
    client.force_login(user)
    return client


def path(trajectory: StoredTrajectory, rest: str = "") -> str:
    return f"/trajectories/{trajectory.code}{rest}"


def test_a_comment_is_written_at_a_range_and_read_there(web: Client, stored: StoredTrajectory) -> None:
    page = one_line(web.get(path(stored, "?t=5-9")))
    form = page[page.index('id="comment-form"') :]
    assert 'name="t"' in form and 'value="5-9"' in form  # the address fills the form in
    answer = web.post(path(stored, "/comments"), {"row": "0", "t": "5-9", "text": f"first\r\nsecond {HOSTILE}"})
    made = Comment.objects.get()
    assert answer.status_code == 302
    assert answer["Location"] == f"/trajectories/{stored.code}?row=0&t=5-9#comment-{made.code}"
    assert (made.row_index, made.start, made.stop, made.author_name) == (0, 5, 9, "ada")
    assert made.text.startswith("first\nsecond <script>")
    assert web.get(path(stored, f"/comments/{made.code}"))["Location"] == answer["Location"]
    for view in ("runs", "tokens"):
        page = web.get(path(stored, f"?view={view}")).content.decode()
        assert f'id="comment-{made.code}"' in page and "first\nsecond &lt;script&gt;" in page
        assert "<script>alert" not in page
        (mark,) = re.findall(r'<a class="gap said"[^>]*></a>', page)
        assert f'href="#comment-{made.code}"' in mark and 'aria-label="Comment by ada. Read it."' in mark
        assert "open comments begin here" in page and "tokens missing or replaced" not in page
    twin = web.get(path(stored, ".json")).json()
    (one,) = twin["comments"]
    assert one["text"] == made.text and (one["row"], one["start"], one["stop"]) == (0, 5, 9)
    assert one["may_edit"] and one["may_delete"] and one["resolved_at"] is None
    assert web.get(path(stored, "/comments.json")).json()["comments"] == twin["comments"]


def test_one_of_the_whole_trajectory_stands_on_each_page_and_in_the_list(web: Client, stored: StoredTrajectory) -> None:
    made = web.post(path(stored, "/comments.json"), {"text": "look"}).json()
    assert made["row"] is None and made["url"] == path(stored, f"/comments/{made['code']}")
    assert "1 comment, 1 open" in one_line(web.get(path(stored, "/mask")))
    run = stored.run

    def listed(query: str = "") -> dict[str, tuple[int, int]]:
        lines = web.get(f"/runs/{run.code}.json{query}").json()["trajectories"]
        return {one["external_id"]: (one["comments"], one["open_comments"]) for one in lines}

    assert listed() == {"a": (1, 1), "b": (0, 0)}
    assert listed("?comments=open") == listed("?comments=any") == {"a": (1, 1)}
    assert "1 open" in one_line(web.get(f"/runs/{run.code}"))
    web.post(path(stored, f"/comments/{made['code']}"), {"do": "resolve"})
    assert listed("?comments=open") == {} and listed("?comments=any") == {"a": (1, 0)}
    assert "“shut”" in one_line(web.get(f"/runs/{run.code}?comments=shut"))
    page = one_line(web.get(path(stored)))
    assert "1 resolved" in page and "resolved by ada" in page


@pytest.mark.parametrize(
    ("form", "field", "sentence"),
    [
        ({"text": " \r\n "}, "text", "Write something"),
        ({"text": "x" * (MAX_TEXT + 1)}, "text", "at most 4,000 characters; these are 4,001"),
        ({"text": "x", "t": "here"}, "t", "“here” is not a range of tokens. Write it as 1204-1260"),
        ({"text": "x", "t": "5-9", "row": "7"}, "row", "There is no row 7 in this trajectory: its rows are 0 to 0."),
        ({"text": "x", "t": "5-9", "row": "one"}, "row", "“one” is not the number of a row"),
        ({"text": "x", "t": "5-999999"}, "t", "are not in row 0, which holds tokens 0-"),
        ({"text": "x", "t": "9-5"}, "t", "Tokens 9-5 are not in row 0"),
        ({"text": "x", "t": "5-5"}, "t", "Tokens 5-5 are not in row 0"),
    ],
)
def test_what_makes_no_sense_is_answered_with_a_sentence(
    web: Client, stored: StoredTrajectory, form: dict[str, str], field: str, sentence: str
) -> None:
    answer = web.post(path(stored, "/comments.json"), form)
    assert answer.status_code == 422 and sentence in answer.json()["errors"][field][0]
    page = web.post(path(stored, "/comments"), form)
    assert page.status_code == 422 and sentence in page.content.decode()
    assert form["text"].strip() in page.content.decode()  # what was typed is not lost
    assert not Comment.objects.exists()


def test_a_comment_is_changed_by_its_author_and_settled_by_any_member(web: Client, member: Any, stored: Any) -> None:
    made = add_comment(stored, member, "one", (0, 1, 3))
    url = path(stored, f"/comments/{made.code}")
    bob, eve = browser(make_member("bob", Role.MEMBER)), browser(make_member("eve", Role.VIEWER))
    assert bob.post(url, {"do": "edit", "text": "two"}).status_code == 403
    assert bob.post(url, {"do": "delete"}).status_code == 403
    assert eve.post(url, {"do": "resolve"}).status_code == 403
    assert eve.post(path(stored, "/comments"), {"text": "x"}).status_code == 403
    page = one_line(eve.get(path(stored)))
    assert "one</p>" in page and 'id="comment-form"' not in page and 'value="resolve"' not in page
    assert bob.post(url, {"do": "resolve"}).status_code == 302
    twice = bob.post(url + ".json", {"do": "resolve"})
    assert twice.status_code == 422 and twice.json()["errors"]["form"] == ["bob has resolved this comment already."]
    assert 'class="gap said"' not in web.get(path(stored)).content.decode()  # what is settled has no sign in the row
    assert web.post(url, {"do": "reopen"}).status_code == 302
    assert web.post(url, {"do": "dance"}).status_code == 422
    assert web.post(url, {"do": "edit", "text": "two", "version": "1"}).status_code == 302
    late = web.post(url, {"do": "edit", "text": "three", "version": "1"})
    assert late.status_code == 422 and "edited or deleted since" in late.content.decode()
    assert "three" in late.content.decode() and "two" in late.content.decode()  # both texts, so that none is lost
    made.refresh_from_db()
    assert (made.text, made.version, made.resolved_at) == ("two", 2, None) and made.edited_at
    assert web.post(url + ".json", {"do": "delete"}).json() == {"deleted": made.code}
    assert web.get(url).status_code == 404
    said = [one.action for one in AuditEvent.objects.filter(target="trajectory").order_by("pk")]
    assert said == ["comment written", *["comment changed"] * 3, "comment deleted"]


def test_an_admin_deletes_what_others_wrote_and_a_text_outlives_its_account(make: Maker, stored: Any) -> None:
    author = make_member("bob", Role.MEMBER)
    first, second = add_comment(stored, author, "first"), add_comment(stored, author, "second")
    root = browser(make_member("root", Role.ADMIN))
    assert root.post(path(stored, f"/comments/{first.code}"), {"do": "delete"}).status_code == 302
    get_user_model().objects.get(pk=author.pk).delete()
    second.refresh_from_db()
    assert second.author is None and "bob" in one_line(root.get(path(stored)))


def test_the_holder_of_a_share_link_reads_no_comment(visitor: Client, member: Any, stored: StoredTrajectory) -> None:
    made = add_comment(stored, member, "for us alone", (0, 1, 3))
    for target in (stored, stored.run):
        _, token = create_share(member, target)
        visitor.get(f"/s/{token}")
    for page in ("", "/mask", "/record", "?view=tokens"):
        answer = visitor.get(path(stored, page))
        assert answer.status_code == 200 and b"omment" not in answer.content, page
    assert visitor.get(path(stored, ".json")).json()["comments"] is None
    run = visitor.get(f"/runs/{stored.run.code}.json?comments=any").json()
    assert [one["comments"] for one in run["trajectories"]] == [None, None]  # the filter is left out
    assert "Only who has a role" in run["notices"][0]
    for address in ("/comments.json", "/comments", f"/comments/{made.code}", f"/comments/{made.code}.json"):
        assert visitor.get(path(stored, address)).status_code == (401 if address.endswith(".json") else 302)


def test_a_comment_reaches_the_browser_that_kept_the_page(web: Client, member: Any, stored: Any) -> None:
    web.get(path(stored))  # it sets the cookie of the forms
    etag = web.get(path(stored))["ETag"]
    assert web.get(path(stored), headers={"if-none-match": etag}).status_code == 304
    made = add_comment(stored, member, "new")
    newer = web.get(path(stored), headers={"if-none-match": etag})
    assert newer.status_code == 200 and "new" in newer.content.decode()
    resolve_comment(made, member)
    assert web.get(path(stored), headers={"if-none-match": newer["ETag"]}).status_code == 200


def test_a_trajectory_without_tokens_is_discussed_on_its_conversation(web: Client, make: Maker) -> None:
    run = make.run([make.conversation("a")])
    StoredTrajectory.objects.filter(run=run).update(n_tokens=0)
    stored = run.trajectories.get()
    answer = web.post(path(stored, "/comments"), {"text": "on the messages"})
    assert answer["Location"].startswith(path(stored, "/record#comment-"))
    page = web.get(path(stored, "/record")).content.decode()
    assert "on the messages" in page and 'name="t"' not in page and 'href="#comments"' in page
    assert f'href="{path(stored, "/record#comments")}"' in web.get(path(stored, "/mask")).content.decode()


def test_what_came_too_late_changes_nothing(member: Any, stored: StoredTrajectory) -> None:
    made = add_comment(stored, member, "one")
    stale = find_comment(stored, made.code)
    assert stale is not None
    edit_comment(made, "two", 1)
    for late in (
        lambda: edit_comment(stale, "three", 1),
        lambda: reopen_comment(stale),
        lambda: (resolve_comment(made, member), resolve_comment(stale, member)),
    ):
        with pytest.raises(CommentMoved):
            late()
    delete_comment(made)
    delete_comment(made)
    for late in (lambda: resolve_comment(stale, member), lambda: edit_comment(stale, "three", 2)):
        with pytest.raises(CommentMoved, match="deleted"):
            late()
    assert AuditEvent.objects.filter(action="comment deleted").count() == 1


def test_comments_go_with_their_run(member: Any, stored: StoredTrajectory) -> None:
    add_comment(stored, member, "one")
    delete_run(stored.run)
    assert not Comment.objects.exists() and not Run.objects.exists()


def test_comments_cost_one_query_however_many_there_are(
    web: Client, member: Any, stored: Any, django_assert_max_num_queries: Any
) -> None:
    with django_assert_max_num_queries(21) as few:
        web.get(path(stored))
    for start in range(20):
        add_comment(stored, member, "one", (0, start, start + 1))
    with django_assert_max_num_queries(len(few)):
        web.get(path(stored))
