"""What the guard lets pass and what it refuses."""

import json
from collections.abc import Iterator
from typing import Any

import numpy as np
import pyarrow as pa

from rollout_inspector.guard.audit_settings import AuditSettings
from rollout_inspector.guard.shard_audit import audit
from rollout_inspector.streams.trajectory import Row, ids_array
from rollouts.gallery import BUNDLE

PLAIN = """\
{%- for m in messages %}
<|im_start|>{{ m.role }}
{{ m.content }}
{%- if m.tool_calls %}
{{ m.tool_calls }}
{%- endif %}<|im_end|>
{%- endfor %}
{%- if add_generation_prompt %}
<|im_start|>assistant
{%- endif %}
"""

REWRITES = PLAIN.replace("{{ m.content }}", "{{ m.content }}{% if loop.last %}!{% endif %}")

DEAF = PLAIN.replace("{{ m.tool_calls }}", "")

CLEAN = "clean"


def lines_of(*names: str) -> str:
    """The gallery's trajectories of these names, as a file holds them."""
    found = {}
    for line in BUNDLE.read_text(encoding="utf-8").splitlines():
        value = json.loads(line)
        found[value["external_id"]] = line
    return "".join(found[name] + "\n" for name in names)


def in_this_process(todo: Any, settings: AuditSettings, *_: Any) -> Iterator[tuple[str, pa.Table]]:
    return ((key, audit(shard, settings)) for key, shard in todo.items())


def row(logprob: float = -0.5) -> Row:
    """A row of eight tokens; a log-probability above 0 is an error."""
    mask = np.array([0, 0, 0, 1, 1, 1, 1, 1], dtype=np.bool_)
    logprobs = np.where(mask, np.float32(logprob), np.float32(np.nan)).astype(np.float32)
    return Row(ids_array(range(10, 18)), mask, logprobs)


GOOD, BAD = row(), row(0.5)
