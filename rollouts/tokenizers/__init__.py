"""The only place that loads a tokenizer.

``byte_table`` serves the web process: numpy and the standard library alone. ``load`` gives a codec; the native encoders
and ``transformers`` are imported when they are first needed, never when this package is.
"""

from rollouts.tokenizers.byte_table import ByteTable, byte_table
from rollouts.tokenizers.files import TokenizerUnusable
from rollouts.tokenizers.hub import from_hub
from rollouts.tokenizers.loaded import LoadedTokenizer, load
from rollouts.tokenizers.validate import check_folder, unpack_zip

__all__ = [
    "ByteTable",
    "LoadedTokenizer",
    "TokenizerUnusable",
    "byte_table",
    "check_folder",
    "from_hub",
    "load",
    "unpack_zip",
]
