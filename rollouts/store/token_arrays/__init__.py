"""Where the token arrays of steps and rows lie: in the database, or in segments, which are files of the storage. The
setting ``INSPECTOR_TOKENS`` says which store a new run gets, and the run remembers it. A step or row itself says where
its arrays are, so a reader needs no store: :mod:`rollouts.store.token_arrays.reading` reads from both."""

from rollouts.store.token_arrays.items import TokenItem
from rollouts.store.token_arrays.stores import STORES, Place, TokenStore
