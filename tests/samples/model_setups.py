"""Tokenizers and chat templates made here, small and unlike each other, for witnesses of every kind."""

import json
import random
from functools import cache
from pathlib import Path
from tempfile import mkdtemp

from tests.samples.planted.plant_setup import CITIES, TOOLS, TOPICS, ModelSetup

CHAT = """\
{%- macro think(m, last) -%}
{%- if m.reasoning_content and (keep_thinking or last) %}<think>
{{ m.reasoning_content }}
</think>

{% elif last and not m.reasoning_content and enable_thinking is not defined %}<think>

</think>

{% endif -%}
{%- endmacro -%}
{%- if tools %}<|open|>system
{% if messages[0].role == 'system' %}{{ messages[0].content }}

{% endif %}Tools:
{% for t in tools %}{{ t | tojson }}
{% endfor %}<|shut|>
{% elif messages[0].role == 'system' %}<|open|>system
{{ messages[0].content }}<|shut|>
{% else %}<|open|>system
You are a helpful thing.<|shut|>
{% endif -%}
{%- for m in messages -%}
{%- if m.role == 'user' or (m.role == 'system' and not loop.first) %}<|open|>{{ m.role }}
{{ m.content }}<|shut|>
{% elif m.role == 'assistant' %}<|open|>assistant
{{ think(m, loop.last) }}{{ m.content }}
{%- for c in m.tool_calls or [] %}{% if not loop.first or m.content %}
{% endif %}<call>
{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}
</call>{% endfor %}<|shut|>
{% elif m.role == 'tool' %}{% if loop.previtem.role != 'tool' %}<|open|>tools{% endif %}
<result>
{{ m.content }}
</result>{% if loop.last or loop.nextitem.role != 'tool' %}<|shut|>
{% endif %}{% endif -%}
{%- endfor -%}
{%- if add_generation_prompt %}<|open|>assistant
{% if enable_thinking is defined and not enable_thinking %}<think>

</think>

{% endif %}{% endif -%}
"""
"""Role headers, a separator behind the stop token, tools in groups; an empty think block that comes and goes."""

STABLE = CHAT.replace("{{ think(m, loop.last) }}", "{{ think(m, true) }}")
"""The same, with blocks that stay."""

BARE = """\
{{ bos_token }}{% for m in messages -%}
{%- if m.role == 'system' %}{{ m.content }}{% elif m.role == 'user' %}<|user|>{{ m.content }}
{%- elif m.role == 'assistant' %}<|bot|>{{ m.content.split('</think>')[-1].lstrip() }}<|end|>{% endif -%}
{%- endfor -%}
{%- if add_generation_prompt %}<|bot|><think>
{% endif -%}
"""
"""BOS, no separators, a forced think tag that history does not keep."""

HEADERS = """\
{{ bos_token }}{% if messages[0].role == 'system' %}<|system|>
{{ messages[0].content }}{% endif -%}
{%- if tools %}<|system|>
Tools: {{ tools | tojson }}{% endif -%}
{%- for m in messages -%}
{%- if m.role == 'user' %}<|user|>
{{ m.content }}
{%- elif m.role == 'assistant' %}<|bot|>
{{ m.content }}{% for c in m.tool_calls or [] %}
<call>{{ c.function.name }}
{% for k, v in c.function.arguments.items() %}<arg>{{ k }}={{ v | tojson }}</arg>
{% endfor %}</call>{% endfor %}
{%- elif m.role == 'tool' -%}
{%- if loop.previtem.role != 'tool' %}<|tool|>{% endif %}
<result>{{ m.content }}</result>
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt %}<|bot|>
{% endif -%}
"""
"""The next turn's header is the stop token."""

SPECIAL = ["<s>", "<|open|>", "<|shut|>", "<|end|>", "<|user|>", "<|bot|>", "<|tool|>", "<|system|>"]
PLAIN = ["<think>", "</think>", "<call>", "</call>"]


@cache
def tokenizer_folder(kind: str = "bytes", eos: str = "<|shut|>") -> Path:
    """A vocabulary of a few hundred tokens: ``bytes`` is a byte-level BPE, ``pieces`` one with a metaspace and byte
    fallback as SentencePiece has it, ``prefixed`` the same with a space put before all text, ``words`` a WordPiece
    that lowers case, ``composed`` the first with accents joined to their letters, ``stripping`` the first with control
    tokens that take the white space behind them.
    """
    from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

    texts = [
        f"In {city}, someone asks about {topic}: what is 12 * 345? The answer is 67."
        for city in CITIES
        for topic in TOPICS
    ]
    texts += [
        json.dumps(TOOLS),
        "You are a careful assistant.\n\nuser\nassistant\nsystem\n",
        "I will compute that.\n\n",
    ] * 3
    if kind in ("bytes", "composed", "stripping"):
        tokenizer = Tokenizer(models.BPE())
        if kind == "composed":
            tokenizer.normalizer = normalizers.NFC()
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        trainer = trainers.BpeTrainer(vocab_size=600, initial_alphabet=alphabet, show_progress=False)
    elif kind == "words":
        tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
        tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
        tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
        tokenizer.decoder = decoders.WordPiece()
        trainer = trainers.WordPieceTrainer(
            vocab_size=600, special_tokens=["[UNK]"], initial_alphabet=["<", "|", ">"], show_progress=False
        )
    else:
        tokenizer = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
        before = [normalizers.Prepend("▁")] if kind == "prefixed" else []
        tokenizer.normalizer = normalizers.Sequence([*before, normalizers.Replace(" ", "▁")])
        tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
        pieces = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256))]
        trainer = trainers.BpeTrainer(vocab_size=600, special_tokens=pieces, show_progress=False)
    tokenizer.train_from_iterator(texts, trainer)
    if kind in ("pieces", "prefixed"):
        tokenizer = _byte_pieces_as_vocabulary(tokenizer)
    tokenizer.add_special_tokens([AddedToken(text, normalized=False, rstrip=kind == "stripping") for text in SPECIAL])
    tokenizer.add_tokens([AddedToken(text, normalized=False) for text in PLAIN])
    folder = Path(mkdtemp(prefix="inspector-model-setup-"))
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": eos}
    if eos != "<|shut|>" or kind != "bytes":
        config["bos_token"] = "<s>"
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def _byte_pieces_as_vocabulary(tokenizer):  # type: ignore[no-untyped-def]
    """Byte pieces are ordinary vocabulary in such tokenizers, not special tokens that text could spell."""
    from tokenizers import Tokenizer

    definition = json.loads(tokenizer.to_str())
    definition["added_tokens"] = []
    return Tokenizer.from_str(json.dumps(definition))


def model_setup(name: str, seed: int = 7, **options: object) -> ModelSetup:
    """A setup by name: ``toggling``, ``stable``, ``bare``, ``headers``, ``pieces``, ``prefixed``, ``words``,
    ``composed``, ``stripping``."""
    from rollout_inspector.text.chat_templates import renderer
    from rollout_inspector.text.tokenizers import load

    template, kind, eos, tools = {
        "toggling": (CHAT, "bytes", "<|shut|>", True),
        "stable": (STABLE, "bytes", "<|shut|>", True),
        "bare": (BARE, "bytes", "<|end|>", False),
        "headers": (HEADERS, "bytes", "<|user|>", True),
        "pieces": ("{{ bos_token }}" + STABLE, "pieces", "<|shut|>", True),
        "prefixed": (STABLE, "prefixed", "<|shut|>", True),
        "words": (STABLE, "words", "<|shut|>", True),
        "composed": (STABLE, "composed", "<|shut|>", True),
        "stripping": (STABLE, "stripping", "<|shut|>", True),
    }[name]
    codec = load(tokenizer_folder(kind, eos))
    settings = {"tools": tools, **options}
    return ModelSetup(name, codec, renderer(codec, template), random.Random(seed), **settings)  # type: ignore[arg-type]
