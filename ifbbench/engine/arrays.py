"""Types of arrays."""

from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

IntArray: TypeAlias = NDArray[np.int32]
Int64Array: TypeAlias = NDArray[np.int64]
FloatArray: TypeAlias = NDArray[np.float32]
BoolArray: TypeAlias = NDArray[np.bool_]
Rows: TypeAlias = Int64Array  # indices into the table of requests

NO_ROWS: Rows = np.zeros(0, np.int64)
