"""The planner: what strategies need, which cards hold it, what it advises, and what it refuses."""

from __future__ import annotations

import json
import re
import socket
import subprocess
import sys
import textwrap
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from helpers import fit, memory
from helpers.fit import cards, configs, packed, strategies
from helpers.fit.__main__ import main

ROOT = Path(__file__).parent.parent
GIB = 2**30
WIDTH = 512


def build() -> nn.Module:
    layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU()) for _ in range(6)]
    return nn.Sequential(*layers, nn.Linear(WIDTH, 10))


def batch(rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.zeros(rows, WIDTH), torch.zeros(rows, dtype=torch.long)


def loss(model: nn.Module, both: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    return nn.functional.cross_entropy(model(both[0]), both[1])


def fused(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, fused=True)


def job(**changes: Any) -> strategies.Job:
    known = {"micro_batch": 256, "gpus": 8} | changes
    return strategies.Job(lambda dtype: build().to(dtype), batch, loss, fused, **known)


def ask(settings: Any, **options: Any) -> fit.Fit:
    return fit.module(build, batch, loss, settings, **({"optimizer": fused} | options))


@pytest.fixture(scope="module")
def found() -> dict[str, strategies.Estimate]:
    return strategies.estimates(job())


pytestmark = pytest.mark.filterwarnings("ignore:.*activation_checkpointing.*:FutureWarning")
COUNT = sum(p.numel() for p in build().parameters())


# --- strategies -----------------------------------------------------------------------------------------------------


def test_ddp_holds_its_gradients_twice_unless_they_live_in_the_buckets() -> None:
    beside, inside = (strategies.estimate(job(bucket_view=view), "ddp") for view in (False, True))
    assert beside.parts()["communication"] == pytest.approx(4 * COUNT, rel=0.01)
    assert inside.parts()["communication"] == 0
    assert inside.parts()["gradients"] == pytest.approx(4 * COUNT, rel=0.01)


def test_one_gpu_has_no_buckets_and_no_nccl_buffers() -> None:
    parts = strategies.estimate(job(gpus=1), "ddp").parts()
    assert parts["communication"] == 0
    assert parts["allowance"] == cards.CUDA_CONTEXT


def test_zero_divides_by_the_world_size_what_its_stage_says(found: dict[str, strategies.Estimate]) -> None:
    two, three = (found[name].points[256]["step//peak"] for name in ("zero2", "zero3"))
    assert two["weights"] == pytest.approx(4 * COUNT, rel=0.01)
    assert three["weights"] == pytest.approx(4 * COUNT / 8, rel=0.02)
    for parts in (two, three):
        assert parts["gradients"] == pytest.approx(4 * COUNT / 8, rel=0.02)
        assert parts["optimizer"] == pytest.approx(8 * COUNT / 8, rel=0.02)


def test_below_fp32_deepspeed_keeps_a_master_copy_and_fp32_state() -> None:
    """Twelve bytes a parameter, divided among the ranks, whatever the dtype of the weights."""
    parts = strategies.estimate(job(precision="bf16"), "zero3").points[256]["step//peak"]
    assert parts["weights"] == pytest.approx(2 * COUNT / 8, rel=0.02)
    assert parts["optimizer"] == pytest.approx(12 * COUNT / 8, rel=0.02)


@pytest.mark.parametrize("gpus", [2, 8, 13])
def test_fsdp2_shards_at_any_world_size(gpus: int) -> None:
    parts = strategies.estimate(job(gpus=gpus), "fsdp2").points[256]["step//peak"]
    assert parts["weights"] == pytest.approx(4 * COUNT / gpus, rel=0.03)
    assert parts["gradients"] == pytest.approx(4 * COUNT / gpus, rel=0.03)
    assert parts["optimizer"] == pytest.approx(8 * COUNT / gpus, rel=0.03)


def test_fsdp2_gathers_a_few_blocks_not_the_model(found: dict[str, strategies.Estimate]) -> None:
    gathered = found["fsdp2"].points[256]["forward//peak"]["communication"]
    assert 4 * WIDTH**2 < gathered < 0.6 * 4 * COUNT


def test_mixed_precision_keeps_fp32_weights_and_fsdp2_gathers_bf16() -> None:
    whole, half = (strategies.estimate(job(precision=p), "fsdp2").points[256] for p in ("fp32", "mixed"))
    assert half["step//peak"]["weights"] == whole["step//peak"]["weights"]
    assert half["forward//peak"]["communication"] < 0.7 * whole["forward//peak"]["communication"]


def count_on_two_real_ranks() -> list[dict[str, int]]:
    program = """
        import json, sys, torch, torch.distributed as dist
        from torch.distributed.fsdp import fully_shard
        from helpers import memory
        from helpers.fit import depth
        from tests.test_fit import batch, build, fused, loss
        rank, port = int(sys.argv[1]), sys.argv[2]
        dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
        mesh = dist.init_device_mesh("cpu", (2,))
        def shard(model):
            for block in depth.blocks(model):
                fully_shard(block, mesh=mesh)
            return fully_shard(model, mesh=mesh)
        peak = memory.trace(build, batch, loss, 256, optimizer=fused, wrap=shard, fake=False)
        print(json.dumps(dict(peak.bytes)))
        dist.destroy_process_group()
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(program), str(rank), port],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in (0, 1)
    ]
    return [json.loads(rank.communicate(timeout=150)[0].splitlines()[-1]) for rank in ranks]


def test_the_fake_world_of_fsdp2_counts_what_two_real_ranks_count() -> None:
    parts = strategies.estimate(job(gpus=2), "fsdp2").parts()
    for real in count_on_two_real_ranks():
        assert sum(real.values()) == pytest.approx(sum(parts.values()) - parts["allowance"], rel=0.01)


# --- answers --------------------------------------------------------------------------------------------------------


def test_the_largest_micro_batch_is_the_last_whose_own_trace_fits() -> None:
    small = cards.Card("small", 2.5, 1)
    largest = strategies.estimate(job(), "ddp").largest_micro_batch(small)
    assert largest > 1000
    assert strategies.estimate(job(micro_batch=largest), "ddp").fits(small)
    assert not strategies.estimate(job(micro_batch=int(1.05 * largest)), "ddp").fits(small)


def test_the_answer_reads_the_settings_that_train_and_says_the_batch_identity() -> None:
    answer = ask(fit.Batch(micro_batch=64, gpus=4, accumulation=2, hardware="4xA100-40"))
    assert answer.fits
    assert answer.card == cards.CARDS["A100-40"]
    assert answer.global_batch == 512
    assert "micro 64 x accumulation 2 x world 4 = global 512" in answer.summary()
    assert "DDP fits on A100-40" in answer.summary()


def test_the_table_has_every_strategy_and_card() -> None:
    rows = ask(fit.Batch(64, 8, 1, "8xH100")).rows()
    assert [row["strategy"] for row in rows] == ["DDP", "FSDP2", "ZeRO-2", "ZeRO-3"]
    assert all({"A10", "A100-40", "A100-80", "H100", "H200", "B200"} < row.keys() for row in rows)
    assert all(row["A10"] < row["A100-40"] < row["H200"] < row["B200"] for row in rows)


def test_too_large_a_micro_batch_is_answered_by_accumulation_at_the_same_global_batch() -> None:
    answer = ask(fit.Batch(2**21, 8, 1, "8xA10"), strategies=("ddp",))
    assert answer.fits is False
    assert answer.advice[0].startswith("DDP does not fit on A10")
    assert "with accumulation" in answer.advice[1]
    assert answer.advice[1].endswith("fits")


def test_hardware_that_is_no_card_gets_the_smallest_card_that_holds_the_job() -> None:
    answer = ask(fit.Batch(64, 2, 1, "2 CPU processes"))
    assert answer.fits is None
    assert answer.advice == ["The smallest card for DDP is A10"]


def test_hours_follow_from_six_flop_per_parameter_and_sample_and_dollars_from_the_price() -> None:
    answer = ask(fit.Batch(64, 8, 1, "8xH100"), samples=1e12, utilisation=0.5, price=3.0)
    hours = 6 * COUNT * 1e12 / (989e12 * 0.5 * 8) / 3600
    assert answer.cost.hours(cards.CARDS["H100"], 8) == pytest.approx(hours)
    assert f"{hours * 8 * 3:,.2f} at 3 per GPU-hour" in answer.summary()
    assert "per GPU-hour" not in ask(fit.Batch(64, 8, 1, "8xH100")).summary()


def test_the_picture_has_a_bar_per_strategy_and_a_line_for_the_card_asked_for() -> None:
    pytest.importorskip("matplotlib", reason="the picture needs matplotlib")
    answer = ask(fit.Batch(64, 8, 1, "8xH100"))
    (axes,) = answer.plot().axes
    assert [label.get_text() for label in axes.get_yticklabels()] == ["DDP", "FSDP2", "ZeRO-2", "ZeRO-3"]
    assert "GiB" in axes.get_xlabel()
    drawn = sum(bar.get_width() for bar in axes.patches if bar.get_y() == pytest.approx(-0.31))
    assert drawn == pytest.approx(answer.estimates["ddp"].total() / GIB, rel=0.01)
    assert any("H100" in text.get_text() for text in axes.texts)


def test_the_answer_shows_itself_in_a_notebook_and_escapes_the_title() -> None:
    page = ask(fit.Batch(64, 8, 1, "8xH100"), title="<b>mine</b>")._repr_html_()
    assert "&lt;b&gt;mine" in page
    assert "<table>" in page


# --- what bitsandbytes keeps ----------------------------------------------------------------------------------------


def held(tensors: Any) -> int:
    return sum(t.numel() * t.element_size() for t in tensors)


def test_four_bit_weights_take_half_a_byte_and_a_byte_of_scale_per_64_twice_quantised() -> None:
    layer = packed.Linear4bit(nn.Linear(1024, 4096, bias=False, dtype=torch.bfloat16, device="meta"))
    count = 1024 * 4096
    books = 4 * (16 + 256 + 1)
    assert held([*layer.parameters(), *layer.buffers()]) == count // 2 + count // 64 + 4 * count // (64 * 256) + books


def test_four_bit_weights_take_what_bitsandbytes_takes() -> None:
    functional = pytest.importorskip("bitsandbytes.functional", reason="compares with bitsandbytes itself")
    weight = torch.randn(1000, 768, dtype=torch.bfloat16)
    quantised, state = functional.quantize_4bit(weight, quant_type="nf4", compress_statistics=True)
    theirs = held([quantised, state.absmax, state.code, state.offset, state.state2.absmax, state.state2.code])
    layer = packed.Linear4bit(nn.Linear(768, 1000, bias=False, dtype=torch.bfloat16))
    assert held([*layer.parameters(), *layer.buffers()]) == theirs


def test_eight_bit_state_is_what_bitsandbytes_makes() -> None:
    optim = pytest.importorskip("bitsandbytes.optim", reason="compares with bitsandbytes itself")
    sizes = []
    for make in (lambda ps: optim.AdamW(ps, optim_bits=8), packed.AdamW8bit):
        parameters = [nn.Parameter(torch.randn(shape)) for shape in ((1000, 301), (63, 64), (64, 64))]
        for parameter in parameters:
            parameter.grad = torch.zeros_like(parameter)
        optimizer = make(parameters)
        optimizer.step()
        sizes.append([held(v for k, v in optimizer.state[p].items() if k[:4] in ("stat", "absm")) for p in parameters])
    assert sizes[0] == sizes[1]


def test_eight_bit_state_is_two_bytes_an_element_and_eight_per_block() -> None:
    parameter = nn.Parameter(torch.zeros(256, 1024))
    parameter.grad = torch.zeros_like(parameter)
    optimizer = packed.AdamW8bit([parameter])
    optimizer.step()
    assert held(optimizer.state[parameter].values()) == 256 * 1024 * 2 + 1024 * 2 * 4


# --- language models ------------------------------------------------------------------------------------------------

LLAMA = {
    "model_type": "llama", "vocab_size": 2048, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 6,
    "num_attention_heads": 8, "num_key_value_heads": 4, "max_position_embeddings": 512, "tie_word_embeddings": False,
}  # fmt: skip
GPT_OSS = {
    "model_type": "gpt_oss", "vocab_size": 2048, "hidden_size": 128, "intermediate_size": 128, "num_hidden_layers": 6,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "num_local_experts": 4,
    "num_experts_per_tok": 2, "sliding_window": 64, "max_position_embeddings": 512,
    "quantization_config": {"quant_method": "mxfp4"},
}  # fmt: skip
OLMO = {
    "model_type": "olmo3", "vocab_size": 2048, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 6,
    "num_attention_heads": 4, "sliding_window": 64, "max_position_embeddings": 512, "pad_token_id": 0,
}  # fmt: skip
SMALL = LLAMA | {"num_hidden_layers": 2}
PUBLISHED = {  # billions of parameters, as the model cards and reports state them
    "gpt-oss-20b": 20.91, "gpt-oss-120b": 116.83, "llama-3.2-1b": 1.236, "llama-3.2-3b": 3.213, "llama-3.1-8b": 8.030,
    "llama-3.1-70b": 70.55, "olmo-3-7b": 7.298, "olmo-3-32b": 32.23, "qwen3-4b": 4.022, "smollm2-135m": 0.1345,
}  # fmt: skip


@pytest.fixture(scope="module")
def transformers() -> Any:
    pytest.importorskip("peft", reason="language models need transformers and peft")
    return pytest.importorskip("transformers", reason="language models need transformers and peft")


@pytest.fixture
def shape(tmp_path: Path) -> Any:
    def write(values: dict[str, Any]) -> str:
        (tmp_path / "config.json").write_text(json.dumps(values))
        return str(tmp_path / "config.json")

    return write


def plan(path: str, **options: Any) -> Any:
    from helpers.fit.plan import Plan

    return Plan(configs.load(path), **({"sequence": 128} | options))


@pytest.mark.parametrize("name", configs.known_models())
def test_a_known_shape_has_the_published_number_of_parameters(transformers: Any, name: str) -> None:
    assert plan(name).facts.parameters / 1e9 == pytest.approx(PUBLISHED[name], rel=0.002)


def test_every_known_shape_names_its_source_and_date() -> None:
    for name in configs.known_models():
        source = json.loads((configs.SHAPES / f"{name}.json").read_text())["source"]
        assert set(source) == {"hub_id", "date"}


@pytest.mark.parametrize(
    ("values", "options", "strategy"),
    [
        (LLAMA, {"checkpointing": False}, "ddp"),
        (LLAMA, {"lora": 8}, "fsdp2"),
        (GPT_OSS, {"lora": 8, "four_bit": True}, "ddp"),
        (OLMO, {"precision": "mixed"}, "fsdp2"),
    ],
    ids=["llama-ddp", "llama-lora-fsdp2", "gpt-oss-qlora-ddp", "olmo-mixed-fsdp2"],
)
def test_two_shallow_traces_give_the_peak_of_all_layers(
    transformers: Any, shape: Any, values: dict[str, Any], options: dict[str, Any], strategy: str
) -> None:
    path = shape(values)
    short, full = (
        strategies.estimate(plan(path, full_depth=all_layers, **options).job(fit.Batch(2, 4)), strategy)
        for all_layers in (False, True)
    )
    for rows in (2, 4, 16):
        assert short.total(rows) == pytest.approx(full.total(rows), rel=0.001)


def test_fake_tensors_are_accounted_as_real_ones_for_lora_with_checkpointing(transformers: Any, shape: Any) -> None:
    wanted = plan(shape(SMALL), lora=8)
    fake, real = (
        memory.trace(
            lambda: wanted.build(torch.bfloat16),
            wanted.make_batch,
            lambda model, rows: model(**rows).loss,
            2,
            optimizer=wanted.make_optimizer,
            fake=f,
        )
        for f in (True, False)
    )
    assert fake.total == pytest.approx(real.total, rel=0.01)
    assert fake.bytes["adapters"] > 0


def test_lora_trains_adapters_alone_and_qlora_packs_the_base(transformers: Any, shape: Any) -> None:
    path = shape(SMALL)
    full, lora, qlora = (
        strategies.estimate(plan(path, **options).job(fit.Batch(1, 1)), "ddp").points[1]["step//peak"]
        for options in ({}, {"lora": 8}, {"lora": 8, "four_bit": True})
    )
    assert full["adapters"] == 0
    assert lora["optimizer"] == pytest.approx(2 * lora["adapters"], rel=0.2)
    assert lora["weights"] == pytest.approx(full["weights"], rel=0.01)
    layers = plan(path).facts.packable
    assert full["weights"] - qlora["weights"] == pytest.approx(layers * (2 - 0.5 - 1 / 64), rel=0.05)


def test_eight_bit_state_is_a_quarter_of_the_states_of_adamw_in_fp32_but_for_embeddings(
    transformers: Any, shape: Any
) -> None:
    path = shape(SMALL)
    wide, narrow = (
        strategies.estimate(plan(path, optimizer=o, precision="fp32").job(fit.Batch(1, 1)), "ddp").points[1][
            "step//peak"
        ]
        for o in ("adamw", "adamw8bit")
    )
    table = 8 * LLAMA["vocab_size"] * LLAMA["hidden_size"]
    assert narrow["optimizer"] - table == pytest.approx((wide["optimizer"] - table) / 4, rel=0.05)


def test_packing_makes_no_padding_mask(transformers: Any, shape: Any) -> None:
    path = shape(SMALL)
    padded, full = (
        strategies.estimate(plan(path, sequence=512, packing=p).job(fit.Batch(8, 1)), "ddp").total()
        for p in (False, True)
    )
    assert full < padded


def test_dequantised_gpt_oss_does_not_fit_on_40_gb_cards(transformers: Any) -> None:
    """People load the 13 GB checkpoint of gpt-oss-20b for LoRA and run out of memory on 8 cards of 40 GB."""
    answer = fit.language_model(
        "gpt-oss-20b", fit.Batch(1, 8, 1, "8xA100-40"), sequence=1024, lora=16, strategies=("ddp", "zero3")
    )
    assert answer.fits is False
    assert answer.estimates["ddp"].parts()["weights"] / GIB == pytest.approx(39.0, abs=0.1)
    assert any("12.8 GiB, MXFP4" in note and "39.0 GiB of bf16" in note for note in answer.notes)
    assert "ZeRO-3, more communication" in answer.advice[-1]
    assert answer.advice[-1].endswith("fits")


def test_what_does_not_fit_is_given_changes_in_order_of_their_cost(transformers: Any, shape: Any) -> None:
    large = SMALL | {"hidden_size": 16384, "intermediate_size": 120_000, "num_attention_heads": 128}
    answer = fit.language_model(
        shape(large), fit.Batch(1, 2, 1, "2xA10"), sequence=128, checkpointing=False, strategies=("ddp", "zero2")
    )
    changes = [line.split(",")[0].strip() for line in answer.advice[1:]]
    assert changes[0] == "ZeRO-2"
    assert changes[1:] == ["gradient checkpointing", "8-bit AdamW", "LoRA rank 16", "QLoRA"][: len(changes) - 1]
    assert len(changes) > 3
    assert answer.advice[-1].endswith(" fits")
    assert all(line.endswith("does not fit") for line in answer.advice[1:-1])


def test_flash_attention_keeps_no_score_matrices(transformers: Any, shape: Any) -> None:
    path = shape(GPT_OSS | {"num_hidden_layers": 2})
    eager, flash = (
        strategies.estimate(
            plan(path, sequence=512, lora=8, checkpointing=False, attention=a).job(fit.Batch(2, 1)), "ddp"
        )
        for a in ("eager", "flash")
    )
    scores = 2 * 2 * GPT_OSS["num_attention_heads"] * 512**2 * 2
    assert eager.total() - flash.total() > 0.9 * scores


# --- bad input ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--model lama-3.1-8b", r"'lama-3.1-8b' is unknown. Did you mean llama-3.1-8b"),
        ("--model none/such.json", r"is unknown. Known: gpt-oss-120b"),
        ("--model qwen3-4b --gpus 8xH10", r"card 'H10' is unknown: choose from A10, .* Did you mean"),
        ("--model qwen3-4b --gpus 8xA100", r"'A100' comes with 40 and with 80 GB: say A100-40 or A100-80"),
        ("--model qwen3-4b --gpus H100", r"'H100' is not understood: write count x card, such as 8xH100"),
        ("--model qwen3-4b --gpus 0xH100", r"'0xH100' is not understood"),
        ("--model qwen3-4b --strategy fsdp", r"--strategy='fsdp' is unknown: choose ddp, fsdp2, .* Did you mean fsdp2"),
        ("--model qwen3-4b --optimizer adam8bit", r"Did you mean adamw8bit"),
        ("--model qwen3-4b --precision fp16", r"choose fp32, bf16, mixed"),
        ("--model qwen3-4b --micro-batch 0", r"--micro-batch 0 must be 1 or more"),
        (
            "--model qwen3-4b --micro-batch 3 --global-batch 100",
            r"no multiple of micro-batch 3 x 8 GPUs = 24: use 96 or 120",
        ),
        ("--model qwen3-4b --utilisation 40", r"--utilisation 40.0 must be above 0 and at most 1"),
    ],
)
def test_a_slip_in_the_options_is_named_with_its_fix(arguments: str, message: str, capsys: Any) -> None:
    assert main(arguments.split()) == 2
    error = capsys.readouterr().err
    assert error.startswith("gallery fit: ")
    assert re.search(message, error), error


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--model smollm2-135m --sequence 9000", "sequence=9000 is longer than this model's 8192 positions"),
        ("--model smollm2-135m --four-bit", "4-bit weights cannot be fully fine-tuned"),
        ("--model smollm2-135m --lora -1", "lora=-1 is no rank"),
        (
            "--model smollm2-135m --optimizer adafactor --strategy fsdp2",
            "Adafactor fails on FSDP2's sharded parameters",
        ),
    ],
)
def test_an_impossible_combination_is_named_with_its_fix(
    transformers: Any, arguments: str, message: str, capsys: Any
) -> None:
    assert main(arguments.split()) == 2
    assert message in capsys.readouterr().err


def test_a_config_that_is_none_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"hidden_size": 8}')
    pytest.importorskip("transformers", reason="reads a Transformers config")
    with pytest.raises(fit.UnknownModel, match="no model_type"):
        configs.load(str(tmp_path))


def test_hardware_that_contradicts_the_world_size_is_refused() -> None:
    with pytest.raises(fit.UnknownCard, match="hardware='8xH100' has 8 cards but gpus=4"):
        ask(fit.Batch(64, 4, 1, "8xH100"))


def test_the_command_prints_the_answer_and_its_exit_code_says_whether_it_fits(
    transformers: Any, shape: Any, tmp_path: Path, capsys: Any
) -> None:
    path = shape(SMALL)
    picture = tmp_path / "fit.png"
    asked = f"--model {path} --sequence 128 --global-batch 32 --gpus 8xH100 --price 2"
    assert main([*asked.split(), "--plot", str(picture)]) == 0
    text = capsys.readouterr().out
    assert "micro 1 x accumulation 4 x world 8 = global 32" in text
    assert picture.stat().st_size > 10_000
    assert main([*asked.split(), "--micro-batch", "4", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["fits"] is True


def test_options_are_read_without_torch_and_plain_modules_without_transformers() -> None:
    for imported, absent in (
        ("helpers.fit.options", ("torch", "transformers")),
        ("helpers.fit.modules", ("transformers", "peft", "matplotlib", "pandas")),
    ):
        program = f"import sys, {imported}; print([m for m in {absent} if m in sys.modules])"
        done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
        assert done.stdout.strip() == "[]"


def test_a_job_needs_positive_numbers() -> None:
    with pytest.raises(fit.ImpossibleCombination, match="gpus=0 must be 1 or more"):
        replace(job(), gpus=0)
