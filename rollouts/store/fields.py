"""Arrays as one little-endian BLOB per column."""

import struct
from typing import Any

import numpy as np
from django.db import models
from numpy.typing import NDArray


class ArrayField(models.BinaryField):  # type: ignore[type-arg]
    """A flat numpy array of one fixed dtype; None stays None. A value that is read is an immutable view of bytes."""

    dtype: np.dtype[Any]
    # The type of a model's attribute, for the type checker.
    _pyi_private_set_type: Any
    _pyi_private_get_type: Any

    def from_db_value(self, value: bytes | memoryview | None, *_: object) -> NDArray[Any] | None:
        return None if value is None else self.from_bytes(bytes(value))

    def from_bytes(self, raw: bytes) -> NDArray[Any]:
        """The array that the column holds as these bytes."""
        return np.frombuffer(raw, dtype=self.dtype)

    def to_bytes(self, value: Any) -> bytes:
        """The bytes that the column holds for an array."""
        return np.asarray(value, dtype=self.dtype).tobytes()

    def get_db_prep_value(self, value: Any, connection: Any, prepared: bool = False) -> Any:
        if value is not None and not isinstance(value, bytes | memoryview):
            value = self.to_bytes(value)
        return super().get_db_prep_value(value, connection, prepared)


class IdsField(ArrayField):
    """Token ids: 4 bytes each."""

    dtype = np.dtype("<i4")


class FloatsField(ArrayField):
    """Log-probabilities and the like: 4 bytes each. The rounding of float16 alone would change an importance ratio."""

    dtype = np.dtype("<f4")


class OriginsField(ArrayField):
    """``rollout_inspector.streams.trajectory.Origin`` codes: 1 byte each."""

    dtype = np.dtype("u1")


class MaskField(ArrayField):
    """A 4-byte count, then the booleans, 8 in each byte."""

    dtype = np.dtype("?")

    def from_bytes(self, raw: bytes) -> NDArray[np.bool_]:
        (count,) = struct.unpack_from("<I", raw)
        return np.unpackbits(np.frombuffer(raw, dtype=np.uint8, offset=4), count=count).astype(np.bool_)

    def to_bytes(self, value: Any) -> bytes:
        mask = np.asarray(value, dtype=np.bool_)
        return struct.pack("<I", mask.size) + np.packbits(mask).tobytes()
