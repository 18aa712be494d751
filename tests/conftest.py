"""Helpers: run the scripts as users do, and read what they report."""

import contextlib
import csv
import functools
import hashlib
import http.server
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

# Set before anything imports the Hugging Face libraries. No test may reach the network or find another run's caches.
CACHES = tempfile.TemporaryDirectory()
os.environ |= {"HF_HUB_OFFLINE": "1", "HF_HOME": CACHES.name}
# Waiting threads sleep: on a loaded machine, spinning ones take ten times the CPU time.
os.environ["OMP_WAIT_POLICY"] = "passive"

import torch

import peft
import pytest
from packaging.version import Version
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM, LlamaConfig
from transformers.integrations.peft import MIN_PEFT_VERSION

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "benchmarks")]

import forked
from shared import torchrun

from inside import MODULES, builtin_article, draw_digits, train_tokenizer

DEVICE = os.environ.get("DEVICE", "cpu")  # the scripts run on it, even on a machine with a GPU
SCRIPTS = tuple(MODULES)
VERSIONS = (1, 2)  # of FSDP
SAVE_ON_CPU = VERSIONS if torch.__version__ >= (2, 14) else (2,)  # the versions that can save a whole model on a CPU
# Flags for small runs of the LM. If a flag appears twice, the second value counts.
SMALL = (
    *("--seq-length", 32, "--global-batch-size", 16, "--micro-batch-size", 2, "--num-validation-texts", 3),
    *("--warmup-steps", 2, "--log-every", 1, "--precision", "fp32"),
)
CLOSE = {"abs": 1e-5}  # for losses of about 1 to 8, computed in different ways from the same weights
# For losses after several steps of Adam. If a gradient is almost 0, rounding decides the sign of a step of size lr.
AFTER_ADAM = {"abs": 1e-4}
long = functools.partial(pytest.param, marks=pytest.mark.long)  # a case of a table
# .ci/run then also runs these tests with an older transformers, as the recipe's page says.
needs_peft = pytest.mark.skipif(
    Version(peft.__version__) < Version(MIN_PEFT_VERSION), reason=f"transformers needs peft {MIN_PEFT_VERSION} for LoRA"
)


def fsdp(version):
    """The flags for a version of FSDP. A version that cannot save on a CPU gets --no-save-model."""
    flags = ("--fsdp-version", version)
    return flags if version in SAVE_ON_CPU else (*flags, "--no-save-model")


def pytest_sessionstart(session):
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell makes background jobs ignore it
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # nohup makes its command ignore it
    if session.config.getoption("dist", "no") == "no":  # in a worker, or without workers
        forked.start_server()


def run(script, *arguments, **options):
    """Run a script once: by the real command unless fork=True. Otherwise as `run_many`, without its check."""
    return run_many(script, [arguments], **{"fork": False, "check": False} | options)


def succeed(*arguments, **options):
    """Like `run`, but a failing script fails the test, which shows the script's output."""
    return run(*arguments, **options, check=True)


def run_many(
    script, settings, processes=None, fork=True, device=DEVICE, change=(), check=True, timeout=300, **environment
):
    """Run a script once for each list of arguments, in one launch. Returns the finished process, output as text.

    `settings`: the lists, or {output folder: arguments}. `processes`: torchrun's; None: plain `python`, one process.
    `fork`: fork the processes from one that has already done the imports (never on a GPU). `per_node`: see forked.py.
    `change`: the name of a change in inside.py, and its arguments.
    """
    script = str(ROOT / script)
    if isinstance(settings, dict):
        settings = [[*arguments, "--output-dir", folder] for folder, arguments in settings.items()]
    settings = [[str(argument) for argument in arguments] for arguments in settings]
    for arguments in settings:
        if Path(script).name in SCRIPTS and device and "--device" not in arguments:
            arguments += ["--device", device]
    per_node = environment.pop("per_node", None)
    environment = os.environ | environment
    if not processes:  # without torchrun, variables that are left of it must not matter
        environment |= {"WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
    if device not in ("cpu", None):
        fork = False
        # TF32 would keep only 10 bits of mantissa. Processes may share a GPU.
        environment |= {"NVIDIA_TF32_OVERRIDE": "0", "NCCL_MULTI_RANK_GPU_ENABLE": "1"}
    if fork:
        finished = forked.launch(script, settings, processes, environment, timeout, change, per_node)
    else:
        command = torchrun(processes) if processes else [sys.executable]
        if len(settings) == 1 and not change:
            command += [script, *settings[0]]
        else:
            command += [ROOT / "tests" / "forked.py", script, json.dumps(settings), json.dumps(change)]
            environment["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"  # each setting needs its own store
        finished = subprocess.run(command, capture_output=True, text=True, timeout=timeout, env=environment)
    if check:
        output = f"{finished.stdout[-2000:]}\n{finished.stderr[-9000:]}"
        assert finished.returncode == 0, f"{script} {settings[0]}\n{output}"
    return finished


@contextlib.contextmanager
def hub(folder):
    """Serve the files of one model. Yields the variables that make a process use this server, and its requests."""
    requests = []

    class Hub(Files):
        def translate_path(self, path):
            requests.append(f"{self.command} {path}")
            return str(folder / path.partition("?")[0].rpartition("/resolve/main/")[2])

        def end_headers(self):
            self.send_header("X-Error-Code", "EntryNotFound")  # the client reads it from a 404
            self.send_header("X-Repo-Commit", "0" * 40)
            self.send_header("ETag", hashlib.sha1(self.path.encode()).hexdigest())
            super().end_headers()

    with serve(folder, Hub) as address:
        yield {"HF_ENDPOINT": address, "HF_HUB_OFFLINE": "0", "no_proxy": "127.0.0.1"}, requests


class Files(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_):
        pass


@contextlib.contextmanager
def serve(folder, handler=Files):
    """Serve the files of a folder. Yields the address."""
    handler = functools.partial(handler, directory=folder)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def records(output_dir, *names):
    """The records of `metrics.jsonl` that have all these names: "loss" for training, "val_loss" for validation."""
    lines = (Path(output_dir) / "metrics.jsonl").read_text().splitlines()
    return [record for record in map(json.loads, lines) if set(names) <= set(record)]


def curve(output_dir, name="loss"):
    """The values of one name, in order. "loss" has one for each logged step."""
    return [record[name] for record in records(output_dir, name)]


def losses(output_dir):
    """The loss of each step. If a step ran twice, the last loss counts."""
    return {record["step"]: record["loss"] for record in records(output_dir, "loss")}


def check_curves(output_dir, plain):
    """Losses and gradient norms equal those of a plain loop, and so do validation losses, if `plain` has them."""
    # `exact`: how many values come before the second step of Adam can change them.
    for name, exact, values in zip(("loss", "grad_norm", "val_loss"), (2, 0, 1), plain, strict=False):
        exact = exact if DEVICE == "cpu" else 0
        expected = [pytest.approx(value, **CLOSE if i < exact else AFTER_ADAM) for i, value in enumerate(values)]
        if name == "grad_norm":  # after a step of Adam, rounding shows more in it than in the loss
            expected = [pytest.approx(value, rel=1e-3 if i else 1e-4) for i, value in enumerate(values)]
        assert curve(output_dir, name) == expected, (output_dir, name)


def write_csv(path, rows):
    """Write dictionaries as a CSV file in WikiHow's style: quotes where needed, Unix newlines."""
    with open(path, "w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    return path


@pytest.fixture(scope="session")
def small_mnist(tmp_path_factory):
    """A folder with 90 training images, which 4 processes cannot divide, and 100 test images, which 3 cannot: built-in
    digits, in the files in which torchvision keeps MNIST."""
    folder = tmp_path_factory.mktemp("mnist")
    (folder / "MNIST" / "raw").mkdir(parents=True)
    for count, seed, part in ((90, 0, "train"), (100, 1, "t10k")):
        images, labels = draw_digits(count, seed).tensors
        images = images.clamp(0, 1).mul(255).round().squeeze(1)
        for array, kind in ((images, "images-idx3"), (labels, "labels-idx1")):
            header = bytes([0, 0, 8, array.dim()]) + b"".join(size.to_bytes(4, "big") for size in array.shape)
            content = header + array.to(torch.uint8).numpy().tobytes()
            (folder / "MNIST" / "raw" / f"{part}-{kind}-ubyte").write_bytes(content)
    return folder


@pytest.fixture(scope="session")
def articles_csv(tmp_path_factory):
    """200 of the built-in articles in WikiHow's format."""
    return write_csv(tmp_path_factory.mktemp("data") / "articles.csv", [builtin_article(i) for i in range(200)])


@pytest.fixture(scope="session")
def texts(tmp_path_factory):
    """200 texts of about 1,800 characters, for the LM: shorter ones would take it longer to read."""
    path = tmp_path_factory.mktemp("texts") / "texts.jsonl"
    with path.open("w") as file:
        for first in range(0, 2400, 12):
            text = " ".join(builtin_article(index)["text"] for index in range(first, first + 12))
            file.write(json.dumps({"text": text}) + "\n")
    return path


def make_tokenizer(folder):
    """Train a tokenizer on the built-in articles, and save it."""
    articles = [builtin_article(index) for index in range(100)]
    texts = (text for article in articles for text in (article["text"], article["headline"]))
    train_tokenizer(texts, 1000, append_eos=True).save_pretrained(folder)


def make_model(folder, kind="t5", is_tied=True, **changes):
    """Write a tiny T5, or a relative of it, with random weights and a tokenizer, as `from_pretrained` reads them."""
    make_tokenizer(folder)
    torch.manual_seed(0)
    shape = {"d_model": 32, "d_kv": 8, "num_heads": 4, "d_ff": 64, "num_layers": 2, "dropout_rate": 0.0}
    shape |= {"vocab_size": 1024, "pad_token_id": 0, "eos_token_id": 1, "decoder_start_token_id": 0} | changes
    model = AutoModelForSeq2SeqLM.from_config(AutoConfig.for_model(kind, **shape))
    if not is_tied:  # transformers ties only equal weights
        model.lm_head.weight = torch.nn.Parameter(torch.randn_like(model.lm_head.weight) / 8)
    model.save_pretrained(folder)
    return folder


def make_llama(folder, kind=LlamaConfig, **changes):
    """Write a tiny Llama, or a model of another kind, with random weights and a tokenizer."""
    make_tokenizer(folder)
    torch.manual_seed(0)
    shape = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4} | changes
    config = kind(vocab_size=1024, initializer_range=0.2, eos_token_id=1, **shape)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def tiny_llama(tmp_path_factory):
    return make_llama(tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("model"))
