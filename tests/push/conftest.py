"""A token, a run, and recorded calls to push."""

from typing import Any

import pytest

from rollouts.store.models import Run
from rollouts.store.people.shares import create_api_key
from rollouts.store.runs.runs import create_run
from tests.people import make_member


@pytest.fixture
def token(db: None) -> str:
    return create_api_key(make_member("ann"), "trainer")[1]


@pytest.fixture
def run(db: None) -> Run:
    return create_run(Run.Kind.IMPORT, "grpo", status=Run.Status.DONE)


@pytest.fixture(autouse=True)
def diagnosed(sent: list[int]) -> list[int]:
    """The keys of the jobs that were sent; nothing goes to a broker."""
    return sent


def call(session: str, prompt: list[int], completion: list[int], **more: Any) -> dict[str, Any]:
    """One recorded call."""
    choice = {"index": 0, "token_ids": completion, "message": {"role": "assistant", "content": "x"},
              "finish_reason": "stop"}
    request = {"model": "m", "messages": [{"role": "user", "content": session}]}
    return {"session_id": session, "request": request, "response": {"prompt_token_ids": prompt, "choices": [choice]},
            **more}


def episodes(n: int, start: int = 0) -> list[dict[str, Any]]:
    """Two calls for each of ``n`` sessions."""
    return [
        one
        for i in range(start, start + n)
        for one in (call(f"s{i}", [1, 2, 3], [4, 5]), call(f"s{i}", [1, 2, 3, 4, 5, 6], [7], reward=1.0))
    ]
