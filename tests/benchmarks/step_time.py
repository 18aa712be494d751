"""How long the kernels of a training step take on a GPU, and the data of the GPUs. Needs a trace, but no GPU.

A kernel takes as long as its arithmetic or its memory traffic, whichever takes longer. Computing a step takes the sum
over its kernels. If the host cannot start them in that time, the host is the limit. Communication is not counted here.
"""

import math
from typing import NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from memory_tracker import local


class Gpu(NamedTuple):
    """A GPU, as its data sheet describes it. Only the memory is what PyTorch reports, which is less."""

    memory_gib: float
    bf16_tflops: float  # of dense matrix products
    fp32_tflops: float  # of fp32 products after `set_float32_matmul_precision("high")`, which is TF32 if the GPU has it
    memory_gbytes: float  # GB/s
    link_gbytes: float  # GB/s in one direction to the GPUs of its node, over NVLink, xGMI or PCIe


GPUS = {
    "L4": Gpu(22, 121, 60, 300, 32),
    "A10G": Gpu(22, 70, 35, 600, 32),
    "RTX4090": Gpu(23.6, 165, 83, 1008, 32),  # PCIe 4
    "A100-40": Gpu(39.4, 312, 156, 1555, 300),
    "L40S": Gpu(44.4, 362, 183, 864, 32),
    "A100-80": Gpu(79.1, 312, 156, 2039, 300),
    "H100": Gpu(79.1, 989, 495, 3350, 450),
    "H200": Gpu(139.8, 989, 495, 4800, 450),
    "B200": Gpu(178.3, 2250, 1100, 8000, 900),
    "MI300X": Gpu(191.7, 1307, 163, 5300, 448),  # PyTorch uses no TF32 on it by default
}

# The shares of the data sheet's peaks that kernels reach: see "Predicted time" in docs/results.md. The first two were
# measured on an H200, the others fitted to whole steps.
PRODUCTS_SHARE = 0.68
ATTENTION_SHARE = 0.27  # of fused attention, forward and backward, with heads of 64; in proportion to their size
FP32_ATTENTION_SHARE = ATTENTION_SHARE / 6
MEMORY_SHARE = 0.65
FULL_PRODUCT = 1024  # products with a smaller dimension reach less, in proportion

# The host needs this time to start one kernel: 36 to 48 microseconds were measured beside an H100 and three H200s.
HOST_SECONDS = 40e-6

# These operators start no kernel. Operators that return views start none either.
NO_KERNEL = set(
    "empty empty_like empty_strided new_empty new_empty_strided _reshape_alias _unsafe_view resize_ set_ lift_fresh"
    " record_stream device detach detach_ alias is_same_size".split()
)
# These operators write a tensor without reading it.
ONLY_WRITE = {"copy_", "zero_", "fill_", "_foreach_copy_", "_foreach_zero_"}


# ---- Operations that a trace on a CPU must replace -------------------------------------------------------------------


def gpu_attention(query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False):
    """Attention with PyTorch's kernels for a GPU: flash attention, or the memory-efficient kernel for fp32 and masks.
    If heads share keys and values, the latter cannot be used, and PyTorch computes plain matrix products."""
    aten = torch.ops.aten
    if attn_mask is None and query.dtype != torch.float32:
        return aten._scaled_dot_product_flash_attention(query, key, value, dropout_p, is_causal, scale=scale)[0]
    if enable_gqa:
        products = aten._scaled_dot_product_attention_math
        return products(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=True)[0]
    efficient = aten._scaled_dot_product_efficient_attention
    return efficient(query, key, value, attn_mask, True, dropout_p, is_causal, scale=scale)[0]


def gpu_dropout(values, p=0.5, training=True, inplace=False):
    """Dropout as a GPU computes it: one kernel, and a mask of one byte per value. A CPU keeps the mask in the dtype of
    the values."""
    if not training or p == 0:
        return values
    return torch.native_dropout(values, p, True)[0]


# ---- Kernels ---------------------------------------------------------------------------------------------------------


def traffic(tensors) -> int:
    """The bytes that tensors take in memory. An expanded dimension counts once."""
    num_bytes = 0
    for tensor in map(local, tensors):
        sizes = [size for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if stride != 0]
        num_bytes += math.prod(sizes) * tensor.element_size()
    return num_bytes


def tensors_in(values) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(values) if torch.is_tensor(leaf)]


class Kernels(TorchDispatchMode):
    """Counts the kernels that operators start, and adds up their FLOPs and the seconds that they take on a GPU."""

    def __init__(self, gpu: Gpu) -> None:
        super().__init__()
        self.gpu = gpu
        self.repeats = 1  # how many times the current micro-batch counts
        self.count = 0
        self.forward_flops = 0
        self.product_seconds = 0.0  # of matrix products and attention
        self.memory_seconds = 0.0  # of all other kernels

    @property
    def seconds(self) -> float:
        return self.product_seconds + self.memory_seconds

    @property
    def host_may_be_the_limit(self) -> bool:
        return self.count * HOST_SECONDS > self.seconds

    @property
    def model_flops(self) -> int:
        """The FLOPs that MFU counts: backward is twice forward, and recomputed layers count once."""
        return 3 * self.forward_flops

    def __torch_dispatch__(self, function, types, arguments=(), options=None):
        options = options or {}
        result = function(*arguments, **options)
        name = function._schema.name.split("::")[1]
        if name not in NO_KERNEL and not function.is_view and function.namespace != "c10d":
            self.add(function, name, arguments, options, result)
        return result

    def add(self, function, name: str, arguments, options, result) -> None:
        written = tensors_in(result)
        values = dict(zip((a.name for a in function._schema.arguments), arguments, strict=False)) | options
        if function._schema.is_mutable:
            written = tensors_in([values.get(a.name) for a in function._schema.arguments if a.is_write])
        read = tensors_in((arguments, options))
        if name in ONLY_WRITE:
            read = [tensor for tensor in read if not any(tensor is other for other in written)]
        if not read and not written:
            return

        self.count += self.repeats
        memory_seconds = self.repeats * traffic([*read, *written]) / (MEMORY_SHARE * self.gpu.memory_gbytes * 1e9)
        if function.overloadpacket not in flop_registry:
            self.memory_seconds += memory_seconds
            return
        flops = self.repeats * flop_registry[function.overloadpacket](*arguments, **options, out_val=result)
        if torch._C._current_graph_task_id() == -1:  # outside backward, which also recomputes
            self.forward_flops += flops
        if values.get("is_causal"):  # fused attention leaves out half of what MFU counts
            flops /= 2
        self.product_seconds += max(flops / self.rate(name, read), memory_seconds)

    def rate(self, name: str, read: list[torch.Tensor]) -> float:
        """The FLOP/s that a matrix product or a fused attention reaches."""
        is_fp32 = read[0].dtype == torch.float32
        smallest = min(size for tensor in read for size in tensor.shape[-2:])
        share = PRODUCTS_SHARE * min(1, smallest / FULL_PRODUCT)
        if "attention" in name:
            share = (FP32_ATTENTION_SHARE if is_fp32 else ATTENTION_SHARE) * read[0].shape[-1] / 64
        return share * (self.gpu.fp32_tflops if is_fp32 else self.gpu.bf16_tflops) * 1e12
