"""The mean over the ranks of gradients outside of ``.grad``, where DistributedDataParallel does not reduce them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_accum.ranks import Ranks

BUCKET_BYTES = 25 * 2**20
"""So much is reduced at a time, as DistributedDataParallel does."""


@torch.no_grad()
def average(
    sums: dict[nn.Parameter, Tensor], parameters: Sequence[nn.Parameter], ranks: Ranks, zeros: Callable[[nn.Parameter], Tensor]
) -> None:
    """Average gradients over the ranks, in place and in their own type. Called on all ranks.

    A parameter that only other ranks have used gets their mean, and one that no rank has used stays without.

    Args:
        sums: the gradients, by parameter; dense, or sparse on all ranks.
        parameters: all that may be among them on a rank, in the same order on all.
        ranks: those whose gradients are averaged.
        zeros: makes the dense gradient of a parameter that this rank has not used.
    """
    if not parameters:
        return
    dense, sparse = 1.0, 2.0
    own = [0.0 if p not in sums else sparse if sums[p].layout != torch.strided else dense for p in parameters]
    kinds = dict(zip(parameters, ranks.largest(*own), strict=True))
    used = [parameter for parameter, kind in kinds.items() if kind]
    for parameter in used:
        if kinds[parameter] == sparse:
            total = sums[parameter] if parameter in sums else zeros(parameter).to_sparse()
            sums[parameter] = total.coalesce() / ranks.size
            dist.all_reduce(sums[parameter], group=ranks.group)
        elif parameter not in sums:
            sums[parameter] = zeros(parameter)
    for bucket in _buckets(sums[parameter] for parameter in used if kinds[parameter] == dense):
        is_in_place = len(bucket) == 1 and bucket[0].is_contiguous()
        flat = bucket[0] if is_in_place else torch.cat([total.reshape(-1) for total in bucket])
        dist.all_reduce(flat, group=ranks.group)
        flat.div_(ranks.size)
        if not is_in_place:
            for total, part in zip(bucket, torch.split(flat, [total.numel() for total in bucket]), strict=True):
                total.copy_(part.view(total.shape))


def _buckets(tensors: Iterable[Tensor]) -> Iterator[list[Tensor]]:
    """Tensors of one type and device together, in their order, up to a size."""
    open_ones: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    for tensor in tensors:
        key = (tensor.dtype, tensor.device)
        bucket = open_ones.setdefault(key, [])
        if bucket and sum(map(_bytes, bucket)) + _bytes(tensor) > BUCKET_BYTES:
            yield open_ones.pop(key)
            bucket = open_ones.setdefault(key, [])
        bucket.append(tensor)
    yield from open_ones.values()


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()
