"""The only place that loads a tokenizer. ``open_table`` draws pages. ``load`` returns a codec, whose work a limited
process does. Both need numpy and the standard library alone: the native encoders are imported in that process,
``transformers`` at first use of ``hf``."""

from rollout_inspector.text.tokenizers.byte_table import ByteTable, open_table, write_table
from rollout_inspector.text.tokenizers.files import TokenizerUnusable
from rollout_inspector.text.tokenizers.loaded import LoadedTokenizer, load
from rollout_inspector.text.tokenizers.server_folder import copy_from_server
from rollout_inspector.text.tokenizers.validate import check_folder, examined, from_hub, unpack_zip
