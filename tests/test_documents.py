"""What the four documents name can be found here, and links inside the documentation lead somewhere."""

import re

import pytest
from conftest import ROOT
from will_it_fit import rows

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
# Names from the documents, by document: who searches for one must find it, spelled like this.
NAMES = {
    "t5": """
        transformer_auto_wrap_policy transformer_layer_cls enable_wrap T5Block MixedPrecision param_dtype reduce_dtype
        buffer_dtype fpSixteen bfSixteen fp32_policy grad_bf16 bf16_ready device_id ShardingStrategy SHARD_GRAD_OP
        FULL_SHARD backward_prefetch BACKWARD_PRE BACKWARD_POST FullStateDictConfig offload_to_cpu rank0_only
        StateDictType.FULL_STATE_DICT FSDP.state_dict_type checkpoint_wrapper apply_activation_checkpointing
        CheckpointImpl setup cleanup setup_model get_date_of_run format_metrics_to_gb fsdp_main LOCAL_RANK WORLD_SIZE
        --track_memory --run_validation --no-cuda --test-batch-size wikihowAll.csv wikihowSep.csv T5-model- 2-10%
        summarization_dataset.py torchrun StepLR
    """,
    "xpu": """
        intel_extension_for_pytorch oneccl_bindings_for_pytorch ccl torch.xpu.set_device device_ids MASTER_ADDR
        MASTER_PORT 12355 mp.spawn size_based_auto_wrap_policy CPUOffload BackwardPrefetch DistributedSampler set_epoch
        Adadelta torch.xpu.Event torch.xpu.device_count mnist_cnn.pt FSDP_mnist_xpu.py --gamma --save-model
    """,
    "notebook": """
        ShallowNet DeepNet count_params 1,199,882 94,104,234 get_free_addr get_free_port min_num_params NCCL_P2P_LVL
        persistent_workers num_workers memory_allocated train_dist test_dist is_master mps 0.9895 0.9914
    """,
    "multi-node": """
        split_dataset_by_node no_sync SPMD DDP NO_SHARD HYBRID_SHARD _HYBRID_SHARD_ZERO2 devices_mesh MFU RDZV_ENDPOINT
        MY_RANK RANK ping http.server curl --nnodes NVLink NVSwitch SXM InfiniBand OpenDiLoCo C4 ssh
    """,
}


PAIRS = [(document, name) for document, names in NAMES.items() for name in names.split()]


@pytest.mark.parametrize(("document", "name"), PAIRS)
def test_what_a_document_names_is_found(document, name):
    texts = "\n".join(path.read_text() for path in (*PAGES, *ROOT.glob("*.py")))
    assert re.search(rf"(?<![\w-]){re.escape(name)}(?!\w)", texts), f"nothing says what became of {name}"


def prose(page):
    """The page without its blocks of code, whose `#` starts a comment."""
    return re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)


def anchors(page):
    """As GitHub makes them: the heading in lower case, without punctuation, with hyphens; a second one gets -1."""
    found = []
    for heading in re.findall(r"^#+ +(.+?) *$", prose(page), re.MULTILINE):
        heading = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading)
        anchor = re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")
        count = sum(re.fullmatch(rf"{re.escape(anchor)}(-\d+)?", other) is not None for other in found)
        found.append(f"{anchor}-{count}" if count else anchor)
    return found


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_inside_the_repository_lead_somewhere(page):
    broken = []
    for link in re.findall(r"\]\(([^)\s]+)\)", prose(page)):
        if link.startswith(("http://", "https://")):
            continue
        file, _, anchor = link.partition("#")
        target = (page.parent / file).resolve() if file else page
        if not target.exists() or (anchor and anchor not in anchors(target)):
            broken.append(link)
    assert not broken


def test_the_page_on_memory_has_the_table_of_its_benchmark():
    page = (ROOT / "docs" / "will-it-fit.md").read_text()
    for row in rows():
        assert f"| {' | '.join(row.values())} |\n" in page


def test_anchors_are_githubs(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("# `a_b.py`: what, then?\n```bash\n# no heading\n```\n## Same\n## Same\n## [Link](x.md) - end\n")
    assert anchors(page) == ["a_bpy-what-then", "same", "same-1", "link---end"]
