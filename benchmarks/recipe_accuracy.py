"""Every shipped recipe on the example model: calibrate, verify, evaluate; as a table.

    python -m benchmarks.recipe_accuracy --device cpu --dtype float32
    python -m benchmarks.recipe_accuracy --readme        # write the results into the manual

Results go to `benchmarks/results/recipe_accuracy.json`; the manual holds nothing else.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.calibration_overhead import RESULTS, ROOT, hardware
from benchmarks.readme import insert

RESULT = RESULTS / "recipe_accuracy.json"
MODEL = ROOT / "examples" / "tiny_mla" / "model"


def command(*arguments: str) -> dict[str, Any]:
    """Run the command line in this process; its JSON output."""
    from mla_quant.cli import main

    captured = io.StringIO()
    with contextlib.redirect_stdout(captured):
        code = main([*arguments, "--json"])
    if code != 0:
        raise SystemExit(f"mla-quant {' '.join(arguments)} ended with exit code {code}")
    result: dict[str, Any] = json.loads(captured.getvalue())
    return result


def run(recipe: str, device: str, dtype: str, samples: int, windows: int) -> dict[str, Any]:
    """One recipe."""
    with tempfile.TemporaryDirectory() as folder:
        out, report = str(Path(folder, "out")), str(Path(folder, "report"))
        calibrated = command(
            "calibrate", str(MODEL), "--recipe", recipe, "--data", "example", "--out", out,
            "--num-samples", str(samples), "--device", device, "--dtype", dtype,
        )  # fmt: skip
        verified = command("verify", out, "--device", device)
        measured = command(
            "evaluate", out, "--data", "example:heldout", "--out", report, "--device", device,
            "--num-samples", str(windows), "--sensitivity", "none",
        )  # fmt: skip
    return {
        "recipe": recipe,
        "attention": {k: measured["recipe"]["attention"][k] for k in "qkpv"},
        "weights": measured["recipe"]["weights"],
        "calibration_seconds": calibrated["seconds"],
        "calibration_tokens": calibrated["tokens"],
        "verified": verified["passed"],
        "logits": next(c["detail"] for c in verified["checks"] if c["name"] == "logits"),
        "accuracy": measured["accuracy"],
    }


def table(result: dict[str, Any]) -> str:
    """The results as Markdown."""
    rows = result["recipes"]
    original = next(r for r in rows[0]["accuracy"] if r["form"] == "original")
    lines = [
        f"Original model: perplexity {original['perplexity']:.3f} on {original['tokens']} tokens "
        f"of held-out text. {result['hardware']}, {result['dtype']}, torch {result['torch']}, "
        f"{result['date']}.",
        "",
        "| recipe | projected: ppl | KL | top-1 | absorbed: ppl | KL | top-1 | decode: ppl "
        "(original) | KL |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        by_form = {r["form"]: r for r in row["accuracy"]}
        cells = [f"`{row['recipe']}`"]
        for form in ("projected", "absorbed"):
            r = by_form[form]
            cells += [f"{r['perplexity']:.3f}", f"{r['kl_mean']:.4f}", f"{r['top1_agreement']:.1%}"]
        r = by_form["decode"]
        cells += [f"{r['perplexity']:.3f} ({r['original_perplexity']:.3f})", f"{r['kl_mean']:.4f}"]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> None:
    """Parse arguments and run."""
    from mla_quant.recipes import recipe_names

    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--samples", type=int, default=128)
    parser.add_argument("--windows", type=int, default=128)
    parser.add_argument("--recipes", nargs="*", default=recipe_names())
    parser.add_argument("--out", type=Path, default=RESULT)
    parser.add_argument("--readme", action="store_true", help="render the results, run nothing")
    args = parser.parse_args()
    if args.readme:
        insert("recipes", table(json.loads(args.out.read_text(encoding="utf-8"))))
        return
    result = {
        **hardware(args.device),
        "dtype": args.dtype,
        "recipes": [
            run(recipe, args.device, args.dtype, args.samples, args.windows)
            for recipe in args.recipes
        ],
    }
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(table(result))


if __name__ == "__main__":
    main()
