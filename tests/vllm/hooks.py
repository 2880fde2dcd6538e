"""Functions for `before` and `after` of a request to `worker.py`: they run beside vLLM."""

from __future__ import annotations

import importlib
import json
import sys
from typing import Any


def small_workspace() -> None:
    """Read a cached context in chunks of 64 tokens; with vLLM's own size, these tests need one."""
    from vllm.model_executor.layers.attention.mla_attention import MLACommonMetadataBuilder

    MLACommonMetadataBuilder.determine_chunked_prefill_workspace_size = staticmethod(
        lambda vllm_config: 64
    )


def workspace() -> None:
    """For `before`: the workspace that vLLM has on a GPU, closed before the first prompt."""
    import torch
    import vllm
    from vllm.v1.worker import workspace

    torch.accelerator.empty_cache = lambda: None
    workspace.init_workspace_manager(torch.device("cpu"))
    generate = vllm.LLM.generate

    def closed(self: Any, *args: Any, **kwargs: Any) -> Any:
        # From here on, whoever needs more scratch than was reserved fails.
        workspace.lock_workspace()
        return generate(self, *args, **kwargs)

    vllm.LLM.generate = closed


def reserved(llm: Any) -> bool:
    """Whether every layer takes its scratch from the workspace."""
    return all(layer.impl.mla_quant.workspace is not None for layer in layers(llm).values())


def record_cache(llm: Any) -> dict[str, Any]:
    """How the KV cache of records is laid out, and whether its kernels run before any request."""
    import torch

    config = llm.llm_engine.vllm_config
    found = layers(llm).values()
    for layer in found:
        layer.impl.compile_kernels(16, torch.float32, 1)
    return {
        "shapes": [list(layer.kv_cache.shape[-2:]) for layer in found],
        "page_bytes": [layer.get_kv_cache_spec(config).page_size_bytes for layer in found],
        "reserved": all(
            getattr(layer.impl, "mla_quant", layer.impl.mla_records).workspace is not None
            for layer in found
        ),
    }


def allow_float32() -> None:
    """For `before`, on a GPU: let float32 through to the backend, whose kernels are replaced."""
    import torch
    from vllm.v1.attention.backends.mla.prefill import base
    from vllm.v1.attention.backends.mla.triton_mla import TritonMLABackend

    prefill = next(c for c in vars(base).values() if hasattr(c, "supported_dtypes"))
    for backend in (TritonMLABackend, prefill):
        backend.supported_dtypes.append(torch.float32)


def attention(llm: Any) -> dict[str, Any]:
    """How attention ran: the class of each layer's kernels, and calls that reached the platform."""
    from vllm_cpu_triton import calls

    layers = llm.llm_engine.vllm_config.compilation_config.static_forward_context.values()
    kernels = [type(layer.impl).__name__ for layer in layers if hasattr(layer, "impl")]
    return {
        "classes": kernels,
        "calls": calls,
        "project": "mla_quant" in sys.modules,
    }


def project(llm: Any) -> list[str]:
    """Import what of this project works beside vLLM."""
    names = ["mla_quant.kernels", "mla_quant.settings", "mla_quant.recipes"]
    for name in names:
        importlib.import_module(name)
    return names


def layers(llm: Any) -> dict[str, Any]:
    """MLA layers of the model by name."""
    found = llm.llm_engine.vllm_config.compilation_config.static_forward_context
    return {name: layer for name, layer in found.items() if hasattr(layer, "impl")}


def model(llm: Any) -> Any:
    """The model, where the engine and its only worker are in this process."""
    return llm.llm_engine.model_executor.driver_worker.worker.model_runner.model


def cache_width(llm: Any) -> int:
    """Elements that a token takes in the KV cache of a layer."""
    (width,) = {layer.kv_cache[0].shape[-1] for layer in layers(llm).values()}
    return int(width)


def example_settings(llm: Any) -> Any:
    """Settings for every layer of the model, as calibration would write them."""
    from mla_quant.recipes import OPERANDS, load_recipe
    from mla_quant.settings import LayerSettings, OperandSettings, Settings

    operands = {name: OperandSettings(format="nvfp4", amax=4.0) for name in OPERANDS}
    names = [name.removesuffix(".attn") for name in layers(llm)]
    return Settings(
        producer={"name": "test", "version": "0"},
        model={"source": "test", "family": "deepseek_v3", "geometry": {}},
        recipe=load_recipe("nvfp4_mla"),
        layers=dict.fromkeys(names, LayerSettings.from_operands(operands)),
    )


def every_gate(llm: Any) -> dict[str, str]:
    """What `plan` and `install` say of models that cannot be served, one change at a time."""
    from mla_quant.errors import MlaQuantError
    from mla_quant.integrations import vllm as integration
    from mla_quant.recipes import OPERANDS, load_recipe
    from mla_quant.records import RECORDS
    from mla_quant.settings import LayerSettings, OperandSettings

    config, settings = llm.llm_engine.vllm_config, example_settings(llm)
    found = {}

    def reason(call: Any) -> str:
        try:
            call()
        except MlaQuantError as error:
            return str(error)
        return "no error"

    def changed(name: str, change: list[tuple[Any, str, Any]], call: Any) -> None:
        undo = [(thing, field, getattr(thing, field, None)) for thing, field, _ in change]
        for thing, field, value in change:
            object.__setattr__(thing, field, value)
        found[name] = reason(call)
        for thing, field, value in undo:
            object.__setattr__(thing, field, value)

    def with_change(name: str, change: list[tuple[Any, str, Any]], **kwargs: Any) -> None:
        arguments = {"settings": settings, "vllm_config": config} | kwargs
        changed(name, change, lambda: integration.plan(model(llm), **arguments))

    every = list(layers(llm).values())
    with_change("nothing", [])
    with_change("kv_cache_dtype", [(layer, "kv_cache_dtype", "fp8") for layer in every])
    with_change("calculate_kv_scales", [(every[0], "calculate_kv_scales", True)])
    with_change("q_pad_num_heads", [(every[0].impl, "q_pad_num_heads", 128)])
    with_change("sliding_window", [(every[0].impl, "sliding_window", 128)])
    with_change("logits_soft_cap", [(every[0].impl, "logits_soft_cap", 30.0)])
    with_change("indexer", [(every[0].impl, "is_sparse", True)])
    other = type("OtherImpl", (type(every[0].impl),), {})
    with_change("class", [(every[0].impl, "__class__", other)])
    parallel = config.parallel_config
    with_change("decode_context_parallel_size", [(parallel, "decode_context_parallel_size", 2)])
    with_change("side_cache", [(config, "additional_config", {"mla_quant_side_cache": "yes"})])
    connector = type("Config", (), {"kv_connector": "OffloadingConnector"})()
    with_change("kv_connector", [(config, "kv_transfer_config", connector)])
    recipe = settings.recipe
    attention = recipe.attention.model_copy(update={"p_reference": "running_max"})
    moved = settings.model_copy(
        update={"recipe": recipe.model_copy(update={"attention": attention})}
    )
    with_change("p_reference", [], settings=moved)
    renamed = {f"other.{i}": layer for i, layer in enumerate(settings.layers.values())}
    with_change("names", [], settings=settings.model_copy(update={"layers": renamed}))
    worker = llm.llm_engine.model_executor.driver_worker.worker
    found["no settings"] = reason(lambda: integration.install(worker))
    found["no model"] = reason(lambda: integration.install(object()))
    unquantized = {name: OperandSettings(format="nvfp4", amax=4.0) for name in OPERANDS}
    unquantized["q"] = OperandSettings(format="none")
    layer = LayerSettings.from_operands(unquantized)
    some = settings.model_copy(update={"layers": dict.fromkeys(settings.layers, layer)})
    found["recipe"] = reason(
        lambda: integration.install(worker, load_recipe("nvfp4_mla"), settings=some)
    )
    assert found.pop("nothing") == "no error", found

    def records(name: str, change: list[tuple[Any, str, Any]], fmt: str) -> None:
        arguments = (RECORDS[fmt], None, config)
        changed(name, change, lambda: integration.plan_records(model(llm), *arguments))

    whole = "nvfp4_fp8rope_352"
    records("records: nothing", [], whole)
    assert found.pop("records: nothing") == "no error", found
    records("records: footer", [], "dsv4_fp8_584")
    records("records: widths", [], "nvfp4_outer_304")
    records("records: kv_connector", [(config, "kv_transfer_config", connector)], whole)
    records("records: context", [(parallel, "decode_context_parallel_size", 2)], whole)
    records("records: class", [(every[0].impl, "__class__", other)], whole)
    passes = type("Passes", (), {"fuse_rope_kvcache_cat_mla": True})()
    records("records: fusion", [(config.compilation_config, "pass_config", passes)], whole)
    return found


def failures_leave_nothing(llm: Any) -> dict[str, bool]:
    """Whether every layer is as it was after `install` failed at each of its steps."""
    from mla_quant.integrations import vllm as integration
    from mla_quant.integrations import vllm_attention, vllm_records

    every = list(layers(llm).values())
    worker = llm.llm_engine.model_executor.driver_worker.worker
    settings = example_settings(llm)

    def state() -> list[Any]:
        return [(type(x.impl), x.attn_backend, set(vars(x)), set(vars(x.impl))) for x in every]

    class StepError(Exception):
        pass

    class Failing(list):
        """An undo list whose n-th step does not come to pass."""

        def __init__(self, allowed: int) -> None:
            super().__init__()
            self.allowed = allowed

        def append(self, step: Any) -> None:
            if len(self) == self.allowed:
                raise StepError
            super().append(step)

    before, results = state(), {}
    # What has how many steps a layer.
    cases = [(vllm_attention, 4, {}), (vllm_records, 6, {"records": "nvfp4_fp8rope_352"})]
    for module, steps, arguments in cases:
        original = module.reclass
        for allowed in range(steps * len(every)):
            log: Any = Failing(allowed)

            def reclass(*args: Any, original: Any = original, log: Any = log) -> None:
                # What is undone is what was logged, in the list of `publish`.
                try:
                    original(*args[:-1], log)
                finally:
                    args[-1][:] = list(log)

            module.reclass = reclass
            name = f"{module.__name__} {allowed}"
            try:
                integration.install(worker, settings=settings, **arguments)
                results[name] = False
            except StepError:
                results[name] = state() == before
            finally:
                module.reclass = original
    return results


def kernels(llm: Any) -> list[str]:
    """The class of each layer's kernels."""
    return [type(layer.impl).__name__ for layer in layers(llm).values()]


def compile_kernels(llm: Any) -> bool:
    """What is done on a GPU when an engine starts."""
    import torch

    impl = next(iter(layers(llm).values())).impl
    impl.compile_kernels(llm.llm_engine.vllm_config.cache_config.block_size, torch.float32, 1)
    return True


def preemptions(llm: Any) -> int:
    """How often a request lost its place in the cache."""
    return sum(
        metric.value for metric in llm.get_metrics() if metric.name == "vllm:num_preemptions"
    )


_query_lengths: set[int] = set()


def record_query_lengths() -> None:
    """For `before`: note how many tokens of a request decode steps have."""
    from mla_quant.integrations import vllm_attention

    original = vllm_attention.decode_attention

    def decode_attention(*args: Any, max_query_len: int, **kwargs: Any) -> Any:
        _query_lengths.add(max_query_len)
        return original(*args, max_query_len=max_query_len, **kwargs)

    vllm_attention.decode_attention = decode_attention


def query_lengths(llm: Any) -> list[int]:
    """What `record_query_lengths` noted."""
    return sorted(_query_lengths)


def another_model(llm: Any) -> dict[str, Any]:
    """Load the checkpoint that a variable names beside the first; run both, in turn."""
    import os
    from pathlib import Path

    import vllm

    from tests.vllm import worker

    folder = Path(os.environ["MLA_QUANT_TEST_OTHER"])
    request = json.loads((folder / "request.json").read_text())
    other = vllm.LLM(model=request["model"], **(worker.ENGINES["cpu"] | request["engine"]))
    for name, engine in (("first", llm), ("second", other), ("again", llm)):
        (folder / name).mkdir()
        worker.generate(engine, request["runs"], folder / name)
    return {"classes": kernels(llm) + kernels(other)}


def calibration(llm: Any) -> dict[str, Any]:
    """Calibrate on what the variable's file asks for; arrays go beside it."""
    import os
    from pathlib import Path

    import numpy as np

    from mla_quant.integrations import vllm_calibration as engine
    from mla_quant.recipes import load_recipe
    from mla_quant.settings import ModelSettings, Producer, Settings

    path = Path(os.environ["MLA_QUANT_TEST_CALIBRATION"])
    request = json.loads(path.read_text())
    recipe = load_recipe(request["recipe"])
    recipe = recipe.model_copy(
        update={"observer": recipe.observer.model_copy(update={"method": request["method"]})}
    )
    formats, samples = request["formats"], request["samples"]
    observers = engine.collect(llm, formats, samples, recipe)
    settings = Settings(
        producer=Producer(name="test", version="0"),
        model=ModelSettings(source="test", family="deepseek_v3", geometry={}),
        recipe=recipe,
        layers=engine.layer_settings(list(formats), formats, observers, recipe),
    )
    logits = engine.reference_logits(
        llm, settings, request["reference_samples"], request["positions"]
    )
    np.savez(path.with_suffix(".npz"), **logits)
    return {
        "settings": settings.model_dump(),
        "statistics": {
            name: {operand: o.summary(None) for operand, o in operands.items()}
            for name, operands in observers.items()
        },
    }
