"""What each of the four documents names is in its section; links inside the documentation lead somewhere; tables
render."""

import re
import shlex

from conftest import ROOT

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
# Names from the documents, by the section of docs/from-the-documents.md that follows a document: who searches that
# section for one must find it, spelled like this. Its table of features counts for all.
SHARED = "FSDP1 beside FSDP2"
NAMES = {
    "The T5 tutorial": """
        https://pytorch.org/blog/introducing-pytorch-fully-sharded-data-parallel-api/ https://arxiv.org/abs/2304.11277
        https://engineering.fb.com/2021/07/15/open-source/fsdp/ "PyTorch 1.12" all_gather reduce_scatter torchaudio
        T5ForConditionalGeneration T5Tokenizer AutoTokenizer GPT2TokenizerFast T5Block DDP mp AdamW StepLR DataLoader
        DistributedSampler set_epoch transformer_auto_wrap_policy transformer_layer_cls t5_auto_wrap_policy
        functools.partial enable_wrap wrap auto_wrap_policy checkpoint_wrapper CheckpointImpl
        apply_activation_checkpointing apply_activation_checkpointing_wrapper MixedPrecision mp_policy param_dtype
        reduce_dtype buffer_dtype fpSixteen bfSixteen fp32_policy grad_bf16 bf16_ready LooseVersion nccl device_id
        torch.cuda.set_device ShardingStrategy sharding_strategy SHARD_GRAD_OP FULL_SHARD Zero2 Zero3 backward_prefetch
        BackwardPrefetch BACKWARD_PRE BACKWARD_POST 2-10% FullStateDictConfig offload_to_cpu rank0_only
        StateDictType.FULL_STATE_DICT FSDP.state_dict_type save_policy cpu_state torch.save setup cleanup
        dist.init_process_group destroy_process_group RANK LOCAL_RANK WORLD_SIZE setup_model get_date_of_run time_of_run
        format_metrics_to_gb g_gigabyte inner_pbar train validation fsdp_main fsdp_loss train_accuracy val_loss
        best_val_loss file_save_name currEpoch T5-model- "New Val Loss Record" "entering save and stats zone" dur
        training_start_time train_acc_tracking val_acc_tracking mem_alloc_tracker mem_reserved_tracker memory_allocated
        memory_reserved init_start_event init_end_event source_ids source_mask target_ids num_workers pin_memory
        len(batch) .item() load_dataset wikihow data/ wikihowAll.csv wikihowSep.csv summarization_dataset.py 1,500 300
        512 150 --batch-size --test-batch-size --epochs --lr --gamma --seed --no-cuda --track_memory --run_validation
        --save-model --print-model torchrun T5_training.py P4dn A100 60M 11B 3B t5-base 4x 30% OOM Ampere V100 MHSA FFN
    """,
    "The page for Intel GPUs": """
        intel_extension_for_pytorch ipex oneccl_bindings_for_pytorch torch-ccl oneCCL ccl c10d ProcessGroup AllGather
        ReduceScatter https://github.com/intel/torch-ccl/issues/80 "GPU only" torch.xpu.set_device args.local_rank
        model.to(device) device_id device_ids setup cleanup dist.init_process_group MASTER_ADDR MASTER_PORT 12355
        mp.spawn WORLD_SIZE torch.xpu.device_count Net log_softmax nll_loss train test fsdp_main ddp_loss
        DistributedSampler set_epoch Normalize 0.1307 0.3081 num_workers pin_memory my_auto_wrap_policy
        size_based_auto_wrap_policy min_num_params=100 enable_wrap wrap CPUOffload BackwardPrefetch DDP Adadelta StepLR
        torch.xpu.Event init_start_event init_end_event elapsed_time "Train Epoch" "Test set: Average loss" Accuracy
        "XPU event elapsed time" "--batch-size 64" "--test-batch-size 1000" "--epochs 10" "--lr 1.0" "--gamma 0.7"
        "--seed 1" --no-cuda --save-model mnist_cnn.pt FSDP_mnist_xpu.py
    """,
    "The notebook": """
        ShallowNet DeepNet count_params 1,199,882 94,104,234 60,000 10,000 Normalize 0.1307 0.3081 tqdm train test
        avg_loss total_correct num_datapoints accuracy memory_allocated MB Adam 0.001 256 1000 "10 epochs" 0.9895 0.9914
        0.0325 0.0451 "86 and 10 batches a second" 22,000 2,600 mps num_workers pin_memory drop_last persistent_workers
        "massively slows down training" "a nontrivial amount of ceremony" get_free_addr get_free_port setup_distributed
        cleanup_distributed is_master MASTER_ADDR MASTER_PORT dist.get_rank() NCCL_P2P_LVL NVL A100s "Allen HPC"
        train_dist test_dist DistributedSampler set_epoch size_based_auto_wrap_policy min_num_params 20000 mp.spawn
        torch.cuda.device_count
    """,
    "The multi-node page": """
        torch transformers datasets "one GPU" 150M C4 PrimeIntellect/llama-150m-fresh mistralai/Mistral-7B-v0.1 SPMD
        torchrun "process group" LOCAL_RANK FSDP DDP "mixed precision" split_dataset_by_node no_sync ssh "private IP"
        10. 192. master 10.15.42.1 1234 RDZV_ENDPOINT MY_RANK RANK "rank 0 is the node whose address it is"
        "adjust `--nnodes`" "none twice" "none missing" ping http.server curl ShardingStrategy "no free lunch" MFU
        "Model FLOPs Utilization" "See this paper" NO_SHARD 1B SHARD_GRAD_OP NVLink NVSwitch "PCIe 5.0" FULL_SHARD
        "avoid `FULL_SHARD` without NVSwitch" SXM HYBRID_SHARD _HYBRID_SHARD_ZERO2 devices_mesh InfiniBand
        "100 Gb/s Ethernet" "below 7B" "slower than 100 Gb/s" OpenDiLoCo
    """,
}


def test_what_a_document_names_is_in_its_section():
    text = (ROOT / "docs" / "from-the-documents.md").read_text()
    sections = dict(re.findall(r"^## (.+?)\n(.+?)(?=^## |\Z)", text, re.MULTILINE | re.DOTALL))
    for document, names in NAMES.items():
        for name in shlex.split(names):
            pattern = rf"(?<![\w-]){re.escape(name)}(?!\w)"
            assert re.search(pattern, sections[document] + sections[SHARED]), (document, name)


def prose(page):
    """The page without its blocks of code, whose `#` starts a comment."""
    return re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)


def anchors(page):
    """As GitHub makes them: the heading in lower case, without punctuation, with hyphens for spaces."""
    found = []
    for heading in re.findall(r"^#+ +(.+?) *$", prose(page), re.MULTILINE):
        heading = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading)
        found.append(re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-"))
    return found


def test_links_inside_the_repository_lead_somewhere():
    for page in PAGES:
        for file, anchor in re.findall(r"\]\((?!https?://)([^)\s#]*)#?([^)\s]*)\)", prose(page)):
            target = (page.parent / file).resolve() if file else page
            assert target.exists() and (not anchor or anchor in anchors(target)), (page.name, file, anchor)


def test_every_table_renders():
    """GitHub cuts off or fills up rows with other numbers of cells than the head. A bar behind a backslash is text."""
    for page in [*PAGES, ROOT / "tests" / "README.md"]:
        for table in re.findall(r"^\|.+\|$(?:\n\|.*$)+", prose(page), re.MULTILINE):
            head, ruler, *rows = [re.split(r"(?<!\\)\|", row.strip())[1:-1] for row in table.splitlines()]
            assert all(re.fullmatch(r" *:?-+:? *", cell) for cell in ruler), (page.name, head)
            assert {len(row) for row in (ruler, *rows)} == {len(head)}, (page.name, head)


def test_the_lines_of_fsdp_are_those_of_the_script():
    [lines] = re.findall(r"```python\n(.+?)```", (ROOT / "README.md").read_text(), re.S)
    assert lines in (ROOT / "lm_multinode.py").read_text()
