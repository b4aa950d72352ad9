"""The lines of trajectories for lists: the task and the answer, from messages, texts or ids."""

import numpy as np
import pytest

from rollout_inspector.streams.preview import MAX_LINE, Preview, first_line, preview_of
from rollout_inspector.streams.trajectory import NO_IDS, Request, Row, Step, ids_array

USER = {"role": "user", "content": "\n What is 2 + 2? \nShow your work."}


def step(*messages: dict, reply: dict | None = None, text: str | None = None, **more: object) -> Step:
    return Step(NO_IDS, NO_IDS, request=Request(messages) if messages else None, reply=reply, text=text, **more)


@pytest.mark.parametrize(
    ("steps", "found"),
    [
        ([step({"role": "system", "content": "Be brief."}, USER, reply={"content": "4"})], ("What is 2 + 2?", "4")),
        ([step(USER, reply={"content": "<think>2 and 2\nis 4</think>\n\nFour."})], ("What is 2 + 2?", "Four.")),
        # What an environment says later is not the task.
        (
            [
                step(USER, reply={"content": "5"}),
                step(USER, {"role": "user", "content": "Wrong"}, reply={"content": "4"}),
            ],
            ("What is 2 + 2?", "4"),
        ),
        (
            [step(USER, reply={"content": "", "tool_calls": [{"function": {"name": "add", "arguments": "{}"}}]})],
            ("What is 2 + 2?", "calls add({})"),
        ),
        ([step(USER, reply={"content": None, "reasoning_content": "Hm"})], ("What is 2 + 2?", "thinks: Hm")),
        ([step(text="It is 4.<|im_end|>", extra={"prompt": "2 + 2?\n"})], ("2 + 2?", "It is 4.")),
        ([step(text="4", extra={"prompt": [USER]})], ("What is 2 + 2?", "4")),
        (
            [step({"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "Which?"}]}, reply={})],
            ("[image] Which?", ""),
        ),
        ([], ("", "")),
    ],
)
def test_the_lines_come_from_messages_and_texts(steps: list[Step], found: tuple[str, str]) -> None:
    assert preview_of(steps) == Preview(*found)


def test_a_line_is_short_and_one() -> None:
    assert first_line("\u2028 \n\t a  b \n c") == "a b"
    assert len(first_line("x" * 1000)) == MAX_LINE and first_line("x" * 1000).endswith("…")
    assert first_line("") == ""


def test_ids_are_read_where_there_is_no_text() -> None:
    """Control tokens cut the text; a stretch that is a role alone is no line."""

    def pieces(ids: np.ndarray) -> list[str]:
        return "".join(map(chr, ids.tolist())).replace(">", "<").split("<")

    def coded(text: str) -> np.ndarray:
        return ids_array([ord(letter) for letter in text])

    prompt = coded("<system\nBe brief.><user\n2 + 2?><assistant\n")
    assert preview_of([Step(prompt, coded("4>"))], (), pieces) == ("2 + 2?", "4")
    ids = np.concatenate([prompt, coded("4>")])
    row = Row(ids=ids, loss_mask=np.arange(len(ids)) >= len(prompt))
    assert preview_of([], [row], pieces) == ("2 + 2?", "4")
    assert preview_of([], [row]) == ("", "")
    assert preview_of([], [Row(ids=ids, loss_mask=np.zeros(len(ids), bool))], pieces).answer == ""
