"""The tab What if: it lists forks with their figures, takes both forms, and answers hostile input with a sentence."""

from typing import Any

import numpy as np
import pytest
from django.test import Client

from rollout_inspector.diagnose.trajectory_end import TrajectoryEnd
from rollout_inspector.streams.trajectory import Step, Trajectory, ids_array
from rollouts.jobs import gallery
from rollouts.store.models import Fork, StoredTrajectory
from rollouts.store.runs.forks import find_fork
from rollouts.store.token_arrays.reading import fork_prefix
from rollouts.store.trajectories.launched_trajectories import finish_trajectories, lease_trajectories, save_steps
from tests.people import make_member
from tests.web.samples import one_line

pytestmark = pytest.mark.django_db
FIELDS = {"row": "0", "at": "150", "samples": "2", "seed": "4"}


@pytest.fixture(autouse=True)
def no_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rollouts.jobs.launch.send_run", lambda run: None)


@pytest.fixture
def trajectory(member: Any) -> StoredTrajectory:
    return gallery.load().trajectories.get(external_id="tool_call_reserialized")


def address(one: StoredTrajectory, rest: str = "") -> str:
    return f"/trajectories/{one.code}/forks{rest}"


def finish(fork: Fork, *completions: list[int], reward: float | None = 1.0) -> None:
    """Store a completion for each trajectory of a fork, as a worker would."""
    prefix = fork_prefix(fork)
    leased = lease_trajectories(fork.run, len(completions), 60)
    save_steps(
        [(one.pk, 0, Step(prefix, ids_array(ids))) for one, ids in zip(leased, completions, strict=True)], prefix
    )
    finish_trajectories([TrajectoryEnd(one.pk, attempt=one.attempt, reward=reward, stop_reason="answered")
                         for one in leased])


def test_a_fork_is_asked_for_listed_and_put_beside_its_parent(
    web: Client, trajectory: StoredTrajectory, django_assert_max_num_queries: Any
) -> None:
    page = one_line(web.get(address(trajectory) + "?row=0&at=57"))
    assert "Nothing has been continued from here yet." in page and 'name="at" value="57"' in page
    assert web.post(address(trajectory, "/new"), FIELDS).status_code == 302
    (fork,) = Fork.objects.all()
    assert (fork.parent, fork.offset, fork.run.settings["seed"]) == (trajectory, 150, 4)
    finish(fork, [300, 301, 302], [300, 305])
    with django_assert_max_num_queries(40):
        twin = web.get(address(trajectory, ".json")).json()
    (of_fork,) = twin["forks"]
    assert (of_fork["finished"], of_fork["expected"], of_fork["reward_mean"]) == (2, 2, 1.0)
    assert (of_fork["length_mean"], of_fork["calls_mean"], of_fork["parts_at"]) == (2.5, 1.0, 151)
    assert [sample["n_tokens"] for sample in of_fork["samples"]] == [3, 2]
    page = one_line(web.get(address(trajectory)))
    code = of_fork["samples"][0]["code"]
    assert f"/trajectories/{trajectory.code}/compare?with={code}" in page and "token 151" in page
    child = one_line(web.get(f"/trajectories/{code}/forks"))
    assert "This trajectory continues" in child and f"/trajectories/{trajectory.code}?" in child
    assert web.get(f"/trajectories/{code}").status_code == 200
    assert web.get(f"/trajectories/{code}/record").status_code == 200
    assert web.get(f"/trajectories/{code}/deltas").status_code == 200
    assert web.get(f"/trajectories/{trajectory.code}/compare?with={code}").status_code == 200
    head = one_line(web.get(f"/runs/{of_fork['run']}"))
    assert f"Fork of {trajectory.external_id}" in head and f'{address(trajectory)}">continues a trajectory' in head


def test_both_sides_are_asked_for_by_a_press_on_the_finding(web: Client, trajectory: StoredTrajectory) -> None:
    assert "What did it do?" in one_line(web.get(f"/trajectories/{trajectory.code}"))
    answer = web.post(address(trajectory, "/new.json"), {"finding": "1", "samples": "2"})
    assert answer.status_code == 201 and len(answer.json()["runs"]) == 2
    for fork in Fork.objects.order_by("pk"):
        finish(fork, [300], [301, 302], reward=1.0 if fork.side == "sampled" else 0.0)
    (effect,) = web.get(address(trajectory, ".json")).json()["effects"]
    assert effect["finding"] == 1 and not effect["reward"]["is_seen"] and effect["sampled"] != effect["broken"]
    assert effect["reward"]["difference"] == -1 and effect["length"]["difference"] == 0
    assert "no difference to be seen with n = 2" in one_line(web.get(address(trajectory)))


@pytest.mark.parametrize(
    ("form", "words"),
    [
        ({"at": "x"}, "Write a whole number"), ({"at": "-1"}, "at least 0"), ({"row": "9"}, "counted from 0"),
        ({"token": "99999999"}, "run from 0 to"), ({"text": "a\0b"}, "Null characters"),
        ({"text": "a" * 30_000}, "at most 20000"),
        ({"model": "<b>"}, "is not offered"), ({"temperature": "nan"}, ""), ({"samples": "999999"}, "at most 512"),
        ({"at": "99999999999999999999"}, "at most"), ({"chat_template": "zz"}, "is not offered"),
    ],
)
def test_hostile_input_is_a_sentence(
    web: Client, trajectory: StoredTrajectory, form: dict[str, str], words: str
) -> None:
    answer = web.post(address(trajectory, "/new"), FIELDS | form)
    assert answer.status_code == 422 and words in answer.content.decode() and not Fork.objects.exists()
    assert web.post(address(trajectory, "/new.json"), FIELDS | form).json()["errors"]


def test_the_api_refuses_the_same_and_answers_the_same(web: Client, trajectory: StoredTrajectory) -> None:
    at = f"/api/v1/trajectories/{trajectory.code}"

    def post(path: str, **body: Any) -> Any:
        return web.post(at + path, body, "application/json")

    for body, field in (
        ({"at": 0}, "at"), ({"row": 7, "at": 3}, "row"), ({"at": 5, "samples": -1}, "samples"),
        ({"at": 5, "text": "a"}, "text"), ({"at": 5, "token": 10**8}, "token"),
    ):
        answer = post("/forks", settings=body)
        assert answer.status_code == 422 and f"settings.{field}" in answer.json()["errors"], (body, answer.content)
    assert post("/forks", settings={"at": 5, "what": 1}).status_code == 422
    assert "counted from 1" in post("/forks", settings={"finding": 77}).json()["detail"]
    made = post("/forks", settings={"row": 0, "at": 150, "samples": 3, "seed": 1})
    assert made.status_code == 201 and made.json()["forks"][0]["expected"] == 3
    assert web.get(at + "/forks").json() == made.json()
    both = post("/forks", settings={"finding": 1, "samples": 2}).json()
    assert both["effects"][0]["active"] and len(both["forks"]) == 2
    assert len(web.get(at + "/forks").json()["forks"]) == 3


def test_the_continuations_are_a_tree(web: Client, trajectory: StoredTrajectory) -> None:
    web.post(address(trajectory, "/new"), FIELDS | {"samples": "6"})
    fork = Fork.objects.get()
    finish(fork, [300, 301, 302], [300, 301, 302], [300, 305, 306], [300, 305], [400])
    (of_fork,) = web.get(address(trajectory, ".json")).json()["forks"]
    codes = [sample["code"] for sample in of_fork["samples"]]

    def shape(branch: dict[str, Any]) -> Any:
        samples = [codes.index(code) for code in branch["samples"]]
        return branch["start"] - 150, branch["ids"], samples, [shape(one) for one in branch["branches"]]

    assert shape(of_fork["tree"]) == (0, [], [0, 1, 2, 3, 4], [
        (0, [300], [0, 1, 2, 3], [
            (1, [301, 302], [0, 1], []), (1, [305], [2, 3], [(2, [306], [2], []), (2, [], [3], [])])
        ]),
        (0, [400], [4], []),
    ])
    assert of_fork["parts_at"] == 150 and of_fork["tree"]["reward_mean"] == 1.0
    page = one_line(web.get(address(trajectory)))
    assert "it ends here" in page and page.count("/compare?with=") == 5 and page.count(">queued</a>") == 1


def test_a_tree_goes_on_over_calls_until_a_break(web: Client, trajectory: StoredTrajectory) -> None:
    web.post(address(trajectory, "/new"), FIELDS | {"samples": "3"})
    fork = Fork.objects.get()
    prefix, calls = fork_prefix(fork), ([300, 310], [300, 310], [299, 310])
    second = [np.concatenate([prefix, ids_array(ids)]) for ids in calls]
    leased = lease_trajectories(fork.run, 3, 60)
    steps = [(0, [Step(prefix, ids_array([300]))] * 3), (1, [Step(second[n], ids_array([320 + n])) for n in range(3)])]
    for index, of_index in steps:
        save_steps([(one.pk, index, step) for one, step in zip(leased, of_index, strict=True)], prefix)
    lane = Step(np.concatenate([prefix, ids_array([300, 333])]), ids_array([334]))  # it goes on from the first call
    save_steps([(leased[0].pk, 2, lane)], prefix)
    (of_fork,) = web.get(address(trajectory, ".json")).json()["forks"]
    tree = of_fork["tree"]  # the prompt of the third one's second call is not what was sampled
    assert (tree["start"], tree["ids"], of_fork["parts_at"]) == (150, [300], 151)
    assert [(one["ids"], len(one["samples"])) for one in tree["branches"]] == [([310], 2), ([], 1)]
    assert [one["ids"] for one in tree["branches"][0]["branches"]] == [[320], [321]]


def test_equal_continuations_are_one_branch_and_a_long_one_is_cut(web: Client, trajectory: StoredTrajectory) -> None:
    web.post(address(trajectory, "/new"), FIELDS)
    finish(Fork.objects.get(), [*range(300, 340)], [*range(300, 340)])
    (of_fork,) = web.get(address(trajectory, ".json")).json()["forks"]
    tree = of_fork["tree"]
    assert of_fork["parts_at"] is None and tree["branches"] == [] and tree["stop"] - tree["start"] == 40
    assert tree["ids"] == [*range(300, 324)] and "…</code>" in one_line(web.get(address(trajectory)))


def test_a_viewer_sees_forks_and_asks_for_none(trajectory: StoredTrajectory, client: Client) -> None:
    viewer = make_member("vera", role="viewer")
    client.force_login(viewer)
    page = one_line(client.get(address(trajectory)))
    assert "Nothing has been continued" in page and "/forks/new" not in page
    assert client.post(address(trajectory, "/new"), FIELDS).status_code == 403


def test_what_the_store_keeps_is_the_new_tokens(trajectory: StoredTrajectory, web: Client) -> None:
    web.post(address(trajectory, "/new"), FIELDS)
    fork = Fork.objects.get()
    finish(fork, [300, 301], [302])
    assert find_fork(fork.run) == fork and not len(fork.tail_ids)
    steps = [one.steps.select_related("tokens").get() for one in fork.run.trajectories.all()]
    assert [len(step.tokens.delta_ids) for step in steps] == [0, 0]
    assert [(step.prompt_length, step.shared_length) for step in steps] == [(150, 150)] * 2


def test_a_trajectory_of_text_alone_has_no_tab(web: Client, make: Any) -> None:
    run = make.run([Trajectory("a", (Step(ids_array([]), ids_array([]), text="hello"),))])
    assert "What if" not in one_line(web.get(f"/trajectories/{run.trajectories.get().code}/record"))
