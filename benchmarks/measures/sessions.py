"""Sessions of a model that calls tools, recorded token by token as an engine and a careful harness would."""

import json
import random
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from benchmarks.measures.models import CLOSE, OPEN, Message, Model, call_message, result_of
from rollout_inspector.streams.trajectory import Request, Row, Step, Trajectory, ids_array

PHRASES = (
    "HAVING count(*) > 3",
    "東京タワーの高さは333メートル",
    "family 👩‍👩‍👧‍👦 and 🏳️‍🌈 done",
    "مرحبا بالعالم",
    "Łódź nad Wisłą",
    "e\u0301te\u0301 a\u0300 Saint-E\u0301tienne",
    "naïve café",
    "def f(x):\n    return x ** 2",
    "Привет, мир",
    "हिन्दी में",
    "1,234,567.89 EUR",
    "left\tright",
    "two  spaces   three",
    "the quick brown fox jumps over the lazy dog",
    'path C:\\temp\\new and "quotes"',
    "x < 3 && y > 4",
    "한국어 문장입니다",
    "tokenization of underscores_and_CamelCase",
)
COMPOSED = tuple(one for one in PHRASES if "\u0301" not in one and "\u0300" not in one)
LONG = "row of the table with value {} and a note; "
TOOLS = (
    ("calc", {"expr": "string"}),
    ("search", {"name": "string", "arguments": "string", "id": "integer"}),
    ("write_file", {"path": "string", "content": "string", "overwrite": "boolean", "tags": "array"}),
    ("list_all", {}),
)
SYSTEM = "You are agent {}. Session 4711 began at 08:15. Use the tools."


@dataclass(frozen=True)
class Label:
    """What was planted and where."""

    kind: str
    step: int | None = None
    """The step that shows it; None = any step, or a row."""
    offset: int | None = None
    """The first wrong token; None = no single token is."""
    row: int | None = None
    variant: str = ""
    also: int | None = None
    """Another step that is as right: one of two calls alike."""


@dataclass(frozen=True)
class Turn:
    """What the model does at one call."""

    calls: int = 0
    reasons: bool = False
    speaks: bool = False
    spelling: str = ""
    """How the sample differs from what the template writes; a key of ``SPELLINGS``."""
    user: bool = False
    """A user's message follows the results of the tools."""


class NotHere(Exception):
    """This fault cannot be planted in this session."""


Spelling = Callable[["Session", Message, str], tuple[str, list[int]]]


@dataclass
class Session:
    """One conversation while it is recorded."""

    model: Model
    rng: random.Random
    name: str
    tools: Any = None
    kwargs: Mapping[str, Any] | None = None
    messages: list[Message] = field(default_factory=list)
    stream: list[int] = field(default_factory=list)
    """What the engine has read and sampled so far."""
    started: int = 0
    """Where the last completion begins in the stream."""
    first_text: str = ""
    new: list[Message] = field(default_factory=list)
    """The messages since the last completion."""
    delta_text: str = ""
    delta: list[int] = field(default_factory=list)
    calls: list[dict[str, Any]] = field(default_factory=list)
    labels: list[Label] = field(default_factory=list)
    spans: list[tuple[int, int]] = field(default_factory=list)
    """The completions of the stream."""
    with_logprobs: bool = True
    zeros: float = 0.0
    """How many log-probabilities are exactly 0: where the model was certain."""
    with_reply: bool = True
    with_text: bool = False
    plain: bool = False
    """Whether messages hold no decomposed accents."""
    written: str = ""
    """The last completion as the template writes it."""
    read_last: str = ""
    """The text of the prompt that the last completion followed, or its end."""
    undo: Callable[[], None] | None = None
    """Called behind the next completion, where a fault lasts for one call."""

    # -- what is said

    def phrase(self) -> str:
        return self.rng.choice(COMPOSED if self.plain else PHRASES)

    def marked(self, long: bool = False) -> str:
        """A text that begins with a word of its own, so that a render can be searched for it."""
        text = f"ref{self.rng.randrange(10**9):09} value {self.rng.randrange(1000, 9999)}: {self.phrase()}."
        return text + (" " + "".join(LONG.format(n) for n in range(60)) if long else " " + self.phrase())

    def begin(self, system: str = SYSTEM, with_tools: bool = True) -> None:
        model = self.model
        if model.calls and with_tools:
            self.tools = [
                {"type": "function", "function": {"name": name, "description": f"Calls {name}.", "parameters": {
                    "type": "object", "properties": {key: {"type": kind} for key, kind in properties.items()},
                    "required": list(properties)}}}
                for name, properties in TOOLS
            ]
        if model.takes_system and self.rng.random() < 0.8:
            self.messages.append({"role": "system", "content": system.format(self.rng.randrange(100, 999))})
        self.messages.append({"role": "user", "content": self.marked()})
        self.first_text = self.render()

    def render(self, messages: Sequence[Message] | None = None, more: bool = True) -> str:
        return self.model.render(self.messages if messages is None else messages, self.tools, self.kwargs, more)

    def reply(self, turn: Turn) -> Message:
        model, rng = self.model, self.rng
        n = min(turn.calls, model.calls)
        message: Message = {"role": "assistant", "content": ""}
        if n:
            ids = [f"{rng.randrange(16**9):09x}" for _ in range(n)]
            message = call_message([self._arguments() for _ in range(n)], ids)
        if not n or (turn.speaks and model.speaks_and_calls):
            message["content"] = f"answer {rng.randrange(1000, 9999)}: {self.phrase()}, {self.phrase()}."
        if turn.reasons and model.reasons and not (n and turn.speaks and "gpt" in model.name):
            message[model.reasoning_key or "reasoning_content"] = f"I think {self.phrase()} so {rng.randrange(999)}."
        return message

    def _arguments(self) -> tuple[str, dict[str, Any]]:
        name, properties = self.rng.choice(TOOLS)
        values = {"string": self.phrase(), "integer": self.rng.randrange(10**6), "boolean": self.rng.random() < 0.5,
                  "array": [self.phrase(), {"n": 1.5, "none": None}]}
        arguments = {key: values[kind] for key, kind in properties.items()}
        if "expr" in arguments:
            arguments["expr"] = f"({self.rng.randrange(99)} + {self.rng.randrange(99)}) * 3"
        return name, arguments

    def text_of(self, message: Message, prompt: str | None = None) -> str:
        """The completion that the template writes for a reply, its stop token included."""
        model, stops = self.model, self.model.pair.stops
        reasoning = message.get(model.reasoning_key or "reasoning_content") or ""
        opened = (self.prompt_text() if prompt is None else prompt).rstrip().endswith(OPEN)
        text = model.says(message)
        if model.reasons in ("open", "free"):
            text = re.sub(rf"^\s*{OPEN}.*?{CLOSE}\s*|^\s*{CLOSE}\s*", "", text, count=1, flags=re.DOTALL)
            gap = "\n" if model.generation_prompt.endswith("\n") or model.reasons == "free" else ""
            if opened or (reasoning and model.reasons == "free"):
                head = "" if opened else f"{OPEN}\n"
                text = f"{head}{reasoning}{gap}{CLOSE}{gap * 2}{text.lstrip()}"
        ends = [text.rindex(stop) + len(stop) for stop in stops if stop in text]
        if ends:
            return text[: max(ends)]
        return text.rstrip() + (stops[0] if message.get("tool_calls") or len(stops) == 1 else stops[1])

    # -- what the engine reads

    def prompt_text(self) -> str:
        return self.delta_text if self.stream else self.first_text

    def text_after(self, new: Sequence[Message], more: bool = True) -> str:
        """What the template writes behind the last stop token, for these messages."""
        whole = self.render([*self.messages_before_new(), *new], more)
        at = whole.rfind(str(new[0]["content"])[:12])
        if at < 0:
            raise NotHere("the template drops the message")
        stop = max(whole.rfind(stop, 0, at) + len(stop) for stop in self.model.pair.stops if stop in whole[:at])
        return whole[stop:]

    def messages_before_new(self) -> list[Message]:
        return self.messages[: len(self.messages) - len(self.new)]

    def observe(self, turn: Turn, long: bool = False, user_text: str = "") -> None:
        """Results of the tools, or what a user says; and the tokens that the template puts in between."""
        last = self.messages[-1]
        self.new = [result_of(call, self.marked(long)) for call in last.get("tool_calls", ())]
        if not self.new or (turn.user and self.model.pair.template != "mistral-nemo"):
            self.new.append({"role": "user", "content": self.marked() + user_text})
        self.messages += self.new
        self.set_delta(self.text_after(self.new))

    def set_delta(self, text: str) -> None:
        self.delta_text, self.delta = text, self.model.encode(text)

    def honest(self) -> list[int]:
        return self.stream + self.delta if self.stream else self.model.encode(self.first_text)

    # -- what is recorded

    def complete(self, turn: Turn, prompt: list[int], *, cut: bool = False) -> None:
        message = self.reply(turn)
        text = self.written = self.text_of(message)
        self.read_last = self.prompt_text()
        spelling = SPELLINGS[turn.spelling] if turn.spelling else None
        text, ids = spelling(self, message, text) if spelling else (text, self.model.encode(text))
        finish = "tool_calls" if message.get("tool_calls") else "stop"
        if cut:
            ids, finish = ids[: max(2, len(ids) * 2 // 3)], "length"
        self.record(prompt, ids, message, finish)
        self.spans.append((len(prompt), len(prompt) + len(ids)))
        self.started, self.stream = len(prompt), prompt + ids
        self.messages.append(message)
        self.new = []

    def record(self, prompt: Sequence[int], ids: Sequence[int], message: Message | None, finish: str = "stop") -> None:
        body = ids[:-1] if ids and ids[-1] in self.model.stop_ids else ids
        call = {
            "messages": json.loads(json.dumps(self.messages)),
            "tools": self.tools,
            "kwargs": dict(self.model.pair.kwargs if self.kwargs is None else self.kwargs),
            "prompt": list(prompt),
            "ids": list(ids),
            "logprobs": self._logprobs(len(ids)),
            "reply": message if self.with_reply and finish != "length" else None,
            "text": self.model.decode(list(body)) if self.with_text else None,
            "finish": finish,
            "stop_reason": None,
        }
        self.calls.append(call)

    def _logprobs(self, n: int) -> list[float] | None:
        if not self.with_logprobs:
            return None
        return [0.0 if self.rng.random() < self.zeros else round(-self.rng.expovariate(1.0), 5) for _ in range(n)]

    def lines(self) -> list[bytes]:
        """The session as recorded calls."""
        return [json.dumps(self._line(call)).encode() for call in self.calls]

    def _line(self, call: Mapping[str, Any]) -> dict[str, Any]:
        request = {"model": "m", "messages": call["messages"], "temperature": 1.0}
        request |= {"tools": call["tools"]} if call["tools"] else {}
        request |= {"chat_template_kwargs": call["kwargs"]} if call["kwargs"] else {}
        choice = {"index": 0, "token_ids": call["ids"], "finish_reason": call["finish"]}
        choice |= {"stop_reason": call["stop_reason"]}
        if call["logprobs"] is not None:
            choice["logprobs"] = {"content": [{"logprob": one} for one in call["logprobs"]]}
        choice |= {"message": call["reply"]} if call["reply"] else {}
        choice |= {"text": call["text"]} if call["text"] is not None else {}
        response = {"id": f"c{self.rng.randrange(10**9)}", "prompt_token_ids": call["prompt"], "choices": [choice]}
        return {"session_id": self.name, "tokenizer": self.model.pair.tokenizer, "request": request,
                "response": response, "reward": 1.0}

    def trajectory(self, rows: Sequence[Row], **fields: Any) -> Trajectory:
        """The session as steps, with these rows."""
        steps = tuple(
            Step(
                ids_array(call["prompt"]), ids_array(call["ids"]),
                None if call["logprobs"] is None else np.array(call["logprobs"], dtype=np.float32),
                finish_reason=call["finish"], temperature=1.0, reply=call["reply"],
                request=Request(tuple(call["messages"]), tuple(call["tools"] or ()) or None, call["kwargs"]),
                **fields.get("steps", {}).get(n, {}),
            )
            for n, call in enumerate(self.calls)
        )
        return Trajectory(self.name, steps, tuple(rows), reward=1.0, extra=fields.get("extra", {}))


def first_difference(left: Sequence[int], right: Sequence[int]) -> int:
    """The first place at which two lists differ; the length of the shorter one where it is a start of the other."""
    for n, (a, b) in enumerate(zip(left, right, strict=False)):
        if a != b:
            return n
    return min(len(left), len(right))


# -- how a sample can differ from what the template writes


def split_somewhere(session: Session, ids: list[int]) -> list[int]:
    """The same text with one token cut in two, which the encoder would not do."""
    model = session.model
    places = list(range(len(ids)))
    session.rng.shuffle(places)
    for n in places:
        text = model.decode([ids[n]])
        if ids[n] in model.special or len(text) < 4 or not text.isascii() or not text.strip().isalpha():
            continue
        at = session.rng.randrange(2, len(text) - 1)
        left, right = model.encode(text[:at]), model.encode(text[at:])
        found = [*ids[:n], *left, *right, *ids[n + 1 :]]
        if len(left) == len(right) == 1 and model.decode(found) == model.decode(ids) != "":
            return found
    raise NotHere("no token can be split")


def _split(session: Session, message: Message, text: str) -> tuple[str, list[int]]:
    return text, split_somewhere(session, session.model.encode(text))


def _half(session: Session, message: Message, text: str) -> tuple[str, list[int]]:
    """One token of a character of several tokens is missing."""
    model = session.model
    rare = session.rng.choice("𒀀𓂀𐍈🜁")
    if not message["content"]:
        raise NotHere("no text to hold the character")
    message["content"] += f" {rare} end"
    ids = model.encode(session.text_of(message))
    parts = [n for n, one in enumerate(ids) if "�" in model.decode([one])]
    later = [n for n in parts if rare in model.decode(ids[: n + 4]) and rare not in model.decode(ids[:n])]
    if not later:
        raise NotHere("the character is one token")
    ids = ids[: later[-1]] + ids[later[-1] + 1 :]
    found = re.search("�+", model.decode(ids))
    if found is None:
        raise NotHere("nothing was cut")
    message["content"] = message["content"].replace(rare, found[0])
    return model.decode(ids), ids


def _json(session: Session, message: Message, text: str) -> tuple[str, list[int]]:
    """Arguments in a spelling of the model's own: spaces, order, escapes, the case of a truth value."""
    changed = text
    calls = list(message.get("tool_calls", ()))
    session.rng.shuffle(calls)
    for call in calls:
        spelled = call["function"]["arguments"]
        value = json.loads(spelled)
        for other in session.rng.sample(_spellings_of(value), k=len(_spellings_of(value))):
            if other != spelled and spelled in text:
                return _changed(session, text, text.replace(spelled, other, 1))
    changed = re.sub(r">\n(True|False)\n<", lambda found: f">\n{found[1].lower()}\n<", text)
    return _changed(session, text, changed)


def _spellings_of(value: Any) -> list[str]:
    backwards = dict(reversed(list(value.items())))
    return [
        json.dumps(value, ensure_ascii=False, separators=(",", ":")),
        json.dumps(value, ensure_ascii=True),
        json.dumps(backwards, ensure_ascii=False),
        json.dumps(value, ensure_ascii=False, separators=(", ", " : ")),
    ]


def _changed(session: Session, text: str, changed: str) -> tuple[str, list[int]]:
    if changed == text:
        raise NotHere("this reply has nothing to spell otherwise")
    return changed, session.model.encode(changed)


def _space(session: Session, message: Message, text: str) -> tuple[str, list[int]]:
    """More or less white space beside a call or a think marker."""
    marks = [("\n<tool_call>", "\n\n<tool_call>"), (f"{CLOSE}\n\n", f"{CLOSE}\n"),
             ("<｜tool▁calls▁begin｜>", "\n<｜tool▁calls▁begin｜>"), ("[TOOL_CALLS][", "[TOOL_CALLS] ["),
             ("{\"name\": ", " {\"name\": ") if session.model.name.startswith("llama") else ("\x00", "")]
    found = [one for one in marks if one[0] in text]
    if not found:
        raise NotHere("no marker with white space")
    return _changed(session, text, text.replace(*session.rng.choice(found), 1))


def _lead(session: Session, message: Message, text: str) -> tuple[str, list[int]]:
    """A line break first, right behind the line break of the generation prompt."""
    model = session.model
    before = session.prompt_text()
    if not before.endswith("\n") or message.get("tool_calls") or model.reasons:
        raise NotHere("no line break to merge with")
    message["content"] = "\n" + message["content"]
    text = "\n" + text
    apart = model.encode(before) + model.encode(text)
    if apart == model.encode(before + text):
        raise NotHere("nothing merges")
    return text, model.encode(text)


def _no_think(session: Session, message: Message, text: str) -> tuple[str, list[int]]:
    """Without the empty block of thoughts that the template writes."""
    return _changed(session, text, re.sub(rf"^\s*{OPEN}\s*{CLOSE}\s*", "", text))


def _trailing(session: Session, message: Message, text: str) -> tuple[str, list[int]]:
    """Two spaces at the end of the text, which the parsed reply keeps."""
    if message.get("tool_calls") or "<|channel|>" in text:
        raise NotHere("the spaces would stand in a call")
    stop = next(stop for stop in session.model.pair.stops if text.endswith(stop))
    message["content"] += "  "
    return _changed(session, text, text.removesuffix(stop) + "  " + stop)


SPELLINGS: Mapping[str, Spelling] = {
    "split": _split, "half": _half, "json": _json, "space": _space, "lead": _lead, "no_think": _no_think,
    "trailing": _trailing,
}
