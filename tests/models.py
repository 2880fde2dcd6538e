"""Small random models of every MLA family, built from the installed transformers."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

T = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "kv_lora_rank": 32,
    "q_lora_rank": 24,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "intermediate_size": 64,
    "vocab_size": 128,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
MOE = {
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "moe_intermediate_size": 32,
    "first_k_dense_replace": 1,
}

FAMILIES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "deepseek_v2": ("DeepseekV2Config", "DeepseekV2ForCausalLM", MOE),
    "deepseek_v3": ("DeepseekV3Config", "DeepseekV3ForCausalLM", MOE),
    "glm4_moe_lite": ("Glm4MoeLiteConfig", "Glm4MoeLiteForCausalLM", MOE),
    "longcat_flash": (
        "LongcatFlashConfig",
        "LongcatFlashForCausalLM",
        {
            "num_layers": 2, "ffn_hidden_size": 64, "n_routed_experts": 4, "moe_topk": 2,
            "expert_ffn_hidden_size": 32, "zero_expert_num": 2, "head_dim": 8,
        },
    ),
    "minicpm3": ("MiniCPM3Config", "MiniCPM3ForCausalLM", {}),
    "mistral4": ("Mistral4Config", "Mistral4ForCausalLM", MOE),
    "youtu": ("YoutuConfig", "YoutuForCausalLM", {}),
    "axk1": ("AXK1Config", "AXK1ForCausalLM", MOE),
    "kimi_linear": (
        "KimiLinearConfig",
        "KimiLinearForCausalLM",
        MOE
        | {
            "q_lora_rank": None, "num_hidden_layers": 3,
            "layer_types": ["linear_attention", "full_attention", "linear_attention"],
        },
    ),
}  # fmt: skip


def family_classes(family: str) -> tuple[type, type]:
    """Config and model class; skips the test where this transformers lacks the family."""
    config_name, model_name, _ = FAMILIES[family]
    try:
        package = importlib.import_module(f"transformers.models.{family}")
        return getattr(package, config_name), getattr(package, model_name)
    except (ImportError, AttributeError):
        pytest.skip(f"the installed transformers has no {family}")


def make_config(family: str = "deepseek_v3", **changes: Any) -> Any:
    config_class, model_class = family_classes(family)
    fields = T | FAMILIES[family][2] | changes
    return config_class(**fields, architectures=[model_class.__name__])


def make_model(
    family: str = "deepseek_v3",
    *,
    attn: str = "sdpa",
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    **changes: Any,
) -> Any:
    """A random model whose weights are large enough for attention to matter."""
    _, model_class = family_classes(family)
    torch.manual_seed(seed)
    model = model_class._from_config(make_config(family, **changes), attn_implementation=attn)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() >= 2 and "norm" not in name:
                parameter.normal_(std=parameter.shape[-1] ** -0.5)
    return model.to(dtype).eval()


def token_ids(batch: int = 2, length: int = 40, *, seed: int = 1, vocab: int = 128) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, vocab, (batch, length), generator=generator)


def loop(*batches: torch.Tensor, **kwargs: Any) -> Callable[[Any], None]:
    """A forward loop over batches of token ids."""

    def run(model: Any) -> None:
        with torch.no_grad():
            for ids in batches:
                model(input_ids=ids, use_cache=False, **kwargs)

    return run


def make_tokenizer(vocab: int = 128) -> Any:
    """One token a byte below 128, so that every text of ASCII works."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    words = {"<pad>": 0, "<bos>": 1, "<eos>": 2, "<unk>": 3}
    for code in range(32, 127):
        words[chr(code)] = len(words)
    core = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    core.decoder = decoders.Fuse()
    core.post_processor = processors.TemplateProcessing(
        single="<bos> $A", special_tokens=[("<bos>", 1)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=core, pad_token="<pad>", bos_token="<bos>", eos_token="<eos>",
        unk_token="<unk>",
    )  # fmt: skip


def save_model(folder: Path, model: Any | None = None, **kwargs: Any) -> Path:
    """A model folder as users have it: weights, config, tokenizer, sidecars."""
    model = make_model(dtype=torch.bfloat16) if model is None else model
    model.save_pretrained(folder, **kwargs)
    make_tokenizer().save_pretrained(folder)
    (folder / "README.md").write_text("# original card\n")
    (folder / "LICENSE").write_text("some licence\n")
    (folder / "chat_template.jinja").write_text("{{ messages[0].content }}")
    return folder


def save_fp8_model(folder: Path, source: Path) -> Path:
    """Copy a model folder as DeepSeek-V3 is published: FP8 weights with 128x128 block scales."""
    import json
    import shutil

    from safetensors.torch import load_file, save_file

    shutil.copytree(source, folder)
    tensors = {}
    for name, value in load_file(source / "model.safetensors").items():
        if not name.endswith("_proj.weight") and not name.endswith("kv_a_proj_with_mqa.weight"):
            tensors[name] = value
            continue
        rows, columns = ((n + 127) // 128 for n in value.shape)
        scale = torch.empty(rows, columns)
        stored = torch.empty(value.shape, dtype=torch.float8_e4m3fn)
        for row in range(rows):
            for column in range(columns):
                where = (slice(128 * row, 128 * row + 128), slice(128 * column, 128 * column + 128))
                scale[row, column] = value[where].float().abs().max() / 448
                stored[where] = (value[where].float() / scale[row, column]).to(stored.dtype)
        tensors[name] = stored
        tensors[f"{name}_scale_inv"] = scale
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {
        "quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic",
        "weight_block_size": [128, 128],
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    return folder
