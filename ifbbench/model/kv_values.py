"""The data type that keys and values are stored in, where it is not the model's own."""

import torch
from torch import Tensor


class StoredValues:
    """Casts on the way into the cache and back: from the model's data type to a narrower one, such as fp8 e4m3.

    Values beyond the narrow type's range become its largest ones, for an infinity in the cache would make NaNs even
    where it is masked.
    """

    def __init__(self, model_dtype: torch.dtype, stored_dtype: torch.dtype | None = None) -> None:
        self.dtype = stored_dtype or model_dtype
        self._model_dtype = model_dtype
        self.is_same = self.dtype == model_dtype
        self._limits = torch.finfo(self.dtype)
        # PyTorch's index_copy_ on a CPU does not know eight-bit floats, but as bytes they are copied as well.
        is_bytes = self.dtype.itemsize == 1
        self.storage_dtype = torch.uint8 if is_bytes else self.dtype
        # What each byte stands for: on a CPU looked up six times faster than cast.
        self._table = torch.arange(256, dtype=torch.uint8).view(self.dtype).to(model_dtype) if is_bytes else None

    def packed(self, values: Tensor) -> Tensor:
        """`values` as they are stored."""
        if self.is_same:
            return values
        if self._limits.max < torch.finfo(values.dtype).max:
            values = values.clamp(self._limits.min, self._limits.max)
        return values.to(self.dtype).view(self.storage_dtype)

    def unpacked(self, stored: Tensor) -> Tensor:
        """What was stored, in the model's data type."""
        if self.is_same:
            return stored
        if self._table is not None and stored.device.type == "cpu":
            return self._table.index_select(0, stored.flatten().int()).view(stored.shape)
        return stored.view(self.dtype).to(self._model_dtype)
