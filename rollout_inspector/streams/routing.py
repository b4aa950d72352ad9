"""What is kept of the expert routing of a mixture-of-experts model: three figures in place of a large array. Engines
return, for each token, which experts each layer chose. A trainer replays that choice. A record that repeats rows or
holds zeros is then replayed too, and no error is raised."""

from typing import Any

import numpy as np
from numpy.typing import NDArray


def summary(array: NDArray[Any]) -> dict[str, Any]:
    """The figures of expert routing ``[tokens, layers, experts]``; ``[tokens, values]`` counts as one layer.

    ``length``: tokens. ``zero_layers``: layers whose experts are 0 at every token, so nothing was recorded there.
    ``repeats``: a share of the choices of the other layers from the second token on; 0.0 where there are none. They
    equal, in the same order, what the same layer chose for the token before. Raises ``ValueError`` for another shape.
    """
    if array.ndim == 2:
        array = array[:, np.newaxis, :]
    if array.ndim != 3:
        raise ValueError(f"expert routing has the shape [tokens, layers, experts], not {array.ndim} dimensions")
    n_tokens, n_layers = array.shape[:2]
    has_values = array.any(axis=(0, 2)) if n_tokens else np.ones(n_layers, dtype=np.bool_)
    layers = array[:, has_values]
    same = (layers[1:] == layers[:-1]).all(axis=2)
    return {
        "repeats": float(same.mean()) if same.size and array.shape[2] else 0.0,
        "zero_layers": int(n_layers - np.count_nonzero(has_values)),
        "length": int(n_tokens),
    }
