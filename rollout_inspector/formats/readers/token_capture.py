"""NeMo Gym token capture ``<rollout_id>.tokens.jsonl``: one model call a line, ordered by prompt length."""

from typing import Any

from rollout_inspector.formats import shapes
from rollout_inspector.formats.readers.nemo_gym import assistant_message
from rollout_inspector.formats.readers.sessions import Session, session_format
from rollout_inspector.formats.registry import NO_REQUESTS, having
from rollout_inspector.formats.shapes import BadLine
from rollout_inspector.streams.trajectory import Step

NEWEST = 1
_KNOWN = ("rollout_id", "model", "prompt_token_ids", "generation_token_ids", "generation_log_probs", "output_items",
          "schema_version")


def _add_line(session: Session, value: dict[str, Any]) -> None:
    version = shapes.spare(shapes.whole, value.get("schema_version"), "schema_version")
    if version is not None and version > NEWEST:
        raise BadLine(f"schema_version is {version}; this program reads version {NEWEST}.")
    session.tokenizer = session.tokenizer or shapes.text(value.get("model"), "model", 200)
    items = [shapes.mapping(item, "output_items") for item in shapes.sequence(value.get("output_items") or [], "items")]
    extra = shapes.rest(value, _KNOWN)
    if items:
        extra["items"] = items
    session.append(Step(
        prompt_ids=shapes.ids(value.get("prompt_token_ids"), "prompt_token_ids"),
        completion_ids=shapes.ids(value.get("generation_token_ids"), "generation_token_ids"),
        logprobs=shapes.optional_floats(value.get("generation_log_probs"), "generation_log_probs"),
        reply=assistant_message(items) if items else None,
        extra=extra,
    ))


FORMAT = session_format(
    "token_capture", "NeMo Gym token capture", having("prompt_token_ids", "generation_token_ids"),
    lambda value, _: shapes.text(value.get("rollout_id"), "rollout_id", 200) or "rollout", _add_line,
    NO_REQUESTS, by_length=True,
)
