"""What engines told beside sampled tokens, on the tokens page: lenses, cards, and the alternatives of a token."""

from dataclasses import replace

import numpy as np
import pytest
from django.test import Client
from django.urls import reverse

from inspector.trajectories.place import WINDOW
from rollout_inspector.streams.trajectory import Row, Step, Trajectory, ids_array
from rollouts.store import models
from rollouts.store.token_arrays import STORES
from rollouts.store.trajectories.token_moves import move_arrays
from tests.storage.build import same
from tests.web.samples import one_line
from tests.web.trajectory_samples import HOSTILE, Maker, own_row

pytestmark = pytest.mark.django_db


def told(step: Step, other: int, k: int = 2, entropy: bool = True) -> Step:
    """The step with at most ``k`` alternatives for each token, ``other`` first. Each third token is not among them."""
    n = len(step.completion_ids)
    values = np.full((n, k), -np.inf, np.float32)
    ids = np.full((n, k), other, np.int32)
    assert step.logprobs is not None
    values[:, 0] = step.logprobs / 2
    values[:, 1] = step.logprobs
    ids[:, 1] = step.completion_ids
    values[::3, 1] = -np.inf
    return replace(
        step, alternative_ids=ids.reshape(-1), alternative_logprobs=values.reshape(-1),
        entropy=-2 * step.logprobs if entropy else None, kept_set=np.arange(1, n + 1, dtype=np.float32) + 2,
        kept_ids=np.repeat(step.completion_ids, np.arange(1, n + 1) + 2) if entropy else None,
    )


def with_alternatives(make: Maker, entropy: bool = True, turns: int = 2) -> Trajectory:
    """Turn 0 has two alternatives for each token, one of hostile text; the others have none."""
    value = make.conversation("a", turns)
    hostile = int(make.ids(HOSTILE)[0])
    return replace(value, steps=(told(value.steps[0], hostile, entropy=entropy), *value.steps[1:]))


@pytest.mark.parametrize("store", ["database", "segments"])
def test_what_an_engine_told_is_a_lens_and_a_column(web: Client, make: Maker, store: str) -> None:
    value = with_alternatives(make)
    first, second = value.steps
    run = make.run([value])
    stored = run.trajectories.get()
    moved = move_arrays(run, [stored], STORES[store])
    assert moved == (2 if store == "segments" else 0)
    address = reverse("trajectory", args=[stored.code])
    twin = web.get(f"{address}.json").json()
    assert twin["lenses"] == ["mask", "origin", "logprob", "entropy", "kept_set", "behind_likeliest"]
    columns = [token["columns"] for token in twin["window"]["tokens"]]
    sampled = slice(len(first.prompt_ids), len(first.stream))
    found = np.array([one["entropy"] for one in columns], np.float64)
    same(found[sampled].astype(np.float32), -2 * first.logprobs, "entropy")
    assert np.isnan(np.delete(found, np.r_[sampled])).all()
    kept = np.array([one["kept_set"] for one in columns], np.float64)
    assert kept[sampled].tolist() == [n + 2.0 for n in range(1, len(first.completion_ids) + 1)]
    for bound, n_shown in ((2, 0), (3, 1)):
        listed = web.get(f"{reverse('run', args=[run.code])}.json?kept={bound}").json()
        assert len(listed["trajectories"]) == n_shown, bound
    behind = np.array([one["behind_likeliest"] for one in columns], np.float64)
    np.testing.assert_allclose(behind[sampled], -first.logprobs / 2, rtol=1e-5)
    card = web.get(f"{address}/card.json").json()
    assert card["alternatives"] == [[sampled.start, sampled.stop, 2]]
    np.testing.assert_allclose(np.array(card["columns"]["entropy"], np.float64)[sampled], found[sampled], rtol=1e-3)
    for lens, words in (
        ("entropy", "entropy in nats"), ("kept_set", "kept set in tokens"),
        ("behind_likeliest", "behind the likeliest in nats"),
    ):
        page = one_line(web.get(f"{address}?view=tokens&lens={lens}"))
        assert f"{words}, steps at " in page and "colours nothing" not in page and "the same thresholds" in page
        assert f'data-lens-choice="{lens}" data-lens-request="always" aria-current="true"' in page
    # The second turn has nothing: a window there would say so.
    likeliest = replace(second, alternative_ids=second.completion_ids, alternative_logprobs=second.logprobs)
    stored = make.run([replace(value, steps=(likeliest,))]).trajectories.get()
    address = reverse("trajectory", args=[stored.code])
    assert web.get(f"{address}.json").json()["lenses"][3:] == ["entropy_at_least", "behind_likeliest"]
    page = one_line(web.get(f"{address}?lens=behind_likeliest"))
    assert "colours nothing: every value in this row is 0: each sampled token is the likeliest one" in page


def test_the_alternatives_of_a_token(web: Client, make: Maker) -> None:
    value = with_alternatives(make)
    first = value.steps[0]
    assert first.logprobs is not None and first.alternative_ids is not None
    stored = make.run([value]).trajectories.get()
    address = reverse("trajectory-alternatives", args=[stored.code])
    start = len(first.prompt_ids)
    among = web.get(f"{address}?row=0&t={start + 1}").json()
    assert (among["offset"], among["rank"], among["missing"]) == (start + 1, 2, "")
    assert [one["id"] for one in among["alternatives"]] == first.alternative_ids[2:4].tolist()
    assert among["alternatives"][1] == among["sampled"]
    assert among["sampled"]["logprob"] == pytest.approx(float(first.logprobs[1]))
    assert among["alternatives"][0]["text"] == "<" and among["alternatives"][0]["bytes"] == "3c"
    assert among["entropy"] == pytest.approx(float(-2 * first.logprobs[1])) and among["entropy_at_least"] is None
    assert among["behind_likeliest"] == pytest.approx(float(-first.logprobs[1] / 2), rel=1e-5)
    assert [one["id"] for one in among["kept_tokens"]] == [first.completion_ids[1]] * 4
    alone = web.get(f"{address}?row=0&t={start}").json()
    assert alone["rank"] is None and len(alone["alternatives"]) == 1
    assert alone["sampled"]["id"] == first.completion_ids[0]
    for query, words in (
        ("?row=0&t=0", "No step of this row sampled this token"),
        (f"?row=0&t={len(value.steps[1].prompt_ids)}", "No alternatives were kept for this step"),
        ("?row=0&t=99999", "are not in row 0"),
        ("?row=0", "No token was named"),
        ("?row=7&t=1", "no row 7"),
    ):
        found = web.get(address + query).json()
        assert words in found["missing"] and found["alternatives"] == [], query
    own = make.run([own_row()]).trajectories.get()
    answer = web.get(reverse("trajectory-alternatives", args=[own.code]) + "?t=3").json()
    assert "its source names no step" in answer["missing"]


@pytest.mark.parametrize("store", ["database", "segments"])
def test_the_kept_set_of_a_token_is_shown_without_alternatives_too(web: Client, make: Maker, store: str) -> None:
    value = make.conversation("a", 2)
    first, second = value.steps
    sizes = np.full(len(first.completion_ids), 2, np.float32)
    kept = replace(first, kept_set=sizes, kept_ids=np.repeat(first.completion_ids, 2))
    second = replace(second, kept_set=np.full(len(second.completion_ids), 900, np.float32))
    run = make.run([replace(value, steps=(kept, second))])
    stored = run.trajectories.get()
    move_arrays(run, [stored], STORES[store])
    address = reverse("trajectory-alternatives", args=[stored.code])
    start = len(first.prompt_ids)
    told_of = web.get(f"{address}?row=0&t={start + 1}").json()
    assert [one["id"] for one in told_of["kept_tokens"]] == [first.completion_ids[1]] * 2
    assert told_of["alternatives"] == [] and told_of["missing"] == "" and told_of["rank"] is None
    card = web.get(reverse("trajectory", args=[stored.code]) + "/card.json").json()
    assert card["alternatives"][0] == [start, len(first.stream), 0]
    many = web.get(f"{address}?row=0&t={len(second.prompt_ids)}").json()
    assert "how many tokens it could draw from, and not which" in many["missing"] and many["kept_tokens"] == []


def test_a_row_with_tokens_of_its_own_has_the_alternatives_of_what_it_trains_as_sampled(
    web: Client, make: Maker
) -> None:
    """The row ends as its steps do, trains another token in place of the third, and leaves the fifth untrained."""
    value = with_alternatives(make, turns=3)
    first, last = value.steps[0], value.steps[-1]
    start, n = len(first.prompt_ids), len(first.completion_ids)
    ids, mask = last.stream.copy(), np.zeros(len(last.stream), bool)
    for step in value.steps:
        mask[len(step.prompt_ids) : len(step.stream)] = True
    ids[start + 2], mask[start + 4] = ids[start + 2] + 1, False
    head = ids_array([7, 7, 7])  # the row begins with tokens that no prompt holds
    row = Row(np.concatenate([head, ids]), np.concatenate([[False] * 3, mask]), step_indices=(0, 1, 2))
    other = Row(first.stream, np.arange(len(first.stream)) >= start, step_indices=(0, 1, 2))
    stored = make.run([replace(value, rows=(other, row))]).trajectories.get()
    address, start = reverse("trajectory", args=[stored.code]), start + 3
    card = web.get(f"{address}/card.json?row=1").json()
    spans = [[start, start + 2, 2], [start + 3, start + 4, 2], [start + 5, start + n, 2]]
    assert card["alternatives"] == spans
    for at in (start + 1, start + 5):
        found = web.get(f"{address}/alternatives.json?row=1&t={at}").json()
        assert (found["missing"], found["sampled"]["id"]) == ("", int(row.ids[at]))
        assert found["sampled"]["logprob"] == pytest.approx(float(first.logprobs[at - start]))
        assert found["entropy"] == pytest.approx(float(-2 * first.logprobs[at - start]))
    for at in (start + 2, start + 4, 0):
        assert (
            "does not stand as a step sampled it"
            in web.get(f"{address}/alternatives.json?row=1&t={at}").json()["missing"]
        )
    assert web.get(f"{address}/alternatives.json?row=0&t={start - 2}").json()["missing"] == ""


def test_an_engine_that_knows_no_entropy_gets_a_bound_by_that_name(web: Client, make: Maker) -> None:
    stored = make.run([with_alternatives(make, entropy=False)]).trajectories.get()
    address = reverse("trajectory", args=[stored.code])
    twin = web.get(f"{address}.json").json()
    assert twin["lenses"][3:] == ["kept_set", "entropy_at_least", "behind_likeliest"]
    assert ">entropy at least</a>" in one_line(web.get(address))
    token = next(t for t in twin["window"]["tokens"] if t["columns"]["entropy_at_least"] is not None)
    told = web.get(f"{address}/alternatives.json?row=0&t={token['index']}").json()
    assert told["entropy"] is None and told["entropy_at_least"] == token["columns"]["entropy_at_least"]
    assert "entropy" not in web.get(f"{address}/card.json").json()["columns"]


def test_steps_of_a_running_trajectory_show_what_was_told(web: Client, make: Maker) -> None:
    value = with_alternatives(make, turns=1)
    run = make.run([value])
    stored = run.trajectories.get()
    models.StoredRow.objects.filter(trajectory=stored).delete()
    address = reverse("trajectory", args=[stored.code])
    for query in ("?view=tokens&lens=entropy", "?lens=behind_likeliest"):
        page = web.get(address + query)
        assert page.status_code == 200 and "has no lens" not in one_line(page)
    assert web.get(f"{address}/card.json").json()["alternatives"]
    assert web.get(f"{address}.json").json()["window"]["tokens"][-1]["columns"]["entropy"] is not None


def test_what_was_told_keeps_a_window_small(web: Client, make: Maker) -> None:
    """A window whose every token has five alternatives: the data of its cards holds the entropy alone."""
    rng = np.random.default_rng(1)
    words = make.ids(" ".join(f"{n} plus {n * 7} makes {n * 8}," for n in range(3000)))[: 2 * WINDOW]
    step = Step(ids_array([1]), words, -rng.exponential(0.8, len(words)).astype(np.float32))
    plain = make.run([Trajectory("plain", (step,))]).trajectories.get()
    five = make.run([Trajectory("five", (told(step, 7, k=5),))]).trajectories.get()
    asked = {"Accept-Encoding": "gzip"}
    sizes = {}
    for name, stored in (("plain", plain), ("five", five)):
        card = web.get(reverse("trajectory-card", args=[stored.code]) + f"?view=tokens&w={WINDOW}", headers=asked)
        sizes[name] = len(card.content)
        assert card["Content-Encoding"] == "gzip"
    window = web.get(
        reverse("trajectory", args=[five.code]) + f"?view=tokens&w={WINDOW}",
        headers={**asked, "HX-Request": "true", "HX-Target": "reader"},
    )
    assert sizes["five"] - sizes["plain"] < 12_000 and sizes["five"] + len(window.content) < 60_000, sizes
