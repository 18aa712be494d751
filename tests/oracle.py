"""The same training by other code: transformers' own trainers, on models that transformers shards itself.

    torchrun --nproc_per_node 2 tests/oracle.py TASK --output-dir FOLDER    # logs to FOLDER/metrics.jsonl

TASK is a file: {"model": a folder, "samples": all steps' samples in order, "batch_size": samples of a step, over all
processes, "micro_batch_size": samples of one process, "rates": the learning rate of each step, "log_every": steps}.
T5's samples are padded here. A causal model's samples have shifted labels already, as lm_multinode.py makes them.
"""

import gc
import json
import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F

from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    DataCollatorForSeq2Seq,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    T5ForConditionalGeneration,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    default_data_collator,
)
from transformers.distributed import DistributedConfig

sys.path.insert(0, str(Path(__file__).parents[1]))
import common

# Each block is an FSDP unit. transformers has no such plan for T5.
T5ForConditionalGeneration._fsdp_plan = {f"{part}.block.*": "free_full_weight" for part in ("encoder", "decoder")}


def with_shifted_labels(samples):
    """Without `shift_labels`, transformers would shift the labels once more."""
    batch = default_data_collator(samples)
    return batch | {"shift_labels": batch["labels"]}


def t5_loss(outputs, labels, num_items_in_batch):
    """The mean over the target tokens of a step. T5's own loss is the mean over a micro-batch, and the trainer would
    weight all micro-batches equally."""
    return F.cross_entropy(outputs.logits.flatten(0, 1), labels.flatten(), reduction="sum") / num_items_in_batch


class Metrics(TrainerCallback):
    """Writes what the trainer logs, under the names that the scripts use."""

    def __init__(self, path, tokens):
        self.path = path
        self.tokens = tokens  # in each step
        self.last_logged = 0
        self.start = time.perf_counter()

    def on_log(self, args, state, control, logs, **_):
        if state.is_world_process_zero and "loss" in logs:
            seconds = time.perf_counter() - self.start
            record = {"step": state.global_step, "loss": logs["loss"], "grad_norm": logs["grad_norm"]}
            record["tokens/s"] = sum(self.tokens[self.last_logged : state.global_step]) / seconds
            record["peak_gib"] = common.peak_gib(torch.device("cpu"))
            with open(self.path, "a") as file:
                file.write(json.dumps(record) + "\n")
        self.last_logged = state.global_step
        self.start = time.perf_counter()


def main(task, folder):
    folder.mkdir(parents=True, exist_ok=True)
    size = int(os.environ["WORLD_SIZE"])
    samples = task["samples"]
    lengths = [len(sample["input_ids"]) for sample in samples]
    loading = {"distributed_config": DistributedConfig(fsdp_size=size), "dtype": torch.float32}
    if AutoConfig.from_pretrained(task["model"]).is_encoder_decoder:
        trainer_class, arguments_class = Seq2SeqTrainer, Seq2SeqTrainingArguments
        model = T5ForConditionalGeneration.from_pretrained(task["model"], **loading)
        # Given the model, it also makes the decoder's input from the labels, which the trainer removes.
        collator = DataCollatorForSeq2Seq(AutoTokenizer.from_pretrained(task["model"]), model)
        options = {"data_collator": collator, "compute_loss_func": t5_loss}
        adamw = {"weight_decay": 0.01, "adam_beta2": 0.999}
        lengths = [length + len(sample["labels"]) for length, sample in zip(lengths, samples, strict=True)]
    else:
        trainer_class, arguments_class = Trainer, TrainingArguments
        model = AutoModelForCausalLM.from_pretrained(task["model"], **loading)
        options = {"data_collator": with_shifted_labels}
        adamw = {"weight_decay": 0.1, "adam_beta2": 0.95}
    rates = [*task["rates"], 0.0]  # the trainer asks for one more after the last step

    class WithRates(trainer_class):
        def get_decay_parameter_names(self, model):
            if model.config.is_encoder_decoder:  # in t5_fsdp.py, as in its tutorial, norms decay too
                return [name for name, _ in model.named_parameters()]
            return super().get_decay_parameter_names(model)

        def create_scheduler(self, num_training_steps, optimizer=None):
            self.lr_scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer or self.optimizer, rates.__getitem__)
            return self.lr_scheduler

    batch_size = task["batch_size"]
    tokens = [sum(lengths[first : first + batch_size]) for first in range(0, len(samples), batch_size)]
    arguments = arguments_class(
        folder,
        use_cpu=True,
        per_device_train_batch_size=task["micro_batch_size"],
        gradient_accumulation_steps=batch_size // (task["micro_batch_size"] * size),
        max_steps=len(tokens),
        max_grad_norm=1.0,
        learning_rate=1.0,
        train_sampling_strategy="sequential",
        logging_steps=task["log_every"],
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        **adamw,
    )
    callbacks = [Metrics(folder / "metrics.jsonl", tokens)]
    WithRates(model, arguments, train_dataset=samples, callbacks=callbacks, **options).train()


if __name__ == "__main__":
    _, task, _, folder = sys.argv
    main(json.loads(Path(task).read_text()), Path(folder))
    gc.collect()  # as in common.run: otherwise Python may abort
    dist.destroy_process_group()
