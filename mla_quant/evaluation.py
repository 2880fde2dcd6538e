"""What quantized attention costs in accuracy: logits, operands, layer outputs, sensitivity.

Works on a model that `mtq.quantize` has converted and calibrated, on any device. Three stages,
each over its own part of the data:

- accuracy: logits of the original model against those of every form, token by token;
- noise: signal to quantization noise ratio (SQNR) of operands, attention outputs and hidden states;
- sensitivity: logits with one layer, or one operand of all layers, quantized alone.

No stage holds more than one batch of logits per model or of hidden states. Whatever is switched on
the model is switched back, also when a stage fails.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np
import torch
from modelopt.torch.quantization.nn import TensorQuantizer
from numpy.typing import NDArray
from torch import Tensor, nn

from mla_quant.attention import (
    Form,
    Measurement,
    QuantMLAAttention,
    only_operands,
    quant_mla_layers,
    use_form,
)
from mla_quant.calibration import input_device
from mla_quant.data import TokenBatch
from mla_quant.errors import CalibrationError, ConfigError, DataError
from mla_quant.families import layer_index
from mla_quant.quantizers import operand_format, quantizer_amax
from mla_quant.recipes import FORMS, OPERANDS

__all__ = ["EvaluationOptions", "evaluate", "quantizers_off"]

Progress = Callable[[str, int, int], None]
"""Called with a stage's name, the forward passes done and those to do."""

SENSITIVITIES = ("none", "operands", "layers", "all")

_LOGITS_PER_CHUNK = 1 << 23
"""Logits compared at a time: bounds each float64 temporary to 64 MiB."""

_T = TypeVar("_T")


@dataclass(frozen=True)
class EvaluationOptions:
    """What `evaluate` measures.

    Attributes:
        forms: Forms measured, of "projected" and "absorbed".
        decode_tokens: Above 0, also measure decoding: the last so many tokens of every unpadded
            sequence are predicted one by one from a cache. 0: do not.
        measure_sequences: Sequences that SQNR is measured on; 0: none.
        sensitivity: "none", "operands", "layers" or "all" (both).
        sensitivity_sequences: Sequences that sensitivity is measured on.
        batch_size: Sequences of a forward pass at most; larger batches are split.
        original: The model before quantization, where `model` cannot give its outputs because
            weights were changed. None: `model` with every quantizer off, those of linear layers
            included.

    With several processes, the numbers of sequences are those of all together.
    """

    forms: tuple[str, ...] = FORMS
    decode_tokens: int = 32
    measure_sequences: int = 8
    sensitivity: str = "all"
    sensitivity_sequences: int = 8
    batch_size: int = 4
    original: nn.Module | None = None

    def __post_init__(self) -> None:
        if (
            not self.forms
            or not set(self.forms) <= set(FORMS)
            or len(set(self.forms)) < len(self.forms)
        ):
            raise ConfigError(
                f"evaluation: forms must be one or both of {', '.join(FORMS)}, found "
                f"{list(self.forms)!r}"
            )
        if self.sensitivity not in SENSITIVITIES:
            raise ConfigError(
                f"evaluation: sensitivity must be one of {', '.join(SENSITIVITIES)}, found "
                f"{self.sensitivity!r}"
            )
        for name, least in (
            ("decode_tokens", 0),
            ("measure_sequences", 0),
            ("sensitivity_sequences", 1),
            ("batch_size", 1),
        ):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise ConfigError(
                    f"evaluation: {name} must be an integer of {least} or more, found {value!r}"
                )


# ------------------------------------------------------------------------------- model's state


@contextmanager
def quantizers_off(model: nn.Module) -> Iterator[None]:
    """Run a model unquantized for the duration of a block.

    Switches off every `TensorQuantizer`, those of linear layers included, and afterwards those on
    again that were on. Scaling that ModelOpt has folded into weights stays.
    """
    changed = []
    try:
        for module in model.modules():
            # Some disabled ones refuse to be switched on again.
            if isinstance(module, TensorQuantizer) and module.is_enabled and module._if_quant:
                module.disable_quant()
                changed.append(module)
        yield
    finally:
        for module in changed:
            module.enable_quant()


@contextmanager
def _original(model: nn.Module, original: nn.Module | None) -> Iterator[nn.Module]:
    """The model to compare with."""
    if original is not None:
        yield original
        return
    with quantizers_off(model):
        yield model


@contextmanager
def _in_eval_mode(*models: nn.Module | None) -> Iterator[None]:
    modes = [(m, m.training) for model in models if model is not None for m in model.modules()]
    try:
        for model in models:
            if model is not None:
                model.eval()
        yield
    finally:
        for module, training in modes:
            module.training = training


@contextmanager
def _measuring(
    layers: dict[str, QuantMLAAttention], measurements: dict[str, Measurement]
) -> Iterator[None]:
    before = {name: module.measurement for name, module in layers.items()}
    try:
        for name, module in layers.items():
            module.measurement = measurements[name]
        yield
    finally:
        for name, module in layers.items():
            module.measurement = before[name]


@contextmanager
def _watching(
    model: nn.Module, names: Sequence[str], see: Callable[[str, Tensor], None]
) -> Iterator[None]:
    """Call `see` with the name and the output [batch, tokens, width] of some modules."""
    modules = dict(model.named_modules())
    handles = []

    def watch(name: str) -> None:
        def hook(_: nn.Module, __: Any, output: Any) -> None:
            first = output[0] if isinstance(output, (tuple, list)) and output else output
            if isinstance(first, Tensor) and first.dim() == 3:
                see(name, first)

        handles.append(modules[name].register_forward_hook(hook))

    try:
        for name in names:
            if name in modules:
                watch(name)
        yield
    finally:
        for handle in handles:
            handle.remove()


# ----------------------------------------------------------------------------- forward passes


def _logits(output: Any, model: nn.Module) -> Tensor:
    logits = getattr(output, "logits", None)
    if not isinstance(logits, Tensor) or logits.dim() != 3:
        raise ConfigError(
            f"evaluation: {type(model).__name__} returns no logits [batch, tokens, vocabulary]; "
            "load the model with AutoModelForCausalLM"
        )
    return logits


def _forward(model: nn.Module, batch: TokenBatch) -> Tensor:
    """Logits [batch, tokens, vocabulary] in the model's dtype, wherever the model leaves them."""
    device = input_device(model)
    mask = batch.attention_mask.to(device)
    inputs: dict[str, Tensor] = {"input_ids": batch.input_ids.to(device), "attention_mask": mask}
    if not bool(mask[:, 0].all()):
        # A forward pass counts positions from the first column, padding or not.
        inputs["position_ids"] = (mask.cumsum(-1) - 1).clamp(min=0)
    return _logits(model(**inputs, use_cache=False), model)


def _split(batches: Sequence[TokenBatch], size: int, limit: int | None = None) -> list[TokenBatch]:
    """Batches of at most `size` sequences; of the first `limit` sequences only."""
    result = []
    for batch in batches:
        for start in range(0, batch.input_ids.shape[0], size):
            stop = start + size if limit is None else min(start + size, start + limit)
            ids, mask = batch.input_ids[start:stop], batch.attention_mask[start:stop]
            if limit is not None:
                limit -= ids.shape[0]
            if ids.shape[0]:
                result.append(TokenBatch(ids, mask))
    return result


def _check_batches(batches: Sequence[TokenBatch]) -> None:
    for i, batch in enumerate(batches):
        shapes = tuple(batch.input_ids.shape), tuple(batch.attention_mask.shape)
        if len(shapes[0]) != 2 or shapes[0] != shapes[1] or 0 in shapes[0]:
            raise DataError(
                f"evaluation batch {i}: input_ids and attention_mask must both be [batch, tokens] "
                f"and not empty, found {list(shapes[0])} and {list(shapes[1])}"
            )


# ------------------------------------------------------------------------------ comparing logits


@dataclass
class _Tally:
    """Logits of one configuration against those of the original, summed over predicted tokens.

    Sums are float64, in nats.
    """

    keep_divergences: bool = False
    tokens: int = 0
    nonfinite: int = 0
    """Tokens predicted by logits of which some are NaN or infinite."""
    agreeing: int = 0
    nll: float = 0.0
    nll_squares: float = 0.0
    original_nll: float = 0.0
    divergence: float = 0.0
    divergences: list[NDArray[np.float64]] = field(default_factory=list)

    def add(self, original: Tensor, logits: Tensor, targets: Tensor, valid: Tensor) -> None:
        """Compare a batch.

        Args:
            original: [batch, tokens, vocabulary], any floating dtype.
            logits: Likewise; may be on another device.
            targets: int64 [batch, tokens]: the token that each position is to predict.
            valid: bool [batch, tokens]: positions that count.
        """
        device = original.device
        rows, columns = valid.to(device).nonzero(as_tuple=True)
        targets = targets.to(device)
        size = max(1, _LOGITS_PER_CHUNK // original.shape[-1])
        for row, column in zip(rows.split(size), columns.split(size), strict=True):
            if row.numel() == 0:
                continue
            here = logits.device
            p = original[row, column].double()
            q = logits[row.to(here), column.to(here)].to(device).double()
            target = targets[row, column, None]
            self.tokens += row.numel()
            self.nonfinite += int((~(p.isfinite().all(-1) & q.isfinite().all(-1))).sum())
            self.agreeing += int((p.argmax(-1) == q.argmax(-1)).sum())
            # Differences of the log-probabilities of nearby models are lost in fp32.
            p, q = p.log_softmax(-1), q.log_softmax(-1)
            nll = -q.gather(-1, target)
            self.nll += float(nll.sum())
            self.nll_squares += float(nll.square().sum())
            self.original_nll -= float(p.gather(-1, target).sum())
            divergence = (p.exp() * (p - q)).sum(-1)
            self.divergence += float(divergence.sum())
            if self.keep_divergences:
                self.divergences.append(divergence.cpu().numpy())

    def merge(self, other: _Tally) -> None:
        """Add another process's sums."""
        self.tokens += other.tokens
        self.nonfinite += other.nonfinite
        self.agreeing += other.agreeing
        self.nll += other.nll
        self.nll_squares += other.nll_squares
        self.original_nll += other.original_nll
        self.divergence += other.divergence
        self.divergences += other.divergences

    def numbers(self) -> dict[str, float | int | None]:
        """Results; None where logits were not finite."""
        n = self.tokens
        result: dict[str, float | int | None] = {
            "original_perplexity": _perplexity(self.original_nll / n),
            "perplexity": None,
            "nll": None,
            "nll_stderr": None,
            "kl_mean": None,
            "kl_p99": None,
            "kl_max": None,
            "top1_agreement": None,
            "tokens": n,
        }
        if self.nonfinite:
            return result
        mean = self.nll / n
        variance = max(0.0, self.nll_squares / n - mean**2) * n / max(1, n - 1)
        result |= {
            "perplexity": _perplexity(mean),
            "nll": mean,
            "nll_stderr": math.sqrt(variance / n),
            "kl_mean": self.divergence / n,
            "top1_agreement": self.agreeing / n,
        }
        if self.keep_divergences:
            every = np.concatenate(self.divergences)
            result["kl_p99"] = float(np.percentile(every, 99))
            result["kl_max"] = float(every.max())
        return result


def _perplexity(nll: float) -> float | None:
    # exp overflows beyond 709 nats, which only a broken model has.
    return math.exp(nll) if math.isfinite(nll) and nll < 709 else None


def _sqnr_db(signal: float, noise: float) -> float | None:
    """None without signal, without noise, or where either is not finite."""
    if not (math.isfinite(signal) and math.isfinite(noise)) or signal <= 0 or noise <= 0:
        return None
    # A quotient of the two may overflow.
    return 10 * (math.log10(signal) - math.log10(noise))


# ----------------------------------------------------------------------------- several processes


def _distributed() -> bool:
    return torch.distributed.is_available() and torch.distributed.is_initialized()


def _gather(value: _T) -> list[_T]:
    """`value` of every process, in the order of their ranks."""
    if not _distributed():
        return [value]
    values: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(values, value)
    return values


def _share(sequences: int) -> int:
    """This process's part of a number of sequences, rounded up."""
    return -(-sequences // (torch.distributed.get_world_size() if _distributed() else 1))


def _merge_tallies(tallies: list[_Tally]) -> list[_Tally]:
    """The same on every process: sums over all, added in the order of ranks."""
    first, *others = _gather(tallies)
    for other in others:
        for mine, theirs in zip(first, other, strict=True):
            mine.merge(theirs)
    return first


# --------------------------------------------------------------------------------------- stages


def evaluate(
    model: nn.Module,
    batches: Sequence[TokenBatch],
    options: EvaluationOptions | None = None,
    *,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Measure what quantized attention costs.

    Position t predicts token t + 1; both must be real tokens by the attention mask. KL divergence
    is that of the original's distribution from the quantized one, in nats per token. The standard
    error of the NLL takes tokens as independent.

    The "decode" row predicts the last `decode_tokens` tokens of every unpadded sequence of at
    least `decode_tokens` + 2 tokens: all before them runs in one pass, projected, then single-token
    steps in absorbed form follow on the cache, fed with the true tokens. It is compared with the
    original model at the same positions, *run in one pass over the whole sequence*.

    Sensitivity is compared with the same model without attention quantization: quantizers of
    linear layers stay as they are in both, so that only attention is attributed. Quantizing "p"
    alone includes the sparsity of its scores.

    With torch.distributed initialized every process gives its own batches, and every one gets
    the result of all.

    Args:
        model: A converted and calibrated causal language model.
        batches: Token ids with padding on either side.
        options: What to measure; default: everything.
        progress: Told about every forward pass. Stages are "accuracy", "noise", "sensitivity".

    Returns:
        Sections "accuracy", "operands", "layers", "sensitivity" and "warnings" of report.json:
        plain data without NaN or infinities. A number that cannot be given is None: anything from
        logits that are not finite (a warning says so), an SQNR without signal or without noise.

    Raises:
        CalibrationError: The model is not converted, or an enabled quantizer has no amax.
        ConfigError: The model returns no logits.
        DataError: A batch has a wrong shape, or no token is left to predict.
    """
    options = EvaluationOptions() if options is None else options
    layers = quant_mla_layers(model)
    if not layers:
        raise CalibrationError(
            "the model has no quantized MLA layer; run mtq.quantize with an MLA config first"
        )
    _check_batches(batches)
    run = _Run(model, layers, options, progress or (lambda stage, done, total: None))
    with torch.no_grad(), _in_eval_mode(model, options.original):
        accuracy = run.accuracy(batches)
        operands, outputs = run.noise(batches)
        sensitivity = run.sensitivity(batches)
    return {
        "accuracy": accuracy,
        "operands": operands,
        "layers": outputs,
        "sensitivity": sensitivity,
        "warnings": run.warnings,
    }


class _Run:
    """One evaluation; collects warnings, which are the same in every process."""

    def __init__(
        self,
        model: nn.Module,
        layers: dict[str, QuantMLAAttention],
        options: EvaluationOptions,
        progress: Progress,
    ) -> None:
        self.model, self.layers, self.options, self.progress = model, layers, options, progress
        self.warnings: list[str] = []
        self.forms: list[Form] = [
            form for form in FORMS if form in options.forms and self._is_quantized(form)
        ]
        for form in options.forms:
            if form not in self.forms:
                self.warnings.append(
                    f"{form}: skipped, no operand of this form has an enabled quantizer."
                )
        self.decode_tokens = options.decode_tokens
        if self.decode_tokens and not self._is_quantized("absorbed"):
            self.decode_tokens = 0
            self.warnings.append(
                "decode: skipped, no operand of the absorbed form has an enabled quantizer."
            )

    def _is_quantized(self, form: str) -> bool:
        return any(module.active_operands(form) for module in self.layers.values())

    # -- logits -------------------------------------------------------------------------------

    def accuracy(self, batches: Sequence[TokenBatch]) -> list[dict[str, Any]]:
        """The "accuracy" section."""
        batches = _split(batches, self.options.batch_size)
        names = ["original", *self.forms, *(["decode"] if self.decode_tokens else [])]
        tallies = {name: _Tally(keep_divergences=True) for name in names}
        cached = True
        done, total = 0, len(batches) * len(names)
        for batch in batches:
            targets = batch.input_ids[:, 1:]
            valid = (batch.attention_mask[:, 1:] != 0) & (batch.attention_mask[:, :-1] != 0)
            with _original(self.model, self.options.original) as original:
                expected = _forward(original, batch)
            for name in names:
                if name == "original":
                    logits = expected
                elif name == "decode":
                    cached = cached and self._decode(batch, expected, tallies[name])
                else:
                    with use_form(self.model, name):  # type: ignore[arg-type]
                        logits = _forward(self.model, batch)
                if name != "decode":
                    tallies[name].add(expected[:, :-1], logits[:, :-1], targets, valid)
                done += 1
                self.progress("accuracy", done, total)
            del expected, logits
        cached = all(_gather(cached))
        merged = _merge_tallies(list(tallies.values()))
        rows = []
        for name, tally in zip(names, merged, strict=True):
            if tally.tokens:
                rows.append({"form": name, **tally.numbers()})
                self._warn_nonfinite(name, tally)
            elif name != "decode":
                raise DataError(
                    "evaluation: no token is left to predict; give sequences of 2 tokens or more"
                )
            elif cached:
                self.warnings.append(
                    "decode: not measured, no unpadded sequence has at least "
                    f"{self.decode_tokens + 2} tokens; lower decode_tokens or give longer text."
                )
        if not cached:
            self.warnings.append("decode: not measured, the model returns no cache.")
        return rows

    def _decode(self, batch: TokenBatch, expected: Tensor, tally: _Tally) -> bool:
        """Predict the last tokens one by one; False if the model has no cache."""
        length = batch.input_ids.shape[1]
        start = length - 1 - self.decode_tokens
        rows = (batch.attention_mask != 0).all(-1).nonzero().flatten()
        if start < 1 or rows.numel() == 0:
            return True
        ids = batch.input_ids[rows].to(input_device(self.model))
        mask = torch.ones_like(ids)
        valid = mask[:, :1].bool()
        rows = rows.to(expected.device)
        with use_form(self.model, "auto"):
            output = self.model(
                input_ids=ids[:, :start], attention_mask=mask[:, :start], use_cache=True
            )
            for t in range(start, length - 1):
                cache = getattr(output, "past_key_values", None)
                if cache is None:
                    return False
                output = self.model(
                    input_ids=ids[:, t : t + 1],
                    attention_mask=mask[:, : t + 1],
                    past_key_values=cache,
                    use_cache=True,
                )
                logits = _logits(output, self.model)
                tally.add(expected[rows, t].unsqueeze(1), logits, ids[:, t + 1 : t + 2], valid)
        return True

    def _warn_nonfinite(self, what: str, tally: _Tally) -> None:
        if tally.nonfinite:
            self.warnings.append(
                f"{what}: {tally.nonfinite} of {tally.tokens} predictions have logits that are "
                "NaN or infinite (the original's or the quantized model's); its numbers are null."
            )

    # -- noise --------------------------------------------------------------------------------

    def noise(
        self, batches: Sequence[TokenBatch]
    ) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        """The sections "operands" and "layers"."""
        if not self.options.measure_sequences or not self.forms:
            return [], []
        batches = _split(batches, self.options.batch_size, _share(self.options.measure_sequences))
        parents = list(dict.fromkeys(map(_decoder_layer, self.layers)))
        measured = {form: {name: Measurement() for name in self.layers} for form in self.forms}
        hidden: dict[tuple[str, str], list[float]] = {}
        done, total = 0, len(batches) * (1 + len(self.forms))
        for batch in batches:
            real = batch.attention_mask != 0
            kept: dict[str, Tensor] = {}

            def keep(name: str, x: Tensor, kept: dict[str, Tensor] = kept) -> None:
                kept[name] = x.detach().clone()

            with (
                _original(self.model, self.options.original) as original,
                _watching(original, parents, keep),
            ):
                _forward(original, batch)
            done += 1
            self.progress("noise", done, total)
            for form in self.forms:

                def compare(
                    name: str,
                    x: Tensor,
                    form: str = form,
                    kept: dict[str, Tensor] = kept,
                    real: Tensor = real,
                ) -> None:
                    if name not in kept or kept[name].shape != x.shape:
                        return
                    if x.shape[:2] != real.shape:
                        return
                    chosen = real.to(x.device)
                    exact, x = kept[name].to(x.device)[chosen].double(), x[chosen].double()
                    sums = hidden.setdefault((form, name), [0.0, 0.0])
                    sums[0] += float(exact.square().sum())
                    sums[1] += float((exact - x).square().sum())

                with (
                    use_form(self.model, form),
                    _measuring(self.layers, measured[form]),
                    _watching(self.model, parents, compare),
                ):
                    _forward(self.model, batch)
                done += 1
                self.progress("noise", done, total)
        return self._noise_sections(_flatten(measured, hidden))

    def _noise_sections(
        self, local: dict[tuple[str, ...], list[float]]
    ) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        sums: dict[tuple[str, ...], list[float]] = {}
        for part in _gather(local):
            for key, values in part.items():
                before = sums.get(key, [0] * len(values))
                sums[key] = [a + b for a, b in zip(before, values, strict=True)]
        operands, outputs, broken = [], [], []

        def decibels(key: tuple[str, ...], what: str) -> float | None:
            signal, noise = sums.get(key, [0.0, 0.0])[:2]
            if not (math.isfinite(signal) and math.isfinite(noise)):
                broken.append(what)
            return _sqnr_db(signal, noise)

        for form in self.forms:
            for name, module in self.layers.items():
                place = {"form": form, "layer": name, "layer_index": layer_index(name)}
                active = module.active_operands(form)
                for operand in (o for o in module.observed_operands() if o in active):
                    key = ("operand", form, name, operand)
                    counts = [int(count) for count in sums.get(key, [0.0] * 6)[2:]]
                    n, saturated, blocks, flushed = counts
                    quantizer = module.quantizer(operand)
                    amax = float(quantizer_amax(quantizer, f"{name}.{operand}"))
                    operands.append(
                        {
                            **place,
                            "operand": operand,
                            "format": operand_format(quantizer).name,
                            "amax": amax if math.isfinite(amax) else None,
                            "sqnr_db": decibels(key, f"{operand} of {name} ({form})"),
                            "saturated_share": saturated / n if n else None,
                            "flushed_block_share": flushed / blocks if blocks else None,
                            "values": n,
                        }
                    )
                parent = _decoder_layer(name)
                outputs.append(
                    {
                        **place,
                        "attention_sqnr_db": decibels(
                            ("attention", form, name), f"attention output of {name} ({form})"
                        ),
                        "hidden_sqnr_db": decibels(
                            ("hidden", form, parent), f"output of {parent} ({form})"
                        ),
                    }
                )
        broken = list(dict.fromkeys(broken))
        if broken:
            more = f" and {len(broken) - 6} more" if broken[6:] else ""
            self.warnings.append(
                f"NaN or infinite values, so no SQNR: {', '.join(broken[:6])}{more}."
            )
        return operands, outputs

    # -- sensitivity --------------------------------------------------------------------------

    def sensitivity(self, batches: Sequence[TokenBatch]) -> list[dict[str, Any]]:
        """The "sensitivity" section."""
        targets = self._targets()
        if not targets:
            return []
        batches = _split(
            batches, self.options.batch_size, _share(self.options.sensitivity_sequences)
        )
        tallies = [_Tally() for _ in targets]
        done, total = 0, len(batches) * (1 + len(targets))
        for batch in batches:
            successors = batch.input_ids[:, 1:]
            valid = (batch.attention_mask[:, 1:] != 0) & (batch.attention_mask[:, :-1] != 0)
            with only_operands(self.model, lambda layer, operand: False):
                expected = _forward(self.model, batch)[:, :-1]
            done += 1
            self.progress("sensitivity", done, total)
            for (form, kind, target), tally in zip(targets, tallies, strict=True):
                with use_form(self.model, form), only_operands(self.model, _alone(kind, target)):
                    logits = _forward(self.model, batch)[:, :-1]
                tally.add(expected, logits, successors, valid)
                done += 1
                self.progress("sensitivity", done, total)
            del expected, logits
        rows = []
        for (form, kind, target), tally in zip(targets, _merge_tallies(tallies), strict=True):
            if not tally.tokens:
                continue
            self._warn_nonfinite(f"sensitivity to {kind} {target} ({form})", tally)
            numbers = tally.numbers()
            after, before = numbers["perplexity"], numbers["original_perplexity"]
            rows.append(
                {
                    "form": form,
                    "kind": kind,
                    "target": target,
                    "kl_mean": numbers["kl_mean"],
                    "perplexity": after,
                    "delta_perplexity": (
                        None if after is None or before is None else after - before
                    ),
                    "top1_agreement": numbers["top1_agreement"],
                }
            )
        return rows

    def _targets(self) -> list[tuple[Form, str, str]]:
        """(form, "operand" or "layer", name) of everything that is quantized alone."""
        wanted = self.options.sensitivity
        targets: list[tuple[Form, str, str]] = []
        for form in self.forms:
            active = {name: m.active_operands(form) for name, m in self.layers.items()}
            if wanted in ("operands", "all"):
                used = {operand for operands in active.values() for operand in operands}
                targets += [(form, "operand", operand) for operand in OPERANDS if operand in used]
            if wanted in ("layers", "all"):
                targets += [(form, "layer", name) for name, operands in active.items() if operands]
        return targets


def _alone(kind: str, target: str) -> Callable[[str, str], bool]:
    """For `only_operands`: one operand of all layers, or all operands of one layer."""
    return lambda layer, operand: (layer if kind == "layer" else operand) == target


def _decoder_layer(attention: str) -> str:
    """Name of the module that an attention belongs to ("x.3.self_attn" or "x.3.self_attn.1")."""
    parts = attention.split(".")
    while parts and parts[-1].isdigit():
        parts.pop()
    return ".".join(parts[:-1])


def _flatten(
    measured: dict[Form, dict[str, Measurement]], hidden: dict[tuple[str, str], list[float]]
) -> dict[tuple[str, ...], list[float]]:
    """Sums that add up over processes, by what they are of."""
    sums: dict[tuple[str, ...], list[float]] = {
        ("hidden", form, name): values for (form, name), values in hidden.items()
    }
    for form, measurements in measured.items():
        for name, measurement in measurements.items():
            sums["attention", form, name] = measurement.output
            for operand, noise in measurement.noise.items():
                sums["operand", form, name, operand] = [*noise, *measurement.counts[operand]]
    return sums
