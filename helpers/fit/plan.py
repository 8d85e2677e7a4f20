"""One way of fine-tuning a language model: checks that it is possible, and builds it, its batch and its optimizer."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import torch
from torch import nn

from helpers.fit import packed
from helpers.fit.advice import Change
from helpers.fit.modules import multiplied_parameters
from helpers.fit.strategies import Job, estimate
from helpers.fit.vocabulary import ATTENTIONS, OPTIMIZERS, STRATEGIES, ImpossibleCombination, one_of

GIB = 2**30
_ADAFACTOR = "torch's Adafactor fails on FSDP2's sharded parameters: use optimizer adamw, or strategy zero3."


@dataclass(frozen=True)
class Plan:
    """The arguments of fit.language_model that say what is trained and how; raises ImpossibleCombination.

    full_depth: trace every layer, instead of two shallow models (helpers.fit.depth).
    """

    config: Any
    sequence: int
    lora: int = 0
    four_bit: bool = False
    target_modules: str | Sequence[str] = "all-linear"
    optimizer: str = "adamw"
    precision: str = "bf16"
    checkpointing: bool = True
    packing: bool = False
    attention: str | None = None
    full_depth: bool = False

    def __post_init__(self) -> None:
        longest = getattr(self.config, "max_position_embeddings", None)
        if self.sequence < 1:
            raise ImpossibleCombination(f"sequence={self.sequence} must be 1 or more.")
        if longest and self.sequence > longest:
            raise ImpossibleCombination(
                f"sequence={self.sequence} is longer than this model's {longest} positions: use at most {longest}."
            )
        if self.lora < 0:
            raise ImpossibleCombination(f"lora={self.lora} is no rank: use 0 for full fine-tuning, or 8, 16, 32 ...")
        if self.four_bit and not self.lora:
            raise ImpossibleCombination(
                "four_bit=True with lora=0: 4-bit weights cannot be fully fine-tuned, they stay frozen under "
                "adapters. Set lora=16 for QLoRA, or four_bit=False."
            )
        one_of("optimizer", self.optimizer, OPTIMIZERS)
        if self.attention is not None:
            one_of("attention", self.attention, ATTENTIONS)

    def describe(self) -> str:
        how = f"{'QLoRA' if self.four_bit else 'LoRA'} rank {self.lora}" if self.lora else "full fine-tuning"
        checkpointing = ", gradient checkpointing" if self.checkpointing else ""
        return f"{how}, {self.precision}, {self.optimizer}, sequence {self.sequence}{checkpointing}"

    def job(self, settings: Any, bucket_view: bool = False) -> Job:
        return Job(
            self.build,
            self.make_batch,
            lambda model, batch: model(**batch).loss,
            self.make_optimizer,
            micro_batch=settings.micro_batch,
            gpus=settings.gpus,
            accumulation=settings.accumulation,
            precision=self.precision,
            bucket_view=bucket_view,
            state_follows=self.optimizer != "adamw8bit",
            depth=None if self.full_depth else getattr(self.config, "num_hidden_layers", None),
            shallow=_all_kinds(self.config),
            fsdp2_fault=_ADAFACTOR if self.optimizer == "adafactor" else "",
        )

    def build(self, dtype: torch.dtype, depth: int | None = None) -> nn.Module:
        """The model with trained weights in this dtype; a frozen base is bf16 unless the precision is fp32.

        depth: build only so many layers.
        """
        from transformers import AutoModelForCausalLM

        config = _with_layers(self.config, depth)
        frozen = torch.float32 if self.precision == "fp32" else torch.bfloat16
        model = AutoModelForCausalLM.from_config(
            config, dtype=frozen if self.lora else dtype, attn_implementation=_attention(self.attention)
        )
        if self.checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        if self.four_bit:
            packed.pack(model, keep=model.get_output_embeddings())
        for part in model.modules():
            if isinstance(part, nn.Embedding):
                part.weight.keeps_32_bit_state = True  # type: ignore[attr-defined]  # the Trainer asks bitsandbytes for it
        return self._with_adapters(model, dtype) if self.lora else model

    def make_batch(self, micro_batch: int) -> dict[str, torch.Tensor]:
        rows = torch.zeros(micro_batch, self.sequence, dtype=torch.long)
        padding = {} if self.packing else {"attention_mask": torch.ones_like(rows)}
        return {"input_ids": rows, "labels": rows.clone(), **padding}

    def make_optimizer(self, parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        if self.optimizer == "adamw":
            return torch.optim.AdamW(parameters, fused=True)
        return (packed.AdamW8bit if self.optimizer == "adamw8bit" else torch.optim.Adafactor)(parameters)

    @cached_property
    def facts(self) -> Facts:
        """Counts of the whole model before adapters and packing, from two shallow builds."""
        full = replace(self, lora=0, four_bit=False, checkpointing=False)
        layers = self.config.num_hidden_layers
        with torch.device("meta"):
            one, two = (_count(full.build(torch.bfloat16, depth=d), self.config) for d in (1, 2))
        return Facts(*(a + (b - a) * (layers - 1) for a, b in zip(one, two, strict=True)))

    def flops(self) -> tuple[float, str]:
        """Floating-point operations per token, and how they are counted."""
        # Kaplan et al., "Scaling Laws for Neural Language Models", 2020: 2N forward, 4N backward. Half of the
        # backward pass is the weights' own gradients, which a frozen base does not need.
        known = 4 if self.lora else 6
        formula = f"{known}ND" + (" + 2ND recomputed" if self.checkpointing else "")
        active = self.facts.multiplied
        each = (known + 2 * self.checkpointing) * active
        return each, f"{formula}, N = {active / 1e9:.2f}B active parameters"

    def notes(self) -> list[str]:
        lines = []
        facts = self.facts
        stored = getattr(self.config, "quantization_config", None) or {}
        if "mxfp4" in str(stored):  # 4 bits an element and one byte of scale per 32
            size = facts.experts * (0.5 + 1 / 32) + 2 * (facts.parameters - facts.experts)
            lines.append(
                f"the checkpoint holds {size / GIB:.1f} GiB, MXFP4 for the experts; training dequantises it on load to "
                f"{2 * facts.parameters / GIB:.1f} GiB of bf16 weights"
            )
        if self.four_bit and facts.experts:
            lines.append(
                f"bitsandbytes packs nn.Linear alone: {facts.experts / facts.parameters:.0%} of the parameters are "
                "expert tensors, which stay in bf16"
            )
        if self.four_bit:
            wide = 2 * (facts.parameters - facts.packable) / GIB
            lines.append(f"peft's prepare_model_for_kbit_training would add {wide:.1f} GiB: it makes the rest fp32")
        return lines

    def dearer_changes(self, settings: Any, bucket_view: bool) -> Iterator[Change]:
        """What to give up next, cheapest first, each on top of the one before; under FSDP2 with several GPUs."""
        strategy = "fsdp2" if settings.gpus > 1 else "ddp"
        steps: list[tuple[str, dict[str, Any]]] = []
        if not self.checkpointing:
            steps.append(("gradient checkpointing, a third more compute", {"checkpointing": True}))
        if not self.lora:
            if self.optimizer == "adamw":
                steps.append(("8-bit AdamW", {"optimizer": "adamw8bit"}))
            steps.append(("LoRA rank 16, trains adapters alone", {"lora": 16, "optimizer": "adamw"}))
        if not self.four_bit:
            steps.append(("QLoRA, 4-bit frozen weights", {"four_bit": True}))
        changed: Plan = self
        for text, change in steps:
            changed = replace(changed, **change)
            job = changed.job(settings, bucket_view)
            yield f"{text}, with {STRATEGIES[strategy]}", partial(estimate, job, strategy)

    def _with_adapters(self, model: nn.Module, dtype: torch.dtype) -> nn.Module:
        from peft import LoraConfig, get_peft_model

        targets = self.target_modules if isinstance(self.target_modules, str) else list(self.target_modules)
        adapters = LoraConfig(r=self.lora, lora_alpha=2 * self.lora, target_modules=targets)
        adapted = get_peft_model(model, adapters)
        for name, parameter in adapted.named_parameters():
            if "lora_" in name:
                parameter.data = parameter.data.to(dtype)
        return adapted


@dataclass(frozen=True)
class Facts:
    """Numbers of parameters: in all; those a token is multiplied with; in expert tensors; in packable linear layers."""

    parameters: float
    multiplied: float
    experts: float
    packable: float


def _count(model: nn.Module, config: Any) -> tuple[float, float, float, float]:
    experts = getattr(config, "num_local_experts", None) or getattr(config, "num_experts", None) or 1
    share = getattr(config, "num_experts_per_tok", None) or experts
    head = model.get_output_embeddings()  # type: ignore[operator]
    linear = {id(m.weight) for m in model.modules() if isinstance(m, nn.Linear) and m is not head}
    named = list(model.named_parameters())
    return (
        sum(p.numel() for _, p in named),
        multiplied_parameters(model, lambda name: share / experts if ".experts." in name else 1.0),
        sum(p.numel() for name, p in named if ".experts." in name and id(p) not in linear),
        sum(p.numel() for _, p in named if id(p) in linear),
    )


def _all_kinds(config: Any) -> int:
    """The smallest depth, at least two, that has a layer of each kind (sliding-window and full attention)."""
    return max(2, len(set(_kinds(config))))


def _with_layers(config: Any, depth: int | None) -> Any:
    """A copy of the config for training, with only `depth` layers if given: of each kind the first, then the earliest.

    The kind of a layer is what the config's lists of one entry per layer say of it; they are cut alike.
    """
    config = copy.deepcopy(config)
    config.use_cache = False
    config.__dict__.pop("quantization_config", None)
    if depth is not None:
        kinds = _kinds(config)
        first_of_a_kind = sorted({kind: at for at, kind in reversed(list(enumerate(kinds)))}.values())
        others = [at for at in range(len(kinds)) if at not in first_of_a_kind]
        kept = sorted((first_of_a_kind + others)[:depth])
        for name in _per_layer(config):
            entries = getattr(config, name)
            setattr(config, name, [entries[at] for at in kept])
        config.num_hidden_layers = depth
    return config


def _per_layer(config: Any) -> list[str]:
    """Names of the config's lists that have one entry per layer."""
    count = getattr(config, "num_hidden_layers", None)
    lists = [(name, value) for name, value in config.__dict__.items() if isinstance(value, list)]
    return [name for name, value in lists if "layer" in name and len(value) == count]


def _kinds(config: Any) -> list[str]:
    """For each layer, what those lists say of it."""
    names = _per_layer(config)
    return [str([getattr(config, name)[at] for name in names]) for at in range(getattr(config, "num_hidden_layers", 0))]


def _attention(name: str | None) -> str | None:
    """The name Transformers knows it by; "flash" is registered as fused causal attention without a mask tensor."""
    if name != "flash":
        return name
    from transformers import AttentionInterface

    def fused(module: nn.Module, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: Any, **options: Any) -> Any:
        # The CPU kernel that stands in here wants as many heads of keys as of queries: a little more than on a GPU.
        k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], dim=1) for t in (k, v))
        out = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return out.transpose(1, 2).contiguous(), None

    AttentionInterface.register("gallery_fused", fused)
    return "gallery_fused"
