"""Chat templates that are right and wrong in one thing each."""

TURN = (
    "<|im_start|>{{ m.role }}\n{{ m.content }}{% for c in m.tool_calls or [] %}"
    "<tool_call>{{ c.function.name }} {{ c.function.arguments | tojson }}</tool_call>{% endfor %}<|im_end|>\n"
)

PROMPT = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"

PLAIN = "{% for m in messages %}" + TURN + "{% endfor %}" + PROMPT

SAFE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{% for c in m.tool_calls or [] %}{{ (c.function or c) | tojson }}{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

BROKEN = SAFE.replace(
    "{{ m.content }}", "{% if m.role == 'assistant' and loop.last %}(last) {% endif %}{{ m.content }}"
)

TALK = [
    {"role": "user", "content": "2+2?"},
    {"role": "assistant", "content": "It is 4."},
    {"role": "user", "content": "thanks"},
]
