"""Counts the bytes of each kind that one process holds after each operation of a training step, with real tensors or
with fake ones."""

import functools
import json
import statistics
import weakref

import torch
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

KINDS = ("parameters", "optimizer state", "gathered parameters", "gradients", "activations and buffers")


def local(tensor: torch.Tensor) -> torch.Tensor:
    """This process's shard of a DTensor, or the tensor itself."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor  # faster than to_local()


def storage_of(tensor: torch.Tensor) -> torch.UntypedStorage:
    return local(tensor).untyped_storage()


class Tracker(TorchDispatchMode):
    """Counts the bytes of all tensors that are alive.

    For each operation, `operations` has its name, `phases` the phase in which it ran, and `totals` the bytes after it.
    `kinds` has the bytes of each kind after the operations whose indices are in `at`. `offloads`: shards, their
    gradients and the optimizer's state are in the CPU's memory and do not count.
    """

    def __init__(self, model, optimizer, at=(), offloads=False) -> None:
        super().__init__()
        self.optimizer = optimizer
        self.offloads = offloads
        self.at = at
        self.phase = "forward"
        self.operations = []
        self.phases = []
        self.totals = []
        self.kinds = {}

        states = [m._get_fsdp_state() for m in model.modules() if isinstance(m, FSDPModule)]
        # The layers of a unit have the same group.
        self.groups = [group for group in dict.fromkeys(state._fsdp_param_group for state in states) if group]
        self.sharded = [parameter for group in self.groups for parameter in group.fsdp_params]
        # FSDP2 gathers parameters into these storages. It frees them by resizing them to 0 bytes.
        outputs = [[o for p in group.fsdp_params for o in p.all_gather_outputs] for group in self.groups]
        self.gathered = {storage_of(output)._cdata for unit in outputs for output in unit}
        # It gathers and frees all parameters of a unit together: one storage tells whether they are gathered.
        self.units = [(storage_of(unit[0]), sum(output.nbytes for output in unit)) for unit in outputs if unit]

        self.alive = {}
        self.alive_bytes = 0
        for tensors in [model.buffers(), *self.known().values()]:
            for tensor in tensors:
                self.watch(tensor)

    def known(self) -> dict[str, list[torch.Tensor]]:
        """The tensors of each kind, except gathered parameters. All tensors not listed here are activations."""
        parameters = [p.sharded_param for p in self.sharded]
        whole = [p._unsharded_param for p in self.sharded if hasattr(p, "_unsharded_param")]
        moments = [t for state in self.optimizer.state.values() for t in state.values() if torch.is_tensor(t)]
        accumulated = [p.unsharded_accumulated_grad for p in self.sharded]
        of_shards = [p.grad for p in parameters if p.grad is not None]
        of_replicas = [group._partial_reduce_output for group in self.groups]  # before the all-reduce over replicas
        unsharded = [g for g in [*(p.grad for p in whole), *accumulated, *of_replicas] if g is not None]
        return {
            "parameters": parameters + (of_shards if self.offloads else []),
            "optimizer state": moments,
            "gradients": unsharded if self.offloads else of_shards + unsharded,
        }

    def watch(self, tensor: torch.Tensor) -> None:
        storage = storage_of(tensor)
        key = storage._cdata
        if key in self.alive or key in self.gathered:
            return
        size = storage.nbytes()
        self.alive[key] = weakref.ref(storage, functools.partial(self.forget, key, size))
        self.alive_bytes += size

    def forget(self, key: int, size: int, _) -> None:
        del self.alive[key]
        self.alive_bytes -= size

    def gathered_bytes(self) -> int:
        return sum(nbytes for storage, nbytes in self.units if storage.nbytes() > 0)

    def bytes_by_kind(self) -> dict[str, int]:
        sizes = dict.fromkeys(KINDS, 0)
        sizes["gathered parameters"] = self.gathered_bytes()
        seen = set(self.gathered)
        for kind, tensors in self.known().items():
            for tensor in tensors:
                storage = storage_of(tensor)
                if storage._cdata not in seen:
                    seen.add(storage._cdata)
                    sizes[kind] += storage.nbytes()
        total = self.alive_bytes + sizes["gathered parameters"]
        sizes["activations and buffers"] = total - sum(sizes.values())
        if self.offloads:
            sizes["parameters"] = sizes["optimizer state"] = 0
        return sizes

    def __torch_dispatch__(self, function, types, arguments=(), options=None):
        result = function(*arguments, **(options or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor):
                self.watch(leaf)
        if len(self.totals) in self.at:
            self.kinds[len(self.totals)] = self.bytes_by_kind()
        self.operations.append(str(function))
        self.phases.append(self.phase)
        if self.offloads:
            self.totals.append(sum(self.bytes_by_kind().values()))
        else:  # the same sum, computed faster
            self.totals.append(self.alive_bytes + self.gathered_bytes())
        return result


class TrackerWithoutGloo(Tracker):
    """Leaves out a copy of a unit's gradients that gloo's reduce-scatter makes and NCCL's does not. No operation shows
    when gloo makes it. The first operation that returns it is a split after reduce-scatter."""

    is_gloo_copy = False  # whether the operation returns this copy

    def __torch_dispatch__(self, function, types, arguments=(), options=None):
        follows_reduce_scatter = self.operations[-1:] == ["c10d._reduce_scatter_base_.default"]
        self.is_gloo_copy = follows_reduce_scatter and function is torch.ops.aten.split.Tensor
        return super().__torch_dispatch__(function, types, arguments, options)

    def watch(self, tensor: torch.Tensor) -> None:
        if not self.is_gloo_copy:
            super().watch(tensor)


def record_peak(script) -> None:
    """Make every rank write the peak of a training step, in bytes, and the model's vocabulary to `peak-RANK.json`. It
    is the median of the steps after the first, because gloo's threads free tensors at varying times."""
    train_step = script.train_step
    peaks = []

    def recorded_step(args, world, model, optimizer, batch):
        with TrackerWithoutGloo(model, optimizer, offloads=args.cpu_offload) as tracker:
            result = train_step(args, world, model, optimizer, batch)
        peaks.append(max(tracker.totals))
        record = {"peak": statistics.median_low(peaks[1:] or [0]), "vocabulary": model.config.vocab_size}
        (args.output_dir / f"peak-{world.rank}.json").write_text(json.dumps(record))
        return result

    script.train_step = recorded_step
