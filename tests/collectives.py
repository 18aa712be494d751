"""Counts what the processes of lm_multinode.py send each other: `change=count_collectives` (conftest.run_many)."""

import json

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode


class Collectives(TorchDispatchMode):
    """Counts collectives over all processes, by the training step that they belong to or follow, and the bytes that are
    gathered and reduced inside the second step: in the first some units are still gathered from the validation."""

    def __init__(self):
        super().__init__()
        self.step, self.in_step, self.counts, self.bytes, self.order = 0, False, {}, {}, []

    def __torch_dispatch__(self, operator, types, arguments=(), options=None):
        if operator.namespace == "c10d":
            groups = [a for a in arguments if isinstance(a, torch.ScriptObject) and "ProcessGroup" in str(a._type())]
            if dist.ProcessGroup.unbox(groups[0]).size() == dist.get_world_size():
                self.counts[self.step] = self.counts.get(self.step, 0) + 1
            if self.in_step and self.step == 2:
                name = operator._schema.name.removeprefix("c10d::").strip("_")
                tensors = [
                    a for argument in arguments[:2] for a in (argument if isinstance(argument, list) else [argument])
                ]
                largest = max(t.nbytes for t in tensors if torch.is_tensor(t))  # whole, not one process's part
                self.bytes[name] = self.bytes.get(name, 0) + largest
                self.order.append((name, largest))
        return operator(*arguments, **(options or {}))


def count_collectives(script):
    """Write what `Collectives` counts on this rank to collectives-RANK.json."""
    train_step, main = script.train_step, script.main

    def counted_main(args, world):
        mode = Collectives()

        def counted_step(*arguments):
            mode.step += 1
            mode.in_step = True
            result = train_step(*arguments)
            mode.in_step = False
            return result

        script.train_step = counted_step
        with mode:
            main(args, world)
        counts = {"steps": mode.counts, "bytes": mode.bytes, "order": mode.order}
        (args.output_dir / f"collectives-{world.rank}.json").write_text(json.dumps(counts))

    script.main = counted_main
