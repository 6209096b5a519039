"""How much memory a copy of a model takes, and over how many ranks it must be sharded to fit."""

from torch.nn import Module

_SHARE_FOR_STATE = 0.7  # of a device's memory; activations and gathered parameters need the rest


def training_bytes(module: Module, states: int = 2) -> int:
    """Return the bytes of parameters, gradients and optimizer state.

    Args:
        module: The module.
        states: Tensors that the optimizer keeps for each parameter; Adam keeps two.

    """
    sizes = [(p.numel() * p.element_size(), p.requires_grad) for p in module.parameters()]
    return sum(size * (2 + states if is_trained else 1) for size, is_trained in sizes)


def fewest_ranks(num_bytes: int, device_bytes: int, num_devices: int) -> int:
    """Return over how few ranks state must be sharded to fit, so that as many replicas as possible stay.

    Args:
        num_bytes: Of the state of one copy.
        device_bytes: Memory of a device.
        num_devices: To divide into replicas of equal size.

    """
    sizes = [size for size in range(1, num_devices + 1) if num_devices % size == 0]
    return next((size for size in sizes if num_bytes / size <= _SHARE_FOR_STATE * device_bytes), num_devices)
