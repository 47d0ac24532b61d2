"""The capacity calculator against real engines' start-up logs and published wrong answers.

Both tables are checked whole: each row has a check, and the checks count their rows.
"""

import csv
import json
import re
import tomllib
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
from decodelab.predict import (
    HARDWARE,
    KV_FORMATS,
    SHAPES,
    Experts,
    ModelShape,
    UnknownDeviceError,
    decode_step,
    find_hardware,
    kv_blocks,
    kv_pool,
    kv_pool_free,
    kv_pool_static,
    kv_tokens,
    weight_bytes,
)
from decodelab.predict.quantization import stage_weight_bytes

DATA = Path(__file__).parent / "data"
GIB = 2**30
TABLE = tomllib.loads((DATA / "kv_log_shapes.toml").read_text(encoding="utf-8"))
LLAMA_8B, LLAMA_7B = SHAPES["Llama-3.1-8B"], SHAPES["Llama-2-7B"]


def read(name):
    rows = csv.DictReader((DATA / name).read_text(encoding="utf-8").splitlines())
    return {row["id"]: row for row in rows}


def config(path):
    return ModelShape.from_config(json.loads((DATA / path).read_text(encoding="utf-8")))


def shape_of(model):
    fields = {k: v for k, v in TABLE[model].items() if k not in ("other_parameters", "state")}
    if "config" in fields:
        return config(fields["config"])
    if "experts" in fields:
        fields["experts"] = Experts(**fields["experts"])
    if "state" in TABLE[model]:  # three recurrent layers, then one that keeps KV
        fields["windows"] = (0, 0, 0, None) * (fields["layers"] // 4)
    return ModelShape(**fields)


LOGS = read("kv_startup_logs.csv")
GEMMA_27B = config("configs_reduced/google--gemma-3-27b.json")
DEEPSEEK = config("hf_configs/deepseek-ai--DeepSeek-R1.json")


def number(text):
    return float(text) if text else None


class Log:
    """One row with what a check needs, in bytes and tokens."""

    def __init__(self, row):
        self.row, self.id = row, row["id"]
        self.shape = shape_of(row["model"]) if row["model"] in TABLE else None
        self.tp, self.pp = int(row["tp"] or 1), int(row["pp"] or 1)
        kind = row["kv_dtype"].split()[0].split("_e4m3")[0].replace("f32", "fp32")
        self.element = KV_FORMATS.get(kind, 2)  # "auto" is the 16 bits of the weights
        self.block_size = int(row["block_size"] or 16)
        self.context = int(row["max_model_len"] or 0)
        self.pool = (number(row["kv_gib_per_gpu"]) or 0) * GIB
        self.lo, self.hi = (number(row[f"expect_tokens_{end}"]) for end in ("lo", "hi"))

    def cut(self, pool=None, shape=None, **how):
        how = {"pipeline_parallel": self.pp, "round_up": "TensorRT" in self.row["engine"]} | how
        pool = self.pool if pool is None else pool
        return kv_blocks(shape or self.shape, pool, self.block_size, self.element, self.tp, **how)

    def printed_blocks(self, wrong_shape=lambda shape: shape, **how):
        """The pool that has as many blocks as the engine printed, to the byte."""
        bytes_of_blocks = int(self.row["kv_blocks"]) * self.cut(GIB).block_bytes
        return self.cut(bytes_of_blocks, wrong_shape(self.shape), **how)


def logs(condition):
    return [Log(row) for row in LOGS.values() if condition(row)]


EXACT = logs(lambda row: row["tokens_check"] == "exact")
MISMATCH = logs(lambda row: row["tokens_check"] == "MISMATCH" and row["kv_gib_per_gpu"])
RATES = logs(lambda row: row["bytes_per_token_per_gpu"])
BUDGETS = logs(lambda row: row["activation_gib"] and row["total_gib"])
CONCURRENT = logs(lambda row: row["concurrency_check"] == "exact" and row["kv_blocks"])
HYBRIDS = logs(lambda row: row["concurrency_check"] == "exact" and not row["kv_blocks"])
BLOCKS = logs(lambda row: row["kv_blocks"])
WEIGHTS = logs(lambda row: row["weights_gib"])


def by_id(log):
    return log.id[:60]


def test_every_log_has_a_check():
    counts = {
        "rows": len(LOGS),
        "tokens": len(EXACT),
        "tokens, mismatch": len(MISMATCH),
        "rates": len(RATES),
        "budgets": len(BUDGETS),
        "concurrency": len(CONCURRENT),
        "hybrids": len(HYBRIDS),
        "blocks": len(BLOCKS),
        "weights": len(WEIGHTS),
    }
    assert counts == {
        "rows": 51,
        "tokens": 38,
        "tokens, mismatch": 3,
        "rates": 43,
        "budgets": 36,
        "concurrency": 34,
        "hybrids": 3,
        "blocks": 39,
        "weights": 39,
    }
    checked = EXACT + MISMATCH + RATES + BUDGETS + CONCURRENT + HYBRIDS + BLOCKS + WEIGHTS
    assert LOGS.keys() - {log.id for log in checked} == {"vllm-40691"}  # a test of its own, below


# -- what the logs say -----------------------------------------------------------------------


@pytest.mark.parametrize("log", RATES, ids=by_id)
def test_bytes_per_token_on_each_gpu_are_the_engine_s(log):
    rate = log.shape.kv_bytes_per_token(log.element, log.tp) / log.pp
    assert rate == float(log.row["bytes_per_token_per_gpu"])


@pytest.mark.parametrize("log", EXACT, ids=by_id)
def test_the_printed_gib_hold_the_printed_tokens(log):
    assert log.lo <= log.cut().tokens <= log.hi
    least, most = (log.cut(log.pool + half * GIB).tokens for half in (-0.005, 0.005))
    assert least <= int(log.row["kv_tokens"]) <= most


@pytest.mark.parametrize("log", BUDGETS, ids=by_id)
def test_the_pool_is_what_the_engine_leaves_for_it(log):
    """Four figures rounded to 0.01 GiB each."""
    names = ("total", "weights", "activation", "non_torch")
    total, *held = (float(log.row[f"{name}_gib"]) * GIB for name in names)
    pool = kv_pool(total, float(log.row["gpu_memory_utilization"]), *held)
    # The four-stage run prints lines of different ranks: 0.05 GiB apart.
    slack = 0.055 if log.pp == 4 else 0.02 if log.row["kv_tokens"] else 0.01
    assert pool / GIB == pytest.approx(float(log.row["kv_gib_per_gpu"]), abs=slack)
    if log.row["tokens_check"] == "exact":
        least, most = (log.cut(pool + half * GIB).tokens for half in (-0.02, 0.02))
        assert least <= int(log.row["kv_tokens"]) <= most


@pytest.mark.parametrize("log", CONCURRENT, ids=by_id)
def test_concurrency_is_the_engine_s_to_the_hundredth(log):
    concurrency = log.printed_blocks().concurrency(log.context)
    assert concurrency == pytest.approx(float(log.row["max_concurrency"]), abs=0.0051)
    assert log.printed_blocks().sequences(log.context) == int(concurrency)


@pytest.mark.parametrize("log", BLOCKS, ids=by_id)
def test_blocks_hold_the_printed_tokens(log):
    blocks = int(log.row["kv_blocks"])
    if log.shape is None:  # DeepSeek-V2 before its latent was cached: the blocks alone are known
        assert (log.id, blocks * log.block_size) == ("dsv2-83", int(log.row["kv_tokens"]))
        return
    assert log.printed_blocks().tokens == int(log.row["kv_tokens"])
    if log.row["tokens_check"] == "exact":
        least, most = (log.cut(log.pool + half * GIB).blocks for half in (-0.005, 0.005))
        assert least <= blocks <= most


def test_a_request_longer_than_the_pool_does_not_fit_once():
    log = Log(LOGS["vllm-10517-29k"])
    assert log.printed_blocks().sequences(log.context) == 0
    assert log.printed_blocks().context(1) == 23648


# Figures that the rows print outside the columns of the checks above.


def test_a_latent_is_copied_to_all_eight_gpus():
    log = Log(LOGS["aisim-263"])
    pool = int(log.row["kv_tokens"]) * log.shape.kv_bytes_per_token(2, 8)
    assert pool / GIB == pytest.approx(33.3, abs=0.05)
    h200 = HARDWARE["NVIDIA H200 SXM"].capacity_bytes
    static = kv_pool_static(h200, 0.82, weight_bytes(log.shape, "fp8", 8))
    assert static == pytest.approx(pool, rel=0.1)  # the engine's own buffers are in neither figure


def test_sglang_s_static_fraction_holds_weights_and_pool():
    """153 GiB of KV and 57 of weights in 0.911 of "230 GB", which are GiB and rounded."""
    log = Log(LOGS["sglang-18263"])
    weights = float(log.row["weights_gib"]) * GIB
    pools = [kv_pool_static(free * GIB, 0.911, weights) for free in (229.5, 230.5)]
    assert pools[0] <= log.pool <= pools[1]
    assert kv_pool_static("230.5 GB", 0.911, weights) < log.pool


def test_tensorrt_llm_takes_a_fraction_of_what_is_free_and_a10_s_blocks_were_tokens():
    log = Log(LOGS["trtllm-224"])
    pool = int(log.row["kv_tokens"]) * log.shape.kv_bytes_per_token()
    assert pool / GIB == pytest.approx(5.23, abs=0.005)
    a10 = HARDWARE["NVIDIA A10"].capacity_bytes
    weights = weight_bytes(log.shape, "fp16")
    activations = a10 - weights - pool / 0.95
    assert 0 < activations / GIB < 5
    assert kv_pool_free(a10, 0.95, weights, activations) == pytest.approx(pool)
    as_blocks = 8348 * 16 * log.shape.kv_bytes_per_token()
    assert as_blocks / GIB == pytest.approx(65.2, abs=0.05)
    assert as_blocks > 2 * a10


def test_tensorrt_llm_rounds_its_blocks_up_and_the_others_down():
    log = Log(LOGS["trtllm-1400"])
    assert log.cut().blocks == log.cut(round_up=False).blocks == 1036  # 64.75 GiB to the byte
    assert log.cut(log.pool + 1).blocks == 1037
    assert log.cut(log.pool + 1, round_up=False).blocks == 1036


# -- the logs that do not agree with themselves, and why ---------------------------------------


def test_each_mismatch_names_its_reason():
    reasons = {log.id: log.row["note"] for log in MISMATCH}
    stages = "PP: reported GiB is rank 0, pool is the minimum over stages"
    ranks = "the minimum over ranks while the GiB line is per rank"
    assert Counter(stages in why or ranks in why for why in reasons.values()) == {True: 3}
    for log in MISMATCH:  # the printed GiB would hold more than the printed tokens
        assert log.lo <= log.cut().tokens <= log.hi
        assert int(log.row["kv_tokens"]) < log.lo


@pytest.mark.parametrize("log", [log for log in MISMATCH if log.pp > 1], ids=by_id)
def test_pipeline_stages_explain_theirs(log):
    """The last stage computes logits as the one-GPU run does (1.89 GiB); the first does not.

    Its non-torch memory is not printed: between the first stage's 0.07 and the one-GPU run's 0.25.
    """
    first, *_, last = stage_weight_bytes(log.shape, "bf16", pipeline_parallel=log.pp)
    assert first / GIB == pytest.approx(float(log.row["weights_gib"]), rel=0.01)
    rotary = float(log.row["weights_gib"]) * GIB - first
    total = float(log.row["total_gib"]) * GIB
    pools = [
        kv_pool(total, 0.95, last + rotary, "1.89 GiB", f"{other} GiB") for other in (0.25, 0.07)
    ]
    least, most = (log.cut(pool).tokens for pool in pools)
    assert least <= int(log.row["kv_tokens"]) <= most
    assert most < log.lo


def test_the_smallest_rank_explains_its_own():
    log = Log(LOGS["vllm-21348-vllm"])
    smallest = int(log.row["kv_blocks"]) * log.cut().block_bytes
    assert log.cut(min(log.pool, smallest)).tokens == int(log.row["kv_tokens"])
    assert smallest / log.pool == pytest.approx(0.989, abs=0.001)


def state_bytes(model, tp):
    """A Gated DeltaNet layer's state on one GPU: fp32, and its convolution's inputs at 16 bit."""
    state = TABLE[model]["state"]
    width = state["head_dim"]
    channels = (2 * state["key_heads"] + state["value_heads"]) * width
    memory = state["value_heads"] * width * width * 4
    return (memory + channels * (state["convolution"] - 1) * 2) // tp


# The first row's model is not named; its figures are Qwen3.5-27B's to the token.
HYBRID_MODELS = {
    "1cat-237": ("Qwen3.5-27B", 784),
    "club3090-612": ("Qwen3.6-35B-A3B", 2096),
    "talos-1995": ("Qwen3.5-27B", 1568),
}


@pytest.mark.parametrize("log", HYBRIDS, ids=by_id)
def test_recurrent_states_take_blocks_of_the_same_pool(log):
    """A block of one layer must hold a state, so blocks are large, and prefix caching keeps two.

    These versions print concurrency x max_model_len as tokens.
    """
    model, block_size = HYBRID_MODELS[log.id]
    state = state_bytes(model, log.tp)
    cut = log.cut(shape=shape_of(model), state_bytes=state, state_blocks=2)
    assert cut.block_size == block_size
    concurrency = cut.concurrency(log.context)
    assert concurrency == pytest.approx(float(log.row["max_concurrency"]), abs=0.0051)
    assert int(concurrency * log.context) == int(log.row["kv_tokens"])


def test_a_log_of_two_truths_is_explained_by_its_groups():
    """290,864 tokens at 32,768 are 8.88 sequences, and the log says 33.04.

    Four groups share 1,487 blocks of 784 tokens; only one of them grows with the context, but the
    token line divides by all four.
    """
    log = Log(LOGS["vllm-40691"])
    shape, state = shape_of("Qwen3.5-27B"), state_bytes("Qwen3.5-27B", 1)
    cut = log.cut(10**11, shape, state_bytes=state)._replace(blocks=1487)
    assert cut.block_size == 784
    assert cut.tokens == int(log.row["kv_tokens"])
    assert cut.tokens / log.context == pytest.approx(float(log.row["expect_concurrency"]), abs=0.01)
    assert cut.concurrency(log.context) == pytest.approx(
        float(log.row["max_concurrency"]), abs=0.0051
    )


# -- weights ---------------------------------------------------------------------------------

WEIGHT_FORMAT = {
    "bfloat16": "bf16", "float16": "fp16", "bf16/fp16": "fp16", "auto": "bf16", "fp8": "fp8",
    "compressed": "int8", "mxfp4": "mxfp4",
}  # fmt: skip


@pytest.mark.parametrize("log", WEIGHTS, ids=by_id)
def test_weights_are_within_one_percent_of_the_engine_s(log):
    """What is missing is mostly the table of rotary positions: 0.03 GiB at 131,072 positions.

    gpt-oss is the exception, and checked by itself.
    """
    name, printed = WEIGHT_FORMAT[log.row["weight_dtype"]], float(log.row["weights_gib"])
    other = 2 * TABLE[log.row["model"]].get("other_parameters", 0) / log.tp
    ours = (stage_weight_bytes(log.shape, name, log.tp, log.pp)[0] + other) / GIB
    if name == "mxfp4":
        assert ours == pytest.approx(printed, rel=0.09)
        assert ours < 0.99 * printed
    else:
        assert ours == pytest.approx(printed, rel=0.01)


@pytest.mark.parametrize(
    ("log_id", "expert_ffn", "rel"),
    [
        ("llmd-doc-gpt-oss-20b-tp1", 2880, 0.002),
        ("llmd-openai-gpt-oss-20b--h100-80gb--tp2pp1dp1--8192", 2 * 1472, 0.025),
    ],
)
def test_gpt_oss_fills_the_tiles_of_its_kernel(log_id, expert_ffn, rel):
    """Experts of 2880 x 2880 are padded: the hidden width to 3072, half an expert to 1472."""
    log = Log(LOGS[log_id])
    experts = replace(log.shape.experts, ffn=expert_ffn)
    padded = replace(log.shape, experts=experts)
    held = weight_bytes(padded, "mxfp4", log.tp)
    expert = sum(m.weights for m in padded.linears() if m.name.startswith("expert"))
    held += expert * (3072 / 2880 - 1) * 4.25 / 8 / log.tp
    assert held / GIB == pytest.approx(float(log.row["weights_gib"]), rel=rel)


# -- known-wrong calculators: each is refused by a row ------------------------------------------


def everything_windowed(shape):
    windows = [window for window in shape.windows or () if window]
    return replace(shape, windows=(windows[0],) * shape.layers) if windows else shape


def no_windows(shape):
    return replace(shape, windows=None)


def query_heads(shape):
    return replace(shape, kv_heads=shape.heads)


def hidden_over_heads(shape):
    return replace(shape, head_dim=shape.hidden // shape.heads)


def refused_tokens(wrong_shape=lambda shape: shape, scale=1.0):
    return {
        log.id
        for log in EXACT
        if not log.lo <= log.cut(log.pool * scale, wrong_shape(log.shape)).tokens <= log.hi
    }


def refused_concurrency(change=lambda cut: cut, **how):
    def ours(log):
        return change(log.printed_blocks(**how)).concurrency(log.context)

    return {
        log.id for log in CONCURRENT if abs(ours(log) - float(log.row["max_concurrency"])) > 0.0051
    }


def refused_rates(wrong):
    return {log.id for log in RATES if wrong(log) != float(log.row["bytes_per_token_per_gpu"])}


def refused_budgets(pool):
    names = ("total", "weights", "activation", "non_torch")
    return {
        log.id
        for log in BUDGETS
        if abs(
            pool(
                float(log.row["gpu_memory_utilization"]),
                *(float(log.row[f"{name}_gib"]) for name in names),
            )
            - float(log.row["kv_gib_per_gpu"])
        )
        > 0.055
    }


def no_block_over(cut):
    """Windows without the block that straddles."""

    class Wrong(type(cut)):
        def per_sequence(self, context):
            windowed = sum(groups for window, groups in self.groups if window)
            return super().per_sequence(context) - windowed

    return Wrong(*cut)


WRONG = {
    "query heads": lambda: refused_tokens(query_heads),
    "hidden / heads as head_dim": lambda: refused_tokens(hidden_over_heads),
    "GiB read as GB": lambda: refused_tokens(scale=1e9 / GIB),
    "K without V": lambda: refused_tokens(scale=2),
    "every layer windowed": lambda: refused_concurrency(wrong_shape=everything_windowed),
    "every layer full": lambda: refused_concurrency(wrong_shape=no_windows),
    "no block over a window's edge": lambda: refused_concurrency(no_block_over),
    "a window without the chunk being read": lambda: refused_concurrency(chunk=1),
    "a latent divided by tensor parallelism": lambda: refused_rates(
        lambda log: log.shape.kv_bytes_per_token(log.element, 1) / log.tp / log.pp
    ),
    "tensor parallelism ignored": lambda: refused_rates(
        lambda log: log.shape.kv_bytes_per_token(log.element) / log.pp
    ),
    "q8_0 without its scales": lambda: refused_rates(
        lambda log: log.shape.kv_bytes_per_token(int(log.element), log.tp) / log.pp
    ),
    "a fraction of what is free": lambda: refused_budgets(
        lambda share, total, *held: share * (total - sum(held))
    ),
    "activations forgotten": lambda: refused_budgets(
        lambda share, total, weights, activation, other: share * total - weights - other
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_known_wrong_calculator_is_refused_by_a_row(name):
    assert WRONG[name]()


def test_the_right_calculator_is_refused_by_none():
    assert not refused_tokens()
    assert not refused_concurrency()
    assert not refused_rates(lambda log: log.shape.kv_bytes_per_token(log.element, log.tp) / log.pp)
    assert not refused_budgets(lambda share, total, *held: share * total - sum(held))


# -- published wrong answers -------------------------------------------------------------------

CASES = read("wrong_calculators.csv")
QWEN3_06B = config("hf_configs/Qwen--Qwen3-0.6B.json")
QWEN_27B = shape_of("Qwen3.5-27B")
QWEN25_7B = shape_of("Qwen/Qwen2.5-7B-Instruct")
LLAMA_30B = shape_of("LLaMA-30B q4_1")
FALCON = config("configs_reduced/tiiuae--falcon-7b.json")
KIMI_K25 = replace(config("hf_configs/moonshotai--Kimi-K2-Instruct.json"), heads=64, kv_heads=64)
# 78 layers and one for predicting a second token, which the tool counts.
GLM_5 = replace(DEEPSEEK, layers=79, hidden=6144, heads=64, kv_heads=64, experts=None)
QWEN3_4B = replace(QWEN3_06B, layers=36, hidden=2560, heads=32, ffn=9728)
LLAMA_70B = config("configs_reduced/meta-llama--Llama-2-70b-hf.json")
MHA_70B = replace(LLAMA_70B, kv_heads=64)


def naive(shape, kv_heads=None, bits_as_bytes=2):
    """Every layer, hidden / heads as head_dim: KV bytes per token of the usual wrong calculator."""
    head_dim = shape.hidden // shape.heads
    return shape.layers * 2 * (kv_heads or shape.kv_heads) * head_dim * bits_as_bytes


def expanded(shape):
    """A latent model's KV per token if K and V are cached for each head."""
    per_head = shape.mla.qk_nope + shape.mla.qk_rope + shape.mla.v
    return shape.layers * shape.heads * per_head * 2


def agrees(value, printed):
    """Whether `value` rounds to the figure as printed."""
    digits = printed.replace(",", "")
    decimals = len(digits.partition(".")[2])
    return abs(value - float(digits)) <= 0.5 * 10**-decimals * (1 + 1e-9)


# id -> what we say, the right figure as printed, what a wrong formula says, the wrong figure as
# printed. The sizes that tools print as GB are GiB. None: the row gives no formula for it.
FIGURES = [
    ("G01", GEMMA_27B.kv_bytes(131072) / GIB, "10.41", naive(GEMMA_27B) * 131072 / GIB, "81.38"),
    ("G02", DEEPSEEK.kv_bytes(163840) / GIB, "10.72", naive(DEEPSEEK, 1) * 163840 / GIB, "2.08"),
    ("G03", QWEN3_06B.kv_bytes(40960) / GIB, "4.38", naive(QWEN3_06B) * 40960 / GIB, "2.19"),
    ("G04", QWEN_27B.kv_bytes(262144) / GIB, "16.00", naive(QWEN_27B) * 262144 / GIB, "53.25"),
    ("G05", KIMI_K25.kv_bytes(262144) / GIB, "17.16", naive(KIMI_K25, 1) * 262144 / GIB, "6.67"),
    ("G05", GLM_5.kv_bytes(202752) / GIB, "17.18", naive(GLM_5, 1) * 202752 / GIB, "5.73"),
    ("G06", FALCON.kv_bytes_per_token(), "8,192", None, "3,420"),
    ("G06", GIB / FALCON.kv_bytes_per_token(), "131,072", None, "3,420"),
    ("G07", QWEN25_7B.kv_bytes_per_token(), "57,344", naive(QWEN25_7B, 28, 8), "1,605,632"),
    ("G07", QWEN25_7B.kv_bytes_per_token(1), "28,672", naive(QWEN25_7B, 28, 8), "1,605,632"),
    ("G09", LLAMA_8B.kv_bytes_per_token(), "131,072", naive(LLAMA_8B, 32) / 131072, "4"),
    ("G10", QWEN3_4B.kv_bytes_per_token(), "147,456", QWEN3_4B.hidden / QWEN3_4B.heads, "80"),
    ("G27", LLAMA_7B.kv_bytes(4196) / GIB, "2.05", None, "5.6"),
    ("G28", LLAMA_30B.kv_bytes(512) / 2**20, "780", LLAMA_30B.kv_bytes(512, 4) / 2**20, "1560"),
    ("G29", DEEPSEEK.kv_bytes_per_token(), "70,272", expanded(DEEPSEEK), "4,997,120"),
    ("G31", LLAMA_7B.kv_bytes(32768) / GIB, "16", LLAMA_7B.kv_bytes(32768) / 32 / 2**20, "512"),
]
# Rows with no KV size of a model to compute: each has a test of its own.
OTHERS = {"G12", "G15", "G21", "G25", "G30", "G33", "G34", "G37", "G41"}


def test_every_published_wrong_answer_has_a_check():
    assert len(CASES) == 22
    assert {case[0] for case in FIGURES} | OTHERS == CASES.keys()
    tested = re.findall(r"test_(g\d\d)_", " ".join(globals()))
    assert {case.upper() for case in tested} == OTHERS


@pytest.mark.parametrize("figures", FIGURES, ids=lambda figures: figures[0])
def test_we_give_the_right_figure_and_not_the_published_wrong_one(figures):
    case, ours, right, formula, wrong = figures
    assert right in CASES[case]["right_value"]
    assert wrong in CASES[case]["wrong_output"]
    assert agrees(ours, right)
    assert not agrees(ours, wrong)
    if formula is not None:
        assert agrees(formula, wrong)
        assert not agrees(formula, right)


def test_falcon_s_wrong_figure_is_near_that_of_71_heads_and_no_v():
    """G06's author rounds: 3,420 where hidden x layers x 2 bytes gives 3,438."""
    assert 1e9 / (FALCON.hidden * FALCON.layers * 2) == pytest.approx(3420, rel=0.01)


def test_g12_a_step_reads_kv_heads_and_not_query_heads():
    a100 = HARDWARE["NVIDIA A100 80GB SXM"]
    for shape, times in ((LLAMA_70B, 8), (LLAMA_8B, 4)):
        assert f"{times}x" in CASES["G12"]["wrong_output"]
        read = decode_step(shape, a100, 1, 4096, check_memory=False).attention.bytes
        assert read == shape.kv_bytes(4096)
        assert query_heads(shape).kv_bytes(4096) == times * read


def test_g15_recurrent_layers_are_charged_a_state_and_no_kv():
    """24.83 GiB and 18.60 differ by q8_0 KV of 48 layers, less a state of fp32 for each of them.

    The rest of both, the weights of one mixed file, can't be computed from a shape.
    """
    everywhere = replace(QWEN_27B, windows=None)
    element = KV_FORMATS["q8_0"]
    kv = everywhere.kv_bytes(65536, element) - QWEN_27B.kv_bytes(65536, element)
    states = 48 * 4 * (48 * 128 * 128 + 3 * (2 * 16 + 48) * 128)
    assert (kv - states) / GIB == pytest.approx(24.83 - 18.60, abs=0.01)
    assert "24.83" in CASES["G15"]["wrong_output"]
    assert "18.60" in CASES["G15"]["right_value"]


def test_g21_the_cache_s_format_is_not_the_weights():
    pool = 29751 * 16 * LLAMA_8B.kv_bytes_per_token()  # the bf16 log of the same pool: 58.11 GiB
    assert pool / GIB == pytest.approx(58.11, abs=0.005)
    ours, wrong = (kv_tokens(LLAMA_8B, pool, bytes_per_element=size) for size in (1, 2))
    assert agrees(ours, "952,032")
    assert "952,032" in CASES["G21"]["right_value"]
    assert wrong == ours / 2 == pytest.approx(459_509, rel=0.04)  # its pool was 3.5% smaller too


def test_g25_the_weights_line_is_of_one_gpu_and_so_is_the_pool():
    shape = config("configs_reduced/Qwen--Qwen2.5-14B.json")
    assert weight_bytes(shape, "bf16", 2) / GIB == pytest.approx(13.9, rel=0.0105)
    both_less_one_gpu_s_weights = 2 * 23.08 - 13.9
    assert kv_tokens(shape, "7.465 GiB", tensor_parallel=2) == 81536
    assert "81,536" in CASES["G25"]["right_value"]
    assert both_less_one_gpu_s_weights == pytest.approx(31.8, abs=0.5)
    assert 23.08 - weight_bytes(shape, "bf16", 2) / GIB < 31.8 / 2


def test_g30_a_latent_is_the_same_on_each_of_eight_gpus():
    assert CASES["G30"]["right_value"] == "MLA dims"
    right = DEEPSEEK.layer_kv_bytes(2, 8)
    assert right == DEEPSEEK.layer_kv_bytes() == 576 * 2
    assert right != expanded(DEEPSEEK) / DEEPSEEK.layers / 8
    assert (
        kv_blocks(DEEPSEEK, "80 GiB", 16, 2, 8, pipeline_parallel=2).block_bytes == 16 * 31 * right
    )


def test_64_full_heads_take_80_gib():
    assert MHA_70B.kv_bytes(32768) / GIB == 80
    assert "80 GiB" in CASES["G31"]["cause"]


def test_g33_a_float32_llama_can_t_be_faster_than_its_weights_stream():
    """The bound is 76.4 tok/s at 256 cached tokens, and the two published speeds are above it."""
    a100 = HARDWARE["NVIDIA A100 80GB SXM"]
    bound = decode_step(LLAMA_7B, a100, 1, 256, weight_bytes=4, kv_bytes=4).tokens_per_second
    assert bound == pytest.approx(76.3, rel=0.002)
    assert "76.3" in CASES["G33"]["right_value"]
    speeds = [float(s) for s in re.findall(r"\d+\.\d+", CASES["G33"]["wrong_output"])]
    assert speeds == [90.78, 110.36]
    assert min(speeds) > bound
    half = decode_step(LLAMA_7B, a100, 1, 256).tokens_per_second
    assert max(speeds) < half  # they ran in 16 bits


def test_g34_peaks_are_dense_tensor_rates_and_unlisted_devices_are_refused():
    assert HARDWARE["NVIDIA H100 SXM"].peak("bf16") == pytest.approx(989e12, rel=0.001)
    assert "989 bf16" in CASES["G34"]["right_value"]
    assert "51.7" in CASES["G34"]["wrong_output"]
    for name in ("RTX A4000", "Tesla P100"):  # no row of ours, so no wrong bandwidth either
        with pytest.raises(UnknownDeviceError):
            find_hardware(name)


def test_g37_bandwidth_is_decimal():
    assert HARDWARE["NVIDIA H100 SXM"].bandwidth == 3350e9
    assert "3350" in CASES["G37"]["right_value"]
    assert HARDWARE["NVIDIA H100 SXM"].bandwidth != 3072e9 == 3 * 1024 * 1e9


def test_g41_all_users_speed_is_one_user_s_times_the_batch():
    step = decode_step(LLAMA_8B, HARDWARE["NVIDIA H100 SXM"], 32, 1024)
    assert step.tokens_per_second == pytest.approx(32 * step.tokens_per_second_per_user)
    assert agrees(72.5 * 32, "2320")
    assert "2320" in CASES["G41"]["right_value"]
    assert not agrees(72.5 * 32, "2268.8")
