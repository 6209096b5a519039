"""Gradients of embeddings with ``sparse=True``: only the rows that a rank touched travel."""

import torch
from torch import Tensor
from torch.nn import Embedding, EmbeddingBag, Module, Parameter

from lightning_ft.elastic.exchange import Exchange


def sparse_parameters(module: Module) -> frozenset[Parameter]:
    """Return the parameters of ``module`` that get sparse gradients."""
    embeddings = (child for child in module.modules() if isinstance(child, Embedding | EmbeddingBag))
    return frozenset(weight for child in embeddings if child.sparse for weight in child.parameters(recurse=False))


def sum_rows(exchange: Exchange, parameter: Parameter, scale: float) -> tuple[Tensor, Tensor]:
    """Return which rows have a gradient on any rank, and the sum of their gradients, each times its rank's ``scale``."""
    rows, values = _rows(parameter, scale)
    counts = [int(count) for count in exchange.all_gather(torch.tensor([len(rows)]))]
    if not max(counts):
        return rows, values
    padded_rows = rows.new_zeros(max(counts))
    padded_rows[: len(rows)] = rows
    padded_values = values.new_zeros(max(counts), *values.shape[1:])
    padded_values[: len(values)] = values
    all_rows, all_values = exchange.all_gather(padded_rows), exchange.all_gather(padded_values)
    summed = torch.sparse_coo_tensor(
        torch.cat([part[:count] for part, count in zip(all_rows, counts, strict=True)])[None],
        torch.cat([part[:count] for part, count in zip(all_values, counts, strict=True)]),
        parameter.shape,
    ).coalesce()
    return summed.indices()[0].contiguous(), summed.values()


def write_rows(parameter: Parameter, rows: Tensor, values: Tensor) -> None:
    """Let the gradient of ``parameter`` be these rows."""
    parameter.grad = torch.sparse_coo_tensor(rows[None], values, parameter.shape, is_coalesced=True)


def no_rows(parameter: Parameter) -> Tensor:
    """Return a gradient of zero."""
    return torch.sparse_coo_tensor(torch.empty(1, 0, dtype=torch.int64), parameter.detach()[:0], parameter.shape)


def _rows(parameter: Parameter, scale: float) -> tuple[Tensor, Tensor]:
    if parameter.grad is None or scale == 0.0:
        return torch.empty(0, dtype=torch.int64, device=parameter.device), parameter.detach()[:0]
    gradient = parameter.grad.detach()
    gradient = (gradient if gradient.is_sparse else gradient.to_sparse(1)).coalesce()
    return gradient.indices()[0], gradient.values() * scale
