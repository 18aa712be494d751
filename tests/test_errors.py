"""Bad input ends a run with code 2, and one sentence on stderr names the flag and the cure. Nothing is saved."""

import json
import os
import random
import re
import shlex
import shutil
from pathlib import Path

import torch

import forked
import pytest
from conftest import ROOT, SMALL, losses, make_model, run, run_many
from transformers import AutoConfig, AutoModelForCausalLM

from inside import builtin_article, train_tokenizer

T5 = "t5_fsdp.py --model t5 --dataset articles.csv"

# A user's command, its number of processes, and words of the sentence: the flag and the cure, or the library's message.
# t5_fsdp.py stands for all scripts where they share the check.
MISTAKES = [
    ("t5_fsdp.py --micro-batch-size 0", 2, "--micro-batch-size 0", "1 or more"),
    ("lm_multinode.py --log-every 0", 1, "--log-every 0", "1 or more"),
    ("t5_fsdp.py --lr nan", 1, "--lr nan", "0 or more"),
    ("t5_fsdp.py --device cpu:0", 2, "--device cpu:0", "--device cpu"),
    ("t5_fsdp.py --output-dir file", 1, "'file'"),  # the system's
    ("lm_multinode.py --output-dir s3://bucket/run", 1, "--output-dir s3:", "folder of this machine"),
    ("t5_fsdp.py --model t5 --output-dir linked", 1, "replace --model", "--output-dir"),
    ("lm_multinode.py --model linked/model --output-dir t5/../linked", 1, "replace --model", "--output-dir"),
    ("t5_fsdp.py --output-dir trained", 1, "trained", "--resume", "--output-dir"),
    ("t5_fsdp.py --global-batch-size 9", 2, "--global-batch-size", "multiple of 2"),
    (f"{T5} --backward-prefetch post", 1, "--backward-prefetch", "FSDP1"),
    (f"{T5} --fsdp-version 1 --layers-per-unit 2", 1, "--layers-per-unit", "FSDP2"),
    (f"{T5} --fsdp-version 1 --compile", 1, "--compile", "FSDP2"),
    (f"{T5} --fsdp-version 1 --cpu-offload", 1, "--cpu-offload", "--fsdp-version 2"),
    (f"{T5} --global-batch-size 500", 2, "articles", "--global-batch-size 500"),
    (f"{T5} --model other", 1, "--model other", "docs/your-model-and-data.md"),
    (f"{T5} --model endless-t5", 1, "--model endless-t5", "EOS"),
    (f"{T5} --model blank-t5", 2, "unknown"),  # it has no tokenizer, so transformers makes an empty one
    ("t5_fsdp.py --dataset absent.csv", 2, "--dataset absent.csv", "absent.csv'"),  # datasets'
    ("t5_fsdp.py --dataset columns.jsonl", 1, "--dataset columns.jsonl", "text", "body"),
    ("t5_fsdp.py --dataset numbers.jsonl", 1, "--dataset numbers.jsonl", "404 is not a text"),
    ("t5_fsdp.py --dataset empty.csv", 1, "--dataset", "--max-summary-share"),
    ("lm_multinode.py --dataset someone/absent", 1, "--dataset someone/absent"),  # datasets'
    ("lm_multinode.py --dataset columns.jsonl", 2, "--dataset columns.jsonl", "text", "body"),
    ("lm_multinode.py --dataset mixed.jsonl", 1, "--dataset mixed.jsonl", "/text"),  # pyarrow's
    ("lm_multinode.py --dataset several/", 2, "--dataset several/", ".jsonl", "'folder/*.jsonl'"),
    ("lm_multinode.py --dataset notes.md", 1, "--dataset notes.md", "end in .csv"),
    ("t5_fsdp.py --dataset 'several/*'", 1, "--dataset several/*", "end in .csv"),
    ("lm_multinode.py --dataset numbers.jsonl", 1, "column text", "int"),
    ("lm_multinode.py --dataset 'absent/*.jsonl'", 1, "absent/*.jsonl", "no such files"),
    ("lm_multinode.py --dataset one.txt", 1, "--dataset one.txt", "too few texts"),
    ("lm_multinode.py --dataset some.jsonl --seq-length 2048", 1, "texts", "--seq-length"),
    ("lm_multinode.py --tokenizer endless", 1, "EOS"),
    ("lm_multinode.py --model short --tokenizer window", 1, "--model short", "--tokenizer"),
    ("lm_multinode.py --model adapter", 2, "adapter", "model_type"),  # transformers'
    ("lm_multinode.py --model own-code", 1, "own-code", "trust_remote_code"),  # transformers'
    ("t5_fsdp.py --model own-code", 1, "own-code", "trust_remote_code"),  # transformers'
    ("lm_multinode.py --model other", 1, "--model other", "bert", "qwen2"),
    ("lm_multinode.py --model quantized", 1, "--model quantized"),
    ("lm_multinode.py --model bidirectional", 1, "--model bidirectional", "causal"),
    ("lm_multinode.py --model encoder", 1, "--model encoder", "causal"),
    ("lm_multinode.py --model short --seq-length 65", 1, "--model short", "--seq-length can be 64"),
    ("lm_multinode.py --model window --seq-length 33", 1, "--model window", "--seq-length can be 32"),
    ("lm_multinode.py --model headless", 2, "headless has no weights for lm_head.weight"),
    ("lm_multinode.py --model weightless", 2, "weightless", "safetensors"),  # transformers'
    ("lm_multinode.py --sharding-strategy HYBRID_SHARD --shards-per-replica 2", 3, "--shards-per-replica 2", "3"),
    ("mnist_fsdp.py --global-batch-size 9999", 1, "6400", "--global-batch-size 9999"),
    ("mnist_fsdp_xpu.py --device cpu --global-batch-size 99998", 2, "--global-batch-size 99998"),
]
# Models for the LM script, which have a tokenizer but no weights
SHORT = {"max_position_embeddings": 64}
CONFIGS = {
    "other": ("bert", {}),
    "quantized": ("llama", {"quantization_config": {"quant_method": "gptq", "bits": 4}}),
    "bidirectional": ("gemma3_text", {"use_bidirectional_attention": True}),
    "encoder": ("llama", {"is_causal": False}),
    "short": ("llama", SHORT),
    "window": ("mistral", {**SHORT, "sliding_window": 32}),
    "weightless": ("llama", {}),
}


@pytest.fixture(scope="module")
def files(tmp_path_factory, articles_csv, tiny_llama):
    folder = tmp_path_factory.mktemp("files")
    shutil.copy(articles_csv, folder)
    rows = {
        "some": [{"text": f"text {index}"} for index in range(100)],
        "mixed": [{"text": "a"}, {"text": 404}],
        "numbers": [{"text": 404, "headline": "s"}],
        "columns": [{"body": "a"}],
    }
    for name, content in rows.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in content))
    (folder / "one.txt").write_text("A line.\n" * 99)
    (folder / "several").mkdir()
    (folder / "several/notes").touch()
    (folder / "notes.md").touch()
    (folder / "empty.csv").write_text("text,headline\na,\n")
    (folder / "file").touch()
    (folder / "linked").mkdir()
    for name in ("best", "model"):
        (folder / "linked" / name).symlink_to("../t5")
    (folder / "trained/checkpoints/step-0000001").mkdir(parents=True)
    (folder / "trained/checkpoints/step-0000001/progress.json").touch()

    for name in ("t5", "endless-t5", "blank-t5"):
        make_model(folder / name)
    for path in (folder / "blank-t5").glob("tokenizer*"):
        path.unlink()
    shutil.copytree(tiny_llama, folder / "headless")
    AutoModelForCausalLM.from_pretrained(tiny_llama).model.save_pretrained(folder / "headless")
    tokenizer = train_tokenizer(["0 1"], 300, append_eos=False)
    tokenizer.save_pretrained(folder / "endless-t5")
    for name, (kind, settings) in CONFIGS.items():
        AutoConfig.for_model(kind, **settings).save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
    tokenizer.save_pretrained(folder / "adapter")
    (folder / "adapter/adapter_config.json").write_text('{"peft_type": "LORA"}')
    shutil.copytree(folder / "short", folder / "own-code")
    settings = {"model_type": "mine", "auto_map": {"AutoConfig": "mine.Config"}}
    (folder / "own-code/config.json").write_text(json.dumps(settings))
    (folder / "own-code/mine.py").touch()
    tokenizer.eos_token = None
    tokenizer.save_pretrained(folder / "endless")
    return folder


@pytest.fixture
def here(files, monkeypatch):
    """Run in the folder `files`. Afterwards, check that nothing was saved."""
    monkeypatch.chdir(files)
    yield
    written = {path.name for path in Path("output").rglob("*") if path.is_file()}
    assert written <= {"metrics.jsonl"}


def refuse(script, *flags, words, processes=1, fork=True, **options):
    """Check that a command ends with code 2 and one sentence, which contains these words."""
    finished = run(script, *flags, processes=processes, fork=fork, **options)
    start = f"{Path(script).name}: error: "
    [sentence] = [line for line in finished.stderr.splitlines() if line.startswith(start)]
    for word in words:
        assert word in sentence
    assert finished.returncode == 2
    assert "Traceback" not in finished.stderr


@pytest.mark.parametrize(
    "command, processes, words", [pytest.param(*case[:2], case[2:], id=case[0]) for case in MISTAKES]
)
def test_a_mistake_is_one_sentence(command, processes, words, here):
    script, *flags = shlex.split(command)
    refuse(script, *flags, words=words, processes=processes)


@pytest.mark.long
def test_every_shard_of_a_checkpoint_must_be_in_one_folder(tmp_path):
    flags = ("--max-steps", 1, "--checkpoint-every", 1, "--validate-every", 0, "--output-dir", tmp_path)
    refuse("lm_multinode.py", *flags, words=["--output-dir", "all nodes"], processes=2, change=("own_folders",))
    assert not list(tmp_path.rglob("progress.json"))


@pytest.mark.parametrize("flags, words", [(["--epoch", 1], "--epochs"), (["--fsdp-version", 3], "--fsdp-version")])
def test_only_one_of_two_processes_prints_what_tyro_says(flags, words, here):
    finished = run("t5_fsdp.py", *flags, processes=2, fork=True)
    assert finished.returncode == 2
    assert words in finished.stderr and finished.stderr.count("╭") == finished.stderr.count("error: ") == 1


@pytest.mark.long
def test_different_data_on_two_nodes_is_refused(here):
    change = ("read_other_data",)
    refuse("lm_multinode.py", words=["dataset is", "rank 0"], processes=2, per_node=1, change=change)


@pytest.mark.long
def test_a_bad_row_on_one_rank_alone_is_one_sentence(tmp_path):
    """Its worker meets it in mid-run. The other rank, which then loses its connection, prints nothing."""
    order = [*range(700)]
    random.Random(1).shuffle(order)
    bad = order[649]  # the 41st file of stream 9 of 16, which reads 1,000 rows at once
    for number in range(700):
        rows = [f'"{builtin_article(30 * number + row)["text"][:120]}",{row}' for row in range(30)]
        rows[2] += "," if number == bad else ""
        (tmp_path / f"{number:03}.csv").write_text("\n".join(["text,id", *rows, ""]))
    flags = (*SMALL, "--seq-length", 64, "--global-batch-size", 64, "--micro-batch-size", 32)
    flags = (*flags, "--max-steps", 4000, "--validate-every", 0, "--output-dir", tmp_path)
    finished = run("lm_multinode.py", *flags, "--dataset", tmp_path / "*.csv", processes=2)
    sentences = re.findall(r"^lm_multinode.py: error: .*", finished.stderr, re.M)
    assert len(sentences) == 1 and f"{bad:03}.csv, line 4: 3 fields" in sentences[0]
    assert losses(tmp_path)


def test_a_file_that_vanishes_in_mid_run_is_one_sentence(tmp_path):
    """The worker's traceback is not in it."""
    flags = (*SMALL, "--max-steps", 9, "--validate-every", 0, "--output-dir", tmp_path)
    words = ["error: [Errno 116] Stale file handle: 'texts.jsonl'"]
    refuse("lm_multinode.py", *flags, words=words, change=("lose_file",))


def test_more_processes_than_gpus_are_refused_unless_they_may_share(here, monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    change = ("one_gpu",)
    refuse("lm_multinode.py", words=["2 processes", "--device cpu"], processes=2, device=None, change=change)
    for name in ("CUDA_VISIBLE_DEVICES", "NCCL_MULTI_RANK_GPU_ENABLE"):
        finished = run("lm_multinode.py", processes=2, device=None, fork=True, change=change, **{name: "1"})
        assert "2 processes" not in finished.stderr and "set_device 0" in finished.stderr


def test_a_model_without_layers_is_refused(here):
    """FSDP would gather it as a whole."""
    for script in ("lm_multinode.py", T5):
        script, *flags = shlex.split(script)
        refuse(script, *flags, words=["does not name the layers of"], processes=2, change=("unname_layers",))


@pytest.mark.skipif(torch.xpu.is_available(), reason="it would train on the Intel GPU here")
def test_the_xpu_script_trains_on_a_cpu_only_when_told_to(here):
    refuse("mnist_fsdp_xpu.py", words=["--device xpu", "--device cpu"], device=None)


def test_a_home_folder_is_found(tmp_path):
    """The shell does not expand it in `--output-dir=~/run`."""
    run_many("mnist_fsdp_xpu.py", [("--epochs", 0, "--no-save-model", "--output-dir=~/run")], HOME=str(tmp_path))
    assert (tmp_path / "run").is_dir()


@pytest.mark.skipif(torch.accelerator.is_available(), reason="torch can use the GPU here")
def test_a_gpu_that_torch_cannot_use_is_not_replaced_by_the_cpu(here, tmp_path):
    """NVIDIA's driver is there, but this build of torch is for CPUs, or needs a newer driver."""
    (tmp_path / "nvidia-smi").touch(mode=0o755)
    path = f"{tmp_path}{os.pathsep}{os.environ['PATH']}"
    refuse("lm_multinode.py", words=["--device auto", "--device cpu"], device=None, PATH=path)


def test_a_launcher_that_is_not_torchrun_is_one_sentence(here):
    """Some set only RANK and WORLD_SIZE."""
    environment = {name: value for name, value in os.environ.items() if "RANK" not in name}
    environment |= {"RANK": "0", "WORLD_SIZE": "2"}
    finished = forked.launch(str(ROOT / "lm_multinode.py"), [["--device", "cpu"]], None, environment, timeout=60)
    assert finished.returncode == 2 and re.search("error: RANK .*torchrun\n$", finished.stderr)
