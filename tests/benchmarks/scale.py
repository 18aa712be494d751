"""What grows with the number of processes, and what does not.

    python tests/benchmarks/scale.py

measured   In forked processes on this machine, eight a node. What each of n streams makes is measured in one process.
           Requests are calls of what `first_on_node` runs to read the dataset. Steps do not wait for stops.
simulated  What PyTorch does on rank 0 in `common.save_checkpoint`: unpickle the plans of all ranks, join them, pickle a
           part for each, unpickle what each has written, write `.metadata`. Later saves keep the plan.
~          From measured values, on a straight line.
"""

import gc
import os
import pickle
import signal
import statistics
import tempfile
import time
import timeit
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
import torch.multiprocessing as mp
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.elastic.utils.distributed import get_free_port
from torch.testing._internal.distributed.fake_pg import FakeStore

import made_up
import shared
from transformers import AutoTokenizer

from inside import MODULES, lm_shape, lm_stream, parse, set_up

SIZES = (8, 64, 256, 1024)
FLAGS = ("lm_multinode.py", "--device", "cpu", "--precision", "fp32", "--seq-length", 1024)
script = MODULES["lm_multinode.py"]
common = script.common


def forked(measure, *arguments, size: int = 1):
    """Return rank 0's result of `measure` in processes like torchrun's. Start no threads here: forks copy locks."""
    receiver, sender = mp.Pipe(duplex=False)
    mp.start_processes(run_rank, (size, get_free_port(), sender, measure, arguments), size, start_method="fork")
    return receiver.recv()


def run_rank(rank: int, size: int, port: int, sender, measure, arguments: tuple) -> None:
    script.protect_worker(None)  # it ends together with the benchmark,
    signal.alarm(1800)  # or after 30 minutes
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(size), "MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}
    os.environ |= {"LOCAL_RANK": str(rank % 8), "LOCAL_WORLD_SIZE": str(min(size, 8))}
    result = measure(*arguments)
    if rank == 0:
        sender.send(result)
    time.sleep(1)  # others may still be in the last collective
    os._exit(0)


def tokens_per_cpu_second(folder: Path, files: str, num_streams: int) -> float:
    args = parse(*FLAGS, "--dataset", f"{folder}/{files}.json.gz")
    moments = []  # at which it has just tokenized some texts
    for count, (_, position) in enumerate(lm_stream(args, AutoTokenizer.from_pretrained(folder), 0, num_streams)):
        if position["used"] == 1:
            moments.append((time.process_time(), count))
            seconds = moments[-1][0] - moments[0][0]
            if seconds > 4:
                return args.seq_length * (count - moments[0][1]) / seconds


def measure_group() -> dict:
    world = set_up(parse(*FLAGS))
    requests = []
    common.first_on_node(world, lambda: requests.append(1))
    count = common.sum_over_ranks(torch.tensor(len(requests)))
    counts = {"requests for the dataset": count, "open files of rank 0": len(os.listdir("/proc/self/fd"))}
    seconds = timeit.repeat(lambda: common.ask_for_stops()(), number=1, repeat=200)
    return counts | {"ms to ask for stops": 1000 * statistics.median(seconds)}


def simulate_saves(folder: Path, name: str, size: int) -> dict:
    """The other ranks are fake, and the model has no memory. The process becomes each rank in turn to make its plan."""
    torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=size)
    model = lm_shape(name, 32_000)
    torch.distributed.fsdp.fully_shard(model, mesh=init_device_mesh("cpu", (size,)))
    weights, optimizer_state = dcp.state_dict.get_state_dict(model, torch.optim.AdamW(model.parameters()))
    planner = dcp.DefaultSavePlanner(enable_plan_caching=True)
    planner.set_up_planner({"model": weights, "optimizer": optimizer_state}, is_coordinator=True)
    plans = []
    results = []
    for rank in range(size):
        DeviceMesh._sym_get_coordinate = lambda *_, rank=rank: rank
        plan = planner.create_local_plan()
        plans.append(pickle.dumps(plan))
        place = dcp.filesystem._StorageInfo(f"__{rank}_0.distcp", 0, 1)
        shards = [item.index for item in plan.items if item.type.name == "SHARD"]
        results.append(pickle.dumps([dcp.storage.WriteResult(index, 1, place) for index in shards]))

    seconds = {}
    writer = dcp.FileSystemWriter(folder)
    unchanged = [pickle.dumps(dcp.SavePlan([], usable=False))] * size
    gc.disable()  # as in common.save_checkpoint
    for save, received in {"the first save": plans, "each later save": unchanged}.items():
        start = time.process_time()
        global_plans, metadata = planner.create_global_plan([pickle.loads(plan) for plan in received])
        _ = [pickle.dumps(plan) for plan in writer.prepare_global_plan(global_plans)]
        writer.finish(metadata, [pickle.loads(written) for written in results])
        pickle.dumps(metadata)
        seconds[f"CPU seconds of rank 0 in {save}, {name}"] = time.process_time() - start
    return seconds


def rows_of(how: str, measured: dict):
    """A row for each quantity, of `measured[size][quantity]`. Counts grow on a straight line."""
    for quantity in measured[8]:
        values = {size: of_size[quantity] for size, of_size in measured.items()}
        if isinstance(values[8], int):
            slope, start = statistics.linear_regression(list(values), list(values.values()))
            values = {size: f"~{start + slope * size:,.0f}" for size in SIZES} | values
        yield {"quantity": quantity, "how": how} | {f"{size:,} processes": values.get(size, "-") for size in SIZES}


def rows(folder: Path):
    for name, files in {"100 files": "c4-train.000*", "1,024 files": "*"}.items():
        quantity = f"tokens of a stream per CPU second, {name}"
        yield from rows_of("measured", {n: {quantity: forked(tokens_per_cpu_second, folder, files, n)} for n in SIZES})
    yield from rows_of("measured", {size: forked(measure_group, size=size) for size in (8, 64)})
    for name, sizes in {"7b": (8, 64, 256), "70b": (8, 64)}.items():  # the next ones take more than three minutes
        yield from rows_of("simulated", {size: forked(simulate_saves, folder, name, size) for size in sizes})


if __name__ == "__main__":
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # threads do not survive forks
    gc.freeze()  # collections in forks would copy what they visit
    print(f"{shared.MACHINE}\n")
    with tempfile.TemporaryDirectory() as scratch:
        forked(made_up.write_texts, Path(scratch), 100)
        for file in Path(scratch).glob("c4-*"):
            os.link(file, file.with_name(f"again.{file.name}"))
        shared.print_table(rows(Path(scratch)))
