"""Lists, summaries, shares and tokenizers."""

from dataclasses import replace
from pathlib import Path

import pytest
from django.db import connection
from django.test.utils import CaptureQueriesContext

from rollout_inspector.diagnose.finding import Axis, Cost, Finding, Severity
from rollout_inspector.text.tokenizers import TokenizerUnusable
from rollouts.store import files, models, parameters
from rollouts.store.chat_templates.tokenizers import find_tokenizer, register_tokenizer
from rollouts.store.parameters import SORTS
from rollouts.store.people.shares import create_share, revoke, token_hash
from rollouts.store.runs.run_summary import run_summary
from rollouts.store.runs.runs import create_run
from rollouts.store.trajectories.groups import group_stats
from rollouts.store.trajectories.save_trajectories import save_trajectories
from rollouts.store.trajectories.trajectory_list import NULLABLE, list_trajectories, neighbours
from rollouts.store.trajectory_filters import TrajectoryFilters
from tests.people import make_member
from tests.storage.build import chain

pytestmark = pytest.mark.django_db

REWARDS = [1.0, None, 0.5, 1.0, 0.1, None, 0.5, 0.30000000000000004, -2.0, 1.0, 0.5]


@pytest.fixture
def run() -> models.Run:
    run = create_run(models.Run.Kind.IMPORT, "list")
    values = [
        replace(chain(f"id-{n}", 1 + n % 3, n), reward=reward, group=f"g{n % 3}", stop_reason="length" if n % 2 else "")
        for n, reward in enumerate(REWARDS)
    ]
    found = [
        [
            Finding(Axis.STREAM, "branch", Severity.INFO, cost=Cost(2)),
            Finding(Axis.STREAM, "unclassified", Severity.ERROR, cost=Cost(2, 1)),
        ][: n % 3]
        for n in range(len(values))
    ]
    save_trajectories(run, values, found)
    return run


@pytest.mark.parametrize("sort", SORTS)
@pytest.mark.parametrize("limit", [1, 3, 100])
def test_pages_together_are_the_whole_list_in_order(run: models.Run, sort: str, limit: int) -> None:
    found: list[models.StoredTrajectory] = []
    after = ""
    while True:
        with CaptureQueriesContext(connection) as context:
            items, following = list_trajectories(run, None, sort, after, limit)
        in_order = sort.endswith("index")
        assert len(context) <= (1 if in_order else 2 + sort.endswith(NULLABLE))
        found += items
        after = following or ""
        if not after:
            break
    assert len(found) == len(REWARDS) and len({one.pk for one in found}) == len(REWARDS)
    column = sort.removeprefix("-")
    keys = [getattr(one, column) for one in found]
    known = [key for key in keys if key is not None]
    assert known == sorted(known, reverse=sort.startswith("-"))
    assert all(key is None for key in keys[len(known) :])


@pytest.mark.parametrize("after", ["x", "!!!!", "W10", "WyJpbmRleCIsMSw5OTk5OTk5OTk5OTld", "é", "W" * 5000])
def test_a_cursor_that_cannot_be_read_starts_at_the_beginning(run: models.Run, after: str) -> None:
    assert list_trajectories(run, None, "index", after)[0][0].index == 0
    assert list_trajectories(run, None, "nonsense", after)[0][0].index == 0


@pytest.mark.parametrize(
    ("filters", "expected"),
    [
        (TrajectoryFilters(kind="branch"), [n for n in range(11) if n % 3 >= 1]),
        (TrajectoryFilters(kind="unclassified"), [n for n in range(11) if n % 3 == 2]),
        (TrajectoryFilters(severity="error"), [n for n in range(11) if n % 3 == 2]),
        (TrajectoryFilters(kind="branch", severity="error"), []),
        (TrajectoryFilters(reward_min=0.5), [0, 2, 3, 6, 9, 10]),
        (TrajectoryFilters(reward_min=0.0, reward_max=0.5), [2, 4, 6, 7, 10]),
        (TrajectoryFilters(stop_reason="length"), [1, 3, 5, 7, 9]),
        (TrajectoryFilters(group="g1"), [1, 4, 7, 10]),
        (TrajectoryFilters(status="failed"), []),
        (TrajectoryFilters(text="ID-1"), [1, 10]),
        (TrajectoryFilters(text="%"), []),
    ],
)
def test_filters(run: models.Run, filters: TrajectoryFilters, expected: list[int]) -> None:
    assert [one.index for one in list_trajectories(run, filters)[0]] == expected


def test_a_filter_holds_what_a_database_takes() -> None:
    for fault in ({"text": "\0"}, {"tokens_min": -1}, {"reward_min": float("nan")}, {"severity": "loud"}):
        with pytest.raises(ValueError, match="1 validation error"):
            TrajectoryFilters(**fault)


def test_lengths_are_bounded_with_the_ends(run: models.Run) -> None:
    lengths = {one.index: one.n_tokens for one in run.trajectories.all()}
    low, *_, high = sorted(set(lengths.values()))
    for filters, expected in (
        (TrajectoryFilters(tokens_min=high), [n for n, length in lengths.items() if length == high]),
        (TrajectoryFilters(tokens_max=low), [n for n, length in lengths.items() if length == low]),
        (TrajectoryFilters(tokens_min=low + 1, tokens_max=high - 1), [n for n, k in lengths.items() if low < k < high]),
        (TrajectoryFilters(tokens_min=high + 1), []),
    ):
        assert [one.index for one in list_trajectories(run, filters)[0]] == sorted(expected)


def test_neighbours_honour_the_filter(run: models.Run) -> None:
    record = run.trajectories.get(index=4)
    before, after = neighbours(record, TrajectoryFilters(kind="unclassified"))
    assert (before and before.index, after and after.index) == (2, 5)
    assert neighbours(run.trajectories.get(index=0))[0] is None


@pytest.mark.parametrize("sort", parameters.SORTS)
def test_neighbours_follow_every_order_of_the_list(run: models.Run, sort: str) -> None:
    listed = list_trajectories(run, None, sort)[0]
    for place, record in enumerate(listed):
        before, after = neighbours(record, None, sort)
        assert before == (listed[place - 1] if place else None)
        assert after == (listed[place + 1] if place + 1 < len(listed) else None)


def test_the_summary_counts_in_a_fixed_number_of_queries(run: models.Run) -> None:
    def count(one: models.Run) -> int:
        with CaptureQueriesContext(connection) as context:
            run_summary(one)
        return len(context)

    summary = run_summary(run)
    assert summary.by_status == {"done": 11} and summary.stop_reasons == {"": 6, "length": 5}
    assert (summary.n_rewards, summary.reward_min, summary.reward_max) == (9, -2.0, 1.0)
    assert summary.reward_mean == pytest.approx(sum(r for r in REWARDS if r is not None) / 9)
    assert sum(bar.n for bar in summary.reward_bins) == 9 and summary.reward_bins[-1].n == 3
    assert summary.reward_bins[0].n == 1
    assert summary.finding_counts == {"branch": 7, "unclassified": 3} == summary.finding_trajectories
    assert summary.severities == {"": 4, "info": 4, "error": 3}
    assert summary.finding_severities == {"branch": {"info": 7}, "unclassified": {"error": 3}}
    assert summary.finding_tokens == {"branch": 0, "unclassified": 9}  # an info costs nothing
    before = count(run)
    save_trajectories(run, [chain(f"more-{n}") for n in range(20)])
    assert count(run) == before <= 6
    empty = run_summary(create_run("import", "empty"))
    assert (empty.reward_bins, empty.reward_mean, empty.by_status) == ([], None, {})


def test_a_group_whose_rewards_are_all_equal_has_no_signal(run: models.Run) -> None:
    stats = group_stats(run, ["g0", "g1", "none"])
    assert set(stats) == {"g0", "g1"} and stats["g0"].n == 4 and not stats["g0"].has_no_signal
    other = create_run(models.Run.Kind.IMPORT, "flat")
    save_trajectories(other, [chain("a"), chain("b")])
    assert group_stats(other, ["g"])["g"].has_no_signal


def test_shares_are_found_by_their_hash_and_revoked_once(run: models.Run) -> None:
    user = make_member("u")
    link, token = create_share(user, run, "t=1-2", "look", 3)
    assert link.token_sha256 == token_hash(token) and token.startswith(link.hint)
    assert token not in str(vars(link)) and link.run == run and link.trajectory is None
    revoke(link)
    first = link.revoked_at
    revoke(link)
    assert link.revoked_at == first is not None
    assert create_share(user, run.trajectories.all()[0])[0].trajectory is not None
    with pytest.raises(KeyError):
        create_share(user, user)


def test_a_tokenizer_is_registered_once_by_its_contents(tiny_tokenizer: Path, tmp_path: Path) -> None:
    first = register_tokenizer(tiny_tokenizer, "demo")
    assert first.chat_template is not None and models.ProjectTemplate.objects.get().label == "demo"
    assert register_tokenizer(tiny_tokenizer, "demo") == first
    assert files.exists(f"tokenizers/{first.files_sha256}/tokenizer.json") and first.vocab_size > 100
    assert find_tokenizer("demo") == first
    assert find_tokenizer(str(tiny_tokenizer / "tokenizer.json")).name == tiny_tokenizer.name
    import shutil

    other = tmp_path / "demo"
    other.mkdir()
    for file in tiny_tokenizer.glob("*token*.json"):
        shutil.copy(file, other)
    (other / "chat_template.jinja").write_text("{{ messages }}")
    with pytest.raises(ValueError, match="Another tokenizer is registered as 'demo'"):
        register_tokenizer(other, "demo")
    second = register_tokenizer(other)
    assert (
        second.name.startswith("demo (") and second.files_sha256 != first.files_sha256 and second.sha256 == first.sha256
    )
    assert find_tokenizer(str(other)) == second


def test_what_is_no_tokenizer_is_said_so(tmp_path: Path) -> None:
    with pytest.raises(TokenizerUnusable, match=r"no tokenizer\.json"):
        register_tokenizer(tmp_path)
    with pytest.raises(ValueError, match="There is no tokenizer 'nothing'"):
        find_tokenizer("nothing")
    assert not models.Tokenizer.objects.exists()
