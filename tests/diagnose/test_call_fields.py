"""Fields of one engine call against each other: what agrees stays silent, what contradicts is named at its place."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rollout_inspector.diagnose import Finding, Severity, diagnose
from rollout_inspector.streams.trajectory import Trajectory
from rollout_inspector.text.chat_templates import renderer
from rollout_inspector.text.tokenizers import load
from tests.samples.diagnosis import PAIRS
from tests.samples.formats import changed, jsonl, read
from tests.samples.model_setups import model_setup
from tests.samples.planted.plant_setup import ModelSetup

USER = {"role": "user", "content": "Where does Ada live?"}
SAYS = "She lives in Cusco, 札幌 🦀."
INCONSISTENT = ["engine_ids_inconsistent"]


def setup(name: str) -> ModelSetup:
    return model_setup(name, tools=False, system=False)


def alone(codec: Any, token_id: int) -> str:
    """A token's text as servers write it: decoded by itself."""
    return str(codec.token_bytes(np.array([token_id], np.int32))[0].decode("utf-8", "replace"))


def chat(s: ModelSetup, says: str = SAYS, **fields: Any) -> dict[str, Any]:
    """A call of vLLM's chat API. Fields of the choice may be replaced."""
    prompt, ids = s.render([USER]).tolist(), s.codec.encode(f"{says}<|shut|>").tolist()
    entries = [{"token": alone(s.codec, token_id), "logprob": -0.5} for token_id in ids]
    choice = {"index": 0, "token_ids": ids, "finish_reason": "stop", "logprobs": {"content": entries},
              "message": {"role": "assistant", "content": says.strip()}, **fields}
    usage = {"prompt_tokens": len(prompt), "completion_tokens": len(choice["token_ids"])}
    return {"session_id": "s", "request": {"messages": [USER]},
            "response": {"prompt_token_ids": prompt, "choices": [choice], "usage": usage}}


def generate(s: ModelSetup, **meta: Any) -> dict[str, Any]:
    """A call of SGLang's ``/generate``. Fields of ``meta_info`` may be replaced."""
    prompt, ids = s.render([USER]).tolist(), s.codec.encode(f"{SAYS}<|shut|>").tolist()
    fields = {"id": "r", "finish_reason": {"type": "stop", "matched": ids[-1]}, "prompt_tokens": len(prompt),
              "completion_tokens": len(ids), "output_token_logprobs": [[-0.5, token_id, None] for token_id in ids],
              **meta}
    return {"session_id": "s", "request": {"input_ids": prompt, "sampling_params": {}},
            "response": {"text": SAYS, "output_ids": ids, "meta_info": fields}}


def findings(s: ModelSetup, *calls: dict[str, Any]) -> list[Finding]:
    _, trajectories, rejected = read(jsonl(*calls))
    assert rejected == []
    return [
        finding for trajectory in trajectories for finding in diagnose(trajectory, s.codec, lambda sha: s.renderer)
        if finding.severity is not Severity.INFO
    ]


def kinds(s: ModelSetup, *calls: dict[str, Any]) -> list[str]:
    return [finding.kind for finding in findings(s, *calls)]


@pytest.mark.parametrize("name", ["stable", "pieces", "prefixed", "composed", "words", "stripping"])
def test_texts_of_tokens_beside_their_ids(name: str) -> None:
    s = setup(name)
    says = SAYS if name != "words" else "She lives in Cusco."
    call = chat(s, says)
    assert kinds(s, call) == []
    ids = call["response"]["choices"][0]["token_ids"]
    place = next(i for i, token_id in enumerate(ids) if alone(s.codec, token_id).strip() == alone(s.codec, token_id))
    entries = ("response", "choices", 0, "logprobs", "content")
    wrong = changed(call, *entries, place, "token", to="QQ")
    (finding,) = findings(s, wrong)
    assert (finding.kind, finding.step) == ("engine_ids_inconsistent", 0)
    assert finding.start == len(call["response"]["prompt_token_ids"]) + place and "'QQ'" in finding.evidence
    for text in ("", "�", f"▁{alone(s.codec, ids[place])}", f"Ġ{alone(s.codec, ids[place])}", None):
        assert kinds(s, changed(call, *entries, place, "token", to=text)) == [], text


@pytest.mark.parametrize("name", ["stable", "pieces"])
def test_ids_that_were_made_from_decoded_tokens(name: str) -> None:
    """https://github.com/ai-dynamo/dynamo/pull/8630: half a character became U+FFFD, which has ids of its own."""
    s, says = setup(name), "She lives in Cusco 🦀."
    sampled = s.codec.encode(f"{says}<|shut|>")
    again = [token_id for one in sampled for token_id in s.codec.encode(alone(s.codec, int(one))).tolist()]
    assert s.codec.token_bytes(np.array(again, np.int32)) != s.codec.token_bytes(sampled)
    (finding,) = findings(s, chat(s, says, token_ids=again, logprobs=None))
    assert finding.kind == "engine_ids_inconsistent"
    assert "\ufffd" in finding.actual_text
    kept = {"role": "assistant", "content": says.replace("🦀", "\ufffd")}
    assert kinds(s, chat(s, says, token_ids=again, logprobs=None, message=kept)) == []
    assert kinds(s, chat(s, says)) == []


def test_ids_named_beside_the_ids() -> None:
    s = setup("stable")
    call = chat(s)
    choice = call["response"]["choices"][0]
    for key, name in (("token", "token_id:{}".format), ("token_id", int), ("id", int)):
        entries = [{key: name(token_id), "logprob": -0.5} for token_id in choice["token_ids"]]
        right = changed(call, "response", "choices", 0, "logprobs", "content", to=entries)
        assert kinds(s, right) == []
        bare = changed(right, "response", "choices", 0, "token_ids", to=None)
        _, (trajectory,), _ = read(jsonl(bare))
        assert trajectory.steps[0].completion_ids.tolist() == choice["token_ids"]
        wrong = changed(right, "response", "choices", 0, "logprobs", "content", 1, key, to=name(7))
        (finding,) = findings(s, wrong)
        assert finding.kind == "engine_ids_inconsistent" and "against 7" in finding.evidence


def test_texts_of_a_text_completion() -> None:
    s = setup("stable")
    ids = s.codec.encode(SAYS + "<|shut|>").tolist()
    texts = [alone(s.codec, token_id) for token_id in ids]
    right = chat(s, message=None, text=SAYS, logprobs={"tokens": texts, "token_logprobs": [-0.5] * len(ids)})
    assert kinds(s, right) == []
    assert kinds(s, changed(right, "response", "choices", 0, "logprobs", "tokens", 0, to="Q")) == INCONSISTENT


def test_counts_of_an_answer() -> None:
    s = setup("stable")
    call = chat(s)
    usage = call["response"]["usage"]
    n = usage["completion_tokens"]
    for name, counts in {"prompt_tokens": {0: INCONSISTENT, -1: INCONSISTENT}, "completion_tokens": {
        n - 1: [],  # the stop token is not counted
        n + 1: INCONSISTENT, n - 2: INCONSISTENT, 2 * n: INCONSISTENT,
    }}.items():
        for count, expected in counts.items():
            value = usage[name] + 3 if count < 1 else count
            assert kinds(s, changed(call, "response", "usage", name, to=value)) == expected, (name, value)
    odd: Any
    for odd in (None, "7", -1, 2.5, True, 10**30, []):
        assert kinds(s, changed(call, "response", "usage", to={"prompt_tokens": odd, "completion_tokens": odd})) == []
    assert kinds(s, changed(call, "response", "usage", to=[])) == []
    without_stop = chat(s, token_ids=s.codec.encode(SAYS).tolist(), logprobs=None)
    without_stop["response"]["usage"]["completion_tokens"] += 1
    assert kinds(s, without_stop) == []
    assert kinds(s, changed(without_stop, "response", "choices", 0, "finish_reason", to="length")) == INCONSISTENT
    # A count of several choices, and the tokens of an image, say nothing of one list of ids.
    two = changed(call, "response", "choices", to=[*call["response"]["choices"]] * 2)
    assert "engine_ids_inconsistent" not in kinds(s, changed(two, "response", "usage", "completion_tokens", to=2 * n))
    shown = [{"type": "image_url", "image_url": {"url": "x"}}, {"type": "text", "text": USER["content"]}]
    image = changed(call, "request", "messages", 0, "content", to=shown)
    image["response"]["usage"]["prompt_tokens"] += 500
    assert "engine_ids_inconsistent" not in kinds(s, image)


def test_ids_of_the_prompt_that_were_sent_and_read() -> None:
    s = setup("stable")
    call = changed(chat(s), "request", "prompt", to=s.render([USER]).tolist())
    assert kinds(s, call) == []
    cut = changed(call, "response", "prompt_token_ids", to=call["request"]["prompt"][2:])
    cut["response"]["usage"] = None
    assert "engine_ids_inconsistent" in kinds(s, cut)
    assert "engine_ids_inconsistent" not in kinds(s, changed(cut, "request", "truncate_prompt_tokens", to=9))
    assert kinds(s, changed(call, "request", "prompt", to=["some text"])) == []
    right = generate(s)
    assert kinds(s, changed(right, "response", "input_ids", to=right["request"]["input_ids"])) == []
    assert kinds(s, changed(right, "response", "input_ids", to=right["request"]["input_ids"][1:])) == INCONSISTENT


def test_an_answer_of_sglang() -> None:
    s = setup("stable")
    right = generate(s)
    ids = right["response"]["output_ids"]
    assert kinds(s, right) == []
    assert kinds(s, changed(right, "response", "output_ids", to=ids[:-1])) == []  # without its stop token
    for wrong in ([*ids, ids[-1]], [*ids[:-1], ids[-2]], ids[:-2], [ids[1], *ids[1:]]):
        assert kinds(s, changed(right, "response", "output_ids", to=wrong)) == INCONSISTENT
    assert kinds(s, generate(s, prompt_tokens=3)) == INCONSISTENT
    assert kinds(s, generate(s, completion_tokens=len(ids) - 3)) == INCONSISTENT
    texts = [[-0.5, token_id, alone(s.codec, token_id)] for token_id in ids]
    assert kinds(s, generate(s, output_token_logprobs=texts)) == []
    texts[0][2] = "Q"
    assert kinds(s, generate(s, output_token_logprobs=texts)) == INCONSISTENT
    # An abort that repeats its last token, without log-probabilities: https://github.com/sgl-project/sglang/issues/34488
    aborted = generate(s, output_token_logprobs=None, finish_reason={"type": "abort"}, completion_tokens=len(ids) - 1)
    assert kinds(s, changed(aborted, "response", "output_ids", to=[*ids[:-1], ids[-2]])) == INCONSISTENT


def test_versions_within_one_call() -> None:
    s = setup("stable")
    n = len(generate(s)["response"]["output_ids"])
    runs = [{"version": "12", "start": 0, "end": 2}, {"version": "13", "start": 2, "end": n}]
    for spans, expected in ((runs, 1), (runs[1:], 0), ([{**runs[0], "end": 0}, runs[1]], 0)):
        _, trajectories, _ = read(jsonl(generate(s, weight_version="13", weight_versions=spans)))
        mixed = [f for f in diagnose(trajectories[0], s.codec, None) if f.kind == "mixed_policy_versions"]
        assert len(mixed) == expected and all("12, 13" in finding.evidence for finding in mixed)


STOPPED = ["stop_string_misaligned"]


@pytest.mark.parametrize(
    ("sampled", "returned", "stop", "expected"),
    [
        ("wait...", "wait", "..", STOPPED),
        ("The sum is 3.\nObservation: it is so", "The sum is 3.", "Observation:", STOPPED),
        ("The sum is 3.\nObservation: it is so", "The sum is 3.", "\nObservation:", STOPPED),
        ("<a>jazz</a> and then I answer", "<a>jazz", "</a>", STOPPED),
        ("<a>jazz</a>\n\n", "<a>jazz</a>", "</a>", STOPPED),
        ("wait... wait...", "wait... wait", "...", STOPPED),
        ("<a>jazz</a>", "<a>jazz</a>", "</a>", []),
        ("<a>jazz</a> and more of it", "<a>jazz</a> and more of it", "</a>", []),
        ("please stop now", "please stop now", "stop", []),
        ("all is said", "all is said", "eos", []),
    ],
)
def test_a_stop_string_of_a_chat_message(sampled: str, returned: str, stop: str, expected: list[str]) -> None:
    s = setup("stable")
    message = {"role": "assistant", "content": returned}
    fields = {"token_ids": s.codec.encode(sampled).tolist(), "logprobs": None, "message": message}
    found = findings(s, chat(s, **fields, stop_reason=stop))
    assert [finding.kind for finding in found] == expected
    for named in ({"matched_stop": stop}, {}):
        call = changed(chat(s, **fields, **named), "request", "stop", to=[stop, "never"])
        assert kinds(s, call) == expected, named
    closed = {**fields, "token_ids": s.codec.encode(f"{sampled}<|shut|>").tolist()}
    assert "stop_string_misaligned" not in kinds(s, changed(chat(s, **closed), "request", "stop", to=stop))
    thought = f"<think>{returned}!</think>{sampled}"
    again = {**fields, "token_ids": s.codec.encode(thought).tolist(),
             "message": {**message, "reasoning_content": f"{returned}!"}}
    assert kinds(s, chat(s, **again, stop_reason=stop)) == expected
    for finding in found:
        text = s.decode(s.codec.encode(sampled)[finding.start - len(s.render([USER])) :])
        assert sampled.endswith(text) and len(text) >= len(sampled) - len(returned) - 1


def test_a_stop_string_behind_a_call() -> None:
    s = setup("stable")
    call = '<call>{"name": "lookup", "arguments": {"query": "Ada"}}</call>'
    message = {"role": "assistant", "content": None, "tool_calls": [
        {"id": "a", "type": "function", "function": {"name": "lookup", "arguments": '{"query": "Ada"}'}}]}
    for sampled, expected in ((call, []), (f"{call} and then I answer it", STOPPED)):
        ids = s.codec.encode(sampled).tolist()
        fields = {"token_ids": ids, "logprobs": None, "message": message, "stop_reason": "</call>"}
        assert kinds(s, chat(s, **fields)) == expected


@pytest.mark.parametrize(("tokenizer", "template"), PAIRS)
def test_a_first_prompt_without_its_head(corpus: Path, tokenizer: str, template: str) -> None:
    codec = load(corpus / "tokenizers" / tokenizer)
    text = (corpus / "templates" / f"{template}.jinja").read_text(encoding="utf-8")
    s = ModelSetup(template, codec, renderer(codec, text), None, tools=False, system=False)  # type: ignore[arg-type]
    prompt = s.render([USER])
    ids = codec.encode(SAYS).tolist()

    def call(prompt_ids: list[int], messages: list[dict[str, Any]]) -> dict[str, Any]:
        value = chat(s, token_ids=ids, logprobs=None)
        value["response"] |= {"prompt_token_ids": prompt_ids, "usage": None}
        return changed(value, "request", "messages", to=messages)

    assert kinds(s, call(prompt.tolist(), [USER])) == []
    (finding,) = findings(s, call(prompt[1:].tolist(), [USER]))
    assert finding.kind == ("bos_mismatch" if int(prompt[0]) == codec.bos_id else "delta_differs")
    assert (finding.step, finding.start, finding.expected_ids.tolist()) == (0, 0, prompt[:1].tolist())
    moved = {"role": "user", "content": "Ada moved to another town in May. " * 20}
    longer = [moved, {"role": "assistant", "content": "I see."}, USER]
    whole = s.render(longer)
    half = len(whole) // 2
    assert kinds(s, call(whole[half:].tolist(), longer)) == ["context_truncated"]
    empty = ModelSetup(template, codec, renderer(codec, ""), None, tools=False, system=False)  # type: ignore[arg-type]
    assert kinds(empty, call(prompt.tolist(), [USER])) == []
    # A harness that writes its own text at the start is no fault that a render can name.
    own = np.concatenate([codec.encode("A note of the harness.\n"), prompt]).tolist()
    assert kinds(s, call(own, [USER])) == []


def encoded_apart(s: ModelSetup, text: str, name: str) -> Any:
    """The ids of a text whose control token of this name was encoded as text."""
    head, behind = text.split(name)
    return np.concatenate([s.codec.encode(part) for part in (head, name[:2], name[2:], behind)])


@pytest.mark.parametrize("name", ["stable", "stripping"])
def test_control_text_beside_white_space(name: str) -> None:
    s = setup(name)
    messages = [{"role": "user", "content": "run $<|end|>\n ls"}]
    right = encoded_apart(s, s.text(messages), "<|end|>")
    for prompt, expected in ((s.render(messages), ["special_tokens_injected"]), (right, [])):
        value = changed(chat(s), "request", "messages", to=messages)
        value["response"] |= {"prompt_token_ids": prompt.tolist(), "usage": None}
        assert kinds(s, value) == expected
    reply = {"role": "assistant", "content": "Yes."}
    before, completion = s.answer([USER], reply)
    first = s.step([USER], s.codec.encode(before), s.codec.encode(completion), reply)
    later = [USER, reply, *messages]
    delta = "<|shut|>" + s.text(later)[len(before + completion) :]
    right = encoded_apart(s, delta, "<|end|>")
    for ids, expected in ((s.codec.encode(delta), ["special_tokens_injected"]), (right, [])):
        step = s.step(later, np.concatenate([first.stream, ids[1:]]), s.codec.encode("No.<|shut|>"), None, text="No.")
        found = diagnose(Trajectory("t", (first, step)), s.codec, lambda sha: s.renderer)
        assert [f.kind for f in found if f.severity is not Severity.INFO] == expected


def test_a_cut_inside_a_character_whose_text_is_whole() -> None:
    s = setup("stable")
    reply = {"role": "assistant", "content": "In 札幌 it is."}
    before, completion = s.answer([USER], reply)
    later = [USER, reply, {"role": "user", "content": "And Ada?"}]
    behind = s.text(later)[len(before) :]
    pieces = s.codec.token_bytes(np.arange(s.codec.vocab_size, dtype=np.int32))
    of_byte = {piece: token_id for token_id, piece in enumerate(pieces) if len(piece) == 1}
    head, tail = completion.split("札幌")
    half = np.array([of_byte[bytes([value])] for value in "札幌".encode()], np.int32)

    def kinds_of(ids: Any, came: str) -> list[str]:
        first = s.step([USER], s.codec.encode(before), ids, reply)
        last = s.step(later, s.codec.encode(before + came), s.codec.encode("No.<|shut|>"), None, text="No.")
        found = diagnose(Trajectory("t", (first, last)), s.codec, lambda sha: s.renderer)
        return [f.kind for f in found if f.step == 1 and f.severity is not Severity.INFO]

    def sampled(n_bytes: int) -> Any:
        return np.concatenate([s.codec.encode(head), half[:n_bytes], s.codec.encode(tail)])

    assert kinds_of(s.codec.encode(completion), behind) == []
    # White space differs behind the cut character, so that the texts are not equal.
    assert kinds_of(sampled(6), behind.replace("札幌 it", "札幌  it")) == ["whitespace_changed"]
    assert kinds_of(sampled(5), behind.replace("札幌", "札�")) == ["invalid_utf8"]


@pytest.mark.parametrize(
    ("tokenizer", "template"),
    [("qwen2.5", "vllm--chatml"), ("llama3.1", "llama3.2"), ("deepseek-r1", "deepseek-v3.1"),
     ("mistral-nemo", "mistral-nemo"), ("qwen3", "qwen3-coder")],
)
def test_a_turn_whose_stop_token_was_stripped_stays_open(corpus: Path, tokenizer: str, template: str) -> None:
    """https://github.com/ai-dynamo/dynamo/issues/14302"""
    codec = load(corpus / "tokenizers" / tokenizer)
    text = (corpus / "templates" / f"{template}.jinja").read_text(encoding="utf-8")
    s = ModelSetup(template, codec, renderer(codec, text), None, tools=False, system=False)  # type: ignore[arg-type]
    later = [USER, {"role": "assistant", "content": "In Cusco."}, {"role": "user", "content": "Since when?"}]
    prompt, whole = s.render([USER]).tolist(), s.render(later).tolist()
    said = codec.encode("In Cusco.").tolist()
    at = len(prompt) + len(said)
    assert whole[:at] == [*prompt, *said] and whole[at] in codec.special_ids

    def calls(ids: list[int], behind: list[int]) -> list[dict[str, Any]]:
        values = []
        for messages, prompt_ids in ((later[:1], prompt), (later, [*prompt, *ids, *behind])):
            value = chat(s, "In Cusco.", token_ids=ids, logprobs=None)
            value["response"] |= {"prompt_token_ids": prompt_ids, "usage": None}
            values.append(changed(value, "request", "messages", to=messages))
        return values

    assert kinds(s, *calls([*said, whole[at]], whole[at + 1 :])) == []
    assert kinds(s, *calls(said, whole[at:])) == []  # the harness closes it
    (finding,) = findings(s, *calls(said, whole[at + 1 :]))
    assert (finding.kind, finding.step, finding.start) == ("delta_differs", 1, at)
    assert finding.expected_ids.tolist() == [whole[at]]


@pytest.mark.parametrize("tokenizer", ["qwen2.5", "llama3.1", "deepseek-r1", "mistral-nemo", "qwen3"])
def test_a_stop_token_that_the_template_does_not_write(corpus: Path, tokenizer: str) -> None:
    """https://github.com/vllm-project/vllm/issues/46224, https://github.com/rllm-org/rllm/pull/238"""
    codec = load(corpus / "tokenizers" / tokenizer)
    assert codec.chat_template is not None
    s = ModelSetup(tokenizer, codec, renderer(codec, codec.chat_template), None, tools=False, system=False)  # type: ignore[arg-type]
    prompt, stop = s.render([USER]).tolist(), alone(codec, codec.eos_id)
    said = [*codec.encode("In Cusco.").tolist(), codec.eos_id]

    def call(messages: list[Any], says: str, prompt_ids: list[int]) -> dict[str, Any]:
        value = chat(s, says, token_ids=said, logprobs=None)
        value["response"] |= {"prompt_token_ids": prompt_ids, "usage": None}
        return changed(value, "request", "messages", to=messages)

    for at in range(2, len(prompt)):  # the prompt of a parser that begins or ends a header with it
        (finding,) = findings(s, call([USER], "In Cusco.", [*prompt[:at], codec.eos_id, *prompt[at:]]))
        assert (finding.kind, finding.axis, finding.step) == ("delta_differs", "delta", 0)
    for leaks in (True, False):  # into the content that comes back
        text = "In Cusco." + stop * leaks
        later = [USER, {"role": "assistant", "content": text}, {"role": "user", "content": "Since when?"}]
        whole = s.render(later).tolist()
        expected = ["stop_token_doubled"] if leaks and whole[: len(prompt) + len(said)] == [*prompt, *said] else []
        if expected or not leaks:
            assert kinds(s, call([USER], text, prompt), call(later, "In Cusco.", whole)) == expected
