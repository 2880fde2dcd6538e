"""What quantization costs: every number against one computed another way."""

from __future__ import annotations

import copy
import json
import math
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import modelopt.torch.quantization as mtq
import numpy as np
import pytest
import torch
from torch import Tensor, nn
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM, DynamicCache

from mla_quant import evaluation
from mla_quant.attention import quant_mla_layers, set_form
from mla_quant.data import TokenBatch
from mla_quant.errors import CalibrationError, ConfigError, DataError
from mla_quant.evaluation import EvaluationOptions, evaluate, quantizers_off
from mla_quant.plugin import register_with_modelopt
from mla_quant.recipes import parse_recipe, to_modelopt_config

VOCABULARY = 96
LAYERS = ["model.layers.0.self_attn", "model.layers.1.self_attn"]
OFF = EvaluationOptions(decode_tokens=0, measure_sequences=0, sensitivity="none")


def options(**changes: Any) -> EvaluationOptions:
    """Nothing but the accuracy rows, unless asked for."""
    return EvaluationOptions(**{**OFF.__dict__, **changes})


def tiny_model() -> DeepseekV3ForCausalLM:
    torch.manual_seed(0)
    config = DeepseekV3Config(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=96,
        moe_intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        n_routed_experts=4,
        num_experts_per_tok=2,
        n_group=1,
        topk_group=1,
        kv_lora_rank=32,
        q_lora_rank=24,
        qk_nope_head_dim=16,
        qk_rope_head_dim=8,
        v_head_dim=16,
        first_k_dense_replace=1,
        # Large enough that 4-bit attention visibly moves the logits.
        initializer_range=0.15,
        max_position_embeddings=128,
    )
    return DeepseekV3ForCausalLM(config).eval()


def tokens(lengths: list[int], side: str = "right", seed: int = 1) -> TokenBatch:
    generator = torch.Generator().manual_seed(seed)
    width = max(lengths)
    ids = torch.zeros(len(lengths), width, dtype=torch.int64)
    mask = torch.zeros_like(ids)
    for row, length in enumerate(lengths):
        where = slice(width - length, None) if side == "left" else slice(length)
        ids[row, where] = torch.randint(3, VOCABULARY, (length,), generator=generator)
        mask[row, where] = 1
    return TokenBatch(ids, mask)


PADDED = tokens([40, 40, 23])
FULL = tokens([21, 21], seed=2)


def convert(model: nn.Module, recipe: dict[str, Any]) -> nn.Module:
    def forward_loop(m: nn.Module) -> None:
        m(input_ids=PADDED.input_ids, attention_mask=PADDED.attention_mask)

    register_with_modelopt()
    config = to_modelopt_config(parse_recipe({"name": "test", **recipe}, origin="test"))
    result: nn.Module = mtq.quantize(model, config, forward_loop)
    return result


ALL = {"q": "nvfp4", "k": "nvfp4", "p": "nvfp4", "v": "nvfp4"}


@pytest.fixture(scope="module")
def plain() -> nn.Module:
    """The model before conversion."""
    return tiny_model()


@pytest.fixture(scope="module")
def shared_model() -> nn.Module:
    return convert(tiny_model(), {"attention": ALL})


@pytest.fixture
def model(shared_model: nn.Module) -> nn.Module:
    return copy.deepcopy(shared_model)


@torch.no_grad()
def run(model: nn.Module, batch: TokenBatch, form: str | None = None) -> Tensor:
    if form is not None:
        set_form(model, form)  # type: ignore[arg-type]
    logits: Tensor = model(input_ids=batch.input_ids, attention_mask=batch.attention_mask).logits
    return logits


def row_of(result: dict[str, Any], form: str) -> dict[str, Any]:
    (row,) = [r for r in result["accuracy"] if r["form"] == form]
    return dict(row)


def assert_close(a: dict[str, Any], b: dict[str, Any], rel: float, abs_: float = 0.0) -> None:
    """Compare two rows of a section, text exactly."""
    assert a.keys() == b.keys()
    for key, value in a.items():
        if isinstance(value, float):
            assert value == pytest.approx(b[key], rel=rel, abs=abs_), (key, a, b)
        else:
            assert value == b[key], (key, a, b)


def log_probabilities(logits: Tensor, batch: TokenBatch) -> np.ndarray:
    """float64 [predictions, vocabulary] at positions that predict a real token, by numpy."""
    x = logits.numpy().astype(np.float64)
    x = x - x.max(-1, keepdims=True)
    x = x - np.log(np.exp(x).sum(-1, keepdims=True))
    mask = batch.attention_mask.numpy()
    chosen = []
    for b in range(mask.shape[0]):
        for t in range(mask.shape[1] - 1):
            if mask[b, t] and mask[b, t + 1]:
                chosen.append(x[b, t])
    return np.stack(chosen)


def cross_entropy(logits: Tensor, batch: TokenBatch) -> float:
    labels = batch.input_ids.masked_fill(batch.attention_mask == 0, -100)[:, 1:]
    return float(
        nn.functional.cross_entropy(
            logits[:, :-1].reshape(-1, VOCABULARY), labels.reshape(-1), ignore_index=-100
        )
    )


# ---------------------------------------------------------------------------------------- logits


@pytest.mark.parametrize("form", ["projected", "absorbed"])
def test_perplexity_is_the_exponential_of_cross_entropy(
    model: nn.Module, plain: nn.Module, form: str
) -> None:
    row = row_of(evaluate(model, [PADDED], OFF), form)
    expected = cross_entropy(run(model, PADDED, form), PADDED)
    assert row["nll"] == pytest.approx(expected, rel=1e-6)
    assert row["perplexity"] == pytest.approx(math.exp(expected), rel=1e-6)
    original = cross_entropy(run(plain, PADDED), PADDED)
    assert row["original_perplexity"] == pytest.approx(math.exp(original), rel=1e-6)
    assert row["perplexity"] != pytest.approx(row["original_perplexity"], rel=1e-4)
    assert row["tokens"] == 39 + 39 + 22


def test_original_differs_from_itself_by_nothing(model: nn.Module, plain: nn.Module) -> None:
    row = row_of(evaluate(model, [PADDED], OFF), "original")
    assert (row["kl_mean"], row["kl_p99"], row["kl_max"], row["top1_agreement"]) == (0, 0, 0, 1)
    assert row["nll"] == pytest.approx(cross_entropy(run(plain, PADDED), PADDED), rel=1e-6)


@pytest.mark.parametrize("form", ["projected", "absorbed"])
def test_divergence_agreement_and_error_equal_numpy(
    model: nn.Module, plain: nn.Module, form: str
) -> None:
    row = row_of(evaluate(model, [PADDED], OFF), form)
    p = log_probabilities(run(plain, PADDED), PADDED)
    q = log_probabilities(run(model, PADDED, form), PADDED)
    divergence = np.sort((np.exp(p) * (p - q)).sum(-1))
    assert row["kl_mean"] == pytest.approx(divergence.mean(), rel=1e-9)
    assert row["kl_mean"] > 1e-3
    # The 99th percentile of n values lies at position 0.99 (n - 1), between two of them.
    at = 0.99 * (len(divergence) - 1)
    low, high = divergence[math.floor(at)], divergence[math.ceil(at)]
    assert row["kl_p99"] == pytest.approx(low + (high - low) * (at % 1), rel=1e-9)
    assert row["kl_max"] == pytest.approx(divergence[-1], rel=1e-9)
    agreement = (p.argmax(-1) == q.argmax(-1)).mean()
    assert row["top1_agreement"] == agreement < 1
    targets = PADDED.input_ids[:, 1:][PADDED.attention_mask[:, 1:] == 1].numpy()
    nll = -q[np.arange(len(q)), targets]
    assert row["nll_stderr"] == pytest.approx(nll.std(ddof=1) / math.sqrt(len(nll)), rel=1e-9)


def test_divergence_of_close_models_is_not_rounding_noise(
    model: nn.Module, plain: nn.Module
) -> None:
    """A divergence near 1e-10 is far below what fp32 log-probabilities resolve."""
    close = copy.deepcopy(plain)
    with torch.no_grad():
        close.lm_head.weight += 1e-6 * torch.randn_like(close.lm_head.weight)
    tally = evaluation._Tally()
    a, b = run(plain, FULL), run(close, FULL)
    tally.add(
        a[:, :-1], b[:, :-1], FULL.input_ids[:, 1:], torch.ones_like(FULL.input_ids[:, 1:]).bool()
    )
    p, q = log_probabilities(a, FULL), log_probabilities(b, FULL)
    expected = (np.exp(p) * (p - q)).sum(-1).mean()
    assert 0 < expected < 1e-9
    assert tally.numbers()["kl_mean"] == pytest.approx(expected, rel=1e-3)


@pytest.mark.parametrize("decode_tokens", [1, 5, 19])
def test_decode_row_equals_a_loop_over_the_cache(
    model: nn.Module, plain: nn.Module, decode_tokens: int
) -> None:
    result = evaluate(model, [FULL], options(decode_tokens=decode_tokens))
    set_form(model, "auto")
    expected = run(plain, FULL)
    nll, original_nll, agreements, divergences = [], [], [], []
    for b in range(2):
        ids = FULL.input_ids[b : b + 1]
        cache = DynamicCache(config=model.config)
        start = 21 - decode_tokens - 1
        with torch.no_grad():
            model(input_ids=ids[:, :start], past_key_values=cache, use_cache=True)
            for t in range(start, 20):
                logits = model(input_ids=ids[:, [t]], past_key_values=cache, use_cache=True).logits
                p, q = (
                    expected[b, t].double().log_softmax(-1),
                    logits[0, 0].double().log_softmax(-1),
                )
                nll.append(nn.functional.cross_entropy(logits[0].double(), ids[0, [t + 1]]).item())
                original_nll.append(-p[ids[0, t + 1]].item())
                agreements.append(p.argmax() == q.argmax())
                divergences.append(nn.functional.kl_div(q, p, reduction="sum", log_target=True))
    row = row_of(result, "decode")
    assert row["tokens"] == len(nll) == 2 * decode_tokens
    # The loop ran the rows one by one: sums differ by fp32 rounding, which may flip an element.
    assert row["nll"] == pytest.approx(np.mean(nll), rel=1e-4)
    assert row["original_perplexity"] == pytest.approx(np.exp(np.mean(original_nll)), rel=1e-5)
    assert row["kl_mean"] == pytest.approx(np.mean(divergences), rel=1e-2)
    assert row["top1_agreement"] == np.mean(agreements)


def test_decode_takes_unpadded_sequences_only(model: nn.Module) -> None:
    row = row_of(evaluate(model, [PADDED], options(decode_tokens=4)), "decode")
    assert row["tokens"] == 2 * 4
    result = evaluate(model, [FULL], options(decode_tokens=20))
    assert [r["form"] for r in result["accuracy"]] == ["original", "projected", "absorbed"]
    assert "at least 22 tokens" in result["warnings"][0]


@pytest.mark.parametrize("side", ["left", "right"])
def test_original_perplexity_is_that_of_sequences_without_padding(
    model: nn.Module, plain: nn.Module, side: str
) -> None:
    lengths = [9, 33, 17]
    batch = tokens(lengths, side)
    total = 0.0
    for b, length in enumerate(lengths):
        ids = batch.input_ids[b][batch.attention_mask[b] == 1][None]
        alone = TokenBatch(ids, torch.ones_like(ids))
        total += cross_entropy(run(plain, alone), alone) * (length - 1)
    row = row_of(evaluate(model, [batch], OFF), "original")
    assert row["nll"] == pytest.approx(total / (sum(lengths) - 3), rel=1e-5)


@pytest.mark.parametrize(
    ("side", "expected"),
    [("left", [[0, 1, 2, 3, 4], [0, 0, 0, 1, 2]]), ("right", None)],
)
def test_positions_count_tokens_not_padding(
    model: nn.Module, side: str, expected: list[list[int]] | None
) -> None:
    """Logits cannot show it: rotary embedding depends on differences of positions only."""
    seen: list[Any] = []
    model.register_forward_pre_hook(
        lambda _, args, kwargs: seen.append(kwargs.get("position_ids")), with_kwargs=True
    )
    evaluate(model, [tokens([5, 3], side)], OFF)
    assert len(seen) == 3
    assert all((p if p is None else p.tolist()) == expected for p in seen)


def test_results_do_not_depend_on_the_padding_side(model: nn.Module) -> None:
    sides = [tokens([40, 40, 23], side) for side in ("left", "right")]
    left, right = (evaluate(model, [batch], EvaluationOptions(decode_tokens=8)) for batch in sides)
    for section in ("accuracy", "operands", "layers", "sensitivity"):
        assert len(left[section]) == len(right[section]) > 0
        for a, b in zip(left[section], right[section], strict=True):
            if a.get("operand") == "p":
                continue  # See the next test.
            assert_close(a, b, 1e-3, 1e-5)


def test_noise_of_p_does_not_depend_on_the_padding_side(model: nn.Module) -> None:
    sides = [tokens([40, 40, 23], side) for side in ("left", "right")]
    left, right = (evaluate(model, [batch], options(measure_sequences=3)) for batch in sides)
    p = [[r for r in result["operands"] if r["operand"] == "p"] for result in (left, right)]
    assert [r["values"] for r in p[0]] == [r["values"] for r in p[1]]


def test_batches_are_split_and_logits_compared_in_chunks(
    model: nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = evaluate(model, [PADDED], EvaluationOptions(forms=("absorbed",), decode_tokens=4))
    monkeypatch.setattr(evaluation, "_LOGITS_PER_CHUNK", 7 * VOCABULARY)
    seen: list[int] = []
    handle = model.register_forward_pre_hook(
        lambda _, args, kwargs: seen.append(kwargs["input_ids"].shape[0]), with_kwargs=True
    )
    parts = evaluate(
        model, [PADDED], EvaluationOptions(forms=("absorbed",), decode_tokens=4, batch_size=1)
    )
    handle.remove()
    assert set(seen) == {1}
    for section in ("accuracy", "operands", "layers", "sensitivity"):
        for a, b in zip(whole[section], parts[section], strict=True):
            assert_close(a, b, 1e-3, 1e-5)


def test_an_original_model_is_compared_with(model: nn.Module, plain: nn.Module) -> None:
    everything = EvaluationOptions(decode_tokens=4)
    alone = evaluate(model, [PADDED], everything)
    given = EvaluationOptions(decode_tokens=4, original=copy.deepcopy(plain))
    assert evaluate(model, [PADDED], given) == alone
    other = copy.deepcopy(plain)
    with torch.no_grad():
        other.lm_head.weight.mul_(2)
    row = row_of(evaluate(model, [PADDED], options(original=other)), "original")
    assert row["nll"] == pytest.approx(cross_entropy(run(other, PADDED), PADDED), rel=1e-6)


# ----------------------------------------------------------------------------------------- noise


def decibels(exact: np.ndarray, noisy: np.ndarray) -> float:
    exact, noisy = exact.astype(np.float64), noisy.astype(np.float64)
    return float(10 * np.log10((exact**2).sum() / ((exact - noisy) ** 2).sum()))


@pytest.mark.parametrize(
    ("form", "operand"),
    [(f, o) for f, os in {
        "projected": ["q", "k", "v"],
        "absorbed": ["q_latent", "q_rope", "k_latent", "k_rope", "v_latent"],
    }.items() for o in os],
)  # fmt: skip
def test_operand_noise_equals_numpy_on_captured_operands(
    model: nn.Module, form: str, operand: str
) -> None:
    result = evaluate(model, [PADDED], options(measure_sequences=3))
    real = PADDED.attention_mask.numpy().astype(bool)
    for name, module in quant_mla_layers(model).items():
        captured: list[tuple[np.ndarray, np.ndarray]] = []
        handle = module.quantizer(operand).register_forward_hook(
            lambda _, args, out, captured=captured: captured.append((args[0].numpy(), out.numpy()))
        )
        run(model, PADDED, form)
        handle.remove()
        ((x, y),) = captured
        x, y = (a.transpose(0, 2, 1, 3)[real] for a in (x, y))
        (row,) = [
            r
            for r in result["operands"]
            if (r["form"], r["layer"], r["operand"]) == (form, name, operand)
        ]
        assert row["sqnr_db"] == pytest.approx(decibels(x, y), abs=1e-3)
        assert row["values"] == x.size
        amax = float(module.quantizer(operand).amax)
        assert row["amax"] == pytest.approx(amax)
        assert row["saturated_share"] == pytest.approx((np.abs(x) > amax).mean())
        assert (row["format"], row["layer_index"]) == ("nvfp4", LAYERS.index(name))


@pytest.mark.parametrize("form", ["projected", "absorbed"])
@torch.no_grad()
def test_output_noise_equals_numpy_on_captured_outputs(
    model: nn.Module, plain: nn.Module, form: str
) -> None:
    result = evaluate(model, [PADDED], options(measure_sequences=3))
    row = next(r for r in result["layers"] if r["form"] == form and r["layer"] == LAYERS[0])
    real = PADDED.attention_mask.numpy().astype(bool)
    set_form(model, form)  # type: ignore[arg-type]
    outputs: dict[str, list[np.ndarray]] = {"attention": [], "hidden": []}
    for m in (plain, model):
        # The first layer's inputs are the same in both models, so what enters o_proj differs by
        # this layer's noise only.
        handle = m.get_submodule(f"{LAYERS[0]}.o_proj").register_forward_pre_hook(
            lambda _, args: outputs["attention"].append(args[0].numpy()[real])
        )
        states = m(
            input_ids=PADDED.input_ids,
            attention_mask=PADDED.attention_mask,
            output_hidden_states=True,
        ).hidden_states
        outputs["hidden"].append(states[1].numpy()[real])
        handle.remove()
    for kind, (exact, noisy) in outputs.items():
        assert row[f"{kind}_sqnr_db"] == pytest.approx(decibels(exact, noisy), abs=1e-3), kind


def test_measured_sequences_are_the_first_ones(model: nn.Module) -> None:
    result = evaluate(model, [FULL, PADDED], options(measure_sequences=3))
    k = next(r for r in result["operands"] if r["operand"] == "k")
    assert k["values"] == (21 + 21 + 40) * 4 * (16 + 8)
    nothing = evaluate(model, [FULL], OFF)
    assert nothing["operands"] == nothing["layers"] == nothing["sensitivity"] == []


def test_no_noise_and_no_signal_give_null(model: nn.Module) -> None:
    with torch.no_grad():
        for module in quant_mla_layers(model).values():
            module.kv_a_layernorm.weight.zero_()
    result = evaluate(model, [FULL], options(measure_sequences=2))
    silent = [r for r in result["operands"] if r["operand"] in ("v", "k_latent", "v_latent")]
    assert len(silent) == 6
    assert all(r["sqnr_db"] is None and r["values"] > 0 for r in silent)
    assert all(r["attention_sqnr_db"] is None for r in result["layers"])
    json.dumps(result, allow_nan=False)


@pytest.mark.parametrize(
    ("attention", "layer"),
    [
        ("model.layers.3.self_attn", "model.layers.3"),
        ("model.layers.3.self_attn.1", "model.layers.3"),
        ("language_model.model.layers.0.attention", "language_model.model.layers.0"),
    ],
)
def test_decoder_layer_of_an_attention(attention: str, layer: str) -> None:
    assert evaluation._decoder_layer(attention) == layer


# ----------------------------------------------------------------------------------- sensitivity


def only(model: nn.Module, keep: Callable[[str, str], bool]) -> nn.Module:
    """A copy in which other attention quantizers are disabled for good."""
    result = copy.deepcopy(model)
    for name, module in quant_mla_layers(result).items():
        for operand in module.enabled_operands():
            if not keep(name, operand):
                module.quantizer(operand).disable()
    return result


@pytest.mark.parametrize("form", ["projected", "absorbed"])
def test_sensitivity_equals_a_model_with_the_rest_disabled(model: nn.Module, form: str) -> None:
    result = evaluate(model, [FULL], options(forms=(form,), sensitivity="all"))
    rows = {(r["kind"], r["target"]): r for r in result["sensitivity"]}
    operands = {
        "projected": ["q", "k", "p", "v"],
        "absorbed": ["q_latent", "q_rope", "k_latent", "k_rope", "v_latent", "p"],
    }[form]
    assert set(rows) == {("layer", n) for n in LAYERS} | {("operand", o) for o in operands}
    original = row_of(result, "original")["perplexity"]
    for (kind, target), row in rows.items():
        alone = only(model, lambda n, o, kind=kind, target=target: target == {
            "layer": n, "operand": o
        }[kind])  # fmt: skip
        expected = row_of(evaluate(alone, [FULL], options(forms=(form,))), form)
        assert row["kl_mean"] == expected["kl_mean"] > 1e-5
        assert row["perplexity"] == expected["perplexity"]
        assert row["delta_perplexity"] == expected["perplexity"] - original
        assert row["top1_agreement"] == expected["top1_agreement"]


def test_quantizing_nothing_costs_nothing(
    model: nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(evaluation, "_alone", lambda kind, target: lambda layer, operand: False)
    rows = evaluate(model, [FULL], options(sensitivity="all"))["sensitivity"]
    assert len(rows) == 4 + 6 + 2 * 2
    assert all(
        (r["kl_mean"], r["delta_perplexity"], r["top1_agreement"]) == (0, 0, 1) for r in rows
    )


@pytest.mark.parametrize(("wanted", "kinds"), [("operands", {"operand"}), ("layers", {"layer"})])
def test_sensitivity_of_one_kind(model: nn.Module, wanted: str, kinds: set[str]) -> None:
    rows = evaluate(model, [FULL], options(sensitivity=wanted))["sensitivity"]
    assert {r["kind"] for r in rows} == kinds


def test_quantized_weights_are_not_attributed_to_attention(plain: nn.Module) -> None:
    model = convert(tiny_model(), {"attention": {"k": "nvfp4"}, "weights": "fp8"})
    with quantizers_off(model):
        assert torch.equal(run(model, FULL), run(plain, FULL))
    result = evaluate(model, [FULL], options(sensitivity="operands", forms=("projected",)))
    original = cross_entropy(run(plain, FULL), FULL)
    assert row_of(result, "projected")["original_perplexity"] == pytest.approx(math.exp(original))
    (row,) = result["sensitivity"]
    weights_only = cross_entropy(run(only(model, lambda n, o: False), FULL), FULL)
    assert abs(weights_only - original) > 1e-4
    reference = row["perplexity"] - row["delta_perplexity"]
    assert reference == pytest.approx(math.exp(weights_only), rel=1e-6)


# ------------------------------------------------------------------------------ state and errors


def state(model: nn.Module) -> dict[str, Any]:
    return {
        "modules": {
            name: (
                module.training,
                getattr(module, "form", None),
                getattr(module, "measurement", None),
                getattr(module, "_if_quant", None),
                len(module._forward_hooks),
                len(module._forward_pre_hooks),
            )
            for name, module in model.named_modules()
        },
        "grad": torch.is_grad_enabled(),
    }


class _InterruptError(Exception):
    pass


def test_state_is_restored_wherever_it_stops(model: nn.Module, plain: nn.Module) -> None:
    original = copy.deepcopy(plain)
    model.train()
    original.train()
    model.get_submodule("model.layers.1").eval()
    set_form(model, "absorbed")
    quant_mla_layers(model)[LAYERS[0]].quantizer("k").disable_quant()
    before = state(model), state(original)
    calls = 0
    stop_at = 0

    def count(*_: Any) -> None:
        nonlocal calls
        calls += 1
        if calls == stop_at:
            raise _InterruptError

    for kwargs in ({"original": original}, {}):
        everything = EvaluationOptions(decode_tokens=2, **kwargs)
        stop_at = calls = 0
        # The last layer's attention: inside every context of every stage.
        hooks = [m.get_submodule("lm_head").register_forward_hook(count) for m in (model, original)]
        evaluate(model, [FULL], everything)
        total = calls
        assert total > 20
        for stop_at in range(1, total + 1, 4):
            calls = 0
            with pytest.raises(_InterruptError):
                evaluate(model, [FULL], everything)
            for hook in hooks:
                hook.remove()
            assert (state(model), state(original)) == before, f"stopped at pass {stop_at}"
            hooks = [
                m.get_submodule("lm_head").register_forward_hook(count) for m in (model, original)
            ]
        for hook in hooks:
            hook.remove()


def test_progress_counts_up_to_its_total(model: nn.Module) -> None:
    seen: dict[str, list[tuple[int, int]]] = {}
    evaluate(
        model,
        [FULL, PADDED],
        EvaluationOptions(decode_tokens=2),
        progress=lambda stage, done, total: seen.setdefault(stage, []).append((done, total)),
    )
    assert list(seen) == ["accuracy", "noise", "sensitivity"]
    for counts in seen.values():
        total = counts[0][1]
        assert counts == [(i, total) for i in range(1, total + 1)]


def test_logits_that_are_not_finite_give_null_and_a_warning(model: nn.Module) -> None:
    quantizer = quant_mla_layers(model)[LAYERS[1]].quantizer("q")
    quantizer._amax.fill_(math.nan)
    result = evaluate(model, [FULL], EvaluationOptions(decode_tokens=0))
    json.dumps(result, allow_nan=False)
    broken = row_of(result, "projected")
    assert all(broken[k] is None for k in ("nll", "perplexity", "kl_mean", "kl_p99", "kl_max"))
    assert broken["top1_agreement"] is None
    assert broken["original_perplexity"] == row_of(result, "original")["perplexity"]
    assert row_of(result, "absorbed")["kl_mean"] > 0
    text = "\n".join(result["warnings"])
    assert "projected: 40 of 40 predictions" in text
    assert f"sensitivity to layer {LAYERS[1]} (projected)" in text
    assert f"q of {LAYERS[1]} (projected)" in text
    assert "absorbed" not in text
    nulls = [r["target"] for r in result["sensitivity"] if r["kl_mean"] is None]
    assert nulls == ["q", LAYERS[1]]


def test_form_without_quantizers_is_skipped() -> None:
    recipe = {"attention": {"q": "fp8", "k": "fp8", "forms": ["projected"]}}
    result = evaluate(
        convert(tiny_model(), recipe), [FULL], EvaluationOptions(sensitivity="operands")
    )
    assert [r["form"] for r in result["accuracy"]] == ["original", "projected"]
    assert [r["target"] for r in result["sensitivity"]] == ["q", "k"]
    assert {r["form"] for r in result["operands"] + result["layers"]} == {"projected"}
    assert all(r["flushed_block_share"] is None for r in result["operands"])
    assert [w.split(":")[0] for w in result["warnings"]] == ["absorbed", "decode"]


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"forms": ()}, "forms"),
        ({"forms": ("projected", "projected")}, "forms"),
        ({"forms": ("auto",)}, "auto"),
        ({"sensitivity": "heads"}, "heads"),
        ({"decode_tokens": -1}, "decode_tokens"),
        ({"batch_size": 0}, "batch_size"),
        ({"sensitivity_sequences": True}, "sensitivity_sequences"),
    ],
)
def test_options_are_checked(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        EvaluationOptions(**changes)


def test_bad_input_is_refused(model: nn.Module, plain: nn.Module) -> None:
    with pytest.raises(CalibrationError, match=r"mtq\.quantize"):
        evaluate(plain, [FULL], OFF)
    with pytest.raises(DataError, match="no token"):
        evaluate(model, [], OFF)
    with pytest.raises(DataError, match="no token"):
        evaluate(model, [tokens([1, 1])], OFF)
    with pytest.raises(DataError, match=r"batch 1.*\[2, 21\].*\[2, 20\]"):
        evaluate(model, [FULL, TokenBatch(FULL.input_ids, FULL.attention_mask[:, 1:])], OFF)
    with pytest.raises(ConfigError, match="AutoModelForCausalLM"):
        evaluate(model.model, [FULL], OFF)
    del quant_mla_layers(model)[LAYERS[0]].quantizer("k")._amax
    with pytest.raises(CalibrationError, match=r"k.* has no amax|'k' has no amax"):
        evaluate(model, [FULL], OFF)


# ----------------------------------------------------------------------------- several processes


def test_processes_return_the_result_of_all(
    model: nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Threads stand in for two processes; only the exchange of objects is replaced."""
    # One sequence a batch, so that both ways add the same numbers.
    parts = [[FULL], [PADDED, tokens([30], seed=3)]]
    whole = [FULL, PADDED, tokens([30], seed=3)]
    everything = EvaluationOptions(
        decode_tokens=4, batch_size=1, measure_sequences=6, sensitivity_sequences=6
    )
    expected = evaluate(model, whole, everything)

    barrier, slots, rank = threading.Barrier(2, timeout=60), [None, None], threading.local()
    # ModelOpt replaces functions of torch during a forward pass, so one thread runs at a time.
    turn = threading.Lock()

    def gather(value: Any) -> list[Any]:
        slots[rank.number] = copy.deepcopy(value)
        turn.release()
        barrier.wait()
        values = copy.deepcopy(slots)
        barrier.wait()
        turn.acquire()
        return values

    monkeypatch.setattr(evaluation, "_gather", gather)
    results: list[Any] = [None, None]

    def work(number: int, own: nn.Module) -> None:
        rank.number = number
        with turn:
            results[number] = evaluate(own, parts[number], everything)

    threads = [threading.Thread(target=work, args=(i, copy.deepcopy(model))) for i in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results[0] == results[1]
    for section in ("accuracy", "operands", "layers", "sensitivity"):
        for a, b in zip(results[0][section], expected[section], strict=True):
            assert_close(a, b, 1e-9)
    assert results[0]["warnings"] == expected["warnings"]


def test_a_process_group_is_used(model: nn.Module, tmp_path: Path) -> None:
    expected = evaluate(model, [PADDED], EvaluationOptions(decode_tokens=4))
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1
    )
    try:
        assert evaluate(model, [PADDED], EvaluationOptions(decode_tokens=4)) == expected
    finally:
        torch.distributed.destroy_process_group()
