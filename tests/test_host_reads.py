"""Nothing in a training step stops the device: no operator gives the host a number to read, and no worker a program."""

import json

from torch.utils._python_dispatch import TorchDispatchMode

import pytest
from conftest import ROOT, VERSIONS, fsdp, run, run_many

# Of these the host gets a number, or a shape that depends on numbers: on a GPU it waits for them.
READS = ("_local_scalar_dense", "equal", "is_nonzero", "nonzero", "masked_select", "_unique2", "unique_consecutive")


class HostReads(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.found = []

    def __torch_dispatch__(self, operator, types, arguments=(), options=None):
        name = operator._schema.name
        if name.removeprefix("aten::") in READS:
            self.found.append(name)
        return operator(*arguments, **(options or {}))


def record_host_reads(script):
    """Write what each training step of this rank reads to reads-RANK.json."""
    train_step, steps = script.train_step, []

    def recorded_step(args, world, *arguments):
        with HostReads() as mode:
            result = train_step(args, world, *arguments)
        steps.append(mode.found)
        (args.output_dir / f"reads-{world.rank}.json").write_text(json.dumps(steps))
        return result

    script.train_step = recorded_step


def record_and_read_once(script):
    """As a change of the loss might do: with a print, or an `if`."""
    record_host_reads(script)
    summed_loss = script.summed_loss

    def read_the_loss(model, batch):
        loss = summed_loss(model, batch)
        float(loss.detach())
        return loss

    script.summed_loss = read_the_loss


def reads(folder, processes=2):
    """What the second step and the third of all ranks read. The LM's first starts its loader, which draws a seed."""
    found = [json.loads((folder / f"reads-{rank}.json").read_text()) for rank in range(processes)]
    assert all(len(steps) == 3 for steps in found)
    return [name for steps in found for step in steps[1:] for name in step]


LM = (
    *("--seq-length", 32, "--global-batch-size", 8, "--micro-batch-size", 2, "--num-validation-texts", 3),
    *("--max-steps", 3, "--precision", "fp32", "--no-save-model"),
)
T5 = (
    *("--batch-size", 4, "--accumulation-steps", 2, "--max-steps", 3, "--precision", "fp32", "--no-save-model"),
    *("--num-train-samples", 64, "--no-run-validation"),
)
WAYS = {
    f"fsdp{version}{name}": (*fsdp(version), *flags)
    for version in VERSIONS
    for name, flags in {"": (), " recomputing": ("--activation-checkpointing",)}.items()
}


@pytest.mark.parametrize("script", ["lm_multinode.py", "t5_fsdp.py"])
def test_no_training_step_reads(script, tiny_model, articles_csv, tmp_path):
    """With two micro-batches in a step."""
    shared = LM if script == "lm_multinode.py" else (*T5, "--model", tiny_model, "--dataset", articles_csv)
    ways = WAYS | {"fsdp2 offload": ("--cpu-offload",)}
    settings = [[*shared, *flags, "--output-dir", tmp_path / name] for name, flags in ways.items()]
    run_many(script, settings, 2, change=record_host_reads)
    for name in ways:
        assert reads(tmp_path / name) == [], name
    run_many(script, [[*shared, "--output-dir", tmp_path / "read"]], 2, change=record_and_read_once)
    assert reads(tmp_path / "read") == ["aten::_local_scalar_dense"] * (2 * 2 * 2)  # it would be seen


ENDS_WITH_A_LOADER = """
import sys
sys.path.insert(0, {root!r})
import common
from torch.utils.data import DataLoader

if __name__ == "__main__":
    batches = iter(DataLoader(range(1000), num_workers=1, worker_init_fn=common.ignore_sigterm))
    print(next(batches).item())
    sys.exit(3)
"""


def test_a_program_ends_while_its_loader_is_alive(tmp_path):
    """Python ends its workers with a SIGTERM, which they ignore, and waits for them."""
    script = tmp_path / "script.py"
    script.write_text(ENDS_WITH_A_LOADER.format(root=str(ROOT)))
    finished = run(script, timeout=100)
    assert (finished.returncode, finished.stdout, finished.stderr) == (3, "0\n", "")
