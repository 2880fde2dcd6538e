"""The manual names only what exists: pages, links, commands, options, files, tests.

mkdocs is not needed; `make docs` builds the site, with warnings as errors.
"""

from __future__ import annotations

import ast
import importlib
import json
import re
import unicodedata
from functools import cache
from pathlib import Path

import pytest
import typer
import yaml

from mla_quant import families
from mla_quant.cli import app, main
from mla_quant.integrations import vllm
from mla_quant.recipes import parse_recipe, recipe_names
from mla_quant.records import RECORDS
from tests.manual import PAGES, READABLE, ROOT, Command, blocks, commands, prose
from tests.models import FAMILIES

LINKED = [*READABLE, ROOT / "CONTRIBUTING.md"]
COMMANDS = commands()
OTHER_PROGRAMS = {"make", "pip", "python", "torchrun", "vllm", "curl", "lm_eval"}


def by_name(value: object) -> str:
    return value.name if isinstance(value, Path) else str(value)


def test_every_page_is_in_the_navigation() -> None:
    config = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))
    listed = [name for entry in config["nav"] for name in entry.values()]
    assert listed[0] == "index.md"
    assert sorted(listed) == [page.name for page in PAGES]
    assert config["theme"]["font"] is False, "nothing is loaded from elsewhere"
    for entry in config["nav"]:
        for title, name in entry.items():
            heading = (ROOT / "docs" / name).read_text(encoding="utf-8").partition("\n")[0]
            assert heading == f"# {title}"


@cache
def anchors(page: Path) -> set[str]:
    """Ids that mkdocs, and GitHub, give to the headings of a page."""
    found: set[str] = set()
    for title in re.findall(r"^#+ (.*)$", prose(page), re.MULTILINE):
        text = unicodedata.normalize("NFKD", title.replace("`", "")).encode("ascii", "ignore")
        text = re.sub(r"[^\w\s-]", "", text.decode()).strip().lower()
        found.add(re.sub(r"[-\s]+", "-", text))
    return found


@pytest.mark.parametrize("page", LINKED, ids=by_name)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", prose(page)):
        if re.match(r"https?://", target):
            continue
        name, _, anchor = target.partition("#")
        found = (page.parent / name).resolve() if name else page
        assert found.exists(), target
        if page in PAGES:
            assert found in PAGES, f"{target}: the site has no other files; name its path as code"
        if anchor:
            assert anchor in anchors(found), target


@pytest.mark.parametrize("page", LINKED, ids=by_name)
def test_nothing_is_loaded_from_elsewhere(page: Path) -> None:
    assert not re.search(r"!\[[^\]]*\]\(http|<(img|script|link|iframe)\b", prose(page))


@cache
def functions(path: Path) -> set[str]:
    return {
        node.name
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.FunctionDef)
    }


@pytest.mark.parametrize("page", LINKED, ids=by_name)
def test_files_and_tests_that_are_named_exist(page: Path) -> None:
    """In `code`, without spaces, below a folder of the repository."""
    folders = "tests|mla_quant|benchmarks|examples|configs|docs|\\.ci"
    for named in re.findall(rf"`((?:{folders})/[^`\s]*)`", prose(page)):
        name, _, test = named.partition("::")
        # Files of a checkpoint that calibrate writes.
        if name.startswith("mla_quant/") and name.endswith((".json", ".npz")):
            continue
        assert list(ROOT.glob(name)), named
        if test:
            assert test in functions(ROOT / name), named


# -- commands -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "command", [c for c in COMMANDS if c.mla_quant is not None], ids=by_name
)  # fmt: skip
def test_commands_parse(command: Command) -> None:
    """By the parser of the command line itself, which refuses unknown commands and options."""
    arguments = list(command.mla_quant or ())
    group = typer.main.get_command(app)
    context = group.make_context("mla-quant", arguments)
    name, chosen, rest = group.resolve_command(context, arguments)  # type: ignore[attr-defined]
    chosen.make_context(name, rest, parent=context)


def test_the_parser_refuses() -> None:
    """Negative control of the test above."""
    command = Command(ROOT, ("mla-quant", "verify", "OUT", "--no-such-option"))
    with pytest.raises(Exception, match="no-such-option"):
        test_commands_parse(command)
    with pytest.raises(Exception, match="no-such-command"):
        test_commands_parse(Command(ROOT, ("mla-quant", "no-such-command")))


def test_options_that_are_named_exist() -> None:
    """In `code`: `--option`, of some command; and `mla-quant command`."""
    group = typer.main.get_command(app)
    chosen = group.commands  # type: ignore[attr-defined]
    known = {
        option
        for command in chosen.values()
        for parameter in command.params
        for option in (*parameter.opts, *parameter.secondary_opts)
    }
    # Of click, vLLM, the benchmarks and the mutator.
    known |= {"--help", "--attention-backend", "--additional-config", "--readme", "--sample"}
    for page in PAGES:
        for code in re.findall(r"`([^`]+)`", prose(page)):
            for option in re.findall(r"(?<![\w-])--[a-z][a-z-]*", code):
                assert option in known, f"{page.name}: {code}"
            if found := re.match(r"mla-quant ([a-z]+)", code):
                assert found.group(1) in chosen, f"{page.name}: {code}"


def test_every_program_is_known() -> None:
    programs = {command.words[0] for command in COMMANDS if command.words[0] != "mla-quant"}
    assert programs <= OTHER_PROGRAMS


def test_make_targets_exist() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = set(re.findall(r"^([a-z-]+):.*## ", makefile, re.MULTILINE))
    named = {word for c in COMMANDS if c.words[0] == "make" for word in c.words[1:]}
    for page in LINKED:
        named |= set(re.findall(r"`make ([a-z-]+)", prose(page)))
    named = {word for word in named if "=" not in word and not word.startswith("-")}
    assert named
    assert named <= targets


def test_the_first_run_is_the_demo() -> None:
    """`make demo` runs the commands that the first page shows."""
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8").replace("$(DEMO)", "build/demo")
    ran = re.findall(r"^\tHF_HUB_OFFLINE=1 \$\(BIN\)/(mla-quant .*)$", makefile, re.MULTILINE)
    shown = [" ".join(c.words) for c in COMMANDS if c.page.name == "index.md" and c.mla_quant]
    assert ran == shown


def test_benchmarks_exist() -> None:
    """Modules that are run, and their options."""
    named = [list(c.words[1:]) for c in COMMANDS if c.words[0] == "python"]
    for page in LINKED:
        named += [s.split() for s in re.findall(r"`python (-m benchmarks\.\w+[^`]*)`", prose(page))]
    for dash, module, *options in named:
        assert dash == "-m"
        source = (ROOT / (module.replace(".", "/") + ".py")).read_text(encoding="utf-8")
        for option in (word for word in options if word.startswith("--")):
            assert f'"{option}"' in source, (module, option)


def test_extras_exist() -> None:
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    section = text.partition("[project.optional-dependencies]\n")[2].partition("\n[")[0]
    extras = set(re.findall(r"^(\w+) = \[", section, re.MULTILINE))
    for command in (c for c in COMMANDS if c.words[0] == "pip"):
        _, install, what = command.words
        assert install == "install"
        found = re.fullmatch(r"\.(?:\[([\w,]+)\])?", what)
        assert found, what
        assert set((found.group(1) or "docs").split(",")) <= extras


def test_serving_is_what_was_run() -> None:
    """Keys that the plugin reads, and no option that no recorded run and no test gave."""
    keys = {vllm.ENABLED, vllm.RECORDS, vllm.SIDE_CACHE}
    served = [c for c in COMMANDS if c.words[:2] == ("vllm", "serve")]
    results = ROOT / "benchmarks" / "results"
    runs = [json.loads(p.read_text()) for p in results.glob("serving_walk_*.json")]
    recorded = " ".join(step["command"] for run in runs for step in run["steps"])
    assert served
    for command in served:
        for word in command.words:
            if word.startswith("--"):
                assert word in recorded, word
            if word.startswith("{"):
                additional = json.loads(word)
                assert set(additional) <= keys
                assert additional.get(vllm.RECORDS, "fp8_ds_mla_656") in RECORDS


# -- what is copied from the package --------------------------------------------------------------


def test_records_table_is_the_output_of_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["records", "--markdown"]) == 0
    table = capsys.readouterr().out.strip()
    text = (ROOT / "docs" / "records.md").read_text(encoding="utf-8")
    begin, end = "<!-- record-formats:begin -->", "<!-- record-formats:end -->"
    shown = text.partition(begin)[2].partition(end)[0].strip()
    assert shown == table, "replace it by the output of `mla-quant records --markdown`"
    assert len(table.splitlines()) == 2 + len(RECORDS)


def test_every_record_format_has_a_reader() -> None:
    text = (ROOT / "docs" / "records.md").read_text(encoding="utf-8")
    section = text.partition("## Which reader expects which")[2].partition("\n## ")[0]
    assert {name for name in RECORDS if f"`{name}`" in section} == set(RECORDS)


def test_families_are_those_of_the_tests() -> None:
    text = (ROOT / "docs" / "add-a-family.md").read_text(encoding="utf-8")
    section = text.partition("## Families that are tested")[2].partition("\n## ")[0]
    assert re.findall(r"^\| `(\w+)` \|", section, re.MULTILINE)[1:] == list(FAMILIES)
    refused = section.partition("Refused by name")[2].partition(".")[0]
    assert set(re.findall(r"`(\w+)`", refused)) == set(families._REFUSED_TYPES)


def test_recipes_that_are_named_exist_and_shown_ones_are_valid() -> None:
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        named = set(re.findall(r"\b(?:nv)?fp[48]_(?:\w+_)?mla\w*", text)) - set(RECORDS)
        # Names that other projects use of records.
        assert {n for n in named if "ds_mla" not in n} <= set(recipe_names()), page.name
        for block in blocks(page, "yaml"):
            parse_recipe(yaml.safe_load(block), origin=page.name)


@pytest.mark.parametrize("page", READABLE, ids=by_name)
def test_python_imports_what_exists(page: Path) -> None:
    for block in blocks(page, "python"):
        for node in ast.walk(ast.parse(block)):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("mla_quant"):
                module = importlib.import_module(node.module or "")
                for alias in node.names:
                    assert hasattr(module, alias.name), alias.name


def test_measured_tables_have_one_place() -> None:
    """Every table that a benchmark writes has one pair of markers, in README.md or the manual."""
    text = "\n".join(page.read_text(encoding="utf-8") for page in READABLE)
    for source in (ROOT / "benchmarks").glob("*.py"):
        for name in re.findall(r"\binsert\(\"([\w-]+)\"", source.read_text(encoding="utf-8")):
            assert text.count(f"<!-- {name}:begin -->") == 1, name
            assert text.count(f"<!-- {name}:end -->") == 1, name
