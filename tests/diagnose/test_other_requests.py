"""A prompt of another request is named; a prompt that is cut, has another head or holds media is not called one."""

import unicodedata
from typing import Any

import numpy as np
import pytest

from rollout_inspector.diagnose import diagnose
from rollout_inspector.streams.interfaces import Conversation
from rollout_inspector.streams.messages import has_trace
from rollout_inspector.streams.trajectory import Ids, Trajectory
from rollout_inspector.text.chat_templates import renderer
from tests.samples.model_setups import model_setup

S = model_setup("stable")
ASKED = "Solve the puzzle, and show your work: how do seven herons cross the river?\nAnswer in one sentence."
OTHER = "Solve the puzzle, and show your work: which of the lamps burns until dawn?\nAnswer in one sentence."
SYSTEM = {"role": "system", "content": "You solve puzzles."}
RESULT = {"role": "tool", "tool_call_id": "a", "content": "The third heron cannot swim, says the ferryman."}
CALL = {"role": "assistant", "content": "", "tool_calls": [
    {"id": "a", "type": "function", "function": {"name": "lookup", "arguments": {"query": "herons"}}}]}
MESSAGES = [SYSTEM, {"role": "user", "content": ASKED}, CALL, RESULT]
NAMED = {"engine_ids_inconsistent", "tokenizer_mismatch"}


PARTS = renderer(S.codec, "{% for m in messages %}<|open|>{{ m.role }}\n{% if m.content is string %}{{ m.content }}"
                 "{% else %}{% for part in m.content %}{{ part.text or '<|open|>' }}{% endfor %}{% endif %}<|shut|>\n"
                 "{% endfor %}<|open|>assistant\n")


def rendered(messages: list[dict[str, Any]], tools: Any = None) -> Ids:
    return S.renderer.render_ids(Conversation(messages, tools, {}, True))


def named(messages: list[dict[str, Any]], prompt: Ids, template: Any = True) -> set[str]:
    trajectory = Trajectory("t", (S.step(messages, prompt, S.codec.encode("They take turns.<|shut|>"), None, None),))
    template = S.renderer if template is True else template or None
    return {one.kind for one in diagnose(trajectory, S.codec, lambda sha: template)} & NAMED


WHOLE = rendered(MESSAGES)
PART = {"type": "text", "text": ASKED}
MEDIA: list[dict[str, Any]] = [
    {"type": "image_url", "image_url": {"url": "https://example.org/herons.png"}}, {"type": "image", "image": "x.png"},
    {"type": "input_audio", "input_audio": {"data": "UklGRg==", "format": "wav"}}, {"type": "video", "video": "x.mp4"},
]


@pytest.mark.parametrize("template", [PARTS, True, False])
@pytest.mark.parametrize("media", MEDIA)
def test_media_have_no_text(media: dict[str, Any], template: Any) -> None:
    """A template writes placeholders for them, and what a log has in their place is in no prompt."""
    pads = S.codec.encode("<|open|><|open|>")
    for content in ([media, PART], [PART, media], [media, {"type": "input_text", "text": ASKED}], [media]):
        shown = np.concatenate([rendered(MESSAGES[:2]), pads]) if len(content) > 1 else pads
        assert named([SYSTEM, {"role": "user", "content": content}], shown, template) == set()
    asked = [SYSTEM, {"role": "user", "content": [media, PART]}]
    assert named(asked, PARTS.render_ids(Conversation(asked))) == set()
    assert named(asked, rendered([{"role": "user", "content": OTHER}]), PARTS) == {"engine_ids_inconsistent"}


@pytest.mark.parametrize("template", [True, False])
def test_another_text_in_place_of_the_requests_is_named(template: bool) -> None:
    other = [SYSTEM, {"role": "user", "content": OTHER}, CALL, {**RESULT, "content": "The lamp is out of oil."}]
    shared = [SYSTEM, {"role": "user", "content": "Which of the lamps burns until dawn, and who lit it on the eve?"}]
    if template:  # both texts begin and end alike
        assert named(MESSAGES, rendered(other)) == {"engine_ids_inconsistent"}
    assert named(MESSAGES, rendered(shared), template) == {"engine_ids_inconsistent"}
    assert named(MESSAGES, WHOLE, template) == set()


@pytest.mark.parametrize("template", [True, False])
def test_a_cut_prompt_is_of_its_request(template: bool) -> None:
    n = len(WHOLE)
    first = int(np.flatnonzero(WHOLE[-3] == WHOLE)[1])
    cuts = {
        "left": WHOLE[n // 2 :], "end alone": WHOLE[-12:], "right": WHOLE[: n // 2], "head alone": WHOLE[: first + 9],
        "middle": np.concatenate([WHOLE[:8], WHOLE[-8:]]),
        "marked": np.concatenate([WHOLE[: first + 20], S.codec.encode(" [...]"), WHOLE[-6:]]),
    }
    cuts = cuts if template else {name: cuts[name] for name in ("left", "right")}
    assert {name for name, prompt in cuts.items() if named(MESSAGES, prompt, template)} == set()


@pytest.mark.parametrize("template", [True, False])
def test_another_head_is_no_other_request(template: bool) -> None:
    """A date, a default system text, tools that the log lacks, and thinking that the template leaves out."""
    facts = "Today is 27 November 2026. You were made in Lima, and you like riddles."
    head = S.codec.encode(f"<|open|>system\n{facts}<|shut|>\n")
    tools = [{"type": "function", "function": {"name": "lookup", "description": "Find it.", "parameters": {}}}]
    thought = [*MESSAGES[:2], {**CALL, "reasoning_content": "Seven herons, one boat: I should ask."}, RESULT]
    for messages, prompt in (
        (MESSAGES, np.concatenate([head, rendered(MESSAGES[1:])])), (MESSAGES[1:], np.concatenate([head, WHOLE])),
        (MESSAGES, rendered(MESSAGES, tools)), (thought, WHOLE), (MESSAGES, rendered(thought)),
        (MESSAGES, rendered([SYSTEM, {"role": "user", "content": f"<b>{ASKED.upper()}</b>"}, CALL, RESULT])),
    ):
        assert named(messages, prompt, template) == set()


def test_other_white_space_and_spelling_is_the_same_text() -> None:
    """A server may normalise what it gets: widths, accents, quotes, white space."""
    asked = "Où est “Çanakkale”?  It\u2019s\u00a0not far, ｎｏ？"
    for shown in ("Où est \"Çanakkale\"? It's not far, no?", "Ou\u0300 est 'C\u0327anakkale'?\nIt's not far, no?"):
        assert named([{"role": "user", "content": asked}], rendered([{"role": "user", "content": shown}])) == set()


@pytest.mark.parametrize("said", ["Tôi đã đến Huế rồi", "서울에 갔습니다", "ガラパゴスです", "Ｗｉｄｅ ｗｏｒｄｓ"])
def test_a_message_in_another_form_of_unicode_was_sampled(said: str) -> None:
    """A harness may normalise what it stores. Signs alone have no letters, and agree with nothing."""
    asked = MESSAGES[1]
    for form in ("NFC", "NFD", "NFKC"):
        sent = {"role": "assistant", "content": unicodedata.normalize(form, said)}
        after = [SYSTEM, asked, sent, {"role": "user", "content": "Go on."}]
        steps = (S.step([SYSTEM, asked], rendered([SYSTEM, asked]), S.codec.encode(f"{said}<|shut|>"), None),
                 S.step(after, rendered(after), S.codec.encode("Yes.<|shut|>"), None))
        findings = diagnose(Trajectory("t", steps), S.codec, lambda sha: S.renderer)
        assert "assistant_rewritten" not in {one.kind for one in findings}
    assert not has_trace("…！？", said.encode(), str) and not has_trace("Đà Nẵng đẹp", said.encode(), str)


def test_texts_too_short_to_tell() -> None:
    for text in ("4", "??", "", " \n", "好"):
        assert named([{"role": "user", "content": text}], rendered([{"role": "user", "content": OTHER}])) == set()
