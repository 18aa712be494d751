"""The GPU benchmark on a CPU, with tiny shapes: each kind of row is measured, the tables say what was measured."""

import json
import re
import sys
from types import SimpleNamespace

import torch

import pytest
from conftest import ROOT, run
from transformers import T5ForConditionalGeneration

sys.path.insert(0, str(ROOT / "tests" / "benchmarks" / "gpu"))
import gpu_table

BENCHMARK = "tests/benchmarks/gpu/gpu_table.py"
FLAGS = ("--device", "cpu", "--tiny", "--turns", 2, "--steps", 2, "--peak-tflops", 1)


def run_forked(case, options):
    """In place of gpu_table.measure_case, whose processes take seconds to import."""
    finished = run(BENCHMARK, *FLAGS, fork=True, BENCHMARK_CASE=json.dumps(case))
    assert finished.returncode == 0, finished.stderr[-3000:]
    *lines, result = finished.stdout.splitlines()
    return json.loads(result), "\n".join(lines)


def test_rows_are_measured():
    # Of a token: 6 FLOPs for each weight but the embedding, and 12 for attention's layers x width x length.
    hidden, width, layers, length, words = 128, 352, 2, 128, 2048
    weights = layers * (4 * hidden * hidden + 3 * hidden * width + 2 * hidden) + hidden + hidden * words
    t5_length = gpu_table.SOURCE + gpu_table.TARGET
    models = {
        "lm": (length, 6 * weights + 12 * layers * hidden * length),
        "t5": (t5_length, 3 * gpu_table.t5_forward_flops(gpu_table.t5_config("tiny")) / t5_length),
    }
    for part, index in (("lm", 3), ("lm-best", 3), ("t5-base", 2), ("t5-base", 6)):
        case = gpu_table.cases(part, tiny=True)[index] | {"compile": False, "profile": part == "lm-best"}
        result, printed = run_forked(case, None)
        tokens, flops = models[case["kind"]]
        assert result["tokens/s"] == pytest.approx(tokens * result["samples/s"]) and result["tokens/s"] > 10
        assert result["mfu"] == pytest.approx(result["tokens/s"] * flops / 1e12)  # the teraflop that FLAGS claims
        assert 0.1 < result["peak_gb"] < 8 and 0 < result["state_gb"] < 0.1
        assert ("aten::mm" in printed) == case["profile"]
        if case["profile"]:
            assert 20 < float(re.search(r"^busy ([\d.]+)% of a step of [\d.]+ ms$", printed, re.M)[1]) < 101


def test_the_prediction_stands_beside_the_measurement(tmp_path, monkeypatch):
    monkeypatch.setattr(gpu_table, "measure_case", lambda case, options: ({"peak_gb": 1.0}, ""))
    options = SimpleNamespace(keep=None, minutes=1000)
    result, _ = gpu_table.run_case(gpu_table.cases("lm", tiny=True)[0], options)
    assert result["peak_gb"] == 1.0 and 0.01 < result["predicted_gb"] < 0.1
    assert gpu_table.start_prediction(gpu_table.cases("t5-base", tiny=True)[0]) is None


def test_the_loader_is_measured_and_a_second_run_keeps_what_is_there(tmp_path, monkeypatch):
    monkeypatch.setattr(gpu_table, "measure_case", run_forked)
    [case] = gpu_table.cases("loader", tiny=True)
    options = SimpleNamespace(keep=tmp_path / "kept", minutes=1000)
    result, _ = gpu_table.run_case(case, options)
    assert 10_000 < result["tokens/s"] < 1e8
    monkeypatch.setattr(gpu_table, "measure_case", None)
    assert gpu_table.run_case(case, options)[0] == result
    options.minutes = 0
    assert gpu_table.run_case(case | {"workers": 3}, options) == ({"note": "no time left"}, "")


def test_the_table_and_the_claims_hold_the_measurements(monkeypatch, capsys):
    monkeypatch.setattr(gpu_table, "run_case", run_forked)
    options = SimpleNamespace(tiny=True)
    inits = gpu_table.run_part("init", options)
    table = capsys.readouterr().out
    assert [line.split("|")[2].strip() for line in table.splitlines()[5:]] == list(gpu_table.WAYS)
    assert all(0 < result["seconds"] < 60 for _, result in inits)

    def fake(case, options):
        speed = {"fp32": 100.0, "tf32": 150.0, "bf16": 300.0}[case["precision"]] * (1.5 if case["compile"] else 1)
        memory = 6.0 if case["precision"] == "bf16" else 8.0
        if case["checkpointing"]:
            speed, memory = speed * 0.75, memory / 2
        if case["fsdp"] == 1 and case["checkpointing"]:
            return {"note": "out of memory"}, ""
        return {"samples/s": 1.0, "tokens/s": speed, "mfu": 0.3, "peak_gb": memory}, ""

    monkeypatch.setattr(gpu_table, "run_case", fake)
    measured = gpu_table.cases("lm", tiny=True)
    too_large = measured[0] | {"fsdp": 1, "checkpointing": True}
    monkeypatch.setattr(gpu_table, "cases", lambda part, tiny: [*measured, too_large])
    results = gpu_table.run_part("lm", options)
    assert len(results) == 7 and capsys.readouterr().out.count("out of memory") == 1
    gpu_table.print_claims({"lm": results, "t5-base": [], "t5-3b": [], "init": inits})
    claims = capsys.readouterr().out
    for line in (
        "bf16: up to 4 times the speed of fp32 | 3.00 to 3.00",
        "bf16, speed of TF32 | 2.00 to 2.00",
        "less memory, 0.7 of fp32's | 0.75 to 0.75",
        "checkpointing, memory | 0.50 to 0.50",
        "checkpointing, speed | 0.75 to 0.75",
        "compile, speed | 1.50 to 1.50 | not measured | not measured |",
        "FSDP2, speed of FSDP1's | 1.00 to 1.00",
        f"FSDP1 with device_id |  |  | {inits[1][1]['seconds']:.2f} s",
    ):
        assert line in claims


def test_t5s_flops_are_those_of_its_matrix_products():
    """Forward, by hand: two FLOPs for each weight and token that meets it, and attention's two products."""
    config = gpu_table.t5_config("tiny")
    with torch.device("meta"):
        model = T5ForConditionalGeneration(config)
    source, target, inner, layers = gpu_table.SOURCE, gpu_table.TARGET, 8 * 4, 2
    # Keys and values of the decoder's attention to the encoder: its weights, but for the encoder's tokens.
    names = ("EncDecAttention.k.weight", "EncDecAttention.v.weight")
    cross = sum(parameter.numel() for name, parameter in model.named_parameters() if name.endswith(names))
    encoder, decoder = (
        sum(p.numel() for name, p in part.block.named_parameters() if p.dim() == 2 and "bias" not in name)
        for part in (model.encoder, model.decoder)
    )
    products = source * (encoder + cross) + target * (decoder - cross) + target * config.d_model * config.vocab_size
    attention = 2 * layers * inner * (source * source + target * target + target * source)
    assert gpu_table.t5_forward_flops(config) == 2 * (products + attention)
