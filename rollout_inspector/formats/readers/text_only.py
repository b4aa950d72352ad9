"""Files that hold text and no token ids: they tell what was said, but not which tokens were sampled. Their steps have
no ids, only the text of the file. One ``_format(...)`` adds a file of one trainer."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from rollout_inspector.formats import limits, shapes
from rollout_inspector.formats.registry import Format, each_batch, has_keys, having, line_format
from rollout_inspector.formats.shapes import BadLine
from rollout_inspector.streams.trajectory import NO_IDS, Request, Step, Trajectory

LACKS = (
    "The file holds text and no token ids: what the engine read and sampled is not decidable from it. "
    "Record calls with return_token_ids to inspect tokens."
)


def _format(
    name: str, title: str, prompt: str, completion: str, reward_key: str, others: tuple[str, ...] = (),
    id_parts: tuple[str, ...] = (), group: str = "", stop_reason: str = "", policy_version: str = "", runs: str = "",
    note: str = "",
) -> Format:
    """The format of one trainer's file, by its keys: one prompt and one completion a line.

    ``others``: further keys that must be there, so that no file of another trainer is taken for this one. ``runs``: the
    policy versions of the tokens, as runs of ``[version, tokens]``. ``note``: what is wrong in the file by the way it
    is written, as a sentence.
    """

    def detect(values: Sequence[Any]) -> bool:
        return has_keys(values[0], prompt, completion, reward_key, *others) and isinstance(values[0][completion], str)

    def trajectory(value: Any, number: int) -> Trajectory:
        value = shapes.mapping(value, "The line")
        parts = [shapes.text(value.get(key), key, 90) for key in id_parts]
        versions = _versions(value.get(runs), runs) if runs else []
        reward = value.get(reward_key)
        if isinstance(reward, list):
            reward = sum(shapes.number(item, reward_key) or 0.0 for item in reward)
        return Trajectory(
            "-".join(parts) if all(parts) and parts else f"line-{number}",
            (_text_step(value, prompt, completion, policy_version, versions),),
            reward=shapes.number(reward, reward_key),
            group=shapes.text(value.get(group), group, 200) if group else "",
            stop_reason=shapes.text(value.get(stop_reason), stop_reason, 60) if stop_reason else "",
            extra=shapes.rest(value, (prompt, completion, reward_key, stop_reason)),
        )

    return line_format(name, title, detect, trajectory, f"{LACKS} {note}".strip())


def _versions(value: Any, where: str) -> list[list[Any]]:
    """Runs of tokens with their policy version, ``[version, tokens]``. Raises :class:`BadLine`."""
    versions = []
    for n, item in enumerate(shapes.sequence(value or [], where)):
        pair = shapes.sequence(item, f"{where}[{n}]")
        if len(pair) != 2:
            raise BadLine(f"{where}[{n}] must hold a policy version and a number of tokens.")
        tokens = shapes.whole(pair[1], f"{where}[{n}]: tokens", least=0)
        versions.append([shapes.text(pair[0], f"{where}[{n}]: version", 100), tokens or 0])
    return versions


def _text_step(
    value: Mapping[str, Any], prompt: str, completion: str, policy_version: str = "", versions: Sequence[Any] = ()
) -> Step:
    """``versions``: runs of :func:`_versions`. The last one sampled the end of the completion."""
    text = shapes.optional_string(value.get(completion), completion)
    if text is None:
        raise BadLine(f"{completion} is missing.")
    version = shapes.text(value.get(policy_version), policy_version, 100) if policy_version else ""
    extra = {"prompt": value.get(prompt)}
    if versions:
        version = version or versions[-1][0]
        extra["policy_versions"] = list(versions)
    return Step(NO_IDS, NO_IDS, text=text, policy_version=version, extra=extra)


# -- columns: ms-swift writes many completions on one line, TRL one a row of a Parquet file


def _columns(value: Any, number: int) -> list[Trajectory]:
    value = shapes.mapping(value, "The line")
    is_one = not isinstance(value.get("completion"), list) or _is_messages(value["completion"])
    rows = [value] if is_one else _transposed(value)
    return [_completion(row, number, n, len(rows)) for n, row in enumerate(rows)]


def _is_messages(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(has_keys(item, "role") for item in value)


def _transposed(value: Mapping[str, Any]) -> list[dict[str, Any]]:
    n = len(value["completion"])
    columns = {key: item for key, item in value.items() if isinstance(item, list) and len(item) == n}
    whole = shapes.rest(value, columns)
    for key in ("prompt", "reward"):
        if isinstance(whole.get(key), list):
            raise BadLine(f"{key} has {len(whole[key])} elements for {n} completions.")
    limits.current().check_repeated(whole, n, "completions")
    return [{**whole, **{key: item[i] for key, item in columns.items()}} for i in range(n)]


_NO_REWARDS = (
    "step", "gen_step", "global_step", "epoch", "advantage", "advantages", "prompt", "completion", "reward", "entropy"
)


def _reward_columns(value: Mapping[str, Any]) -> list[str]:
    """The columns of reward functions. What ms-swift writes after ``advantages`` is no reward."""
    names = list(value)
    behind = names.index("advantages") if "advantages" in names else len(names)
    if "completion" in names[:behind]:
        names = names[:behind]
    return [name for name in names if name not in _NO_REWARDS and type(value[name]) is float]


def _completion(value: dict[str, Any], number: int, n: int, of: int) -> Trajectory:
    """One completion. Without a reward the sum of the reward functions is the reward."""
    completion = value.get("completion")
    name = f"line-{number}-{n}" if of > 1 else f"line-{number}"
    parts = shapes.numbers_by_name({key: value[key] for key in _reward_columns(value)}, "the rewards")
    extra = shapes.rest(value, ("prompt", "completion", "reward", *parts))
    reward = shapes.number(value.get("reward"), "reward")
    if reward is None and parts:
        reward = shapes.number(sum(parts.values()), "The sum of the rewards")
    if _is_messages(completion):
        before = value.get("prompt")
        messages = shapes.messages(
            before if isinstance(before, list) else [{"role": "user", "content": before}], "prompt"
        )
        whole = [*messages, *shapes.messages(completion, "completion")]
        steps = _message_steps(whole, None, range(len(messages), len(whole)))
    else:
        steps = (_text_step(value, "prompt", "completion"),)
    return Trajectory(name, steps, reward=reward, reward_parts=parts, extra=extra)


_WRITTEN_WITH = ("step", "gen_step", "advantage", "advantages")


def _detect_columns(values: Sequence[Any]) -> bool:
    record = values[0]
    if not has_keys(record, "prompt", "completion"):
        return False
    # A single completion is known by these two keys. A line of columns is known by further keys.
    completion = record["completion"]
    return isinstance(completion, str) or _is_messages(completion) or any(key in record for key in _WRITTEN_WITH)


# -- preferences


_PAIR = ("prompt", "chosen", "rejected")


def _preferences(value: Any, number: int) -> list[Trajectory]:
    """A trajectory for each answer to one prompt, in one group. Each says which it is under ``preference``."""
    value = shapes.mapping(value, "The line")
    prompt, further = value.get("prompt"), shapes.rest(value, _PAIR)
    trajectories = []
    for n, side in enumerate(_PAIR[1:]):
        completion = value.get(side)
        if prompt is None and _is_messages(completion):
            prompt, completion = completion[:-1], completion[-1:]
        elif _is_messages(completion) and _is_messages(prompt) and completion[: len(prompt)] == prompt:
            completion = completion[len(prompt) :]  # both hold the whole conversation
        trajectory = _completion({"prompt": prompt, "completion": completion}, number, n, 2)
        trajectories.append(replace(trajectory, group=f"line-{number}", extra={**further, "preference": side}))
    return trajectories


def _detect_preferences(values: Sequence[Any]) -> bool:
    if not has_keys(values[0], *_PAIR[1:]):
        return False
    return all(isinstance(values[0][side], str) or _is_messages(values[0][side]) for side in _PAIR[1:])


# -- ShareGPT


_ROLES = {"human": "user", "gpt": "assistant", "chatgpt": "assistant", "bing": "assistant", "bard": "assistant",
          "model": "assistant", "function_call": "assistant", "observation": "tool", "function_response": "tool"}


def _sharegpt(value: Any, number: int) -> Trajectory:
    """Turns of ``from`` and ``value``, or messages under another name."""
    value = shapes.mapping(value, "The line")
    messages: list[dict[str, Any]] = []
    if isinstance(value.get("system"), str) and value["system"]:
        messages.append({"role": "system", "content": value["system"]})
    for n, item in enumerate(shapes.sequence(value.get("conversations"), "conversations")):
        turn = shapes.mapping(item, f"conversations[{n}]")
        role = turn.get("role", turn.get("from"))
        content = turn.get("content", turn.get("value"))
        messages.append({
            "role": _ROLES.get(role, role) if isinstance(role, str) else role, "content": content,
            **shapes.rest(turn, ("role", "from", "content", "value")),
        })
    tools = shapes.spare(_json, value.get("tools"), "tools")
    fields = {**shapes.rest(value, ("conversations", "system")), "messages": messages, "tools": tools or None}
    return _conversation(fields, number)


def _detect_sharegpt(values: Sequence[Any]) -> bool:
    turns = values[0].get("conversations") if isinstance(values[0], dict) else None
    return isinstance(turns, list) and any(
        has_keys(turn, "from", "value") or has_keys(turn, "role", "content") for turn in turns[:1]
    )


# -- Alpaca


def _alpaca(value: Any, number: int) -> Trajectory:
    """An instruction, perhaps with an input, and its answer. Earlier turns are pairs under ``history``."""
    value = shapes.mapping(value, "The line")
    questions = [shapes.optional_string(value.get(key), key) for key in ("instruction", "input")]
    pairs = [shapes.sequence(pair, "history") for pair in shapes.sequence(value.get("history") or [], "history")]
    turns = [*pairs, ["\n\n".join(text for text in questions if text), value.get("output")]]
    messages = [
        {"role": role, "content": shapes.optional_string(text, f"the text of the {role}")}
        for pair in turns for role, text in zip(("user", "assistant"), pair, strict=False)
    ]
    if isinstance(value.get("system"), str) and value["system"]:
        messages.insert(0, {"role": "system", "content": value["system"]})
    further = shapes.rest(value, ("instruction", "input", "output", "history", "system"))
    return _conversation({**further, "messages": messages}, number)


# -- OpenAI-style messages


def _conversation(value: Any, number: int) -> Trajectory:
    value = shapes.mapping(value, "The line")
    messages = shapes.messages(value.get("messages"), "messages")
    conversation_id = value.get("id")
    name = shapes.text(conversation_id, "id", 200) if isinstance(conversation_id, str | int) else ""
    return Trajectory(
        name or f"line-{number}",
        _message_steps(messages, _json(value.get("tools"), "tools"), range(len(messages))),
        reward=shapes.number(value.get("reward"), "reward"),
        extra=shapes.rest(value, ("messages", "tools", "reward", "id")),
    )


def _art(value: Any, number: int) -> Trajectory:
    """A row of ART's Parquet. Tools, calls and metadata are JSON text there; what the model wrote is ``trainable``."""
    value = shapes.mapping(value, "The row")
    rows = shapes.messages(value.get("messages"), "messages")
    sampled = [n for n, row in enumerate(rows) if row.get("trainable") is True]
    messages = []
    for n, row in enumerate(rows):
        message = {**shapes.rest(row, ("trainable", "tool_calls")), "content": row.get("content") or ""}
        if row.get("tool_calls") is not None:
            message["tool_calls"] = shapes.sequence(_json(row["tool_calls"], f"messages[{n}].tool_calls"), "tool_calls")
        messages.append(message)
    extra = shapes.rest(value, ("messages", "tools", "reward", "group_index"))
    return Trajectory(
        f"line-{number}",
        _message_steps(messages, _json(value.get("tools"), "tools"), sampled or range(len(messages))),
        reward=shapes.number(value.get("reward"), "reward"),
        group=shapes.text(value.get("group_index"), "group_index", 200),
        extra={key: _json(item, key) if key in _ART_JSON else item for key, item in extra.items()},
    )


_ART_JSON = ("metadata", "metrics", "group_metadata", "group_metrics")


def _json(value: Any, where: str) -> Any:
    """The value of a field that some writers fill with JSON text, because a column has one type."""
    if not isinstance(value, str):
        return value
    try:
        return shapes.decode(value.encode())
    except BadLine:
        raise BadLine(f"{where} is a text, but no valid JSON.") from None


def _message_steps(messages: Sequence[Any], tools: Any, places: Iterable[int]) -> tuple[Step, ...]:
    """One step for each assistant message at these places. Raises :class:`BadLine` when there is none."""
    functions = shapes.optional_tools(tools, "tools")
    decoded = limits.Decoded()
    steps = []
    for n in places:
        if messages[n]["role"] == "assistant":
            decoded.add(f"messages[{n}]", 0, n)
            steps.append(Step(NO_IDS, NO_IDS, request=Request(tuple(messages[:n]), functions), reply=messages[n]))
    if not steps:
        raise BadLine("The conversation has no assistant message.")
    return tuple(steps)


FORMATS = (
    _format("verl", "verl rollout data (text only)", "input", "output", "score", ("step",)),
    _format(
        "skyrl_evals", "SkyRL dumped evaluations (text only)", "input_prompt", "output_response", "score",
        stop_reason="stop_reason",
    ),
    _format(
        "areal", "AReaL completions (text only)", "prompt", "completion", "reward", ("task_id", "sample_idx"),
        ("task_id", "sample_idx"), "task_id", policy_version="tail_version", runs="version_rle",
        note="AReaL cuts the prompt off after as many tokens as are masked. Where masked text stands between "
        "completions, as with tools, that cut is at the wrong place.",
    ),
    Format(
        "completions", "TRL or ms-swift completions (text only)", _detect_columns,
        partial(each_batch, read_batch=_columns), LACKS,
    ),
    Format(
        "preferences", "Preference pairs (text only)", _detect_preferences,
        partial(each_batch, read_batch=_preferences), LACKS,
    ),
    line_format("sharegpt", "ShareGPT conversations (text only)", _detect_sharegpt, _sharegpt, LACKS),
    line_format("alpaca", "Alpaca instructions (text only)", having("instruction", output=str), _alpaca, LACKS),
    line_format("art", "ART trajectory groups (text only)", having("group_index", "messages"), _art, LACKS),
    line_format("messages", "OpenAI-style messages (text only)", having(messages=list), _conversation, LACKS),
)
