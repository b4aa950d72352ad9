"""The only place that loads a tokenizer.

``open_table`` draws pages. ``load`` returns a codec, whose work a limited process does. Both need numpy and the
standard library alone: the native encoders are imported in that process, ``transformers`` at first use of ``hf``.
"""

from rollouts.tokenizers.byte_table import ByteTable
from rollouts.tokenizers.files import TokenizerUnusable
from rollouts.tokenizers.hub import from_hub
from rollouts.tokenizers.kept_tables import open_table, write_table
from rollouts.tokenizers.loaded import LoadedTokenizer, load
from rollouts.tokenizers.server_folder import copy_from_server
from rollouts.tokenizers.validate import check_folder, examined, unpack_zip
