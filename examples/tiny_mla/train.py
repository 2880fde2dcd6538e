"""Train the tiny MLA example: a DeepSeek-V3-architecture model of under 4 million parameters.

The attention has the geometry of the published MLA models (latent of 512, 128 + 64 query and key
dimensions a head, 128 value dimensions a head); everything around it is small. The script is
self-contained and uses no network. It trains the tokenizer and the model on the corpus that
``prepare.py`` builds, keeps the checkpoint of the lowest validation loss, saves it in bfloat16,
reloads it with the stock classes and measures it:

* perplexity on the held-out passages, beside that of a unigram model;
* the load of every routed expert;
* range and spread of latent, rotary part, K, V and Q in every layer.

All figures go into ``training.json`` in the output folder.

Usage::

    python train.py --corpus corpus.jsonl.xz --minutes 4.5 --out model
    python train.py --readme model/training.json
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import datetime
import json
import lzma
import math
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import tokenizers
import torch
import torch.nn.functional as F
import transformers
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    PreTrainedTokenizerFast,
)
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

HERE = Path(__file__).resolve().parent

VOCAB_SIZE = 1024
BOS, EOS, PAD = "<|bos|>", "<|eos|>", "<|pad|>"
MAX_BYTES = 8_000_000
"""Upper limit of the safetensors file."""

CHAT_TEMPLATE = (
    "{{- bos_token -}}"
    "{%- for message in messages -%}"
    "{{- message['role'] | upper + '.\n' + message['content'] | trim + '\n\n' -}}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- 'ASSISTANT.\n' -}}{%- endif -%}"
)
"""Roles are written as the plays write their speakers: a line of capitals and a full stop."""

BEGIN, END = "<!-- figures:begin -->", "<!-- figures:end -->"

State = dict[str, torch.Tensor]


# ------------------------------------------------------------------------------------ text


def read_corpus(path: Path) -> dict[str, list[str]]:
    """Read the corpus of ``prepare.py`` into one list of documents per split."""
    documents: dict[str, list[str]] = {"train": [], "validation": []}
    with lzma.open(path, "rt", encoding="utf-8") as stream:
        for line in stream:
            row = json.loads(line)
            documents[row["split"]].append(row["text"])
    return documents


def read_passages(path: Path) -> list[str]:
    """Read the ``text`` fields of a JSON-lines file."""
    with path.open(encoding="utf-8") as stream:
        return [json.loads(line)["text"] for line in stream]


def build_tokenizer(documents: list[str], max_length: int) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE tokenizer that puts the BOS token before every text."""
    core = tokenizers.Tokenizer(tokenizers.models.BPE())
    core.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[BOS, EOS, PAD],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    core.train_from_iterator(documents, trainer)
    assert core.get_vocab_size() == VOCAB_SIZE
    core.post_processor = tokenizers.processors.Sequence(
        [
            tokenizers.processors.ByteLevel(trim_offsets=False),
            tokenizers.processors.TemplateProcessing(
                single=f"{BOS} $A",
                pair=f"{BOS} $A $B",
                special_tokens=[(BOS, core.token_to_id(BOS))],
            ),
        ]
    )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core,
        bos_token=BOS,
        eos_token=EOS,
        pad_token=PAD,
        model_max_length=max_length,
        padding_side="right",
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def encode(tokenizer: PreTrainedTokenizerFast, texts: list[str]) -> list[list[int]]:
    """Encode texts; every row starts with the BOS token."""
    return [e.ids for e in tokenizer.backend_tokenizer.encode_batch(texts)]


# ----------------------------------------------------------------------------------- model


def build_config(tokenizer: PreTrainedTokenizerFast) -> DeepseekV3Config:
    """Build the configuration of the example.

    ``topk_method``, ``scoring_func`` and ``moe_layer_freq`` are fields of the published DeepSeek
    configurations. Transformers does not read them; other runtimes do.
    """
    return DeepseekV3Config(
        architectures=["DeepseekV3ForCausalLM"],
        vocab_size=VOCAB_SIZE,
        hidden_size=128,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=4,
        q_lora_rank=64,
        kv_lora_rank=512,
        qk_nope_head_dim=128,
        qk_rope_head_dim=64,
        v_head_dim=128,
        intermediate_size=256,
        moe_intermediate_size=128,
        first_k_dense_replace=1,
        n_routed_experts=4,
        num_experts_per_tok=2,
        n_shared_experts=1,
        n_group=1,
        topk_group=1,
        norm_topk_prob=True,
        routed_scaling_factor=1.0,
        scoring_func="sigmoid",
        topk_method="noaux_tc",
        moe_layer_freq=1,
        num_nextn_predict_layers=0,
        max_position_embeddings=2048,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        rope_interleave=True,
        tie_word_embeddings=False,
        initializer_range=0.04,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )


def dense_experts(
    module: nn.Module, hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor
) -> torch.Tensor:
    """All experts as one wide MLP whose unselected parts are multiplied by zero.

    With four experts of which two are active this doubles the arithmetic of the experts, and it
    removes the sorting, the synchronisation and the small matrix products of a sparse dispatch.

    Args:
        module: the experts module, with ``gate_up_proj`` (experts, 2 * inner, hidden) and
            ``down_proj`` (experts, hidden, inner).
        hidden: (tokens, hidden).
        index: (tokens, top k) experts of every token.
        weights: (tokens, top k) their weights.
    """
    experts, double, width = module.gate_up_proj.shape
    combine = hidden.new_zeros(hidden.shape[0], experts, dtype=weights.dtype)
    combine = combine.scatter(1, index, weights)
    gate_up = F.linear(hidden, module.gate_up_proj.reshape(experts * double, width))
    gate, up = gate_up.view(-1, experts, double).chunk(2, dim=-1)
    inner = module.act_fn(gate) * up * combine.unsqueeze(-1)
    down = module.down_proj.permute(1, 0, 2).reshape(width, -1)
    return F.linear(inner.flatten(1), down).to(hidden.dtype)


ALL_EXPERTS_FUNCTIONS.register("dense", dense_experts)


def initialise_latent_gains(model: nn.Module, sigma: float) -> None:
    """Draw the gains of ``kv_a_layernorm`` log-normally, scaled to a root mean square of one."""
    for name, parameter in model.named_parameters():
        if name.endswith("kv_a_layernorm.weight"):
            gains = torch.exp(sigma * torch.randn(parameter.shape))
            parameter.data.copy_(gains / gains.square().mean().sqrt())


class Dropout:
    """Dropout on the embedding and on the output of every attention and MLP block.

    The stock model has no residual dropout; forward hooks add it for the training only.
    """

    def __init__(self, model: DeepseekV3ForCausalLM, rate: float) -> None:
        self.rate = rate
        modules = [model.model.embed_tokens]
        for layer in model.model.layers:
            modules += [layer.self_attn.o_proj, layer.mlp]
        self.handles = [m.register_forward_hook(self._hook) for m in modules] if rate else []

    def _hook(self, module: nn.Module, _args: Any, output: torch.Tensor) -> torch.Tensor:
        return F.dropout(output, self.rate, training=module.training)

    def remove(self) -> None:
        """Remove the hooks."""
        for handle in self.handles:
            handle.remove()


class LoadBalancer:
    """Balance of the expert load through the correction bias of the router.

    The bias of an expert that got less than its share in a step goes up by ``speed``, the others'
    goes down, as in the auxiliary-loss-free balancing of DeepSeek-V3.
    """

    def __init__(self, model: DeepseekV3ForCausalLM) -> None:
        self.gates = [m for m in model.modules() if hasattr(m, "e_score_correction_bias")]
        self.counts = [torch.zeros_like(g.e_score_correction_bias) for g in self.gates]
        self.handles = [g.register_forward_hook(self._hook(i)) for i, g in enumerate(self.gates)]

    def _hook(self, number: int) -> Callable[..., None]:
        def hook(_module: nn.Module, _args: Any, output: tuple[torch.Tensor, ...]) -> None:
            index = output[2].detach().flatten()
            self.counts[number].scatter_add_(0, index, self.counts[number].new_ones(len(index)))

        return hook

    @torch.no_grad()
    def step(self, speed: float) -> None:
        """Move the biases, then forget the counts."""
        for gate, count in zip(self.gates, self.counts, strict=True):
            gate.e_score_correction_bias += speed * torch.sign(count.mean() - count)
        self.reset()

    def reset(self) -> None:
        """Forget the counts."""
        for count in self.counts:
            count.zero_()

    def shares(self) -> list[list[float]]:
        """Share of every expert in the selections counted so far, one row per MoE layer."""
        return [[round(v, 4) for v in (c / c.sum()).tolist()] for c in self.counts]

    def remove(self) -> None:
        """Remove the hooks."""
        for handle in self.handles:
            handle.remove()


# -------------------------------------------------------------------------------- training


def make_optimizer(
    model: nn.Module, lr: float, weight_decay: float, latent_gain_lr: float, fused: bool
) -> torch.optim.AdamW:
    """AdamW; vectors (the gains of the norms) are not decayed."""
    gains, vectors, matrices = [], [], []
    for name, parameter in model.named_parameters():
        if name.endswith("kv_a_layernorm.weight"):
            gains.append(parameter)
        elif parameter.ndim < 2:
            vectors.append(parameter)
        else:
            matrices.append(parameter)
    groups = [
        {"params": matrices, "weight_decay": weight_decay, "scale": 1.0},
        {"params": vectors, "weight_decay": 0.0, "scale": 1.0},
        {"params": gains, "weight_decay": 0.0, "scale": latent_gain_lr},
    ]
    return torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.95), fused=fused)


def learning_rate(progress: float, peak: float, warmup: float = 0.02, floor: float = 0.01) -> float:
    """Linear warm-up, then a cosine down to ``floor * peak``."""
    if progress < warmup:
        return peak * max(progress, 1e-4) / warmup
    phase = (progress - warmup) / (1.0 - warmup)
    return peak * (floor + (1.0 - floor) * 0.5 * (1.0 + math.cos(math.pi * min(phase, 1.0))))


def autocast(device: str) -> contextlib.AbstractContextManager[Any]:
    """Return bfloat16 autocast, except on the CPU, where it is slow."""
    if device == "cpu":
        return contextlib.nullcontext()
    return torch.autocast(device_type=device, dtype=torch.bfloat16)


def attention_kernels(device: str) -> contextlib.AbstractContextManager[Any]:
    """Limit attention to kernels that take K and V of different head dimensions."""
    if device == "cpu":
        return contextlib.nullcontext()
    return sdpa_kernel([SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH])


def crops(
    stream: torch.Tensor, rows: int, length: int, bos: int, generator: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor]:
    """Random crops of the token stream, with the BOS token in the first position.

    Returns:
        Inputs and targets, both (rows, length).
    """
    top = stream.numel() - length
    first = torch.randint(top, (rows, 1), generator=generator, device=stream.device)
    block = stream[first + torch.arange(length + 1, device=stream.device)].long()
    inputs = block[:, :-1].clone()
    inputs[:, 0] = bos
    return inputs, block[:, 1:]


def batches(
    rows: list[list[int]], pad: int, device: str, size: int = 32
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Pad rows on the right; yields inputs and targets, where padding is -100."""
    ordered = sorted(rows, key=len)
    for start in range(0, len(ordered), size):
        part = ordered[start : start + size]
        width = max(map(len, part))
        block = torch.full((len(part), width), -100)
        for i, row in enumerate(part):
            block[i, : len(row)] = torch.tensor(row)
        block = block.to(device)
        yield block[:, :-1].clamp(min=0).where(block[:, :-1] >= 0, pad), block[:, 1:]


@torch.no_grad()
def negative_log_likelihood(
    model: nn.Module, rows: list[list[int]], pad: int, device: str, cast: bool
) -> tuple[float, int]:
    """Sum the negative log-likelihood (nats) of the rows after their first token.

    Returns:
        The sum and the number of tokens in it.
    """
    was_training = model.training
    model.eval()
    total = torch.zeros((), dtype=torch.float64, device=device)
    count = 0
    for inputs, targets in batches(rows, pad, device):
        with autocast(device) if cast else contextlib.nullcontext():
            logits = model(input_ids=inputs, use_cache=False).logits
        loss = F.cross_entropy(
            logits.float().flatten(0, 1), targets.flatten(), ignore_index=-100, reduction="sum"
        )
        total += loss.double()
        count += int((targets >= 0).sum())
    model.train(was_training)
    return total.item(), count


def unigram_loss(train: torch.Tensor, rows: list[list[int]], specials: list[int]) -> float:
    """Mean loss (nats) of the rows, less BOS, under add-one-smoothed training frequencies."""
    counts = torch.bincount(train.cpu().long(), minlength=VOCAB_SIZE).double()
    counts[specials] = 0.0
    logp = torch.log((counts + 1.0) / (counts + 1.0).sum())
    tokens = torch.tensor([t for row in rows for t in row[1:]])
    return -logp[tokens].mean().item()


def split_rows(stream: torch.Tensor, length: int, bos: int) -> list[list[int]]:
    """Cut a token stream into consecutive rows that start with the BOS token."""
    tokens = stream.tolist()
    return [[bos, *tokens[i : i + length]] for i in range(0, len(tokens) - 1, length)]


def train(
    model: DeepseekV3ForCausalLM,
    stream: torch.Tensor,
    validation: list[list[int]],
    args: argparse.Namespace,
) -> tuple[State, dict[str, Any]]:
    """Train until the time or the steps are used up.

    Returns:
        The weights of the lowest validation loss, and what is to be recorded of the training.
    """
    config = model.config
    generator = torch.Generator(device=stream.device).manual_seed(args.seed)
    optimizer = make_optimizer(
        model, args.lr, args.weight_decay, args.latent_gain_lr, fused=args.device == "cuda"
    )
    dropout, balancer = Dropout(model, args.dropout), LoadBalancer(model)
    forward = torch.compile(model) if args.compile else model
    model.train()

    best: State = {}
    best_loss, best_step = math.inf, 0
    history: list[dict[str, float]] = []
    loss: torch.Tensor | None = None
    start = time.monotonic()
    step, tokens, next_eval, excluded, progress = 0, 0, 0.0, 0.0, 0.0
    while True:
        if args.steps:
            progress = step / args.steps
        else:
            progress = (time.monotonic() - start) / (60.0 * args.minutes)
        done = progress >= 1.0
        if done or progress >= next_eval:
            pause = time.monotonic()
            balancer_counts = [c.clone() for c in balancer.counts]
            nll, count = negative_log_likelihood(
                model, validation, config.pad_token_id, args.device, cast=True
            )
            for kept, saved in zip(balancer.counts, balancer_counts, strict=True):
                kept.copy_(saved)
            value = nll / count
            if value < best_loss:
                best_loss, best_step = value, step
                best = {k: v.detach().clone() for k, v in model.state_dict().items()}
            recent = math.nan if loss is None else loss.item()
            history.append({"step": step, "tokens": tokens, "validation": value})
            if loss is not None:
                history[-1]["train"] = recent
            seconds = pause - start - excluded
            excluded += time.monotonic() - pause
            print(
                f"step {step:6d}  {tokens / 1e6:7.1f} M tokens  {tokens / max(seconds, 1e-9):10.0f}"
                f" tokens/s  training loss {recent:6.4f}  validation loss {value:6.4f}",
                flush=True,
            )
            next_eval += 1.0 / args.evaluations
        if done:
            break

        long = args.long_every > 0 and step % args.long_every == args.long_every - 1
        factor = config.max_position_embeddings // args.length if long else 1
        factor = max(1, min(factor, args.batch))
        inputs, targets = crops(
            stream, args.batch // factor, args.length * factor, config.bos_token_id, generator
        )
        rate = learning_rate(progress, args.lr)
        for group in optimizer.param_groups:
            group["lr"] = rate * group["scale"]
        with autocast(args.device):
            logits = forward(input_ids=inputs, use_cache=False).logits
        loss = F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        balancer.step(args.balance_speed * rate / args.lr)
        step += 1
        tokens += targets.numel()
        if step % 50 == 0 and not math.isfinite(loss.item()):
            raise SystemExit(f"the loss is not finite at step {step}")

    minutes = (time.monotonic() - start) / 60.0
    dropout.remove()
    balancer.remove()
    return best, {
        "steps": step,
        "tokens": tokens,
        "epochs": round(tokens / stream.numel(), 2),
        "minutes": round(minutes, 2),
        "best_step": best_step,
        "validation_loss": best_loss,
        "history": history,
    }


# ----------------------------------------------------------------------------- measurement


class Spread:
    """Largest magnitude, standard deviation and channel maxima of a stream of activations."""

    def __init__(self) -> None:
        self.channels: torch.Tensor | None = None
        self.first_token = 0.0
        self.count = 0
        self.total = 0.0
        self.square = 0.0

    def add(self, values: torch.Tensor) -> None:
        """Add activations of one text, (1, ..., tokens, channels)."""
        values = values.detach().float().flatten(0, -3) if values.ndim > 3 else values.float()
        self.first_token = max(self.first_token, values[:, 0].abs().max().item())
        rest = values[:, 1:]
        channels = rest.abs().amax(dim=1)
        self.channels = channels if self.channels is None else self.channels.maximum(channels)
        self.count += rest.numel()
        self.total += rest.double().sum().item()
        self.square += rest.double().square().sum().item()

    def summary(self, per_head: bool) -> dict[str, Any]:
        """Return the figures; the BOS position is counted in ``amax_bos`` only."""
        assert self.channels is not None
        mean = self.total / self.count
        result: dict[str, Any] = {
            "amax": self.channels.max().item(),
            "amax_bos": self.first_token,
            "std": math.sqrt(max(self.square / self.count - mean * mean, 0.0)),
            "channel_amax_median": self.channels.median().item(),
            "channel_amax_min": self.channels.min().item(),
        }
        if per_head:
            result["amax_per_head"] = self.channels.amax(dim=1).tolist()
        return result


PARTS = ("latent", "rope", "k", "v", "q")


@torch.no_grad()
def measure_activations(
    model: DeepseekV3ForCausalLM, rows: list[list[int]], device: str
) -> list[dict[str, Any]]:
    """Ranges of latent, rotary part, K, V and Q in every layer, text by text.

    ``latent`` is the output of ``kv_a_layernorm``, ``rope`` the shared rotary part of the key
    after the rotation, ``k`` the expanded key with the rotary part, ``q`` the query with its
    rotary part, rotated.
    """
    layers = model.model.layers
    spreads = [{part: Spread() for part in PARTS} for _ in layers]
    nope = model.config.qk_nope_head_dim

    def record(
        module: nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: torch.Tensor | None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, None]:
        spread = spreads[module.layer_idx]
        spread["q"].add(query)
        spread["k"].add(key)
        spread["v"].add(value)
        spread["rope"].add(key[:, :1, :, nope:])
        return sdpa_attention_forward(module, query, key, value, mask, **kwargs)

    AttentionInterface.register("tiny_mla_record", record)
    AttentionMaskInterface.register("tiny_mla_record", sdpa_mask)
    handles = [
        layer.self_attn.kv_a_layernorm.register_forward_hook(
            lambda _module, _args, output, spread=spread["latent"]: spread.add(output)
        )
        for layer, spread in zip(layers, spreads, strict=True)
    ]
    previous = model.config._attn_implementation
    model.set_attn_implementation("tiny_mla_record")
    model.eval()
    for row in rows:
        model(input_ids=torch.tensor([row], device=device), use_cache=False)
    model.set_attn_implementation(previous)
    for handle in handles:
        handle.remove()
    return [
        {part: spread[part].summary(part in ("k", "v", "q")) for part in PARTS}
        for spread in spreads
    ]


def hardware(device: str) -> str:
    """Name of the device."""
    if device == "cuda":
        return torch.cuda.get_device_name()
    with contextlib.suppress(OSError, StopIteration):
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        return next(x.split(":", 1)[1].strip() for x in lines if x.startswith("model name"))
    return platform.machine()


def revision() -> str | None:
    """Commit of the checkout, if there is one."""
    command = ["git", "-C", str(HERE), "rev-parse", "--verify", "--quiet", "HEAD"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError:
        return None
    return done.stdout.strip() or None


def save(
    model: DeepseekV3ForCausalLM, tokenizer: PreTrainedTokenizerFast, folder: Path
) -> dict[str, int]:
    """Save weights in bfloat16, configuration and tokenizer; returns parameters and bytes.

    The correction bias of the routers stays in float32, as the architecture defines it.
    """
    for parameter in model.parameters():
        parameter.data = parameter.data.to(torch.bfloat16)
    model.config.dtype = torch.bfloat16
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    # The generic class name is understood by every release of Transformers.
    path = folder / "tokenizer_config.json"
    entries = json.loads(path.read_text(encoding="utf-8"))
    entries["tokenizer_class"] = "PreTrainedTokenizerFast"
    path.write_text(json.dumps(entries, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")

    weights = folder / "model.safetensors"
    weights.chmod(0o644)
    size = weights.stat().st_size
    if size > MAX_BYTES:
        raise SystemExit(f"model.safetensors has {size} bytes, more than {MAX_BYTES}")
    return {"parameters": sum(p.numel() for p in model.parameters()), "bytes": size}


# ---------------------------------------------------------------------------------- README


def figures(record: dict[str, Any]) -> str:
    """Render the figures of ``training.json`` as Markdown."""
    held, run, text = record["heldout"], record["training"], record["text"]
    lines = [
        "| | |",
        "|---|---|",
        f"| held-out perplexity per token | {held['perplexity']:.3f} |",
        f"| held-out perplexity per byte | {held['perplexity_per_byte']:.4f} |",
        f"| unigram perplexity per token | {held['unigram_perplexity']:.1f} |",
        f"| held-out tokens, bytes | {held['tokens']:,}, {held['bytes']:,} |",
        f"| training tokens in the corpus | {text['train_tokens']:,} |",
        f"| tokens seen in training | {run['tokens']:,} ({run['epochs']:g} epochs) |",
        f"| steps, step of the checkpoint | {run['steps']:,}, {run['best_step']:,} |",
        f"| parameters | {record['model']['parameters']:,} |",
        f"| `model.safetensors` | {record['model']['bytes']:,} bytes |",
        f"| seed | {record['arguments']['seed']} |",
        f"| hardware, minutes | {record['hardware']}, {run['minutes']:g} |",
        f"| PyTorch, Transformers | {record['versions']['torch']}, "
        f"{record['versions']['transformers']} |",
        f"| date | {record['date']} |",
        "",
        "Load of the routed experts on the calibration passages (share of the selections):",
        "",
        "| layer | " + " | ".join(f"expert {i}" for i in range(len(record["expert_load"][0]))),
    ]
    lines[-1] += " |"
    lines.append("|---|" + "---|" * len(record["expert_load"][0]))
    first = len(record["activations"]) - len(record["expert_load"])
    for number, shares in enumerate(record["expert_load"], start=first):
        lines.append(f"| {number} | " + " | ".join(f"{share:.1%}" for share in shares) + " |")
    lines += [
        "",
        "Largest magnitude (and standard deviation) on the calibration passages, without the BOS "
        "position:",
        "",
        "| layer | latent | rotary part | K | V | Q |",
        "|---|---|---|---|---|---|",
    ]
    for number, layer in enumerate(record["activations"]):
        cells = [f"{layer[part]['amax']:.3g} ({layer[part]['std']:.3g})" for part in PARTS]
        lines.append(f"| {number} | " + " | ".join(cells) + " |")
    lines += [
        "",
        "Spread over the channels: largest, median and smallest of the channels' largest "
        "magnitudes; and the largest magnitude at the BOS position:",
        "",
        "| layer | latent | latent, BOS | rotary part | K, BOS | V, BOS |",
        "|---|---|---|---|---|---|",
    ]
    for number, layer in enumerate(record["activations"]):
        spread = [
            " / ".join(
                f"{layer[part][key]:.3g}"
                for key in ("amax", "channel_amax_median", "channel_amax_min")
            )
            for part in ("latent", "rope")
        ]
        bos = [f"{layer[part]['amax_bos']:.3g}" for part in ("latent", "k", "v")]
        lines.append(f"| {number} | {spread[0]} | {bos[0]} | {spread[1]} | {bos[1]} | {bos[2]} |")
    return "\n".join(lines)


def render_readme(record: dict[str, Any], path: Path) -> None:
    """Replace what stands between the two markers of the README by the figures."""
    text = path.read_text(encoding="utf-8")
    head, rest = text.split(BEGIN, 1)
    tail = rest.split(END, 1)[1]
    path.write_text(f"{head}{BEGIN}\n\n{figures(record)}\n\n{END}{tail}", encoding="utf-8")


# ------------------------------------------------------------------------------------ main


def parse_arguments() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--corpus", type=Path, help="corpus written by prepare.py")
    parser.add_argument("--data", type=Path, default=HERE / "data", help="folder of the passages")
    parser.add_argument("--out", type=Path, default=HERE / "model", help="folder to write")
    parser.add_argument("--readme", type=Path, help="only render this training.json into README")
    parser.add_argument("--minutes", type=float, default=4.5, help="time limit of the training")
    parser.add_argument("--steps", type=int, default=0, help="train so many steps instead")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--batch", type=int, default=64, help="rows of a step")
    parser.add_argument("--length", type=int, default=512, help="tokens of a row")
    parser.add_argument(
        "--long-every",
        type=int,
        default=8,
        help="every so many steps, use rows of the full context instead (0: never)",
    )
    parser.add_argument("--lr", type=float, default=3e-3, help="peak learning rate")
    parser.add_argument("--weight-decay", type=float, default=0.1)
    parser.add_argument("--dropout", type=float, default=0.1, help="residual dropout")
    parser.add_argument("--balance-speed", type=float, default=1e-3, help="step of router biases")
    parser.add_argument(
        "--latent-gain-sigma",
        type=float,
        default=1.0,
        help="log-normal spread of the initial kv_a_layernorm gains (0: all one)",
    )
    parser.add_argument(
        "--latent-gain-lr", type=float, default=1.0, help="learning rate factor of those gains"
    )
    parser.add_argument("--evaluations", type=int, default=20, help="validations in the training")
    parser.add_argument("--passages", type=int, help="measure on so many passages only (a test)")
    parser.add_argument("--compile", action="store_true", help="use torch.compile")
    args = parser.parse_args()
    if args.readme is None and args.corpus is None:
        parser.error("--corpus is needed for training")
    return args


def main() -> None:
    """Train, save, reload and measure."""
    args = parse_arguments()
    if args.readme is not None:
        render_readme(json.loads(args.readme.read_text(encoding="utf-8")), HERE / "README.md")
        return
    torch.manual_seed(args.seed)
    torch.set_float32_matmul_precision("high")

    documents = read_corpus(args.corpus)
    passages = {
        split: read_passages(args.data / f"{split}.jsonl")[: args.passages]
        for split in ("calibration", "heldout")
    }
    tokenizer = build_tokenizer(documents["train"], max_length=2048)
    rows = {split: encode(tokenizer, texts) for split, texts in {**documents, **passages}.items()}
    eos = [tokenizer.eos_token_id]
    streams = {
        split: torch.tensor([t for row in rows[split] for t in row + eos], dtype=torch.int16)
        for split in documents
    }
    config = build_config(tokenizer)
    bos, pad = config.bos_token_id, config.pad_token_id
    print({f"{split}_tokens": stream.numel() for split, stream in streams.items()}, flush=True)

    model = DeepseekV3ForCausalLM(config)
    initialise_latent_gains(model, args.latent_gain_sigma)
    model.to(args.device)
    model.set_experts_implementation("dense")
    print(f"parameters: {sum(p.numel() for p in model.parameters()):,}", flush=True)
    with attention_kernels(args.device):
        best, run = train(
            model,
            streams["train"].to(args.device),
            split_rows(streams["validation"], args.length, bos),
            args,
        )
    model.load_state_dict(best)
    stored = save(copy.deepcopy(model).cpu(), tokenizer, args.out)

    # The saved weights are bfloat16; a CPU computes with them in float32, because it is faster.
    dtype = torch.float32 if args.device == "cpu" else torch.bfloat16
    model = DeepseekV3ForCausalLM.from_pretrained(args.out, dtype=dtype)
    model.to(args.device).eval()
    model.set_experts_implementation("eager")
    nll, count = negative_log_likelihood(model, rows["heldout"], pad, args.device, cast=False)
    size = sum(len(text.encode()) for text in passages["heldout"])
    specials = [bos, config.eos_token_id, pad]
    unigram = unigram_loss(streams["train"], rows["heldout"], specials)
    balancer = LoadBalancer(model)
    activations = measure_activations(model, rows["calibration"], args.device)
    load = balancer.shares()
    balancer.remove()

    record = {
        "heldout": {
            "perplexity": math.exp(nll / count),
            "perplexity_per_byte": math.exp(nll / size),
            "unigram_perplexity": math.exp(unigram),
            "tokens": count,
            "bytes": size,
            "passages": len(passages["heldout"]),
            "dtype": str(dtype).removeprefix("torch."),
        },
        "text": {
            "train_tokens": streams["train"].numel(),
            "train_bytes": sum(len(text.encode()) for text in documents["train"]),
            "validation_tokens": streams["validation"].numel(),
            "calibration_tokens": sum(map(len, rows["calibration"])),
            "calibration_passages": len(passages["calibration"]),
        },
        "model": stored,
        "training": run,
        "expert_load": load,
        "activations": activations,
        "arguments": {
            k: v for k, v in vars(args).items() if k not in ("corpus", "data", "out", "readme")
        },
        "hardware": hardware(args.device),
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "tokenizers": tokenizers.__version__,
        },
        "commit": revision(),
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
    }
    path = args.out / "training.json"
    path.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    print(figures(record))
    idle = [i for i, shares in enumerate(load) if min(shares) < 0.02]
    if idle:
        print(f"warning: nearly unused experts in MoE layers {idle}", file=sys.stderr)


if __name__ == "__main__":
    main()
