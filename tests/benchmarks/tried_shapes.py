"""Which models of the Hub the T5 and LM scripts train, and what they need.

    python tests/benchmarks/tried_shapes.py [--models google-t5/t5-base Qwen/Qwen3-0.6B]

Nothing is downloaded. A folder gets each model's own config, with two layers, at most 32,000 words and 16 experts,
random weights and a small tokenizer. The script trains it there for two steps on two processes of a CPU, exports it,
and transformers loads the export. A model that does not run has the sentence with which the script ends.

The numbers of a row are of the whole model: its parameters, its file on the Hub, and what will_it_fit.py predicts for
one GPU with the smallest batch, recomputing, of 512 + 152 tokens (T5) or 1,024 (Gemma: 512). The tokens per second of
an H100 at 40% MFU are arithmetic.
"""

import argparse
import copy
import re
import subprocess
import sys
import tempfile
from argparse import Namespace
from pathlib import Path

import torch

import shared
import transformers
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    Gemma3TextConfig,
    GPT2Config,
    LlamaConfig,
    MT5Config,
    Olmo2Config,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
    T5Config,
)
from will_it_fit import GB, traced

from inside import PEAK_TFLOPS, builtin_article, num_parameters, train_tokenizer

FLAN = {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False}
TIED = {"tie_word_embeddings": True}
POSITIONS = {"rope_type": "llama3", "rope_theta": 500_000.0, "original_max_position_embeddings": 8192}
POSITIONS |= {"factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA_3 = {"rope_parameters": POSITIONS, "max_position_embeddings": 131_072}
EXPERTS = {"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768}


def t5(width: int, inner: int, layers: int, heads: int, **more) -> T5Config:
    shape = {"d_model": width, "d_ff": inner, "num_layers": layers, "num_heads": heads}
    return T5Config(**shape, vocab_size=32_128, decoder_start_token_id=0, **more)


def decoder(kind, width: int, inner: int, layers: int, heads: int, groups: int, words: int, **more):
    """A Llama-like model; `groups` of heads share their keys and values."""
    shape = {"hidden_size": width, "intermediate_size": inner, "num_hidden_layers": layers}
    shape |= {"num_attention_heads": heads, "num_key_value_heads": groups, "vocab_size": words}
    return kind(**shape, **({"max_position_embeddings": 8192} | more))


# Each model's config and the bytes of a parameter in its file.
MODELS = {
    "google-t5/t5-small": (t5(512, 2048, 6, 8), 4),
    "google-t5/t5-base": (t5(768, 3072, 12, 12), 4),
    "google/flan-t5-small": (t5(512, 1024, 8, 6, **FLAN), 4),
    "google/flan-t5-base": (t5(768, 2048, 12, 12, **FLAN), 4),
    "google/mt5-small": (MT5Config(), 4),
    "HuggingFaceTB/SmolLM2-135M": (decoder(LlamaConfig, 576, 1536, 30, 9, 3, 49_152, **TIED), 2),
    "Qwen/Qwen2.5-0.5B": (decoder(Qwen2Config, 896, 4864, 24, 14, 2, 151_936, use_sliding_window=False, **TIED), 2),
    "Qwen/Qwen3-0.6B": (decoder(Qwen3Config, 1024, 3072, 28, 16, 8, 151_936, head_dim=128, **TIED), 2),
    "meta-llama/Llama-3.2-1B": (
        decoder(LlamaConfig, 2048, 8192, 16, 32, 8, 128_256, head_dim=64, **LLAMA_3, **TIED),
        2,
    ),
    "TinyLlama/TinyLlama-1.1B-Chat-v1.0": (decoder(LlamaConfig, 2048, 5632, 22, 32, 4, 32_000), 2),
    "allenai/OLMo-2-0425-1B": (decoder(Olmo2Config, 2048, 8192, 16, 16, 16, 100_352), 4),
    "google/gemma-3-270m": (
        decoder(Gemma3TextConfig, 640, 2048, 18, 4, 1, 262_144, head_dim=256, sliding_window=512),
        2,
    ),
    "Qwen/Qwen3-30B-A3B": (decoder(Qwen3MoeConfig, 2048, 6144, 48, 32, 4, 151_936, head_dim=128, **EXPERTS), 2),
    "openai-community/gpt2": (GPT2Config(), 4),
}


def auto_class(config):
    return AutoModelForSeq2SeqLM if config.is_encoder_decoder else AutoModelForCausalLM


def write_model(config, folder: Path) -> None:
    """Two layers of it and a part of its words, in bf16 as most files are, and a tokenizer."""
    small = copy.deepcopy(config)
    for name in ("num_layers", "num_decoder_layers", "num_hidden_layers", "n_layer"):
        if getattr(small, name, None):
            setattr(small, name, 2)
    if getattr(small, "layer_types", None):
        small.layer_types = small.layer_types[:2]
    if getattr(small, "num_experts", None):
        small.num_experts = 16
    small.vocab_size = min(small.vocab_size, 32_000)
    small.pad_token_id, small.eos_token_id, small.bos_token_id = 0, 1, None
    model = auto_class(config).from_config(small, dtype=torch.bfloat16)
    if not getattr(config, "scale_decoder_outputs", True):  # FLAN-T5: its output layer is not its embedding
        model.lm_head.weight = torch.nn.Parameter(torch.randn_like(model.lm_head.weight))
    model.save_pretrained(folder)
    texts = [builtin_article(number)["text"] for number in range(100)]
    train_tokenizer(texts, 1000, append_eos=config.is_encoder_decoder).save_pretrained(folder)


def train(config, folder: Path) -> str:
    """Two steps; "trains", or the sentence that says why not."""
    output = folder / "output"
    flags = ["--model", folder / "model", "--max-steps", 2, "--output-dir", output]
    if config.is_encoder_decoder:
        script, exported = "t5_fsdp.py", output / "best"
        flags += ["--num-train-samples", 8, "--batch-size", 2, "--epochs", 1, "--no-run-validation"]
        flags += ["--max-source-length", 32, "--max-target-length", 16]
    else:
        script, exported = "lm_multinode.py", output / "model"
        flags += ["--seq-length", 64, "--micro-batch-size", 1, "--global-batch-size", 2, "--num-validation-texts", 2]
    command = [sys.executable, shared.ROOT / script, *flags, "--num-processes", 2, "--device", "cpu"]
    finished = subprocess.run(list(map(str, command)), capture_output=True, text=True)
    if finished.returncode:
        errors = re.findall(r"error: (.+)", finished.stderr) or finished.stderr.splitlines()[-1:]
        return errors[0].replace(f"--model {folder}/model", "--model")
    auto_class(config).from_pretrained(exported)
    return "trains"


def predict(config, folder: Path) -> tuple[float, float | str]:
    """The GB that one GPU holds, and the tokens per second that it would see."""
    config.save_pretrained(folder / "whole")
    flags = ["--model", folder / "whole", "--num-processes", 1, "--activation-checkpointing"]
    if config.is_encoder_decoder:
        script = "t5_fsdp.py"
        flags += ["--batch-size", 1]
    else:
        script = "lm_multinode.py"
        length = min(1024, getattr(config, "sliding_window", None) or 1024)
        flags += ["--micro-batch-size", 1, "--global-batch-size", 1, "--seq-length", length]
        flags += ["--peak-tflops", PEAK_TFLOPS["H100"]]
    with traced(script, flags, Namespace(vocabulary=0, per_node=8, attention="gpu")) as run:
        peak = run.peak() / GB
    if config.is_encoder_decoder or hasattr(config, "num_experts"):  # of which the script would count all
        return peak, "-"
    empty = run.script.empty_model(config)
    return peak, 0.4 / run.script.mfu_per_token_per_second(run.args, run.world, empty)


def row_of(name: str) -> dict:
    config, file_bytes = MODELS[name]
    row = {"model": name, "parameters": "-", "file, GB": "-", "state, GB": "-", "one GPU, GB": "-"}
    row["tokens/s of an H100 at 40%"] = "-"
    with tempfile.TemporaryDirectory() as folder:
        write_model(config, Path(folder, "model"))
        row["result"] = train(config, Path(folder))
        if row["result"] == "trains":
            row["one GPU, GB"], row["tokens/s of an H100 at 40%"] = predict(config, Path(folder))
            row["parameters"] = num_parameters(config)
            row["file, GB"] = row["parameters"] * file_bytes / GB
            row["state, GB"] = 16 * row["parameters"] / GB
    return row


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS), metavar="NAME")
    options = parser.parse_args()
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    shared.print_table(map(row_of, options.models))
