"""Faults between and inside engine calls, planted by the definitions of the kinds. Each notes where it begins."""

import random
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from benchmarks.measures.models import CLOSE, OPEN, Message, Model
from benchmarks.measures.sessions import Label, NotHere, Session, Turn, first_difference

_SPOKEN, _CALLED, _ANSWER = Turn(calls=1, speaks=True), Turn(calls=1), Turn()
_TWO, _THOUGHT = Turn(calls=2, speaks=True), Turn(reasons=True)


@dataclass(frozen=True)
class Fault:
    """One way of one kind to go wrong."""

    kind: str
    plant: Callable[[Session], list[int]]
    """Returns the prompt that the engine reads instead of the honest one."""
    before: Turn = _SPOKEN
    """What the model does at the call before."""
    variant: str = ""
    finish: Callable[[Session], None] | None = None
    """Changes the recorded call."""
    user_text: str = ""
    every: Turn | None = None
    """What the model does at all earlier calls."""


def play(model: Model, rng: random.Random, name: str, faults: Sequence[tuple[int, Fault]] = (), n: int = 4,
         cut: bool | None = None) -> Session:
    """A session of ``n`` calls with faults at some of them. Raises :class:`NotHere` where one cannot be planted.

    ``cut``: whether the last completion is cut by its length; None = now and then.
    """
    planted = dict(faults)
    every = next((one.every for one in planted.values() if one.every), None)
    session = Session(model, rng, name, plain=bool(planted) and rng.random() < 0.6)
    session.with_reply, session.with_text = bool(planted) or rng.random() < 0.8, rng.random() < 0.4
    session.with_logprobs, session.zeros = rng.random() < 0.8, rng.choice((0.0, 0.05))
    session.begin()
    for step in range(n):
        fault, turn = planted.get(step), _turn(model, rng)
        if step + 1 in planted:
            turn = planted[step + 1].before
        elif every:
            turn = every
        elif step == n - 1:
            turn = Turn(reasons=turn.reasons)
        if turn.calls > model.calls or (turn.reasons and not model.reasons):
            raise NotHere("the template has no such reply")
        if planted and turn.spelling == "half" and step + 1 not in planted:
            turn = replace(turn, spelling="")
        prompt = fault.plant(session) if fault else session.honest()
        session.complete(turn, prompt, cut=step == n - 1 and (rng.random() < 0.15 if cut is None else cut))
        if fault and fault.finish:
            fault.finish(session)
        if session.undo:
            session.undo()
            session.undo = None
        if step < n - 1:
            following = planted.get(step + 1)
            session.observe(turn, rng.random() < 0.1, following.user_text if following else "")
    return session


def _turn(model: Model, rng: random.Random) -> Turn:
    calls = rng.choice((0, 1, 1, 1, 2, 3)) if model.calls else 0
    spelling = rng.choice(("split", "half", "json")) if rng.random() < 0.15 else ""
    if (spelling == "json" and not calls) or (spelling == "half" and calls):
        spelling = ""
    return Turn(
        min(calls, model.calls), bool(model.reasons) and rng.random() < 0.5, rng.random() < 0.5, spelling,
        rng.random() < 0.1,
    )


def _break(session: Session, kind: str, got: list[int], offset: int | None = -1, **more: int) -> list[int]:
    """Note a fault whose prompt first differs from the honest one at ``offset``; -1 = wherever it does."""
    honest = session.honest()
    if got == honest:
        raise NotHere("nothing has changed")
    place = first_difference(honest, got) if offset == -1 else offset
    session.labels.append(Label(kind, len(session.calls), place, **more))
    return got


def _in_completion(session: Session, kind: str, ids: list[int]) -> list[int]:
    return _break(session, kind, session.stream[: session.started] + ids + session.delta)


def _completion(session: Session) -> list[int]:
    return session.stream[session.started :]


def _last_reply(session: Session) -> int:
    return len(session.messages) - len(session.new) - 1


def _canonical_text(session: Session) -> str:
    """The text of the stream, where encoding it returns the stream."""
    text = session.model.decode(session.stream)
    if session.model.encode(text) != session.stream:
        raise NotHere("the stream is not canonical")
    return text


# -- sampled tokens that came back as others


def _retokenized(kind: str) -> Callable[[Session], list[int]]:
    """The text of the last completion, encoded again."""

    def plant(session: Session) -> list[int]:
        model = session.model
        return _in_completion(session, kind, model.encode(model.decode(_completion(session))))

    return plant


def _whole_stream(kind: str) -> Callable[[Session], list[int]]:
    """The text of all so far, encoded again."""

    def plant(session: Session) -> list[int]:
        model, start = session.model, session.started
        got = model.encode(model.decode(session.stream))
        end = len(session.stream) - first_difference(session.stream[::-1], got[::-1])
        if first_difference(session.stream, got) < start - (kind == "boundary_merge") or end <= start:
            raise NotHere("something else changes too")
        return _break(session, kind, got + session.delta)

    return plant


def _as_template(kind: str) -> Callable[[Session], list[int]]:
    """The last reply as the template writes it."""

    def plant(session: Session) -> list[int]:
        return _in_completion(session, kind, session.model.encode(session.written))

    return plant


def _decoded_skipping(session: Session) -> list[int]:
    kept = [one for one in _completion(session) if one not in session.model.special]
    return _in_completion(session, "special_tokens_dropped", kept)


def _wrong_word(session: Session) -> list[int]:
    """One sampled word is another; no rule of the list says why."""
    model, ids = session.model, _completion(session)
    [word] = model.encode(" lamp")[:1]
    places = [n for n, one in enumerate(ids) if re.fullmatch(r" [a-z]{3,}", model.decode([one])) and one != word]
    if not places:
        raise NotHere("no word")
    at = session.rng.choice(places)
    return _in_completion(session, "unclassified", [*ids[:at], word, *ids[at + 1 :]])


# -- messages that changed


def _rewritten(change: Callable[[Session, Message], Message]) -> Callable[[Session], list[int]]:
    def plant(session: Session) -> list[int]:
        at = _last_reply(session)
        message = change(session, session.messages[at])
        text = session.text_of(message, session.read_last)
        session.messages[at] = message
        return _in_completion(session, "assistant_rewritten", session.model.encode(text))

    return plant


def _other_text(session: Session, message: Message) -> Message:
    if "answer" not in message["content"]:
        raise NotHere("no text")
    return {**message, "content": re.sub(r"answer \d+", "answer 17", message["content"])}


def _shorter_text(session: Session, message: Message) -> Message:
    if not message["content"]:
        raise NotHere("no text")
    return {**message, "content": message["content"][: len(message["content"]) // 2].rstrip()}


def _other_argument(session: Session, message: Message) -> Message:
    calls = []
    for call in message.get("tool_calls", ()):
        text = re.sub(r"\d+(?=[^\d]*}$)", "31415", call["function"]["arguments"])
        calls.append({**call, "function": {**call["function"], "arguments": text}})
    return {**message, "tool_calls": calls} if calls else message


def _without_reasoning(session: Session, message: Message) -> Message:
    if session.model.reasons != "template" or session.model.pair.tokenizer == "gpt-oss":
        raise NotHere("the template would not write it anyway")
    return {key: value for key, value in message.items() if key != session.model.reasoning_key}


def _stripped(session: Session, message: Message) -> Message:
    return {**message, "content": message["content"].rstrip()}


def _edited(role: str) -> Callable[[Session], list[int]]:
    """A number in an earlier message is another."""

    def plant(session: Session) -> list[int]:
        model, text = session.model, _canonical_text(session)
        places = [n for n, one in enumerate(session.messages[: _last_reply(session)]) if one["role"] == role]
        if not places:
            raise NotHere(f"no {role} message")
        at = session.rng.choice(places)
        old = str(session.messages[at]["content"])
        found = re.match(r"ref\d+ value \d+", old)
        if not found or text.count(found[0]) != 1:
            raise NotHere("the message cannot be told")
        changed = re.sub(r"value \d+", "value 77", found[0])
        session.messages[at] = {**session.messages[at], "content": old.replace(found[0], changed)}
        return _break(session, "history_rewritten", model.encode(text.replace(found[0], changed)) + session.delta)

    return plant


def _compacted(session: Session) -> list[int]:
    """All but the system text and the task is one summary."""
    start = [one for one in session.messages if one["role"] == "system"]
    task = next(one for one in session.messages if one["role"] == "user")
    summary = f"{task['content']}\nSummary so far: {session.phrase()}, {session.marked()}"
    session.messages = [*start, {"role": "user", "content": summary}]
    session.new = []
    return _break(session, "history_rewritten", session.model.encode(session.render()))


def _step_removed(session: Session) -> list[int]:
    """A reply in the middle and its results are gone."""
    replies = [n for n, one in enumerate(session.messages) if one["role"] == "assistant"]
    if len(replies) < 3 or not session.messages[replies[0]].get("tool_calls"):
        raise NotHere("too early")
    before, text = session.messages[:], _canonical_text(session)
    if session.model.encode(session.render()) != session.honest() or not text:
        raise NotHere("the template rewrites the past itself")
    session.messages = before[: replies[1]] + before[replies[2] :]
    return _break(session, "history_rewritten", session.model.encode(session.render()))


# -- requests that changed


def _new_start(session: Session, kind: str, back: bool = False) -> list[int]:
    """The first prompt as the changed request makes it, then what followed."""
    model, text = session.model, _canonical_text(session)
    first = model.decode(model.encode(session.first_text))
    users = [n for n, one in enumerate(session.messages) if one["role"] == "user"]
    if not text.startswith(first) or (model.pair.template == "mistral-nemo" and len(users) > 1):
        raise NotHere("the start cannot be told")
    other = session.render(session.messages[: users[0] + 1])
    session.set_delta(session.text_after(session.new))
    kept = session.first_text
    session.first_text = other
    got = model.encode(other + text[len(first) :])

    def undo() -> None:
        rest = model.decode(session.stream)[len(model.decode(model.encode(other))) :]
        session.first_text, session.stream = kept, model.encode(kept + rest)

    if back:
        session.undo = undo
    return _break(session, kind, got + session.delta)


def _system_changed(back: bool, old: str, new: str) -> Callable[[Session], list[int]]:
    def plant(session: Session) -> list[int]:
        first = session.messages[0]
        if first["role"] != "system" or old not in first["content"]:
            raise NotHere("no such system text")
        session.messages[0] = {**first, "content": first["content"].replace(old, new)}
        got = _new_start(session, "request_changed", back)
        if session.undo:
            undo = session.undo

            def restore() -> None:
                undo()
                session.messages[0] = first

            session.undo = restore
        return got

    return plant


def _tools_changed(back: bool, keep: int) -> Callable[[Session], list[int]]:
    def plant(session: Session) -> list[int]:
        tools = session.tools
        if not tools:
            raise NotHere("no tools")
        session.tools = tools[:keep] or None
        got = _new_start(session, "request_changed", back)
        if session.undo:
            undo = session.undo

            def restore() -> None:
                undo()
                session.tools = tools

            session.undo = restore
        return got

    return plant


_SWITCHES = {
    "llama3.1": {"date_string": "01 Feb 2025"}, "llama3.2": {"date_string": "01 Feb 2025"},
    "gpt-oss": {"reasoning_effort": "high"}, "trl-training--gptoss": {"reasoning_effort": "low"},
    "glm-4.5": {"enable_thinking": False},
}


def _switched(session: Session) -> list[int]:
    """A keyword of the template changes what it writes first."""
    kwargs = _SWITCHES.get(session.model.pair.template)
    if kwargs is None:
        raise NotHere("no such keyword")
    session.kwargs = kwargs
    return _new_start(session, "chat_template_changed")


# -- context


def _cut(keep_system: bool) -> Callable[[Session], list[int]]:
    def plant(session: Session) -> list[int]:
        stream, head = session.stream, 0
        if keep_system:
            text = session.first_text
            at = text.find(str(session.messages[1]["content"])[:12]) if session.messages[0]["role"] == "system" else -1
            stop = max((text.rfind(one, 0, at) + len(one) for one in session.model.pair.stops if one in text[:at]),
                       default=0)
            head = len(session.model.encode(text[:stop])) if at > 0 else 0
            if not head:
                raise NotHere("no system block of its own")
        at = session.rng.randrange(head + 5, max(head + 6, session.started))
        return _break(session, "context_truncated", stream[:head] + stream[at:] + session.delta)

    return plant


def _bos(doubled: bool) -> Callable[[Session], list[int]]:
    def plant(session: Session) -> list[int]:
        bos, honest = session.model.tokenizer.bos_token_id, session.honest()
        if bos is None or honest[0] != bos:
            raise NotHere("no bos")
        return _break(session, "bos_mismatch", [bos, *honest] if doubled else honest[1:])

    return plant


# -- thoughts


def _rerendered(kind: str, mark: str, put: str = "", near: int = 0) -> Callable[[Session], list[int]]:
    """All messages as the template writes them now, where this first puts ``put`` in place of what matches ``mark``.

    ``near``: how near to the end of the stream that must be; 0 = anywhere.
    """

    def plant(session: Session) -> list[int]:
        model = session.model
        got, honest = model.encode(session.render()), session.honest()
        at = first_difference(honest, got)
        for start in (at, at - 1):
            old, new = model.decode(honest[start:]), model.decode(got[start:])
            changed = re.sub(rf"\A(?:{mark})", put, old, count=1, flags=re.DOTALL)
            if changed != old and changed[:12] == new[:12] and 0 < len(session.stream) - at <= (near or 10**6):
                return _break(session, kind, got)
        raise NotHere("the template does not do it here")

    return plant


def _think_spliced(session: Session) -> list[int]:
    """The last completion without its thoughts, as a template that strips them writes it."""
    model, stream = session.model, session.stream
    before, text = model.decode(stream[: session.started]), model.decode(_completion(session))
    if OPEN in before[-12:]:
        before = before[: before.rindex(OPEN)]
        got = re.sub(rf"^.*?{CLOSE}\s*", "", text, flags=re.DOTALL)
    else:
        got = re.sub(rf"^\s*{OPEN}.*?{CLOSE}\s*|^<\|channel\|>analysis.*?<\|end\|><\|start\|>assistant", "", text,
                     flags=re.DOTALL)
    if got == text or model.encode(model.decode(stream)) != stream:
        raise NotHere("no thoughts")
    return _break(session, "thinking_stripped", model.encode(before + got) + session.delta)


def _misparsed(session: Session) -> list[int]:
    model, at = session.model, _last_reply(session)
    before, text = model.decode(session.stream[: session.started]), model.decode(_completion(session))
    if OPEN not in before[-12:] or CLOSE not in text or model.encode(model.decode(session.stream)) != session.stream:
        raise NotHere("the generation prompt opens no block")
    message = session.messages[at]
    kept = {key: value for key, value in message.items() if key not in (model.reasoning_key, "reasoning_content")}
    inner = text[: text.index(CLOSE) + len(CLOSE)]
    gap = "\n" if model.generation_prompt.endswith("\n") else ""
    kept["content"] = f"{inner}{gap * 2}{message['content']}"
    session.messages[at] = kept
    session.calls[-1]["reply"] = kept if session.with_reply else None
    got = before + gap + CLOSE + gap * 2 + text
    return _break(session, "reasoning_misparsed", model.encode(got) + session.delta)


# -- records


def _recorded(kind: str, change: Callable[[Session, dict], int | None]) -> Fault:
    """A fault of what was recorded of one call."""

    def finish(session: Session) -> None:
        call = session.calls[-1]
        offset = change(session, call)
        session.labels.append(Label(kind, len(session.calls) - 1, offset))

    return Fault(kind, Session.honest, finish=finish, variant=change.__name__.strip("_"))


def _no_prompt(session: Session, call: dict) -> None:
    call["prompt"] = []


def _no_completion(session: Session, call: dict) -> None:
    call["ids"], call["logprobs"] = [], None


def _zero_prompt(session: Session, call: dict) -> None:
    call["prompt"] = [0]


def _constant_completion(session: Session, call: dict) -> None:
    call["ids"] = [0] * len(call["ids"])


def _foreign_id(session: Session, call: dict) -> int:
    at = session.rng.randrange(len(call["ids"]))
    call["ids"][at] = session.model.codec.vocab_size + 7
    call["text"] = None
    return len(call["prompt"]) + at


def _text_differs(session: Session, call: dict) -> None:
    text = session.model.decode(call["ids"][:-1])
    call["text"] = text.replace(text.split()[-1], "elsewhere")


def _logprobs_longer(session: Session, call: dict) -> None:
    call["logprobs"] = [-0.5] * (len(call["ids"]) + 1)


def _logprobs_shorter(session: Session, call: dict) -> None:
    call["logprobs"] = [-0.5] * (len(call["ids"]) - 1)


def _past_the_stop(session: Session, call: dict) -> None:
    """Generation went on behind a stop string, and the text was cut there."""
    model = session.model
    call["text"] = model.decode(call["ids"][:-1])
    call["ids"] = call["ids"][:-1] + model.encode("\nObservation: it went on and on")
    call["logprobs"] = [-0.5] * len(call["ids"])
    call["stop_reason"], call["finish"] = "\nObservation:", "stop"


def _impossible(value: float) -> Callable[[Session, dict], int]:
    """Engines write -9999 in place of -inf; a sum of bfloat16 may be far above 0."""

    def impossible(session: Session, call: dict) -> int:
        if not call["logprobs"]:
            raise NotHere("no log-probabilities")
        at = session.rng.randrange(len(call["ids"]))
        call["logprobs"][at] = value
        return len(call["prompt"]) + at

    return impossible


def _cut_at_stop(session: Session, call: dict) -> int:
    """A stop string inside a chat answer: the message ends before it, the ids go past it."""
    model, ids = session.model, call["ids"]
    if not call["reply"] or call["reply"].get("tool_calls") or not call["reply"]["content"]:
        raise NotHere("no answer of text")
    more = model.encode("\nObservation: it went on")
    call["text"], call["ids"] = None, [*ids[:-1], *more]
    call["logprobs"] = [-0.5] * len(call["ids"])
    call["stop_reason"], call["finish"] = "\nObservation:", "stop"
    return len(call["prompt"]) + len(ids) - 1


# -- other calls


def _duplicate(first: bool) -> Callable[[Session], list[int]]:
    """The same prompt twice with another completion; the second or the first goes on."""

    def call(session: Session, prompt: list[int]) -> None:
        reply = session.reply(Turn())
        session.record(prompt, session.model.encode(session.text_of(reply)), reply)

    def plant(session: Session) -> list[int]:
        prompt, at = session.honest(), len(session.calls)
        session.labels.append(Label("duplicate_call", at + 1, also=at))
        if first:
            call(session, prompt)
        else:
            kept = session.complete

            def complete(turn: Turn, prompt: list[int], *, cut: bool = False) -> None:
                messages = len(session.messages)
                kept(turn, prompt, cut=cut)
                whole, session.messages = session.messages, session.messages[:messages]
                call(session, prompt)
                session.messages = whole
                session.complete = kept  # type: ignore[method-assign]

            session.complete = complete  # type: ignore[method-assign]
        return prompt

    return plant


def _branch(n: int, tools: bool) -> Callable[[Session], list[int]]:
    """Calls of a helper with a system text and a task of its own, between two calls of the main line."""

    def plant(session: Session) -> list[int]:
        side = Session(session.model, session.rng, session.name, with_logprobs=session.with_logprobs)
        side.calls, side.plain = session.calls, session.plain
        session.labels.append(Label("branch", len(session.calls)))
        side.begin("You are a helper {}. Write a title or look one thing up.", tools)
        for step in range(n):
            turn = Turn(calls=1 if tools and step < n - 1 and session.model.calls else 0)
            side.complete(turn, side.honest())
            if step < n - 1:
                side.observe(turn)
        return session.honest()

    return plant


# -- what stands between a completion and the next


def _delta(kind: str, text: Callable[[Session], str], offset: int | None = -1) -> Callable[[Session], list[int]]:
    def plant(session: Session) -> list[int]:
        return _break(session, kind, session.stream + session.model.encode(text(session)), offset)

    return plant


def _no_separator(session: Session) -> str:
    if not session.delta_text.startswith("\n"):
        raise NotHere("no separator")
    return session.delta_text[1:]


def _stop_again(session: Session) -> str:
    return session.model.decode(session.stream[-1:]) + session.delta_text


def _without_generation_prompt(session: Session) -> str:
    text = session.text_after(session.new, more=False)
    if not session.delta_text.startswith(text) or text == session.delta_text:
        raise NotHere("no generation prompt here")
    return text


def _other_generation_prompt(session: Session) -> str:
    text, model = session.delta_text, session.model
    if model.opens and text.endswith(f"{OPEN}\n"):
        return text.removesuffix(f"{OPEN}\n")
    if model.pair.template.startswith("qwen3") and model.reasons == "template" and text.endswith("assistant\n"):
        return f"{text}{OPEN}\n\n{CLOSE}\n\n"
    raise NotHere("thoughts are not switched by the generation prompt")


def _one_message_less(session: Session) -> str:
    if len(session.new) < 2:
        raise NotHere("a single message")
    gone = session.rng.randrange(len(session.new))
    return session.text_after([one for n, one in enumerate(session.new) if n != gone])


def _no_message(session: Session) -> str:
    text = _without_generation_prompt(session)
    rest = session.delta_text[len(text) :]
    return ("\n" if text.startswith("\n") and not rest.startswith("\n") else "") + rest


def _one_by_one(session: Session) -> str:
    """Each result as if it were alone."""
    if len(session.new) < 2 or {one["role"] for one in session.new} != {"tool"}:
        raise NotHere("a single result")
    parts = [session.text_after([one], more=n == len(session.new) - 1) for n, one in enumerate(session.new)]
    text = parts[0]
    for part in parts[1:]:
        text += part[1:] if text.endswith("\n") and part.startswith("\n") else part
    heads = [text.count(token) for token in ("<|im_start|>", "<|observation|>", "<｜tool▁outputs▁begin｜>")]
    if heads == [
        session.delta_text.count(one) for one in ("<|im_start|>", "<|observation|>", "<｜tool▁outputs▁begin｜>")
    ]:
        raise NotHere("the template does not group results")
    return text


def _system_block(session: Session) -> str:
    """The block that a render of the new messages alone begins with."""
    model = session.model
    if model.pair.template.startswith(("deepseek", "trl--deepseek", "trl-training--deepseek", "mistral")):
        raise NotHere("a system text has no block of its own")
    user = {"role": "user", "content": "q"}
    plain = model.render([user])
    start = plain[: plain.index("q")]
    if start.count("\n") < 2 or "ystem" not in start:
        system = {"role": "system", "content": "You are a helpful assistant."}
        start = (start := model.render([system, user]))[: start.rindex("q")]
    header = max(start.rfind(one) for one in ("<|im_start|>", "<|start_header_id|>", "<|start|>", "<|user|>"))
    block = start[:header].removeprefix(model.tokenizer.bos_token or "\x00").removeprefix("[gMASK]<sop>\n")
    if "ystem" not in block:
        raise NotHere("no block")
    text = session.delta_text
    gap = "\n" if text.startswith("\n") and block.endswith("\n") else ""
    return gap + block + text.removeprefix(gap)


def _half_written(session: Session) -> str:
    """An observation that was cut before it was encoded; the request holds it whole."""
    at = session.rng.randrange(len(session.new))
    content = str(session.new[at]["content"])
    cut = session.rng.randrange(14, len(content) - 2)
    shorter = [{**one, "content": content[:cut]} if n == at else one for n, one in enumerate(session.new)]
    return session.text_after(shorter)


def _remark(session: Session) -> str:
    """Words that no message holds."""
    mark = str(session.new[-1]["content"])[:12]
    if mark not in session.delta_text:
        raise NotHere("the message is written otherwise")
    return session.delta_text.replace(mark, f"Remember the rules. {mark}", 1)


def _control_text(session: Session) -> list[int]:
    """Words in a message that spell control tokens are encoded as control tokens."""
    model, new = session.model, session.new
    at = session.rng.randrange(len(new))
    names = [one.content for i, one in model.tokenizer.added_tokens_decoder.items() if i in model.special]
    usual = [one for one in names if re.search(r"im_|eot|eos|end|start|user|assist|INST|</s>|｜", one)]
    token = session.rng.choice(usual)
    new[at] = {**new[at], "content": f"{new[at]['content']} see {token} and {session.phrase()}"}
    session.messages[len(session.messages) - len(new) + at] = new[at]
    session.set_delta(session.text_after(new))
    place = session.delta_text.find(f" see {token}")
    if place < 0:
        raise NotHere("the message is written otherwise")
    before = model.encode(session.delta_text[: place + 5] + token)[:-1]
    session.labels.append(Label("special_tokens_injected", len(session.calls), len(session.stream) + len(before)))
    return session.honest()


# -- another tokenizer


def foreign(model: Model, rng: random.Random, name: str, n: int, writer: Model) -> Session:
    """A session whose every id another tokenizer made."""
    session = play(model, rng, name, n=n)
    if writer.encode(model.decode(session.calls[0]["prompt"])) == session.calls[0]["prompt"]:
        raise NotHere("it encodes the first prompt alike")
    for call in session.calls:
        call["prompt"] = writer.encode(model.decode(call["prompt"]))
        call["ids"] = writer.encode(model.decode(call["ids"]))
        call["logprobs"] = None
        if max(*call["prompt"], *call["ids"]) >= model.codec.vocab_size:
            raise NotHere("ids beyond the vocabulary")
    session.labels.append(Label("tokenizer_mismatch", 0))
    return session


_EMPTY, _THOUGHTS = rf"{OPEN}\s*{CLOSE}\s*", rf"{OPEN}\s*I think.*?{CLOSE}\s*"
_ANALYSIS = r"<\|channel\|>analysis.*?<\|start\|>assistant(?=<)"

FAULTS = (
    Fault("noncanonical_sampling", _retokenized("noncanonical_sampling"), replace(_SPOKEN, spelling="split")),
    Fault("noncanonical_sampling", _whole_stream("noncanonical_sampling"), Turn(spelling="split"), "whole stream"),
    Fault("invalid_utf8", _retokenized("invalid_utf8"), replace(_ANSWER, spelling="half")),
    Fault("invalid_utf8", _retokenized("invalid_utf8"), replace(_SPOKEN, spelling="half"), "beside a call"),
    Fault("boundary_merge", _whole_stream("boundary_merge"), replace(_ANSWER, spelling="lead")),
    Fault("tool_call_reserialized", _as_template("tool_call_reserialized"), replace(_CALLED, spelling="json")),
    Fault("tool_call_reserialized", _as_template("tool_call_reserialized"), replace(_TWO, spelling="json"), "parallel"),
    Fault("tool_call_reserialized", _as_template("tool_call_reserialized"),
          Turn(calls=3, spelling="json"), "three calls"),
    Fault("whitespace_changed", _as_template("whitespace_changed"), replace(_SPOKEN, spelling="space")),
    Fault("whitespace_changed", _as_template("whitespace_changed"), replace(_TWO, spelling="space"), "parallel"),
    Fault("special_tokens_dropped", _decoded_skipping, _ANSWER),
    Fault("special_tokens_dropped", _decoded_skipping, _SPOKEN, "a call"),
    Fault("unclassified", _wrong_word, _ANSWER),
    Fault("assistant_rewritten", _rewritten(_other_text), _SPOKEN, "text"),
    Fault("assistant_rewritten", _rewritten(_shorter_text), _ANSWER, "shorter"),
    Fault("assistant_rewritten", _rewritten(_other_argument), _TWO, "argument"),
    Fault("assistant_rewritten", _rewritten(_without_reasoning), replace(_SPOKEN, reasons=True), "thoughts"),
    Fault("assistant_rewritten", _rewritten(_stripped), Turn(spelling="trailing"), "spaces"),
    Fault("history_rewritten", _edited("tool"), _SPOKEN, "result", every=_CALLED),
    Fault("history_rewritten", _edited("user"), _SPOKEN, "task"),
    Fault("history_rewritten", _compacted, _SPOKEN, "summary"),
    Fault("history_rewritten", _step_removed, _CALLED, "removed", every=_CALLED),
    Fault("request_changed", _system_changed(False, "08:15", "09:21"), _SPOKEN, "time"),
    Fault("request_changed", _system_changed(True, "Session 4711", "Session 4712"), _SPOKEN, "for one call"),
    Fault("request_changed", _tools_changed(False, 0), _SPOKEN, "no tools"),
    Fault("request_changed", _tools_changed(True, 2), _CALLED, "fewer tools once"),
    Fault("chat_template_changed", _switched, _SPOKEN),
    Fault("context_truncated", _cut(False), _SPOKEN),
    Fault("context_truncated", _cut(True), _SPOKEN, "behind the system text"),
    Fault("bos_mismatch", _bos(True), _SPOKEN, "doubled"),
    Fault("bos_mismatch", _bos(False), _ANSWER, "missing"),
    Fault("empty_think_toggled", _rerendered("empty_think_toggled", _EMPTY), _ANSWER, "rendered", every=_ANSWER),
    Fault("empty_think_toggled", _as_template("empty_think_toggled"), Turn(spelling="no_think"), "inserted"),
    Fault("thinking_stripped", _rerendered("thinking_stripped", _THOUGHTS), _THOUGHT, "rendered", every=_THOUGHT),
    Fault("thinking_stripped", _rerendered("thinking_stripped", _ANALYSIS), _THOUGHT, "analysis", every=_THOUGHT),
    Fault("thinking_stripped", _think_spliced, Turn(calls=1, reasons=True), "spliced"),
    Fault("reasoning_misparsed", _misparsed, _THOUGHT),
    Fault("reasoning_misparsed", _misparsed, replace(_SPOKEN, reasons=True), "a call"),
    Fault("template_not_append_only", _rerendered("template_not_append_only", r"<\|return\|>", "<|end|>", 4), _ANSWER),
    Fault("duplicate_call", _duplicate(True), _SPOKEN, "the second goes on"),
    Fault("duplicate_call", _duplicate(False), _SPOKEN, "the first goes on"),
    Fault("branch", _branch(1, False), _SPOKEN, "one call"),
    Fault("branch", _branch(2, True), _CALLED, "a helper"),
    _recorded("token_ids_missing", _no_prompt),
    _recorded("token_ids_missing", _no_completion),
    _recorded("token_ids_missing", _zero_prompt),
    _recorded("token_ids_missing", _constant_completion),
    _recorded("token_ids_missing", _foreign_id),
    _recorded("engine_ids_inconsistent", _text_differs),
    _recorded("engine_ids_inconsistent", _logprobs_longer),
    _recorded("engine_ids_inconsistent", _logprobs_shorter),
    _recorded("stop_string_misaligned", _past_the_stop),
    _recorded("stop_string_misaligned", _cut_at_stop),
    _recorded("logprob_invalid", _impossible(-9999.0)),
    _recorded("logprob_invalid", _impossible(0.5)),
    Fault("turn_separator_lost", _delta("turn_separator_lost", _no_separator)),
    Fault("stop_token_doubled", _delta("stop_token_doubled", _stop_again)),
    Fault("stop_token_doubled", _delta("stop_token_doubled", _stop_again), _ANSWER, "an answer"),
    Fault("generation_prompt_missing", _delta("generation_prompt_missing", _without_generation_prompt)),
    Fault("generation_prompt_missing", _delta("generation_prompt_missing", _other_generation_prompt),
          variant="thinking"),
    Fault("message_dropped", _delta("message_dropped", _one_message_less), _TWO, "one of several"),
    Fault("message_dropped", _delta("message_dropped", _one_message_less), Turn(calls=1, user=True), "with a user"),
    Fault("message_dropped", _delta("message_dropped", _no_message), _SPOKEN, "the only one"),
    Fault("tool_messages_split", _delta("tool_messages_split", _one_by_one), _TWO),
    Fault("tool_messages_split", _delta("tool_messages_split", _one_by_one), Turn(calls=3), "three"),
    Fault("system_prompt_injected", _delta("system_prompt_injected", _system_block)),
    Fault("system_prompt_injected", _delta("system_prompt_injected", _system_block), _ANSWER, "an answer"),
    Fault("delta_differs", _delta("delta_differs", _half_written), _SPOKEN, "cut"),
    Fault("delta_differs", _delta("delta_differs", _half_written), _TWO, "one of two cut"),
    Fault("delta_differs", _delta("delta_differs", _remark), _SPOKEN, "a remark"),
    Fault("special_tokens_injected", _control_text),
    Fault("special_tokens_injected", _control_text, _ANSWER, "a user"),
)
