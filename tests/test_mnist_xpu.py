"""mnist_fsdp_xpu.py without an Intel GPU: what it shares with mnist_fsdp.py, its stacks, its rehearsal."""

import ast
import json

import torch

import pytest
from conftest import ROOT, reports, run, succeed

SAME = (
    *("ShallowNet", "draw_digits", "mnist_folder", "MNIST", "load_mnist", "load_digits", "make_loader"),
    *("shard_with_fsdp1", "train_one_epoch", "evaluate"),
)

# Stand-ins for Intel's two packages: on import the first brings the device (not here), the second registers the
# backend (here gloo under the name ccl).
PACKAGES = {
    "intel_extension_for_pytorch": "import torch; torch.imported = ['intel_extension_for_pytorch']",
    "oneccl_bindings_for_pytorch": """
import torch, torch.distributed as dist
torch.imported.append('oneccl_bindings_for_pytorch')
def create(store, rank, size, timeout):
    return dist.ProcessGroupGloo(store, rank, size, timeout)
dist.Backend.register_backend('ccl', create, devices=['cpu', 'xpu'])
""",
}

# A world of the backend that the script has chosen, on the CPU, and the script's own main() in it.
THROUGH_CCL = """
import gc, json, sys
sys.path.insert(0, {root!r})
import torch, torch.distributed as dist
import common, mnist_fsdp_xpu as script
world = common.setup_distributed("cpu", script.BACKEND)
for version in "12":
    args = script.parse_args()
    args.fsdp_version, args.output_dir = int(version), args.output_dir / version
    script.main(args, world)
    gc.collect()
if world.rank == 0:
    print(json.dumps([torch.imported, script.STACK, script.BACKEND, dist.get_backend()]))
dist.destroy_process_group()
"""


def definitions(script):
    tree = ast.parse((ROOT / script).read_text())
    return {node.name: ast.dump(node) for node in tree.body if isinstance(node, ast.FunctionDef | ast.ClassDef)}


def test_what_the_scripts_share_is_the_same_and_in_the_same_order():
    base, xpu = definitions("mnist_fsdp.py"), definitions("mnist_fsdp_xpu.py")
    for name in SAME:
        assert base[name] == xpu[name], name
    assert [name for name in base if name in xpu] == list(xpu)


@pytest.mark.skipif(torch.xpu.is_available(), reason="this machine has an Intel GPU")
def test_without_an_intel_gpu_it_says_what_is_missing():
    finished = run("mnist_fsdp_xpu.py")
    assert finished.returncode == 2 and len(finished.stderr.splitlines()) == 1
    for part in (
        "finds no Intel GPU",
        "--index-url https://download.pytorch.org/whl/xpu",
        "--device cpu --num-processes 2",
    ):
        assert part in finished.stderr


def test_rehearsal(small_mnist, tmp_path):
    """As the README has it but with fewer images: one process per `--num-processes`, saved weights, elapsed time."""
    finished = succeed(
        *(
            "mnist_fsdp_xpu.py",
            "--device",
            "cpu",
            "--num-processes",
            3,
            "--dataset",
            "mnist",
            "--data-dir",
            small_mnist,
        ),
        *("--batch-size", 16, "--save-model", "--output-dir", tmp_path, "--epochs", 2),
    )
    epochs, [result] = reports(tmp_path, "epoch"), reports(tmp_path, "result")
    assert result["processes"] == 3 and len(epochs) == 2
    assert epochs[1]["train_loss"] < epochs[0]["train_loss"]
    assert result["elapsed_seconds"] > sum(epoch["seconds"] for epoch in epochs)
    assert "(conv1): FSDPConv2d(1, 32" in finished.stdout  # a unit for every 100 parameters
    assert "a rehearsal on the CPU; on Intel GPUs here: none" in finished.stdout
    assert f"elapsed    {result['elapsed_seconds']:.2f} s by the clock of the CPU" in finished.stdout
    assert len(list(tmp_path.glob("mnist-shallow-fsdp-*.safetensors"))) == 1


@pytest.mark.skipif(torch.distributed.is_xccl_available(), reason="PyTorch's own stack comes first")
def test_intels_packages_are_used_where_pytorch_has_no_stack(small_mnist, tmp_path):
    """Imported in the document's order; the process group has the backend ccl, and training through it is the same."""
    for name, code in PACKAGES.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text(code)
    script = tmp_path / "through_ccl.py"
    script.write_text(THROUGH_CCL.format(root=str(ROOT)))
    flags = ("--dataset", "mnist", "--data-dir", small_mnist, "--batch-size", 48, "--epochs", 1, "--num-workers", 0)
    flags += ("--device", "cpu", "--no-print-model")
    finished = succeed(script, *flags, "--output-dir", tmp_path / "ccl", processes=2, PYTHONPATH=str(tmp_path))
    succeed("mnist_fsdp_xpu.py", *flags, "--output-dir", tmp_path / "gloo", processes=2, fork=True)
    imported, stack, backend, used = json.loads(finished.stdout.splitlines()[-1])
    assert imported == list(PACKAGES) and "Intel Extension for PyTorch" in stack and (backend, used) == ("ccl", "ccl")
    [gloo] = reports(tmp_path / "gloo", "result")
    for version in ("1", "2"):
        [ccl] = reports(tmp_path / "ccl" / version, "result")
        assert ccl["train_loss"] == pytest.approx(gloo["train_loss"], abs=1e-6)
