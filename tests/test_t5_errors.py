"""Bad input: one sentence on stderr that says what is wrong and what to do, exit code 2, no traceback."""

import json
import os
import sys
from argparse import Namespace

import torch
from torch.torch_version import TorchVersion

import pytest
from conftest import check_bad_input, run, write_csv

import common

ARTICLES = [common.builtin_article(number) for number in range(20)]


def test_bad_input_is_one_sentence_and_exit_code_2(tmp_path, tiny_model, articles_csv):
    def write(name, content):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        return path

    bert = write("bert/config.json", json.dumps({"model_type": "bert"})).parent
    t5 = write("unnamed/config.json", "{}").parent
    occupied = write("occupied", "a file where the output folder should be")
    data = {
        tmp_path / "absent.csv": "--dataset .*absent.csv with .* cannot be read",
        write("notes.txt", "text"): "notes.txt",
        "someone/absent": "someone/absent",
        write_csv(
            tmp_path / "columns.csv", [{"body": "a", "abstract": "b"}]
        ): "--text-column text and --summary-column headline cannot be read: its columns are body, abstract",
        write_csv(
            tmp_path / "gap.csv", [{"headline": "", "title": "t", "text": "a"}]
        ): "1 rows, of which 0 have a text and a summary within",
        write_csv(tmp_path / "one.csv", [ARTICLES[0]]): "1 rows, of which 1 have .* too few, or of too few titles",
        write("latin1.csv", "headline,title,text\nÉté,t,text of summer\n".encode("latin1")): "utf-8.* decode",
        write("late.csv", b"headline,title,text\na,t,text\n" * 9000 + b"\xe9"): "utf-8.* decode",
        write("broken.csv", "headline,title,text\na,b,c\na,b,c,d,e\n"): "broken.csv .*cannot be read",
        write("broken.jsonl", '{"text": "a", "headline"\n'): "broken.jsonl .*cannot be read",
        write("empty.csv", ""): "empty.csv .*cannot be read",
    }
    here = ("--num-processes", 1)
    usual = ("--model", tiny_model, "--dataset", articles_csv, "--output-dir", tmp_path / "output")
    as_forks = [((*usual, "--dataset", name, *here), None, pattern) for name, pattern in data.items()]
    as_forks += [
        ((*usual, *arguments), None, pattern)
        for arguments, pattern in (
            (("--model", bert, *here), "is not a T5; docs/your-model-and-data.md says what to change"),
            (("--model", t5, *here), "unnamed"),
            (("--model", tmp_path, *here), "config.json"),
            (("--model", "someone/absent", *here), "someone/absent"),
            (("--batch-size", 0), "argument --batch-size: 0 is not a whole number of at least 1"),
            (("--num-train-samples", -1), "argument --num-train-samples: -1 is not a whole number of at least 0"),
            (("--lr", "nan"), "argument --lr: nan is not a number"),
            (("--lr", "fast"), "argument --lr: fast is not a number of at least 0"),
            (("--epochs", "1.5"), "argument --epochs: 1.5 is not a whole number of at least 1"),
            (("--epoch", 1), r"unrecognized arguments: --epoch 1 \(--help lists every flag\)"),
            (("--model", "./nomodel"), r"--model \./nomodel cannot be read: "),
            (("--sharding-strategy", "HYBRID_SHARD"), "invalid choice: 'HYBRID_SHARD'"),
            (("--backward-prefetch", "post"), r"--backward-prefetch post needs .* \(--help"),
            (("--batch-size", 500, *here), r"\d+ articles do not fill a step of 500; lower --batch-size"),
            (("--device", "tpu"), "--device tpu: torch .* finds none; install its build or use --device cpu"),
            (
                ("--precision", "fp16", "--cpu-offload"),
                "--precision fp16 cannot scale gradients that --cpu-offload keeps",
            ),
            (("--output-dir", occupied, *here), "occupied"),
            (("--output-dir", occupied / "deep", *here), "occupied"),
        )
    ]
    as_forks.append(((*usual, "--batch-size", 0), 2, "argument --batch-size"))  # rank 0 speaks
    # Absurd weights have a loss for two steps; it is asked for only after eight.
    steps = (*usual, "--lr", 1e30, "--batch-size", 8, "--checkpoint-every", 8, "--no-run-validation", "--precision")
    as_forks.append(((*steps, "fp32"), 2, "the loss is not finite at step 8; start again with a lower --lr"))
    # Here by two processes that the script has started itself.
    as_users = [((*usual, "--dataset", tmp_path / "absent.csv"), None, "absent.csv")]
    check_bad_input("t5_fsdp.py", as_users, as_forks)
    assert not (tmp_path / "output" / "checkpoints").exists()  # nothing was saved with a loss that is not finite


def test_fsdp1_cannot_save_on_a_cpu_before_torch_2_14(monkeypatch):
    monkeypatch.setattr(torch, "__version__", TorchVersion("2.13.1"))
    monkeypatch.setattr(common, "fail", sys.exit)
    ran = []
    for version, save_model in ((1, False), (2, True)):
        args = Namespace(device="cpu", num_processes=1, fsdp_version=version, save_model=save_model)
        common.run(lambda args, world: ran.append(args.fsdp_version), args)
    with pytest.raises(SystemExit, match=r"before torch 2\.14 FSDP1 cannot save .* on a CPU; add --no-save-model"):
        common.run(None, Namespace(device="cpu", num_processes=2, fsdp_version=1, save_model=True))
    assert ran == [1, 2]


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_without_write_permission(tmp_path):
    tmp_path.chmod(0o500)
    finished = run("t5_fsdp.py", "--output-dir", tmp_path / "output", "--num-processes", 1, fork=True)
    assert finished.returncode == 2 and "Permission denied" in finished.stderr
    assert "Traceback" not in finished.stderr


def test_a_model_that_cannot_fit_is_said_with_what_would_make_it_fit(monkeypatch):
    """T5-11B on four processes of a machine with 64 GB; on 16 it fits."""
    monkeypatch.setattr(os, "sysconf", lambda name: {"SC_PAGE_SIZE": 4096, "SC_PHYS_PAGES": 2**24}[name])
    world = common.World(0, 0, 4, 4, torch.device("cpu"))
    with pytest.raises(common.UserError, match=r"42\.123 GB of state .* has 16 GB; shard over 11 processes or more"):
        common.check_that_it_fits(11_307_321_344, 4, world)
    assert "10.531 GB of state a process, which has 16 GB" in common.check_that_it_fits(11_307_321_344, 16, world)
    assert "15.796 GB of state" in common.check_that_it_fits(11_307_321_344, 16, world, bytes_each=24)  # DiLoCo's


@pytest.mark.parametrize(
    "kind, backends", [("cuda", "cpu:gloo,cuda:nccl"), ("xpu", "cpu:gloo,xpu:xccl"), (None, "gloo")]
)
def test_tensors_of_the_cpu_have_a_backend_beside_those_of_the_device(kind, backends, monkeypatch):
    """Without a name PyTorch takes that of the device alone, and every collective on the CPU fails. All cores compute,
    also for an optimizer that is offloaded from a GPU."""
    asked, threads, before = {}, [], torch.get_float32_matmul_precision()
    monkeypatch.setattr(torch, "set_num_threads", threads.append)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 1)
    monkeypatch.setattr(torch.accelerator, "set_device_index", lambda index: None)
    monkeypatch.setattr(common.dist, "init_process_group", lambda **options: asked.update(options))
    common.setup(kind and torch.device(kind))
    assert asked["backend"] == backends and asked["timeout"].total_seconds() == 600
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    assert threads == [cores]
    assert torch.get_float32_matmul_precision() == ("high" if kind else before)
    torch.set_float32_matmul_precision(before)


def test_collectives_wait_ten_minutes_but_for_a_download_six_hours(monkeypatch):
    world, groups = common.setup(None), []
    make = common.dist.new_group
    monkeypatch.setattr(common.dist, "new_group", lambda **options: groups.append(make(**options)) or groups[-1])
    with common.first_on_node(world):
        pass
    waits = [
        group._get_backend(torch.device("cpu")).options._timeout.total_seconds()
        for group in (common.dist.group.WORLD, *groups)
    ]
    common.dist.destroy_process_group()
    assert waits == [600, 6 * 3600]
