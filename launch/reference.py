"""Command: the pages of the reference that are made from the code, beside docs/recipe.md.

    python -m launch.reference          writes docs/commands.md, exit_codes.md, metrics.md and files.md

- Commands: the parser of each, as its --help shows it.
- Exit codes: the exceptions that end a command (data/ground/errors.py), and data/ground/command.py.
- Metrics: trainer/monitoring/names.py, and the labels of scores.
- Files: the schema of each JSON format, and the docstring of its module.

The modules are imported by their names, as launch/barista.py runs them, because most of them need torch.
"""

from __future__ import annotations

import argparse
import ast
import dataclasses
import importlib
import inspect
import itertools
import json
import re
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pydantic

from data.ground.command import OTHER_CODES, run_command
from data.ground.errors import CommandEnd
from data.ground.files import write_atomically
from data.ground.records import Record
from launch.barista import GROUPS
from trainer.config.reference import help_text
from trainer.monitoring.lines import FORMAT
from trainer.monitoring.names import EVALUATION, FAMILIES, FAULTY, SAVED, STEP

ROOT = Path(__file__).resolve().parents[1]
# Commands that others start, or that only make files of this repository. Those of the second kind have no options.
STARTED_BY_OTHERS, WITHOUT_OPTIONS = ("launch.node",), ("trainer.config.reference", "launch.reference")
_PACKAGES = ("data", "models", "trainer", "launch")


@dataclasses.dataclass(frozen=True)
class Format:
    """A file format: where its files are, its module, its schema there, and the page that explains it.

    described: the module's docstring describes the format.
    """

    file: str
    module: str
    schema: str
    page: str
    described: bool = False


FORMATS = (
    Format("SHARDS/manifest.json", "data.shards.format", "_ManifestFile", "docs/data.md", described=True),
    Format("SHARDS/units/NNNNN.json", "data.shards.writer", "_MarkerFile", "docs/data.md"),
    Format(
        "RUN/checkpoints/step_N/manifest.json", "trainer.checkpoint", "_Manifest", "docs/reliability.md", described=True
    ),
    Format("RUN/environment.json", "trainer.environment", "Environment", "docs/architecture.md"),
    Format("RUN/metrics.jsonl", "trainer.monitoring.lines", "Line", "docs/metrics.md", described=True),
    Format("RUN/tracking.json", "trainer.monitoring.trackers", "_Tracking", "docs/monitoring.md"),
    Format("RUN/job/NNN/environment.json", "launch.record", "Submission", "docs/cluster.md"),
    Format("MODEL/barista.json", "models.settings", "EmbeddingSettings", "docs/backbones.md"),
    Format("EXPORT/export.json", "trainer.exporting.manifest", "ExportManifest", "docs/export.md"),
    Format("RESULTS/results.json", "trainer.evaluate", "", "docs/evaluation.md", described=True),
    Format("RESULTS/raw.jsonl.gz", "trainer.evaluation.results.raw", "_Line", "docs/evaluation.md", described=True),
    Format(
        "VECTORS/TASK/store.json",
        "trainer.evaluation.search.vectors",
        "_Description",
        "docs/evaluation.md",
        described=True,
    ),
    Format("STORE/store.json", "trainer.objectives.vector_store", "StoreRecord", "docs/objectives.md", described=True),
    Format("MINED/report.json", "trainer.mining.mine", "Report", "docs/negatives.md"),
    Format("RESIZED/resize.json", "trainer.resizing.table", "Table", "docs/resize.md"),
    Format("SEEDS/selection.json", "trainer.experiments.selection", "Selection", "docs/negatives.md"),
)


def pages() -> dict[str, str]:
    """Each page of the repository that this module makes, by its path."""
    return {
        "docs/commands.md": commands_page(),
        "docs/exit_codes.md": exit_codes_page(),
        "docs/metrics.md": metrics_page(),
        "docs/files.md": files_page(),
    }


def main() -> None:
    for name, content in pages().items():
        write_atomically(ROOT / name, content)


# Commands


def commands_page() -> str:
    parts = [
        "# Commands",
        made_from("the commands' own parsers")
        + " `barista NAME` is the same as `python -m MODULE`. Training on several GPUs is started by a launcher: "
        "`deepspeed --module trainer.finetune --config RECIPE.toml`.",
    ]
    for group, commands in GROUPS.items():
        parts.append(f"## {group.capitalize()}")
        for name, command in commands.items():
            parts += [f"### {name}", *_command(command.module, also=f"barista {name}")]
    parts += ["## Started by other commands", "The jobs of `launch.submit` start them."]
    for module in STARTED_BY_OTHERS:
        parts += [f"### {module}", *_command(module)]
    parts += ["## For developers", "They make or measure what is in the repository."]
    rows = [
        (f"`python -m {module}`", escaped(_described(_first_paragraph(_docstring(module)))))
        for module in developers_commands()
    ]
    parts.append(_table(("command", "what it does"), rows))
    return "\n\n".join(parts) + "\n"


def developers_commands() -> Iterator[str]:
    """Modules that run by `python -m` and are for whoever changes barista; found by parsing, not importing."""
    yield from WITHOUT_OPTIONS
    yield from ("tests.faults.hostile", "tests.faults.kill_matrix")
    for path in sorted((ROOT / "tests" / "benchmarks").glob("*.py")):
        module = f"tests.benchmarks.{path.stem}"
        if f"    python -m {module}" in _docstring(module):
            yield module


def parser_of(module: str) -> argparse.ArgumentParser:
    """The parser of a command, taken from its `main` when that begins to parse."""
    loaded = importlib.import_module(module)
    main = loaded.main
    # The three commands that train have one `main`, to which they pass their name and their docstring.
    named = (module.rpartition(".")[2], loaded.__doc__) if "command" in inspect.signature(main).parameters else ()

    class Found(BaseException):
        pass

    def stop(self: argparse.ArgumentParser, *_: object, **__: object) -> typing.NoReturn:
        raise Found(self)

    parse = argparse.ArgumentParser.parse_known_args
    argparse.ArgumentParser.parse_known_args = stop  # type: ignore[method-assign, assignment]
    try:
        main(*named, argv=[])
    except Found as found:
        return found.args[0]
    finally:
        argparse.ArgumentParser.parse_known_args = parse  # type: ignore[method-assign]
    raise AssertionError(f"{module} has parsed nothing")


def _command(module: str, *, also: str = "") -> Iterator[str]:
    parser = parser_of(module)
    yield f"`{_usage(parser)}`" + (f", or `{also} …`" if also else "")
    yield from _explanation(parser)
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for name, inner in action.choices.items():
                yield f"#### {parser.prog.rpartition('.')[2]} {name}"
                yield f"`{_usage(inner)}`"
                yield from _explanation(inner)


def _explanation(parser: argparse.ArgumentParser) -> Iterator[str]:
    """A parser's description, a table of each group of its arguments, and what stands below them in its --help."""
    if parser.description:
        yield as_markdown(_described(parser.description))
    for group in parser._action_groups:
        rows = [(f"`{_arguments_of(action)}`", _help(action, parser)) for action in _shown(group._group_actions)]
        if rows:
            kind = "argument" if group.title == "positional arguments" else "option"
            # argparse itself names two groups. The title of any other says what its options have in common.
            title = "meaning" if group.title in ("positional arguments", "options") else group.title or ""
            yield _table((kind, title), rows)
    if parser.epilog == help_text():
        yield "Any key of the recipe can be set as `--section.key=value` (docs/recipe.md)."
    elif parser.epilog:
        yield as_markdown(parser.epilog)


def _shown(actions: Sequence[argparse.Action]) -> list[argparse.Action]:
    hidden = (argparse._HelpAction, argparse._SubParsersAction)
    return [each for each in actions if each.help is not argparse.SUPPRESS and not isinstance(each, hidden)]


def _usage(parser: argparse.ArgumentParser) -> str:
    """The command with all that it requires."""
    words = [parser.prog]
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            words.append("COMMAND")
        elif action.required or not action.option_strings:
            words.append(_arguments_of(action))
    return " ".join([*words, "…" if words[-1] == "COMMAND" else "[options]"])


def _arguments_of(action: argparse.Action) -> str:
    """An option or a positional argument with its values, as they are written."""
    default = "{" + ",".join(map(str, action.choices)) + "}" if action.choices else action.dest.upper()
    # argparse allows a tuple of names, which no command of ours has.
    value = str(action.metavar or default)
    values = {None: value, "?": f"[{value}]", "*": f"[{value} …]", "+": f"{value} …", 0: ""}.get(action.nargs, value)
    if not action.option_strings:
        return values
    return f"{', '.join(action.option_strings)} {values}".strip()


def _help(action: argparse.Action, parser: argparse.ArgumentParser) -> str:
    """An argument's help, with its default where the help says none."""
    given = action.help or ""
    text = given % {**vars(action), "prog": parser.prog}
    default = action.default
    said = "default" in given or re.search(r"\([^)]*\)$", given) is not None
    if not said and default is not argparse.SUPPRESS and default not in (None, "", False, [], 0):
        shown = " ".join(map(str, default)) if isinstance(default, list) else default
        text = f"{text} (default {shown:g})" if isinstance(default, float) else f"{text} (default {shown})"
    if action.required and action.option_strings:
        text = f"{text} (required)"
    return escaped(text.strip())


def _described(text: str) -> str:
    """A description without the word with which docstrings of commands begin."""
    text = re.sub(r"^Commands?: ", "", text.strip())
    return text[:1].upper() + text[1:]


# Exit codes


def exit_codes_page() -> str:
    for group in GROUPS.values():
        for command in group.values():
            importlib.import_module(command.module)  # so that all exceptions are defined
    rows = [(code, "", escaped(meaning)) for code, meaning in OTHER_CODES.items()]
    rows += [(str(end.exit_code), f"`{end.__name__}`", escaped(_first_paragraph(end.__doc__ or ""))) for end in ends()]
    rows.sort(key=lambda row: (not row[0].isdigit(), row[0].zfill(3)))
    parts = [
        "# Exit codes",
        made_from("data/ground/command.py and the exceptions that end a command")
        + " What ended a command is also printed, in one sentence. With `BARISTA_TRACEBACK=FILE` the traceback of such "
        "an error is written to that file.",
        _table(("code", "exception", "meaning"), rows),
    ]
    return "\n\n".join(parts) + "\n"


def ends() -> list[type[CommandEnd]]:
    """The exceptions that end a command, those that are imported."""

    def below(end: type[CommandEnd]) -> Iterator[type[CommandEnd]]:
        for each in end.__subclasses__():
            yield each
            yield from below(each)

    found = {each for each in below(CommandEnd) if each.__module__.partition(".")[0] in _PACKAGES}
    return sorted(found, key=lambda each: (each.exit_code, each.__name__))


# Metrics


def metrics_page() -> str:
    labels: Mapping[str, str] = importlib.import_module("trainer.evaluation.results.report").METRIC_LABELS
    families = {f"{family}/SIZE": meaning for family, meaning in FAMILIES.items()}
    header = ("name", "meaning")
    return (
        "\n\n".join(
            [
                "# Metrics",
                made_from("trainer/monitoring/names.py")
                + " `metrics.jsonl` of a run has one JSON object a line, whose schema is in docs/files.md. Its first "
                f"key is `format`, which is {FORMAT}. Lines without it, which earlier versions wrote, are of format 1. "
                "The trackers show the same numbers (docs/monitoring.md). A number that is not defined, such as the "
                "correlation of equal values, is null. "
                "SIZE is a size's name on the ladder, or LAYERSxDIMENSIONS.",
                "## A logged step",
                _named(STEP, header),
                "## Losses by size",
                "They stand in the line of a logged step. Which of them a run has follows from its recipe.",
                _named(families, header),
                "## Scores",
                "Evaluations during training write a line with `step` and names of the form "
                f"`{EVALUATION}TASK/METRIC/SIZE`. `results.json` of `trainer.evaluate` has the same metrics; "
                "docs/evaluation.md says how each is computed.",
                _named(labels, ("metric", "label in tables and charts")),
                "## A saved checkpoint",
                _named(SAVED, header),
                "## A step with a fault",
                _named(FAULTY, header),
            ]
        )
        + "\n"
    )


def _named(meanings: Mapping[str, str], header: tuple[str, str]) -> str:
    return _table(header, [(f"`{name}`", escaped(meaning)) for name, meaning in meanings.items()])


# Files


def files_page() -> str:
    parts = [
        "# Files",
        made_from("the schemas and the docstrings of the modules that read and write these files")
        + ' docs/architecture.md, "A run on disk", lists the files of a run. Recipes are described in docs/recipe.md, '
        "the names in metrics.jsonl in docs/metrics.md. A reader ignores keys that it does not know. A file with a "
        "`format` that it does not know is refused.",
    ]
    for each in FORMATS:
        module = importlib.import_module(each.module)
        parts += [f"## {each.file}", f"{each.module.replace('.', '/')}.py; {each.page} explains it."]
        if each.schema:
            schema = getattr(module, each.schema)
            parts += [as_markdown(schema.__doc__)] if schema.__doc__ else []
            parts.append(_table(("key", "value", "default"), list(_fields(schema))))
        if each.described:
            parts.append(as_markdown(_described(module.__doc__ or "")))
    return "\n\n".join(parts) + "\n"


def _fields(schema: type) -> Iterator[tuple[str, str, str]]:
    """(key, kind of value, default) of each field of a Record or a dataclass."""
    if issubclass(schema, Record):
        for name, field in schema.model_fields.items():
            default = "" if field.is_required() else _default(field.get_default(call_default_factory=True))
            yield f"`{field.alias or name}`", value_in_words(field.annotation), default
        return
    hints = typing.get_type_hints(schema)
    for each in dataclasses.fields(schema):  # type: ignore[arg-type]
        default = "" if each.default is dataclasses.MISSING else _default(each.default)
        yield f"`{each.name}`", value_in_words(hints[each.name]), default


def _default(value: Any) -> str:
    return f"`{json.dumps(value, default=lambda each: each.model_dump())}`"


_KINDS = {int: "whole number", float: "number", str: "text", bool: "true or false", type(None): "null", Any: "anything"}


def value_in_words(hint: Any) -> str:
    """What a JSON value of an annotated type is, in words."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is typing.Annotated:
        return value_in_words(arguments[0])
    if origin is typing.Literal:
        return " or ".join(f"`{json.dumps(each)}`" for each in arguments)
    if origin in (types.UnionType, typing.Union):
        return " or ".join(value_in_words(each) for each in arguments)
    if origin in (list, tuple):
        if len(arguments) == 1 or arguments[-1] is Ellipsis:
            return f"list of {_in_brackets(arguments[0])}"
        return f"list of {len(arguments)}: " + ", ".join(value_in_words(each) for each in arguments)
    if origin is dict:
        return f"object of {_in_brackets(arguments[1])}"
    if isinstance(hint, type) and (issubclass(hint, pydantic.BaseModel) or dataclasses.is_dataclass(hint)):
        return "object with " + ", ".join(key for key, _, _ in _fields(hint))
    return _KINDS[hint]


def _in_brackets(hint: Any) -> str:
    words = value_in_words(hint)
    return f"({words})" if " or " in words or " of " in words else words


# Markdown


def made_from(source: str) -> str:
    """The sentence that says where a page comes from."""
    return f"Made from {source} by `python -m launch.reference`; edit those, not this page."


def as_markdown(text: str) -> str:
    """A docstring as Markdown: indented blocks become fenced ones, and paragraphs, lists and code spans stay."""
    parts = []
    for block in re.split(r"\n\s*\n", inspect.cleandoc(text)):
        lines = block.splitlines()
        for indented, run in itertools.groupby(lines, key=_is_code):
            if indented:
                parts.append("```text\n" + inspect.cleandoc("\n".join(["", *run])) + "\n```")
            else:
                parts += _prose(list(run))
    return "\n\n".join(parts)


def _is_code(line: str) -> bool:
    return line.startswith("    ")


def _prose(lines: Sequence[str]) -> Iterator[str]:
    """Paragraphs, with a blank line before a list."""
    first = next((number for number, line in enumerate(lines) if line.startswith("- ")), len(lines))
    for part in (lines[:first], lines[first:]):
        if part:
            yield escaped("\n".join(part))


def escaped(text: str) -> str:
    """Text without HTML: what stands in angle brackets outside code spans is shown as it is."""
    spans = re.split(r"(`[^`]*`)", text)
    return "".join(span if span.startswith("`") else span.replace("<", "&lt;") for span in spans)


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)


def _docstring(module: str) -> str:
    """A module's docstring, by parsing its file. A package's command is in its `__main__`."""
    path = ROOT.joinpath(*module.split("."))
    file = path / "__main__.py" if path.is_dir() else path.with_suffix(".py")
    return ast.get_docstring(ast.parse(file.read_text("utf-8"))) or ""


def _first_paragraph(text: str) -> str:
    return " ".join(inspect.cleandoc(text).split("\n\n")[0].split())


if __name__ == "__main__":
    run_command(main)
