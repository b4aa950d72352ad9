"""What the harness asks: a scenario for each property, of calls with marks such as ``#streams.2#``."""

import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from rollout_inspector.gauntlet.engine import COMPLETIONS, Script
from rollout_inspector.gauntlet.harness import Answer, GauntletHarness
from rollout_inspector.gauntlet.vocabulary import OTHER_END, spell

TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}}}]
ARGUMENTS = '{"city":  "Zürich", "days": 2.0, "note": "a\\/b"}'
"""What the model samples: valid JSON that every program writes in another way."""
REWRITTEN = json.dumps({"note": "a/b", "days": 2, "city": "Zürich"})  # What the harness makes of it.
UNICODE = "Grüße 🌍 the weather "
N_AT_ONCE, N_TURNS = 6, 3  # Sessions at once, and turns of each.
LONG = 8000  # Letters of a long message.
LEAVE_AFTER = 10  # Events of a stream after which the client leaves.
SETTINGS = {"temperature": 0.25, "top_p": 0.5, "seed": 7, "max_tokens": 99, "x_vendor": {"a": [1, None]}}


def user(mark: str, text: str = "what is the answer ?") -> dict[str, Any]:
    """A message of a user that ends in a mark."""
    return {"role": "user", "content": f"{text} #{mark}#"}


def _turns(
    harness: GauntletHarness, marks: list[str], session: str, messages: list[Any] | None = None, **fields: Any
) -> list[Any]:
    """A turn for each mark of a conversation that goes on from ``messages``; returns all messages."""
    messages = list(messages or [{"role": "system", "content": "use the tool "}])
    for mark in marks:
        messages.append(user(mark))
        messages.append(harness.ask(mark, session, messages, **fields).message)
    return messages


def _ids(harness: GauntletHarness) -> None:
    harness.engine.scripts["ids.1"] = Script(UNICODE)
    _turns(harness, ["ids.0", "ids.1", "ids.2"], "ids", logprobs=True)
    parts = [{"type": "text", "text": "the "}, {"type": "text", "text": "weather #ids.3#"}]
    harness.ask("ids.3", "ids-parts", [{"role": "user", "content": parts}], tools=TOOLS, return_token_ids=True)
    if harness.ask("ids.4", "ids-text", "the answer #ids.4#", path=COMPLETIONS).status == 200:
        call = harness.engine.calls[-1]
        ids = [*call.prompt_ids, *call.choices[0].ids, *spell(" and ")]
        harness.ask("ids.4", "ids-text", ids, path=COMPLETIONS, logprobs=0)


def _streams(harness: GauntletHarness) -> None:
    harness.engine.scripts |= {
        "streams.1": Script(UNICODE), "streams.2": Script("the tool ", tool=("weather", ARGUMENTS)),
        "streams.3": Script(has_gate=True),
    }
    _turns(harness, ["streams.0", "streams.1"], "streams", stream=True)
    harness.ask("streams.2", "streams-tool", [user("streams.2")], stream=True, tools=TOOLS, logprobs=True)
    harness.ask("streams.3", "streams-gate", [user("streams.3")], stream=True, on_event=harness.engine.gate.set,
                stream_options={"include_usage": True})


def _retries(harness: GauntletHarness) -> None:
    harness.engine.scripts |= {"retries.0": Script(refused=503), "retries.2": Script(is_cut=True)}
    for mark, stream in (("retries.0", False), ("retries.2", True)):
        for _ in range(3):
            answer = harness.ask(mark, mark, [user(mark)], stream=stream)
            if answer.status == 200 and answer.is_whole:
                break
    for _ in range(2):  # the harness did not like the first answer
        harness.ask("retries.1", "retries.1", [user("retries.1")])


def _cancel(harness: GauntletHarness) -> None:
    harness.engine.scripts["cancel.0"] = Script(words="", is_endless=True)
    harness.ask("cancel.0", "cancel", [user("cancel.0")], stream=True, leave_after=LEAVE_AFTER)


def _choices(harness: GauntletHarness) -> None:
    harness.ask("choices.0", "choices", [user("choices.0")], n=3)
    harness.ask("choices.1", "choices-stream", [user("choices.1")], n=3, stream=True)


def _compaction(harness: GauntletHarness) -> None:
    messages = _turns(harness, [f"compaction.{turn}" for turn in range(4)], "compaction")
    summary = {"role": "user", "content": f"so far: {messages[-1].get('content')}"}
    _turns(harness, ["compaction.4", "compaction.5"], "compaction", [messages[0], summary])


def _sub_agents(harness: GauntletHarness) -> None:
    messages = _turns(harness, ["sub-agents.0"], "main-agent")
    for agent in ("1", "2"):
        marks = [f"sub-agents.{agent}{turn}" for turn in range(2)]
        task = [{"role": "system", "content": f"you are agent {agent}"}]
        _turns(harness, marks, f"sub-agent-{agent}", task, parent="main-agent")
    _turns(harness, ["sub-agents.3"], "main-agent", messages)


def _arguments(harness: GauntletHarness) -> None:
    harness.engine.scripts["rewritten-arguments.0"] = Script("the tool ", tool=("weather", ARGUMENTS))
    messages = _turns(harness, ["rewritten-arguments.0"], "arguments", tools=TOOLS)
    changed = json.loads(json.dumps(messages))
    for call in changed[-1].get("tool_calls") or ():
        call["function"]["arguments"] = REWRITTEN
    result = {"role": "tool", "tool_call_id": "call", "content": "sunny #rewritten-arguments.1#"}
    harness.ask("rewritten-arguments.1", "arguments", [*changed, result], tools=TOOLS)


def _each(harness: GauntletHarness, scenario: str, scripts: list[Script], **fields: Any) -> None:
    """A call in a session of its own for each script; the last is a stream."""
    for n, script in enumerate(scripts):
        mark = f"{scenario}.{n}"
        harness.engine.scripts[mark] = script
        harness.ask(mark, mark, [user(mark)], stream=n == len(scripts) - 1, **fields)


def _versions(harness: GauntletHarness) -> None:
    _each(harness, "version-change", [Script(versions=("7",)), *[Script(versions=("7", "8"))] * 2])


def _stops(harness: GauntletHarness) -> None:
    ends = [Script(end=OTHER_END), Script(end=0), Script(end=0, stop_text="STOP"), Script(end=OTHER_END)]
    _each(harness, "wrong-stop", ends, stop=["STOP"], max_tokens=500)


def _doubled(harness: GauntletHarness) -> None:
    for mark in ("doubled-call.0", "doubled-call.0", "doubled-call.1"):
        harness.ask(mark, "doubled", [user(mark)], stream=mark == "doubled-call.1")


def _order(harness: GauntletHarness) -> None:
    """Sessions that begin with the same prompt, at once."""

    def play_session(number: int) -> None:
        marks = ["order.0", *(f"order.{10 * number + turn}" for turn in range(1, N_TURNS))]
        _turns(harness, marks, f"order-{number}", stream=number % 2 == 1)

    with ThreadPoolExecutor(N_AT_ONCE) as pool:
        list(pool.map(play_session, range(N_AT_ONCE)))


def _unchanged(harness: GauntletHarness) -> None:
    script = Script("Grüße ", tool=("weather", ARGUMENTS))
    _each(harness, "answers-unchanged", [script, Script(refused=429), script], tools=TOOLS, **SETTINGS)


def _masks(harness: GauntletHarness) -> None:
    marks = [f"masks.{turn}" for turn in range(3)]
    harness.engine.scripts |= dict.fromkeys(marks, Script(is_canonical=True))
    _turns(harness, marks, "masks")


def _lost(harness: GauntletHarness) -> None:
    """Long texts, and calls at once right before the gateway ends."""
    harness.engine.scripts["lost-call.1"] = Script("long" * (LONG // 4))
    harness.ask("lost-call.0", "lost-long", [user("lost-call.0", "x" * LONG)])
    marks = [f"lost-call.{n}" for n in range(1, 1 + N_AT_ONCE)]
    with ThreadPoolExecutor(N_AT_ONCE) as pool:
        list(pool.map(lambda mark: harness.ask(mark, mark, [user(mark)], stream=mark[-1] in "246"), marks))


SCENARIOS: tuple[Callable[[GauntletHarness], None], ...] = (
    _ids, _streams, _retries, _cancel, _choices, _compaction, _sub_agents, _arguments, _versions, _stops, _doubled,
    _order, _unchanged, _masks, _lost,
)
"""In the order in which they are played."""


def play(harness: GauntletHarness) -> list[Answer]:
    """Play everything; returns what the clients got. Raises :class:`Refusal` where the gateway passes no chat on."""
    harness.check()
    for scenario in SCENARIOS:
        scenario(harness)
    for call in harness.engine.calls:
        call.ended.wait(harness.engine.patience + 1)
    return harness.answers
