"""Engines that serve models with quantized attention. Nothing here imports an engine by itself."""
