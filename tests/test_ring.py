"""Ring attention: each process's result and gradients are those of the complete rows."""

import pytest
import torch
from conftest import slow, together

from finetune.kernels import partial_attention

SETTING = """
import itertools, torch, torch.distributed as dist
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from finetune.distributed.ring import Ring
dist.init_process_group("gloo")
rank, world, share = dist.get_rank(), dist.get_world_size(), 12
tokens, scale = share * world, 0.3
mine = slice(rank * share, (rank + 1) * share)
"""

COMPARED = (
    SETTING
    + """
class Sent(TorchDispatchMode):
    bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.name() == "c10d::send":
            self.bytes += sum(each.nbytes for each in args[0])
        return func(*args, **(kwargs or {}))

def whole(query, key, value, ends):
    given = [[x[:, :, a:b] for x in (query, key, value)] for a, b in itertools.pairwise(ends)]
    words = {"is_causal": True, "enable_gqa": True, "scale": scale}
    return torch.cat([F.scaled_dot_product_attention(*each, **words) for each in given], dim=2)

for ends in (
    (0, tokens),                                 # one document on all processes
    (0, 5, share + 3, share + 5, tokens),        # documents that cross, and that do not
    tuple(range(0, tokens + 1, share)),          # one on each process
    (0, 1, tokens - 1, tokens),
):
    for kind, most in ((torch.float32, 1e-6), (torch.bfloat16, 6e-3)):
        made = torch.Generator().manual_seed(len(ends))
        query, key, value, grad = (
            torch.randn(1, heads, tokens, 16, generator=made).to(kind).double()
            for heads in (4, 2, 2, 4)
        )
        leaves = [each.requires_grad_() for each in (query, key, value)]
        expected = whole(*leaves, ends)
        expected.backward(grad)
        parts = [each.detach()[:, :, mine].to(kind).requires_grad_() for each in leaves]
        with Sent() as sent:
            found = Ring.apply(*parts, dist.group.WORLD, ends, scale)
            found.backward(grad[:, :, mine].to(kind))
        elements = 2 * parts[1].numel()  # keys and values, twice, and their gradients in fp32
        assert sent.bytes == (world - 1) * elements * (2 * kind.itemsize + 4), sent.bytes
        pairs = [(found, expected), *((a.grad, b.grad) for a, b in zip(parts, leaves))]
        for a, b in pairs:
            apart = ((a.double() - b[:, :, mine]).norm() / b[:, :, mine].norm()).item()
            assert apart < most, (ends, kind, apart)
print("alike")
"""
)


@pytest.mark.parametrize("count", [2, slow(4)])
def test_a_ring_computes_what_one_process_computes(count, tmp_path):
    """Documents that cross processes, and fewer key heads; up to the rounding of each type."""
    assert together(COMPARED, count, tmp_path).passed().stdout.count("alike") == count


@pytest.mark.parametrize(
    ("capability", "kind"),
    [((9, 0), torch.bfloat16), ((7, 5), torch.float16), ((9, 0), torch.float32)],
)
def test_kernels_of_a_gpu_take_these_arguments(capability, kind, monkeypatch):
    """PyTorch's shape functions of its GPU kernels: 13 queries, padded to 32 by one of them."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: capability)
    query, key = (
        torch.empty(1, heads, count, 64, dtype=kind, device="meta")
        for heads, count in ((4, 13), (2, 20))
    )
    mixed, logs = partial_attention.attention(query, key, key, causal=False, scale=0.1)
    assert (mixed.shape, mixed.dtype) == (query.shape, kind)
    assert (logs.shape, logs.dtype) == ((1, 4, 13), torch.float32)
    grads = partial_attention.attention_backward(
        mixed, query, key, key, mixed, logs, causal=False, scale=0.1
    )
    assert [each.shape for each in grads] == [query.shape, key.shape, key.shape]
