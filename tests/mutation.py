"""A small mutator: do the tests notice when the code is changed?

    python -m tests.mutation mla_quant/formats.py tests/unit/test_formats.py
    python -m tests.mutation mla_quant/records/codec.py tests/unit/test_records.py --sample 40

Changes one place at a time in a copy of the package (a comparison, an operator, a number, a call of
min or max, a condition), runs the tests that are named, and prints a JSON line for each: caught, or
survived. It works on source, so that functions under `@triton.jit` are mutated as well. Messages of
errors, docstrings, annotations and `__all__` are left alone. Some mutants are equivalent to the
code: survivors are for a reader to judge.
"""

from __future__ import annotations

import argparse
import ast
import copy
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
COMPARISONS: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq, ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In,
}  # fmt: skip
OPERATORS: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Add, ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult, ast.Mod: ast.FloorDiv, ast.LShift: ast.RShift, ast.RShift: ast.LShift,
    ast.BitAnd: ast.BitOr, ast.BitOr: ast.BitAnd, ast.BitXor: ast.BitOr, ast.Pow: ast.Mult,
}  # fmt: skip
CALLS = {
    "min": "max", "max": "min", "minimum": "maximum", "maximum": "minimum", "amax": "amin",
    "amin": "amax", "ceil": "floor", "floor": "ceil", "any": "all", "all": "any",
}  # fmt: skip
Change = Callable[[ast.AST], None]


def changes(node: ast.AST) -> Iterator[tuple[str, Change]]:
    """What can be changed of a node, each with its description."""
    if isinstance(node, ast.Compare) and len(node.ops) == 1 and type(node.ops[0]) in COMPARISONS:
        other = COMPARISONS[type(node.ops[0])]
        yield other.__name__, lambda n: setattr(n, "ops", [other()])
    elif isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
        operator = OPERATORS[type(node.op)]
        if not any(isinstance(x, ast.JoinedStr) for x in ast.walk(node)):
            yield operator.__name__, lambda n: setattr(n, "op", operator())
    elif isinstance(node, ast.BoolOp):
        joined = ast.Or if isinstance(node.op, ast.And) else ast.And
        yield joined.__name__, lambda n: setattr(n, "op", joined())
    elif isinstance(node, ast.Constant) and type(node.value) in (int, float):
        value = node.value
        changed = value + 1 if isinstance(value, int) else value * 2 + 1
        yield f"{value} to {changed}", lambda n: setattr(n, "value", changed)
    elif isinstance(node, ast.Constant) and isinstance(node.value, bool):
        yield f"not {node.value}", lambda n: setattr(n, "value", not getattr(n, "value"))  # noqa: B009
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub | ast.Invert):
        yield "no sign", lambda n: setattr(n, "op", ast.UAdd())
    elif isinstance(node, ast.If | ast.IfExp | ast.While):
        yield (
            "condition turned",
            lambda n: setattr(
                n,
                "test",
                ast.UnaryOp(ast.Not(), getattr(n, "test")),  # noqa: B009
            ),
        )
    elif isinstance(node, ast.Call):
        name = node.func
        if isinstance(name, ast.Attribute) and name.attr in CALLS:
            yield CALLS[name.attr], lambda n: setattr(n.func, "attr", CALLS[name.attr])  # type: ignore[attr-defined]
        elif isinstance(name, ast.Name) and name.id in CALLS:
            yield CALLS[name.id], lambda n: setattr(n.func, "id", CALLS[name.id])  # type: ignore[attr-defined]


def _looked_at(node: ast.AST) -> Iterator[ast.AST]:
    """The nodes below one, in order, without what is not code that computes."""
    for field, value in ast.iter_fields(node):
        if field in ("annotation", "returns", "decorator_list", "type_params"):
            continue
        for child in value if isinstance(value, list) else [value]:
            if not isinstance(child, ast.AST) or isinstance(child, ast.Raise | ast.JoinedStr):
                continue
            if isinstance(child, ast.Expr) and isinstance(child.value, ast.Constant):
                continue
            if isinstance(child, ast.Assign) and "__all__" in ast.unparse(child.targets[0]):
                continue
            yield child
            yield from _looked_at(child)


def mutants(source: str) -> list[tuple[int, str, str]]:
    """Line, description and text of every mutant of a module."""
    tree = ast.parse(source)
    found = []
    for place, node in enumerate(_looked_at(tree)):
        for number, (description, _) in enumerate(changes(node)):
            mutant = copy.deepcopy(tree)
            target = next(x for i, x in enumerate(_looked_at(mutant)) if i == place)
            list(changes(target))[number][1](target)
            line = getattr(node, "lineno", 0)
            text = ast.unparse(ast.fix_missing_locations(mutant))
            found.append((line, f"{ast.unparse(node)[:80]} -> {description}", text))
    return found


def main() -> None:
    """Parse arguments and run."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("module", type=Path)
    parser.add_argument("tests", nargs="+", help="arguments of pytest")
    parser.add_argument("--sample", type=int, help="how many mutants, drawn at random; all")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--timeout", type=float, default=300.0, help="seconds; a mutant that takes"
                        " longer counts as caught")  # fmt: skip
    args = parser.parse_args()
    every = mutants((ROOT / args.module).read_text(encoding="utf-8"))
    if args.sample is not None and args.sample < len(every):
        every = random.Random(args.seed).sample(every, args.sample)
    caught = 0
    with tempfile.TemporaryDirectory() as folder:
        for part in ("mla_quant", "tests", "examples", "configs", "benchmarks"):
            if (ROOT / part).exists():
                shutil.copytree(ROOT / part, Path(folder) / part)
        for file in ("pyproject.toml", "README.md"):
            shutil.copy(ROOT / file, folder)
        environment = {**os.environ, "PYTHONPATH": folder, "PYTHONDONTWRITEBYTECODE": "1"}
        command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider"]
        target = Path(folder) / args.module
        original = target.read_text(encoding="utf-8")
        for line, description, text in [(0, "nothing", original), *every]:
            target.write_text(text, encoding="utf-8")
            try:
                run = subprocess.run(
                    [*command, *args.tests], cwd=folder, env=environment, timeout=args.timeout,
                    capture_output=True, text=True, check=False,
                )  # fmt: skip
                failed = run.returncode != 0
            except subprocess.TimeoutExpired:
                failed = True
            if not line and failed:
                raise SystemExit(f"the tests fail without a change:\n{run.stdout[-2000:]}")
            if line:
                caught += failed
                result = {"line": line, "change": description, "caught": failed}
                print(json.dumps(result), flush=True)
    print(f"{args.module}: {caught} of {len(every)} mutants caught")


if __name__ == "__main__":
    main()
