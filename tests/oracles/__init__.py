"""Independent oracles. Nothing in this package may import `mla_quant`."""
