"""How long a training step takes on a GPU, from a trace without one, and what is known of the GPUs.

A kernel takes as long as its arithmetic or its memory traffic, whichever is longer. A step takes the sum of its
kernels. The host must start all of them in that time, or it becomes the limit. Communication is not counted here.
"""

from typing import NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry, register_flop_formula

from memory_tracker import local


class Gpu(NamedTuple):
    """From its data sheet; but its memory is what PyTorch finds there, which is less than its name says."""

    name: str
    memory_gib: float
    bf16_tflops: float  # of dense matrix products
    fp32_tflops: float  # the same as PyTorch computes them in fp32 after `set_float32_matmul_precision("high")`
    memory_gbytes: float  # GB/s
    link_gbytes: float  # GB/s that it sends to the GPUs of its node: NVLink, xGMI or PCIe, one direction


GPUS = {
    "L4": Gpu("NVIDIA L4", 22, 121, 60, 300, 32),
    "A10G": Gpu("NVIDIA A10G", 22, 70, 35, 600, 32),
    "RTX4090": Gpu("NVIDIA RTX 4090", 23.6, 165, 83, 1008, 32),  # PCIe 4
    "A100-40": Gpu("NVIDIA A100 40GB", 39.4, 312, 156, 1555, 300),
    "L40S": Gpu("NVIDIA L40S", 44.4, 362, 183, 864, 32),
    "A100-80": Gpu("NVIDIA A100 80GB", 79.1, 312, 156, 2039, 300),
    "H100": Gpu("NVIDIA H100", 79.1, 989, 495, 3350, 450),
    "H200": Gpu("NVIDIA H200", 139.8, 989, 495, 4800, 450),
    "B200": Gpu("NVIDIA B200", 178.3, 2250, 1100, 8000, 900),
    "MI300X": Gpu("AMD MI300X", 191.7, 1307, 163, 5300, 448),  # PyTorch uses no TF32 there by default
}

# What kernels reach of a data sheet's figures. Fitted to two rows of one H100, see docs/results.md.
PRODUCTS_SHARE = 0.62
MEMORY_SHARE = 0.65
# Of fused attention, not fitted: FlashAttention-2 reaches 35% of an H100's peak (arXiv:2407.08608).
ATTENTION_SHARE = 0.35
# In fp32 the fused kernel makes three products in TF32 of each.
FP32_ATTENTION_SHARE = ATTENTION_SHARE / 3

# In which a host starts a kernel. The host of that H100 needed more than twice as long.
HOST_SECONDS = 20e-6

# These operators start no kernel, nor do those that make views.
NO_KERNEL = set(
    "empty empty_like empty_strided new_empty new_empty_strided _reshape_alias _unsafe_view resize_ set_ lift_fresh"
    " record_stream device detach detach_ alias is_same_size".split()
)
# These do not read what they write.
ONLY_WRITE = {"copy_", "zero_", "fill_", "_foreach_copy_", "_foreach_zero_"}


# ---- Experts: what F.grouped_mm is for fake tensors ------------------------------------------------------------------

# transformers computes experts by it: each row of `tokens` is multiplied with one of them, as `offs` says. PyTorch's
# own takes no fake tensors in fp32, and has no formula for its FLOPs.


def product(tokens: torch.Tensor, experts: torch.Tensor, offs: torch.Tensor) -> torch.Tensor:
    return tokens.new_empty(tokens.size(0), experts.size(2))


def gradients(tokens: torch.Tensor, experts: torch.Tensor, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.empty_like(tokens), torch.empty_like(experts)


grouped_mm = torch.library.custom_op("will_it_fit::grouped_mm", product, mutates_args=())
grouped_mm_backward = torch.library.custom_op("will_it_fit::grouped_mm_backward", gradients, mutates_args=())


def keep_for_backward(ctx, inputs, output) -> None:
    ctx.save_for_backward(*inputs[:2])


def backward(ctx, gradient) -> tuple:
    return *grouped_mm_backward(*ctx.saved_tensors, gradient), None


grouped_mm.register_fake(product)
grouped_mm_backward.register_fake(gradients)
grouped_mm.register_autograd(backward, setup_context=keep_for_backward)


@register_flop_formula(torch.ops.will_it_fit.grouped_mm)
def product_flops(tokens, experts, *_, **__) -> int:
    return 2 * tokens[0] * experts[1] * experts[2]


@register_flop_formula(torch.ops.will_it_fit.grouped_mm_backward)
def gradients_flops(*shapes, **_) -> int:
    return 2 * product_flops(*shapes)


# ---- Kernels ---------------------------------------------------------------------------------------------------------


def traffic(tensors) -> int:
    """Bytes of tensors in memory. What is only expanded counts once."""
    num_bytes = 0
    for tensor in map(local, tensors):
        count = 1
        for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
            if stride != 0:
                count *= size
        num_bytes += count * tensor.element_size()
    return num_bytes


def tensors_in(values) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(values) if torch.is_tensor(leaf)]


class Kernels(TorchDispatchMode):
    """Counts the kernels that operators start, and adds up their arithmetic and the seconds that a GPU takes."""

    def __init__(self, gpu: Gpu) -> None:
        super().__init__()
        self.gpu = gpu
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
        """What MFU counts: backward as twice forward, and nothing for recomputing."""
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
        if function._schema.is_mutable:
            values = dict(zip((argument.name for argument in function._schema.arguments), arguments, strict=False))
            values |= options
            written = tensors_in([values.get(a.name) for a in function._schema.arguments if a.is_write])
        read = tensors_in((arguments, options))
        if name in ONLY_WRITE:
            read = [tensor for tensor in read if not any(tensor is other for other in written)]
        if not read and not written:
            return

        self.count += 1
        memory_seconds = traffic([*read, *written]) / (MEMORY_SHARE * self.gpu.memory_gbytes * 1e9)
        if function.overloadpacket not in flop_registry:
            self.memory_seconds += memory_seconds
            return
        flops = flop_registry[function.overloadpacket](*arguments, **options, out_val=result)
        if torch._C._current_graph_task_id() == -1:  # not in backward, which also recomputes
            self.forward_flops += flops
        self.product_seconds += max(flops / self.rate(name, read[0].dtype), memory_seconds)

    def rate(self, name: str, dtype: torch.dtype) -> float:
        """FLOP/s that a matrix product or a fused attention reaches."""
        is_attention = "attention" in name
        if dtype == torch.float32:
            return (FP32_ATTENTION_SHARE if is_attention else PRODUCTS_SHARE) * self.gpu.fp32_tflops * 1e12
        return (ATTENTION_SHARE if is_attention else PRODUCTS_SHARE) * self.gpu.bf16_tflops * 1e12
