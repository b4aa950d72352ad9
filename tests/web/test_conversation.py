"""The conversation of a trajectory: what it lays out, where its links lead, and what it keeps from a browser."""

import base64
import json
from dataclasses import replace

import numpy as np
import pytest
from django.test import Client
from django.urls import reverse

from inspector.trajectories.conversation import Pictures
from inspector.trajectories.frame import PLACE_FIELDS
from inspector.trajectories.record_page import time_words
from rollout_inspector.diagnose.finding import Axis, Finding, Severity
from rollout_inspector.streams.messages import LEFT_OUT, media_of, read_message, without_data
from rollout_inspector.streams.trajectory import NO_IDS, Row, Step, Trajectory
from rollouts.store import models
from tests.people import make_member
from tests.web.samples import one_line

pytestmark = [pytest.mark.django_db, pytest.mark.sqlite_only]  # its queries are those of other pages
PNG = b"\x89PNG\r\n\x1a\n" + b"\0" * 40
IMAGE = {"type": "image_url", "image_url": {"url": "data:image/svg+xml;base64," + base64.b64encode(PNG).decode()}}
SCRIPT = {"type": "image", "source": {"type": "base64", "media_type": "image/png",
                                      "data": base64.b64encode(b"<script>alert(1)</script>").decode()}}
ELSEWHERE = {"type": "image_url", "image_url": {"url": "https://elsewhere.example/<b>.png"}}


@pytest.fixture
def reader(client: Client, django_user_model: type) -> Client:
    client.force_login(make_member("reader"))
    return client


def stored(make, *values: Trajectory) -> models.StoredTrajectory:
    return make.run(list(values)).trajectories.get()


def address(trajectory: models.StoredTrajectory, page: str = "trajectory-record", *args: int) -> str:
    return reverse(page, args=[trajectory.code, *args])


def called(*calls: tuple[str, str]) -> dict:
    held = [{"id": key, "function": {"name": name, "arguments": '{"a": "<i>1</i>"}'}} for key, name in calls]
    return {"role": "assistant", "content": None, "reasoning": "think\nfirst", "tool_calls": held}


def with_calls(make) -> Trajectory:
    """Two steps: two calls, whose results come back in the other order; one is an error."""
    first, second = make.conversation("a", 2).steps
    reply = called(("c1", "add"), ("c2", "sub"))
    told = [{"role": "tool", "tool_call_id": "c2", "content": "Error: no sub"},
            {"role": "tool", "tool_call_id": "c1", "content": "x" * 2000}]
    messages = (*first.request.messages, reply, *told)
    second = replace(second, request=replace(second.request, messages=messages))
    return Trajectory("a", (replace(first, reply=reply), second), reward=1.0)


def test_results_stand_under_their_calls_and_the_repeated_reply_once(make, reader):
    html = one_line(reader.get(address(stored(make, with_calls(make)))))
    order = [html.index(words) for words in (">add</code>", "x" * 2000, ">sub</code>", "Error: no sub")]
    assert order == sorted(order)
    assert html.count(">add</code>") == 1 and "The request repeats the reply" in html
    assert html.count('class="chat-flag">error<') == 1 and "It read 2 tool results" in html
    assert "<dt>a</dt>" in html and "&lt;i&gt;1&lt;/i&gt;" in html and "<i>1</i>" not in html
    assert "tool · 2,000 characters" in html and "reasoning · 11 characters" in html


def test_a_message_leads_to_its_tokens_and_back(make, reader):
    trajectory = stored(make, make.conversation("a", 3))
    turns = reader.get(address(trajectory, "trajectory") + ".json").json()["turns"]
    sampled = [turn for turn in turns if turn["part"] == "completion"]
    html = one_line(reader.get(address(trajectory)))
    for turn in sampled:
        assert f"view=tokens&amp;t={turn['start']}-{turn['stop']}" in html
    assert html.count("all trained") == 3 and "decoded from the sampled ids" in html
    at = sampled[1]["start"] + 2
    tokens = one_line(reader.get(address(trajectory, "trajectory") + f"?view=tokens&t={at}-{at + 1}"))
    assert f"/record?place=view%3Dtokens%26t%3D{at}-{at + 1}#here" in tokens
    assert f'data-place-fields="{" ".join(PLACE_FIELDS)}"' in tokens  # what the script takes along
    back = one_line(reader.get(address(trajectory) + f"?place=view%3Dtokens%26t%3D{at}-{at + 1}"))
    assert back.count('id="here"') == back.count("the place you came from") == 1
    step = back.split('id="step-1"')[1].split('id="step-2"')[0]
    assert 'id="here"' in step
    for odd in ("t%3Dx", "t%3D" + "9" * 30, "row%3D-1%26t%3D1", "%00"):
        assert reader.get(address(trajectory) + "?place=" + odd).status_code == 200


def test_a_message_leads_to_the_row_that_trains_other_tokens_in_its_place(make, reader):
    """A trainer encoded the second completion again: its first two tokens became three others."""
    value = make.conversation("a", 3)
    stream = value.steps[-1].stream
    mask = np.zeros(len(stream), np.bool_)
    for step in value.steps:
        mask[len(step.prompt_ids) : len(step.stream)] = True
    at = len(value.steps[1].prompt_ids)
    ids = np.concatenate([stream[:at], [7, 8, 9], stream[at + 2 :]]).astype(np.int32)
    mask = np.insert(mask, at, True)
    row = Row(ids, mask, step_indices=(0, 1, 2))
    trajectory = stored(make, replace(value, rows=(row,)))
    html = one_line(reader.get(address(trajectory)))
    first, second, third = value.steps
    n = len(second.completion_ids)
    places = [(len(first.prompt_ids), len(first.stream)), (at, at + n + 1)]
    for start, stop in [*places, (len(third.prompt_ids) + 1, len(third.stream) + 1)]:
        assert f"view=tokens&amp;t={start}-{stop}" in html, (start, stop)
    assert f"{n} tokens, {n + 1} in row 0" in html and "No row holds" not in html
    assert html.count("all trained") == 2 and f"{n - 2} of {n} trained" in html
    back = one_line(reader.get(address(trajectory) + f"?place=view%3Dtokens%26t%3D{at + 1}-{at + 2}"))
    assert back.count('id="here"') == 1


def test_every_finding_is_told_at_its_step_and_leads_to_its_tokens(make, reader):
    value, findings = make.broken("b")
    row_finding = Finding(Axis.ROW, "sampled_masked", Severity.WARNING, row=1, start=3, stop=4, evidence="Masked.")
    trajectory = make.run([value], [[*findings, row_finding]]).trajectories.get()
    html = one_line(reader.get(address(trajectory)))
    summary, _, steps = html.partition('id="step-0"')
    assert 'href="#step-1">Break of unknown cause</a>' in summary and "Sampled tokens masked" in summary
    start = findings[0].start
    for words in ("The prompt leaves the stream.", "Masked.", f"view=tokens&amp;t={start}-{start + 2}"):
        assert words in steps.partition('id="step-1"')[2], words
    healthy = stored(make, make.conversation("a", 2))
    assert 'aria-label="Findings"' not in one_line(reader.get(address(healthy)))


def test_sampled_text_that_no_message_holds_is_said(make, reader):
    value = make.conversation("a", 1)
    reply = {"role": "assistant", "content": "I compute 12 * 7"}
    html = one_line(reader.get(address(stored(make, replace(value, steps=(replace(value.steps[0], reply=reply),))))))
    assert "No message holds this sampled text" in html and "check the result" in html
    whole = {"role": "assistant", "content": make.tokenizer.decode(value.steps[0].completion_ids[:-1])}
    held = stored(make, replace(value, steps=(replace(value.steps[0], reply=whole),)))
    assert "No message holds" not in one_line(reader.get(address(held)))


def test_text_alone_opens_as_a_conversation(make, reader):
    said = Trajectory("t", (Step(NO_IDS, NO_IDS, text="4<end>", extra={"prompt": "2 + 2?"}),), reward=1.0)
    trajectory = stored(make, said)
    answer = reader.get(address(trajectory, "trajectory") + "?q=x")
    assert answer.status_code == 302 and answer["Location"] == address(trajectory) + "?q=x"
    assert reader.get(address(trajectory, "trajectory") + ".json").status_code == 200
    html = one_line(reader.get(answer["Location"]))
    assert "2 + 2?" in html and "4&lt;end&gt;" in html and ">Tokens</a>" not in html


def test_media_are_placeholders_and_their_data_comes_when_asked_for(make, reader):
    value = make.conversation("a", 1)
    content = [{"type": "text", "text": "Look"}, IMAGE, SCRIPT, ELSEWHERE]
    request = replace(value.steps[0].request, messages=({"role": "user", "content": content},))
    trajectory = stored(make, replace(value, steps=(replace(value.steps[0], request=request),)))
    html = one_line(reader.get(address(trajectory)))
    assert "image/svg+xml · 48" in html and "a link, which is not followed" in html
    assert "<img" not in html and 'href="https://elsewhere' not in html and "iVBOR" not in html
    assert "iVBOR" not in reader.get(address(trajectory) + ".json").content.decode()
    shown = reader.get(address(trajectory, "trajectory-media", 0, 0))
    assert shown.content == PNG and shown["Content-Type"] == "image/png"
    assert "sandbox" in shown["Content-Security-Policy"] and shown["X-Content-Type-Options"] == "nosniff"
    kept = reader.get(address(trajectory, "trajectory-media", 0, 1))
    assert kept["Content-Type"] == "application/octet-stream"
    assert kept["Content-Disposition"].startswith("attachment")
    for step, number in ((0, 2), (0, 3), (1, 0), (10**30, 0)):
        assert reader.get(address(trajectory, "trajectory-media", step, number)).status_code == 404


def test_a_large_image_does_not_hide_its_message(make, reader, monkeypatch):
    value = make.conversation("a", 1)
    large = {"type": "input_image", "image_url": "data:image/png;base64," + base64.b64encode(PNG * 9000).decode()}
    request = replace(value.steps[0].request, messages=({"role": "user", "content": [large, IMAGE]},))
    trajectory = stored(make, replace(value, steps=(replace(value.steps[0], request=request),)))
    answer = reader.get(address(trajectory))
    assert "image/png · 421" in one_line(answer) and len(answer.content) < 40_000
    assert reader.get(address(trajectory, "trajectory-media", 0, 0)).content == PNG * 9000


def test_queries_and_size_do_not_grow_with_tokens(make, reader, django_assert_max_num_queries):
    small, large = (stored(make, make.conversation("a", turns, size)) for turns, size in ((2, 50), (30, 3000)))
    reader.get(address(small))
    with django_assert_max_num_queries(18):
        reader.get(address(small))
    with django_assert_max_num_queries(18):
        answer = reader.get(address(large))
    assert len(answer.content) < 1_000_000


def test_messages_of_other_sources():
    result = {"type": "tool_result", "tool_use_id": "u", "is_error": True, "content": [{"type": "text", "text": "no"}]}
    said = read_message({"role": "user", "content": [result]}, "")
    assert [(one.role, one.result_of, one.is_error, one.texts) for one in said] == [("tool", "u", True, ["no"])]
    (call,) = read_message({"type": "function_call", "call_id": "c", "name": "f", "arguments": "{bad"}, "")[0].calls
    assert (call.id, call.name, call.arguments) == ("c", "f", "{bad")
    assert read_message({"type": "function_call_output", "call_id": "c", "output": "5"}, "")[0].result_of == "c"
    (used,) = read_message({"role": "assistant", "content": [{"type": "thinking", "thinking": "hm"},
                            {"type": "tool_use", "id": "u", "name": "f", "input": {"x": 1}}]}, "")
    assert used.reasoning == ["hm"] and used.calls[0].arguments == {"x": 1}
    assert read_message(["odd"], "prompt")[0].texts == ['["odd"]']
    left = without_data({"content": [IMAGE]})["content"][0]
    assert (
        left[LEFT_OUT]["bytes"] == len(PNG) and media_of(left).n_bytes == len(PNG) and "base64" not in json.dumps(left)
    )


def with_markdown(make) -> Trajectory:
    """A user who writes Markdown with a picture, a tool that answers with some, and a long reply."""
    first, second = make.conversation("a", 2).steps
    png = {**IMAGE, "image_url": {"url": "data:image/png;base64," + base64.b64encode(PNG).decode()}}
    content = [{"type": "text", "text": "# Plan\n\n[a](javascript:alert(1)) <b onclick=x>"}, png, SCRIPT, ELSEWHERE]
    told = {"role": "tool", "content": "# not a heading"}
    request = replace(first.request, messages=({"role": "user", "content": content},))
    after = replace(second.request, messages=(*request.messages, called(("c1", "add")), told))
    reply = {"role": "assistant", "content": "x" * 30_000}
    return Trajectory("a", (replace(first, request=request), replace(second, request=after, reply=reply)), reward=1.0)


def test_texts_are_markdown_where_that_is_asked_for(make, reader):
    trajectory = stored(make, with_markdown(make))
    plain = one_line(reader.get(address(trajectory)))
    assert '<a href="?as=markdown">as Markdown</a>' in plain and "# Plan" in plain and "<img" not in plain
    html = one_line(reader.get(address(trajectory) + "?as=markdown&place=t%3D1-2"))
    assert "<h4>Plan</h4>" in html and "# not a heading" in html and "<b onclick" not in html
    assert "javascript:alert" in html and 'href="javascript' not in html
    # Not the address elsewhere. The HTML that says to be a picture comes as a download, which no browser draws.
    assert html.count("<img") == 2 and 'alt="image of 48' in html and "elsewhere.example" in html
    assert reader.get(address(trajectory, "trajectory-media", 0, 1))["Content-Type"] == "application/octet-stream"
    assert f'<img src="{address(trajectory, "trajectory-media", 0, 0)}"' in html
    assert "for Markdown: shown as text" in html and "x" * 30_000 in html
    assert 'href="?place=t%3D1-2">as text</a>' in html


def test_only_so_much_of_a_page_is_drawn_as_markdown(make, reader, monkeypatch):
    trajectory = stored(make, with_markdown(make))
    monkeypatch.setattr("inspector.trajectories.conversation.MARKDOWN_CHARACTERS", 20)
    html = one_line(reader.get(address(trajectory) + "?as=markdown"))
    assert "<h4>Plan" not in html and "# Plan" in html and html.count("for Markdown: shown as text") >= 2


DOT = "data:image/png;base64," + base64.b64encode(PNG).decode()


def picture(n_bytes: int) -> dict:
    data = base64.b64encode(PNG + b"\0" * (n_bytes - len(PNG))).decode()
    return {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{data}"}}


def said_in_markdown(make, reader, *content: object) -> tuple[models.StoredTrajectory, str]:
    """The page of one message, drawn as Markdown."""
    (step,) = make.conversation("a", 1).steps
    request = replace(step.request, messages=({"role": "user", "content": list(content)},))
    trajectory = stored(make, Trajectory("a", (replace(step, request=request),), reward=1.0))
    return trajectory, one_line(reader.get(address(trajectory) + "?as=markdown"))


def test_a_picture_at_the_bound_is_drawn_and_one_above_it_is_a_link_to_its_data(make, reader):
    n = Pictures.BYTES_OF_ONE
    trajectory, html = said_in_markdown(make, reader, picture(n), picture(n + 1))
    at, above = (address(trajectory, "trajectory-media", 0, part) for part in (0, 1))
    assert html.count("<img") == 1 and f'<img src="{at}"' in html and f'<a href="{above}"' in html
    bounds = "A page draws at most 100 pictures, of at most 2.0 MB each and 20.0 MB together."
    assert f"1 picture is not drawn. {bounds}" in html
    assert len(reader.get(above).content) == n + 1
    plain = one_line(reader.get(address(trajectory)))
    assert "<img" not in plain and "not drawn" not in plain and plain.count("show the data") == 2


def test_the_pictures_of_a_page_have_a_bound_together(make, reader, monkeypatch):
    monkeypatch.setattr(Pictures, "BYTES", 200 + 2 * len(DOT))
    first, last = ({"type": "text", "text": text} for text in (f"![one]({DOT}) ![two]({DOT})", f"![last]({DOT})"))
    _, html = said_in_markdown(make, reader, first, picture(100), picture(101), picture(100), last)
    assert html.count("<img") == 4 and "2 pictures are not drawn." in html
    assert "<span class=no-picture>last</span>" in html and html.count("show the data") == 1


@pytest.mark.parametrize("is_text", [True, False])
def test_of_a_thousand_small_pictures_a_page_draws_a_hundred(make, reader, is_text):
    small = [{"type": "text", "text": f"![{n}]({DOT})"} if is_text else picture(60) for n in range(1000)]
    _, html = said_in_markdown(make, reader, *small)
    assert html.count("<img") == 100 and "900 pictures are not drawn." in html
    assert html.count("<span class=no-picture>") == 900 * is_text and html.count("show the data") == 900 * (not is_text)


def test_pictures_of_a_text_that_stays_text_count_nowhere(make, reader):
    many = {"type": "text", "text": f"![x]({DOT})" * 90 + "y" * 20_000}
    _, html = said_in_markdown(make, reader, many, *[picture(60)] * 100)
    assert "for Markdown: shown as text" in html and html.count("<img") == 100 and "not drawn" not in html


def test_a_token_that_no_message_holds_marks_the_nearest_one(make, reader):
    value = make.conversation("a", 3)
    trajectory = stored(make, value)
    between = len(value.steps[0].stream)  # the template's own words before the next reply
    html = one_line(reader.get(address(trajectory) + f"?place=view%3Dtokens%26t%3D{between}-{between + 1}"))
    assert html.count('id="here"') == 1
    assert html.count("none holds the token you came from") + html.count("the place you came from") == 1
    beyond = one_line(reader.get(address(trajectory) + "?place=row%3D7%26t%3D5-6"))
    assert 'id="here"' not in beyond and "No message on this page holds token 5 of row 7." in beyond


@pytest.mark.parametrize(("fields", "words"), [
    ({"meta_info": {"e2e_latency": 2.0}}, ["2.0 s", "20.0 tokens per second"]),
    ({"timings": {"predicted_ms": 500}}, ["0.5 s", "80.0 tokens per second"]),
    ({"line": {"created_at": "2026-11-29T05:00:01+01:00"}}, ["2026-11-29 04:00:01 UTC"]),
    ({"created": 1_700_000_000}, ["2023-11-14 22:13:20 UTC"]),
    ({"start_time": 1_700_000_000.0, "end_time": 1_700_000_004.0},
     ["4.0 s", "10.0 tokens per second", "2023-11-14 22:13:20 UTC"]),
    ({"latency": 12, "duration": 3, "created": 1_700_000_000_000}, []),  # of which unit?
    ({"latency_s": "2", "timestamp": "yesterday", "created_at": "2026-11-29T05:00:01"}, []),
    ({"latency_s": float("nan"), "duration_ms": -1, "elapsed_s": True}, []),
    ({"latency_s": {"latency_s": {"latency_s": {"latency_s": 1}}}}, []),
    ("text", []), (None, []),
])  # fmt: skip
def test_the_time_of_a_step_is_told_where_its_unit_is_known(fields, words):
    assert time_words(fields, 40) == words


def test_a_step_says_what_it_sampled_and_how_fast(make, reader):
    whole = make.conversation("a", 1)
    step = replace(whole.steps[0], extra={"meta_info": {"e2e_latency": 2.0}})
    html = one_line(reader.get(address(stored(make, replace(whole, steps=(step,))))))
    n = len(step.completion_ids)
    assert f"· {n} tokens sampled" in html and "· 2.0 s" in html and f"· {n / 2:,.1f} tokens per second" in html
