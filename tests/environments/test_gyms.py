"""The environments of other people's packages. What is named here must be what the packages have."""

import importlib.util
import json
import os
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import pytest

from rollout_inspector.refusal import Refusal
from rollouts.sampling.environments import ENVIRONMENTS, Task, environment, reasoning_gym, skyrl_gym
from tests.conftest import ROOT, missing


@pytest.fixture(scope="module", autouse=True)
def packages() -> None:
    for name in ("reasoning_gym", "skyrl_gym"):
        if importlib.util.find_spec(name) is None:
            missing(
                f"{name} is not installed (pip install --no-deps -r rollouts/sampling/environments/requirements.txt)"
            )


def say(text):
    return {"role": "assistant", "content": text}


# -- by name -----------------------------------------------------------------------------------------------------------


def test_every_environment_is_made_by_its_name():
    assert [environment(name).name for name in ENVIRONMENTS] == list(ENVIRONMENTS)


@pytest.mark.parametrize("name", ["skyrl_gym:lcb", "skyrl_gym:search", "reasoning_gym:countdown"])
def test_what_runs_a_models_code_or_calls_a_network_is_withheld(name):
    assert name not in ENVIRONMENTS
    with pytest.raises(Refusal, match=f"{name} is not offered: it"):
        environment(name)


def test_an_unknown_name_is_answered_with_the_known_ones():
    with pytest.raises(Refusal, match="calculator, lookup"):
        environment("chess")


def test_a_file_of_prompts_is_refused_with_the_way_out():
    with pytest.raises(Refusal, match=r"calculator makes its own tasks .*: leave the file out, or choose"):
        environment("calculator", [Task([{"role": "user", "content": "x"}])])


def test_naming_them_imports_neither_package():
    names = "('reasoning_gym', 'skyrl_gym')"
    code = f"import sys, rollouts.sampling.environments; print([n for n in {names} if n in sys.modules])"
    out = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"


@pytest.mark.parametrize("name", ["reasoning_gym:chain_sum", "skyrl_gym:gsm8k"])
def test_a_missing_package_is_said(name, monkeypatch):
    package = name.partition(":")[0]
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(
        Refusal, match=rf"needs? the package {package}.*rollouts/sampling/environments/requirements\.txt"
    ):
        environment(name).tasks(1, seed=0)


# -- reasoning-gym -----------------------------------------------------------------------------------------------------


def test_every_data_set_of_the_package_is_offered_or_withheld():
    reasoning_gym.load_package()
    from reasoning_gym.factory import DATASETS

    assert sorted([*reasoning_gym.DATASETS, *reasoning_gym.WITHHELD]) == sorted(DATASETS)
    topics = {name: made.__module__.split(".")[1] for name, (made, _) in DATASETS.items()}
    assert all(topics[name] == topic for topic, names in reasoning_gym.FAMILIES.items() for name in names)


def test_no_offered_scorer_evaluates_what_a_model_wrote():
    folder = Path(reasoning_gym.load_package().__file__).parent
    from reasoning_gym.factory import DATASETS

    evaluating = set()
    for name, (dataset, _) in DATASETS.items():
        source = (folder / Path(*dataset.__module__.split(".")[1:]).with_suffix(".py")).read_text()
        if any(call in source for call in ("eval(answer", "parse_expr(answer", "sympify(", "exec(")):
            evaluating.add(name)
    assert evaluating and not evaluating & set(reasoning_gym.DATASETS)


@pytest.mark.parametrize(
    "name", ["chain_sum", "basic_arithmetic", "tower_of_hanoi", "figlet_font", "family_relationships"]
)
def test_the_right_answer_scores_1_and_another_less(name):
    made = environment(f"reasoning_gym:{name}")
    (task,) = made.tasks(1, seed=4)
    task = Task(**json.loads(json.dumps(asdict(task))))  # as it is stored
    right = made.start(task).step(say(f"Let me think.\n<answer>{task.answer}</answer>"))
    assert (right.done, right.reward, right.reward_parts) == (True, 1.0, {"score": 1.0, "formatted": 1.0})
    wrong = made.start(task).step(say("<answer>nothing of the kind</answer>"))
    assert wrong.reward < 1.0 and wrong.stop_reason in ("answered", "answer_unreadable")
    bare = made.start(task).step(say(task.answer))
    assert (bare.reward, bare.stop_reason) == (0.0, "no_answer")


def test_no_scorer_raises_for_what_a_model_may_write():
    for name in reasoning_gym.DATASETS:
        made = environment(f"reasoning_gym:{name}")
        (task,) = made.tasks(1, seed=0)
        for text in ("", "<answer></answer>", "<answer>[[[{</answer>", "<answer>1e999 ½ \x00</answer>", None):
            outcome = made.start(task).step({"role": "assistant", "content": text})
            assert outcome.done and 0.0 <= outcome.reward < 1.0, (name, text, outcome)


def test_a_longer_list_begins_with_the_shorter_one():
    made = environment("reasoning_gym:chain_sum")
    assert made.tasks(7, seed=1)[:3] == made.tasks(3, seed=1)
    assert made.tasks(3, seed=1) != made.tasks(3, seed=2)


def test_another_process_makes_the_same_tasks():
    code = (
        "from rollouts.sampling.environments import environment, reasoning_gym as g\n"
        "for name in g.DATASETS:\n"
        "    print('\\n' + repr([t.messages for t in environment(f'reasoning_gym:{name}').tasks(8, 5)]))"
    )
    there = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "PYTHONHASHSEED": "1"},  # this process has another one, by chance
    ).stdout.splitlines()
    here = [repr([t.messages for t in environment(f"reasoning_gym:{name}").tasks(8, 5)])
            for name in reasoning_gym.DATASETS]
    # A data set prints dots while it makes its tasks.
    assert [line for line in there if line.startswith("[[")] == here and len(here) > 1


def test_a_task_of_another_version_is_refused():
    made = environment("reasoning_gym:chain_sum")
    (task,) = made.tasks(1, seed=4)
    task.messages[-1]["content"] = "What is 1 + 1?"
    with pytest.raises(Refusal, match="install the same version"):
        made.start(task)


# -- SkyRL-Gym ---------------------------------------------------------------------------------------------------------


def test_every_environment_of_skyrl_gym_is_offered_or_withheld():
    # "rlm" is in the package without being registered.
    registered = set(skyrl_gym.load_package().registry)
    assert {*skyrl_gym.OFFERED, *skyrl_gym.WITHHELD} == {*registered, "rlm"}


@pytest.mark.parametrize(
    ("name", "right", "wrong", "lost"), [("gsm8k", "#### {}", "{}", 0.0), ("aime", "Answer: {}", "{}", -1.0)]
)
def test_one_turn_is_scored(name, right, wrong, lost):
    made = environment(f"skyrl_gym:{name}")
    (task,) = made.tasks(1, seed=2)
    for text, reward in ((right, 1.0), (wrong, lost)):
        outcome = made.start(task).step(say(text.format(task.answer)))
        assert (outcome.done, outcome.reward, outcome.reward_parts["turn_0"]) == (True, reward, reward)


def test_many_turns_bring_observations_and_their_rewards_add_up():
    made = environment("skyrl_gym:gsm8k_multi_turn")
    (task,) = made.tasks(1, seed=2)
    episode = made.start(task)
    first = episode.step(say("Hm."))
    assert not first.done and [one["role"] for one in first.messages] == ["user"]
    assert not episode.step(say("#### 123456789")).done
    last = episode.step(say(f"#### {task.answer}"))
    assert last.done and last.stop_reason == "done"
    assert last.reward == pytest.approx(0.04 + 1.0)
    assert last.reward_parts == {"turn_0": 0.0, "turn_1": pytest.approx(0.04), "turn_2": 1.0, "steps": 3.0}


def test_it_ends_after_its_own_number_of_turns():
    made = environment("skyrl_gym:gsm8k_multi_turn")
    episode = made.start(made.tasks(1, seed=2)[0])
    assert [episode.step(say("Hm.")).done for _ in range(5)] == [False] * 4 + [True]


def test_a_truncated_episode_keeps_what_its_turns_earned():
    made = environment("skyrl_gym:gsm8k_multi_turn")
    episode = made.start(made.tasks(1, seed=2)[0])
    episode.step(say("#### 123456789"))
    outcome = episode.truncated("length")
    assert (outcome.done, outcome.stop_reason, outcome.reward) == (True, "length", pytest.approx(0.04))


def test_thoughts_are_part_of_a_turn():
    made = environment("skyrl_gym:gsm8k")
    (task,) = made.tasks(1, seed=2)
    message = {"role": "assistant", "content": "Done.", "reasoning_content": f"#### {task.answer}"}
    assert made.start(task).step(message).reward == 1.0


def test_tasks_of_a_file_need_answers():
    ask = [{"role": "user", "content": "2 + 2?"}]
    assert environment("skyrl_gym:gsm8k", [Task(ask, answer="4")]).tasks(2, seed=0)[1].messages == ask
    with pytest.raises(Refusal, match='no "answer"'):
        environment("skyrl_gym:gsm8k", [Task(ask)]).tasks(1, seed=0)
    with pytest.raises(Refusal, match="makes its own tasks"):
        environment("reasoning_gym:chain_sum", [Task(ask, answer="4")])
