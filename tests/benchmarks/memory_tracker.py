"""What one process holds, of which kind, after each operation of a training step: real tensors, or fake ones."""

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
    """This process's shard, if it is one of a sharded tensor."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor  # to_local() is slow


def storage_of(tensor: torch.Tensor) -> torch.UntypedStorage:
    return local(tensor).untyped_storage()


class Tracker(TorchDispatchMode):
    """Counts the bytes of all tensors that are alive, as they come and go.

    Of each operation `operations` has its name, `phases` the phase that was set, and `totals` the bytes after it.
    `at`: numbers of operations; `kinds` has the bytes of each kind after these. `offloads`: shards, their gradients and
    their moments are in the CPU's memory, and do not count.
    """

    def __init__(self, model, optimizer, at=(), offloads=False) -> None:
        super().__init__()
        self.model = model
        self.optimizer = optimizer
        self.offloads = offloads
        self.at = at
        self.phase = "forward"
        self.operations = []
        self.phases = []
        self.totals = []
        self.kinds = {}

        groups = [m._get_fsdp_state()._fsdp_param_group for m in model.modules() if isinstance(m, FSDPModule)]
        self.groups = [group for group in groups if group]
        self.sharded = [parameter for group in self.groups for parameter in group.fsdp_params]
        # FSDP2 gathers into these storages, and frees them by making them empty.
        self.gathered = {}
        for parameter in self.sharded:
            for output in parameter.all_gather_outputs:
                self.gathered[storage_of(output)._cdata] = storage_of(output)

        self.alive = {}
        self.alive_bytes = 0
        for tensors in [model.buffers(), *self.known().values()]:
            for tensor in tensors:
                self.watch(tensor)

    def known(self) -> dict[str, list[torch.Tensor]]:
        """The tensors that are known by what holds them, but for what is gathered; all others are activations."""
        parameters = [p.sharded_param for p in self.sharded] or list(self.model.parameters())
        whole = [p._unsharded_param for p in self.sharded if hasattr(p, "_unsharded_param")]
        moments = [t for state in self.optimizer.state.values() for t in state.values() if torch.is_tensor(t)]
        accumulated = [p.unsharded_accumulated_grad for p in self.sharded]
        of_shards = [p.grad for p in parameters if p.grad is not None]
        of_replicas = [group._partial_reduce_output for group in self.groups]  # until all replicas share them
        of_units = [g for g in [*(p.grad for p in whole), *accumulated, *of_replicas] if g is not None]
        return {
            "parameters": parameters + (of_shards if self.offloads else []),
            "optimizer state": moments,
            "gradients": of_units if self.offloads else of_shards + of_units,
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
        return sum(map(torch.UntypedStorage.nbytes, self.gathered.values()))

    def bytes_by_kind(self) -> dict[str, int]:
        found = dict.fromkeys(KINDS, 0)
        found["gathered parameters"] = self.gathered_bytes()
        seen = set(self.gathered)
        for kind, tensors in self.known().items():
            for tensor in tensors:
                storage = storage_of(tensor)
                if storage._cdata not in seen:
                    seen.add(storage._cdata)
                    found[kind] += storage.nbytes()
        total = self.alive_bytes + found["gathered parameters"]
        found["activations and buffers"] = total - sum(found.values())
        if self.offloads:
            found["parameters"] = found["optimizer state"] = 0
        return found

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
        else:  # the same, faster
            self.totals.append(self.alive_bytes + self.gathered_bytes())
        return result


class TrackerWithoutGloo(Tracker):
    """Leaves out the copy of a unit's gradients that gloo reduce-scatters, and NCCL does not make.

    It is made where no operation shows, and shows when it is split.
    """

    is_gloos = False  # what the operation returns

    def __torch_dispatch__(self, function, types, arguments=(), options=None):
        follows_reduce_scatter = self.operations[-1:] == ["c10d._reduce_scatter_base_.default"]
        self.is_gloos = follows_reduce_scatter and function is torch.ops.aten.split.Tensor
        return super().__torch_dispatch__(function, types, arguments, options)

    def watch(self, tensor: torch.Tensor) -> None:
        if not self.is_gloos:
            super().watch(tensor)


def record_peak(script) -> None:
    """Every rank writes the most bytes that its tensors take in a training step, and the model's vocabulary, to
    `peak-RANK.json`. The median of the steps after the first: what gloo's threads still hold varies a little.
    """
    train_step = script.train_step
    peaks = []

    def recorded_step(args, world, model, optimizer, batch):
        with TrackerWithoutGloo(model, optimizer, offloads=args.cpu_offload) as tracker:
            result = train_step(args, world, model, optimizer, batch)
        peaks.append(max(tracker.totals))
        found = {"peak": statistics.median_low(peaks[1:] or [0]), "vocabulary": model.config.vocab_size}
        (args.output_dir / f"peak-{world.rank}.json").write_text(json.dumps(found))
        return result

    script.train_step = recorded_step
