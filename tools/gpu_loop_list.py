"""The steps of `tools/gpu-check --loop`, in the order of what would be learned first.

Engine and trainer together on one GPU, each step with its limit in seconds; `least_s` is an
estimate of its seconds: with less left it is not begun.  Nobody has run them on a card.
"""

from __future__ import annotations

from functools import partial

from tools.gpu_check_list import Check

_FILE, _FIGURES = "test_loop_gpu.py", "test_loop_figures_gpu.py"
_RUN = "test_a_run_publishes_by"
_GRAPHS = "engines are on the CPU, which has no CUDA graphs"
_PARTS = "`--parts --double` runs it"
_BACKENDS = "engines are on the CPU, which has one backend of attention"
step = partial(Check, file=_FILE, size="loop")

LOOP = (
    step("libraries", "a bf16 product, attention, SGLang's kernels, Transformer Engine or none",
         tests=("test_a_product_and_an_attention_call", "test_kernels_of_sglang",
                "test_transformer_engine_is_whole_or_absent"),
         on_double=("test_a_product_and_an_attention_call",
                    "test_transformer_engine_is_whole_or_absent"), limit_s=60),
    step("token-eager", "an engine of a tiny model to its first recorded token, without graphs",
         tests=("test_first_recorded_token[eager]",), limit_s=150, least_s=45),
    step("token-triton", "the same with Triton's attention, in fp32",
         tests=("test_first_recorded_token[eager-triton]",), on_double=(), absent=_BACKENDS,
         limit_s=100, least_s=40),
    step("token-graphs", "with CUDA graphs, SGLang's choice of attention",
         tests=("test_first_recorded_token[graphs]",), on_double=(), absent=_GRAPHS,
         limit_s=150, least_s=60),
    step("token-graphs-triton", "with CUDA graphs and Triton's attention, in fp32",
         tests=("test_first_recorded_token[graphs-triton]",), on_double=(), absent=_GRAPHS,
         limit_s=120, least_s=50),
    step("records", "recorded routes against transformers on the GPU; control: shifted rows",
         tests=("test_records_are_those_of_transformers",), limit_s=60),
    step("trainer", "the trainer's forward pass under these records, with both replays, one, none",
         tests=("test_trainer_agrees_under_the_records",), limit_s=150, least_s=30),
    step("quickstart", "40 steps of the quickstart, published by cuda_ipc: the reward rises",
         tests=("test_quickstart_learns",), limit_s=270, least_s=90),
    step("publish-shm", "a run that publishes by shm: digests of all buckets are equal",
         tests=(f"{_RUN}[shm]",), on_double=("test_digests_of_a_publish",),
         limit_s=120, least_s=45),
    step("publish-cuda-ipc", "a run that publishes by cuda_ipc",
         tests=(f"{_RUN}[cuda_ipc]",), on_double=(),
         absent="engines are on the CPU; publish-shm has both transports in one process",
         limit_s=120, least_s=45),
    step("turns", "engine and trainer take turns with the GPU",
         tests=("test_turns_with_one_device",), limit_s=150, least_s=50),
    step("401m", "ten steps of a random model of smollm2-moe's shape, made there",
         tests=("test_a_model_of_401_million",), limit_s=200, least_s=80),
    step("lora", "adapters, merged into what the engine serves",
         tests=("test_adapters",), limit_s=120, least_s=50),
    step("kills", "SIGKILL of the engine and of the trainer: the run makes its steps",
         tests=("test_a_run_outlives_its_engine_and_its_trainer",), limit_s=240, least_s=100),
    step("figure-step", "tokens/s of a trainer of 1.8e9 parameters with local layers, no replay",
         file="test_trainer_gpu.py", tests=("test_step[none]",), on_double=(), absent=_PARTS,
         limit_s=120, least_s=30),
    step("figure-replay", "the same with routes and sampling masks replayed",
         file="test_trainer_gpu.py", tests=("test_step[both]",), on_double=(), absent=_PARTS,
         limit_s=120, least_s=30),
    step("figure-layers", "401M trained beside megatron-core alone: Transformer Engine, local",
         file=_FIGURES, tests=("test_trainer_beside_megatron",), limit_s=200, least_s=60),
    step("figure-engine-64", "401M, 64 requests of 256 tokens: the whole path beside bare SGLang",
         file=_FIGURES, tests=("test_engine_beside_sglang[8]",), on_double=(),
         absent="its arms are compared on the CPU by bench/bare.py", limit_s=240, least_s=100),
    step("figure-engine-512", "the same with 512 requests",
         file=_FIGURES, tests=("test_engine_beside_sglang[64]",), on_double=(),
         absent="its arms are compared on the CPU by bench/bare.py", limit_s=300, least_s=120),
    step("figure-publish", "a publish of 1.8e9 parameters beside the copies of the bus",
         file="test_publish_gpu.py", tests=("test_commit",), on_double=(), absent=_PARTS,
         limit_s=120, least_s=30),
    step("figure-turns", "a step in turns beside a step of a shared GPU",
         file=_FIGURES, tests=("test_turns_beside_shared",), on_double=(),
         absent="a ratio of one CPU says nothing; turns has its run", limit_s=240, least_s=90),
    step("figure-head", "the head with sampling masks beside all logits: time of host and GPU",
         file="test_head_gpu.py", tests=("test_speed_beside_all_logits",), on_double=(),
         absent=_PARTS, limit_s=120, least_s=30),
)  # fmt: skip
