"""What operations allocate and what they save for the backward."""

import torch
from torch.utils._python_dispatch import TorchDispatchMode


class LargestTensor(TorchDispatchMode):
    """Remembers the most numbers any operation returned in one tensor."""

    numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for item in result if isinstance(result, (tuple, list)) else [result]:
            if isinstance(item, torch.Tensor):
                self.numel = max(self.numel, item.numel())
        return result


class BytesMade(TorchDispatchMode):
    """Bytes of all results that are no views."""

    def __init__(self):
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        given = {arg.untyped_storage().data_ptr() for arg in args if isinstance(arg, torch.Tensor)}
        for item in result if isinstance(result, (tuple, list)) else [result]:
            if isinstance(item, torch.Tensor) and item.untyped_storage().data_ptr() not in given:
                self.bytes += item.nbytes
        return result


class SavedBytes:
    """Bytes of the distinct storages saved for backward while entered, those of `own` tensors left out."""

    def __init__(self, own=()):
        self.own = {tensor.untyped_storage().data_ptr() for tensor in own}

    def __enter__(self):
        self.storages = {}
        self.hooks = torch.autograd.graph.saved_tensors_hooks(self.pack, lambda tensor: tensor)
        self.hooks.__enter__()
        return self

    def pack(self, tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in self.own:
            self.storages[storage.data_ptr()] = storage.nbytes()
        return tensor

    def __exit__(self, *arguments):
        self.hooks.__exit__(*arguments)

    @property
    def total(self):
        return sum(self.storages.values())
