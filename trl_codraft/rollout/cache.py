"""
A key/value cache whose rows have different lengths, and the masks that go with it.

Slot equals position id: the key of a row's position `p` lives in slot `p`, wherever the token stood in a padded batch.
Rolling back rejected tokens needs no work: their slots are overwritten before they are read again, and until then the
mask hides them.

Shapes: `B` rows, `q` query columns, `kv` visible slots, `C` capacity, `Hkv` key/value heads, `D` head dim.
"""

import torch
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from .decode_attention import DECODING, repeated


class RaggedCache(Cache):
    """
    Keys and values of `B` rows of different lengths, in buffers `(B, C + 1, Hkv, D)` that grow geometrically: tokens
    before heads, so that a forward's columns are written as whole lines.

    Each forward is announced with [`~RaggedCache.begin`], which says where its columns go; the model then calls
    `update` once per layer. Column slots below zero mark padding: they are written to a spare slot nobody reads.

    Args:
        num_rows (`int`):
            Number of rows `B`.
        max_slots (`int`):
            Largest number of slots a row can ever need.
        initial_slots (`int`, *optional*, defaults to `max_slots`):
            Number of slots to allocate first. Buffers grow by half when a forward needs more.
        spare_rows (`int`, *optional*, defaults to `0`):
            Rows to allocate behind the others, for forwards whose batch is padded.
    """

    def __init__(self, num_rows: int, max_slots: int, initial_slots: int | None = None, spare_rows: int = 0):
        super().__init__(layers=[])
        self.num_rows = num_rows
        self._spare_rows = spare_rows
        # Of the buffers, also where a layer first writes when rows have left: forwards are padded to more than are
        # left.
        self._buffer_rows = num_rows + spare_rows
        self.max_slots = max_slots
        self.capacity = max(1, min(max_slots, initial_slots if initial_slots is not None else max_slots))
        self._buffers: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._lines: torch.Tensor | None = None
        self._batch, self._columns, self._visible = num_rows, 0, 0
        self._written: set[int] = set()  # layers that have written since the forward was announced

    @property
    def is_filled(self) -> bool:
        """Whether any layer has written its keys."""
        return len(self._buffers) > 0

    def begin(self, slots: torch.Tensor, visible: int) -> None:
        """
        Announces the next forward.

        Args:
            slots (`torch.LongTensor` of shape `(B, q)`):
                Slot of each column, -1 for padding columns. Rows behind the cache's own are padding.
            visible (`int`):
                Number of leading slots the attention sees: an upper bound of `slots.max() + 1`.

        Raises:
            ValueError: if the forward needs more slots than `max_slots`.
        """
        if visible > self.max_slots:
            raise ValueError(f"The forward needs {visible} cache slots, but the cache was made for {self.max_slots}.")
        if visible > self.capacity:
            self._grow(min(self.max_slots, max(visible, self.capacity + self.capacity // 2 + 64)))
        self._batch, self._columns = slots.shape
        self._written.clear()
        rows = torch.arange(self._batch, device=slots.device)[:, None]
        self._lines = (rows * (self.capacity + 1) + torch.where(slots < 0, self.capacity, slots)).flatten()
        self._visible = visible

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args, **kwargs
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """
        Writes one layer's `(B, Hkv, q, D)` keys and values; returns views `(B, Hkv, kv, D)` of all visible slots.
        """
        if layer_idx not in self._buffers:
            self._buffers[layer_idx] = (self._allocate(key_states), self._allocate(value_states))
        views = []
        for buffer, states in zip(self._buffers[layer_idx], (key_states, value_states), strict=True):
            buffer.flatten(0, 1).index_copy_(0, self._lines, states.transpose(1, 2).flatten(0, 1))
            views.append(buffer[: self._batch, : self._visible].transpose(1, 2))
        self._written.add(layer_idx)
        return views[0], views[1]

    def spread(self, sources: list[int]) -> None:
        """
        Copies rows over rows, in the slots that the last forward saw.

        Args:
            sources (`list[int]`):
                For each of the first rows the row whose content it gets.
        """
        if sources == list(range(len(sources))):
            return
        for buffer in (buffer for buffers in self._buffers.values() for buffer in buffers):
            rows = torch.tensor(sources, device=buffer.device)
            buffer[: len(sources), : self._visible] = buffer[rows, : self._visible]

    def compact(self, keep: list[bool]) -> list[int]:
        """
        Drops rows. Kept rows from the end move into the holes, so only as many rows are copied as leave.

        Args:
            keep (`list[bool]` of length `B`):
                Which rows stay.

        Returns:
            `list[int]`: the old index of each new row; every other per-row state must be reordered by it.
        """
        order = compaction_order(keep)
        moves = [(new, old) for new, old in enumerate(order) if new != old]
        if moves:
            for keys, values in self._buffers.values():
                new_rows, old_rows = (torch.tensor(side, device=keys.device) for side in zip(*moves, strict=True))
                keys[new_rows] = keys[old_rows]
                values[new_rows] = values[old_rows]
        self.num_rows = len(order)
        return order

    # What models ask, mask functions above all. Rows that end at different slots have no common answer and get a mask
    # of their own with the forward; the answers are those of the row that ends last, and of all rows where no mask is
    # given.

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Slots of a layer that are filled: those before the announced columns until the layer has written them."""
        return self._visible if layer_idx in self._written else self._visible - self._columns

    def get_query_offset(self, layer_idx: int = 0) -> int:
        """Slot of the first announced column, whichever layers have written."""
        return self._visible - self._columns

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        """Number of keys that `update` returns, and the slot of the first: windows too see all slots."""
        return self._visible, 0

    def get_max_length(self, layer_idx: int | None = None) -> int:
        """Slots a row can ever have."""
        return self.max_slots

    @property
    def batch_size(self) -> int:
        """Rows of the announced forward."""
        return self._batch

    @property
    def is_initialized(self) -> bool:
        """Whether any layer has written its keys."""
        return self.is_filled

    @property
    def is_croppable(self) -> bool:
        """No: rejected tokens are overwritten, never cropped."""
        return False

    def __len__(self) -> int:
        """Number of layers that have written."""
        return len(self._buffers)

    def __bool__(self) -> bool:
        """A cache is one, also while it is empty."""
        return True

    def layer(self, layer_idx: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The `(B, Hkv, C, D)` keys and values of one layer."""
        keys, values = (buffer[: self.num_rows, : self.capacity] for buffer in self._buffers[layer_idx])
        return keys.transpose(1, 2), values.transpose(1, 2)

    @property
    def key_dtype(self) -> torch.dtype:
        """
        Dtype of the keys, known once a layer has written (by another name than that of tensors, which accelerate
        casts).
        """
        return next(iter(self._buffers.values()))[0].dtype

    def _allocate(self, states: torch.Tensor) -> torch.Tensor:
        """A buffer for states `(B, Hkv, any, D)`."""
        # Zeros, not empty: hidden slots are multiplied by a zero probability, which does not absorb NaN.
        return states.new_zeros(self._buffer_rows, self.capacity + 1, states.shape[1], states.shape[-1])

    def _grow(self, capacity: int) -> None:
        """Moves every buffer into a larger one, one at a time."""
        old, self.capacity = self.capacity, capacity
        self._buffer_rows = self.num_rows + self._spare_rows
        for layer_idx, buffers in self._buffers.items():
            grown = []
            for buffer in buffers:
                target = self._allocate(buffer.transpose(1, 2))
                target[: self.num_rows, :old] = buffer[: self.num_rows, :old]
                grown.append(target)
            self._buffers[layer_idx] = (grown[0], grown[1])


def compaction_order(keep: list[bool]) -> list[int]:
    """Old index of each new row when the kept rows behind the new end fill the holes before it."""
    size = sum(keep)
    movers = [row for row in range(size, len(keep)) if keep[row]]
    movers.reverse()
    return [row if keep[row] else movers.pop() for row in range(size)]


def causal_mask(slots: torch.Tensor, visible: int, window: int | None = None) -> torch.Tensor:
    """
    Which slots each column sees: all up to its own, or the last `window` of them.

    Args:
        slots (`torch.LongTensor` of shape `(B, q)`):
            Slot of each column. Padding columns (-1) see slot 0, so that their softmax stays finite.
        visible (`int`):
            Number of slots `kv`.
        window (`int`, *optional*):
            Sliding window, the column itself included (the convention of Transformers).

    Returns:
        `torch.BoolTensor` of shape `(B, 1, q, kv)`: True where the column may look.
    """
    keys = torch.arange(visible, device=slots.device)
    queries = slots.clamp(min=0)[:, None, :, None]
    mask = keys <= queries
    if window is not None:
        mask = mask & (keys > queries - window)
    return mask


class CausalMask:
    """
    What [`causal_mask`] returns, for the columns that are asked for: the mask of all columns of a long prompt at once
    takes memory that grows with the square of its length.

    Args:
        slots (`torch.LongTensor` of shape `(B, q)`):
            Slot of each column.
        visible (`int`):
            Number of slots.
    """

    def __init__(self, slots: torch.Tensor, visible: int):
        self._slots, self._visible = slots, visible

    def __call__(self, columns: slice | torch.Tensor) -> torch.Tensor:
        """`(B, 1, c, kv)` of neighbouring columns, or `(B, 1, 1, kv)` of one column of each row, `(B,)`."""
        slots = self._slots[:, columns] if isinstance(columns, slice) else self._slots.gather(1, columns[:, None])
        return causal_mask(slots, self._visible)


class PolicyMasks:
    """
    Builds the masks a policy's forward takes, in the form its attention implementation and its layers want.

    Args:
        policy ([`~transformers.PreTrainedModel`]):
            The policy.
    """

    def __init__(self, policy: PreTrainedModel):
        self._config = policy.config.get_text_config()
        self._eager = self._config._attn_implementation == "eager"
        self._layer_types = sorted(set(getattr(self._config, "layer_types", None) or ()))
        self._window = getattr(self._config, "sliding_window", None)
        heads = self._config.num_attention_heads
        self._groups = heads // (getattr(self._config, "num_key_value_heads", None) or heads)

    @property
    def hides_old_slots(self) -> bool:
        """Whether some layers have a sliding window."""
        return self._window is not None

    def __call__(
        self, slots: torch.Tensor, visible: int, dtype: torch.dtype, additive: bool
    ) -> torch.Tensor | dict[str, torch.Tensor]:
        """
        `(B, 1, q, kv)` mask, or one per layer type for policies whose layers differ: boolean, or to be added in
        `dtype`, which eager attention always wants. While the policy attends by
        [`~rollout.decode_attention.decode_attention`], the mask carries its copy for grouped heads, one for all
        layers.
        """
        if not self._layer_types:
            return self._form(causal_mask(slots, visible, self._window), dtype, additive)
        windows = {"full_attention": None, "sliding_attention": self._window}
        return {
            kind: self._form(causal_mask(slots, visible, windows[kind]), dtype, additive) for kind in self._layer_types
        }

    def _form(self, mask: torch.Tensor, dtype: torch.dtype, additive: bool) -> torch.Tensor:
        if additive or self._eager:
            mask = torch.zeros_like(mask, dtype=dtype).masked_fill_(~mask, torch.finfo(dtype).min)
        if self._groups > 1 and self._config._attn_implementation == DECODING:
            mask.repeated = repeated(mask, self._groups)
        return mask
