"""The only place that loads a tokenizer.

``byte_table`` serves the web process; it needs numpy and the standard library alone. ``load`` returns a codec. The
native encoders and ``transformers`` are imported at first use, never when this package is imported.
"""

from rollouts.tokenizers.byte_table import ByteTable, byte_table
from rollouts.tokenizers.files import TokenizerUnusable
from rollouts.tokenizers.hub import from_hub
from rollouts.tokenizers.loaded import LoadedTokenizer, load
from rollouts.tokenizers.server_folder import copy_from_server
from rollouts.tokenizers.validate import check_folder, unpack_zip
