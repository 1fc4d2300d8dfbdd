"""How commands are found and how their help reads: loaded on demand, options under headings."""

from __future__ import annotations

import difflib
import importlib
import itertools
import re
import typing
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any

import click
import typer
from typer.core import TyperCommand, TyperGroup

from t0repro.cli.paths import read_addresses
from t0repro.cli.spelling import canonical
from t0repro.errors import UserError
from t0repro.words import remove_passwords, some

HELP = ["-h", "--help"]
_T5X_RUN_MODES = ("train", "eval", "infer")
_HELP_ALL = "t0repro.help_all"  # in a context's `meta`: whether --help-all was given


class More(str):
    """A heading of options that only --help-all lists."""


def _show_all(context: typer.Context, value: bool) -> None:
    if value:
        context.meta[_HELP_ALL] = True
        typer.echo(context.get_help())
        raise typer.Exit


HelpAll = Annotated[
    bool, typer.Option("--help-all", callback=_show_all, is_eager=True, help="List all options.")
]


class _Parsing:
    """How a command and a group of commands read their command lines."""

    def get_help_option_names(self, ctx: Any) -> list[str]:
        """Those of every command: Click would keep the names that its first context has."""
        return HELP

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Reads the command line; names the options that may be meant by what it cannot take."""
        given = list(args)  # the parser empties the list
        _note_repeated(given, _visible_options(self))
        try:
            return super().parse_args(ctx, args)  # pyright: ignore[reportAttributeAccessIssue]
        except Exception as raised:  # typer's own copy of Click has no public name
            error: Any = raised
            options, message = _visible_options(self), str(getattr(error, "message", ""))
            if message.startswith("Got unexpected extra") and options:
                said = _quote_whole(given) or _repeat_option(given, options)
                takes = [each.metavar for each in _arguments(self)]
                own = f" {ctx.command_path} takes {' and '.join(takes)}." if takes else ""
                error.message += f".{said or own + _name_takers(options)}"
            elif hasattr(error, "option_name") and hasattr(error, "possibilities"):
                named = [word for word in given if word in getattr(self, "commands", ())]
                is_t5x = ctx.info_name in _T5X_RUN_MODES
                after = f"{ctx.command_path} {''.join(named[:1])} {error.option_name}"
                error.message += (
                    f". A command's options stand after its name: {after}."
                    if named
                    else f". {_suggest(error.option_name, options, is_t5x=is_t5x)}"
                )
                # Such as `vertex submit`, whose run has options that it does not read itself.
                if any("[-- " in (each.metavar or "") for each in getattr(self, "params", ())):
                    error.message += f" An option of the run: -- {error.option_name}=VALUE."
                elif (
                    ctx.allow_extra_args
                    and error.option_name.startswith("--")
                    and not ("--" in given or ctx.ignore_unknown_options)
                    and not hasattr(self, "commands")
                ):
                    error.message += (
                        " The command to start follows two dashes, with its options: -- t0repro"
                        f" train {error.option_name}=VALUE."
                    )
                error.possibilities = None
            elif getattr(getattr(error, "param", None), "multiple", False):
                name = error.param.opts[0]
                error.message += f". For several values it is repeated: {name} A {name} B."
            elif "Value error, " in message:  # how pydantic, which checks values, names its errors
                error.message = message.replace("Value error, ", "", 1)
            elif message.startswith("Input should be "):  # pydantic's too, without the input
                wanted = message.removeprefix("Input ").partition(", unable")[0]
                error.message = f"{error.__cause__.errors()[0]['input']!r} {wanted}."
            raise


class Command(_Parsing, TyperCommand):
    """A command whose help has options under their headings, within 80 columns."""

    def __init__(self, name: str | None, **settings: Any):
        super().__init__(name, **settings)
        _prepare(self)

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        """The options' and arguments' names, as `Usage:` shows them."""
        names = [
            each.metavar if each.required else f"[{each.metavar}]" for each in _arguments(self)
        ]
        return ["[OPTIONS]", *(name.replace("[[", "[").replace("]]", "]") for name in names)]

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Writes the options into the help."""
        _write_options(self, ctx, formatter)


class Group(_Parsing, TyperGroup):
    """A group of commands, whose names may be written with _ or -."""

    def __init__(self, **settings: Any):
        super().__init__(**settings)
        _prepare(self)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """The command with this name, in either spelling; None if there is none."""
        return super().get_command(ctx, cmd_name.replace("_", "-"))

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """The name, command and remaining words of a command line."""
        if args and args[0][:1] != "-" and self.get_command(ctx, args[0]) is None:
            word, known = args[0].lower(), self.commands
            near = [each for each in re.split("[-_]", word) if each in known]
            near += [each for each in [_COMMANDS_ELSEWHERE.get(word)] if each in known]
            near += [f"{group} {word}" for group in known if word in _commands_of(known, group)]
            near = near or difflib.get_close_matches(word, known, n=2, cutoff=0.65)
            said, also = "Nearest:", ""
            if not near:
                about = f" {self.get_short_help_str(200)}" if ctx.parent else ""
                also = _name_takers(_visible_options(self)) or about
                said = "There are"
            if (script := re.sub("[-_]", "", word)) in ("quickstart", "setup"):
                ctx.fail(f"{args[0]} is a script of a checkout: bash scripts/{script}.sh")
            listed = ", ".join(dict.fromkeys(near or self.commands))
            ctx.fail(f"No such command {args[0]!r}. {said} {listed}.{also}")
        _, command, rest = super().resolve_command(ctx, args)
        return command and command.name, command, rest

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Writes options and commands into the help."""
        _write_options(self, ctx, formatter)
        self.format_commands(ctx, formatter)


class App(typer.Typer):
    """A Typer application whose group and commands are this module's."""

    def __init__(self, name: str | None = None, *, example: str = "", cls: Any = Group, **settings):
        super().__init__(
            name=name,
            cls=cls,
            epilog=f"Example:\n  {example}" if example else None,
            add_completion=cls is not Group,
            rich_markup_mode=None,  # its panels cut long names of options
            pretty_exceptions_enable=False,  # `gate` prints errors instead
            **settings,
        )

    def command(self, name: str | None = None, **settings: Any) -> Callable[[Any], Any]:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Typer's decorator of the same name."""
        return super().command(name, cls=Command, **settings)


def load(name: str, place: str, **settings: Any) -> Any:
    """Imports the function or `App` at `MODULE:NAME`, and returns its command."""
    module, _, attribute = place.partition(":")
    target = getattr(importlib.import_module(module), attribute)
    if not isinstance(target, App):
        function, target = target, App()
        target.command(name, **settings)(function)
    return typer.main.get_command(target)


class Loaded(Mapping[str, Any]):
    """Commands by their names; each is imported when it is first asked for."""

    def __init__(self, load_command: Callable[[str], Any], names: typing.Iterable[str]):
        self._load, self._commands = load_command, dict.fromkeys(names)

    def __getitem__(self, name: str) -> Any:
        if self._commands[name] is None:
            self._commands[name] = self._load(name)
        return self._commands[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._commands)

    def __len__(self) -> int:
        return len(self._commands)


def _commands_of(commands: Mapping[str, Any], group: str) -> Mapping[str, Any]:
    return getattr(commands[group], "commands", {})


def _arguments(command: Any) -> list[Any]:
    return [each for each in command.params if each.param_type_name == "argument"]


def _visible_options(command: Any) -> list[Any]:
    options: list[Any] = [each for each in command.params if each.param_type_name == "option"]
    return [each for each in options if not each.hidden]


def _is_required(option: Any) -> bool:
    return option.required or option.rich_help_panel == "Required"


def _name_takers(options: list[Any]) -> str:
    """A sentence about the options that a word may be the value of, or ""."""
    valued = [each for each in options if not each.is_flag]
    valued.sort(key=lambda each: not _is_required(each))
    names = [next(name for name in each.opts if name[:2] == "--") for each in valued]
    return f" An option stands before its value: {some(names, 8)}." if names else ""


def _quote_whole(words: list[str]) -> str:
    """A sentence about an override that the shell has split at its spaces, or ""."""
    for word, following in itertools.pairwise(words):
        if word.startswith(("--gin_bindings=", "--gin_param=")):
            value = word.partition("=")[2]
            opened = sum(value.count(mark) for mark in "{[(") > sum(map(value.count, "}])"))
            if opened or following == "=" or value.rstrip().endswith("="):
                return (
                    " The shell split a value at its spaces. Quote the whole:"
                    """ --gin.NAME="{'inputs': 64, 'targets': 16}", --gin_param="NAME = VALUE"."""
                )
    return ""


def _note_repeated(words: list[str], options: list[Any]) -> None:
    """Says of an option that takes one value, and was given several, which one counts.

    Raises:
      UserError: If it names what is worked on, of which both are wanted.
    """
    single = {
        name: next(each for each in option.opts if each[:2] == "--")
        for option in options
        if not (option.multiple or option.is_flag or option.count)
        for name in option.opts
    }
    values: dict[str, list[str]] = {}
    for word, following in itertools.pairwise([*words, ""]):
        if word == "--":
            break
        name, equals, value = word.partition("=")
        if name in single:
            values.setdefault(single[name], []).append(value if equals else following)
    for name, given in values.items():
        if len(set(given)) > 1:
            of_all = remove_passwords(", ".join(given))
            if name == "--mixture":
                raise UserError(
                    f"Of {of_all}, one is taken at a time.",
                    where=name,
                    fix='Give one at a time, or a mixture of them: docs/tasks.md, "Mixtures".',
                )
            typer.echo(f"note: {name} takes one value: of {of_all}, the last", err=True)


def _repeat_option(words: list[str], options: list[Any]) -> str:
    """A sentence about an option that was given several values at once, or ""."""
    repeated = {name for each in options if each.multiple for name in each.opts}
    for name, value, other in zip(words, words[1:], words[2:], strict=False):
        if name in repeated and value[:1] != "-" and other[:1] != "-":
            return f" {name} takes one value, and may be repeated: {name} {value} {name} {other}."
    return ""


# What transformers, lm-evaluation-harness and launchers call an option -> what it is here.
_CALLED_ELSEWHERE = {
    "model": "checkpoint", "model_name_or_path": "checkpoint", "pretrained": "checkpoint",
    "tasks": "mixture", "output_dir": "out", "output_path": "out",
    "batch_size": "tokens_per_batch", "per_device_eval_batch_size": "tokens_per_batch",
    "nodes": "processes", "num_nodes": "processes", "nproc_per_node": "processes",
    "n": "processes", "np": "processes", "init_checkpoint": "from", "model_dir": "from",
}  # fmt: skip
# What people may call a command -> its name.
_COMMANDS_ELSEWHERE = {
    "score": "rank-eval", "evaluate": "rank-eval", "predict": "infer", "generate": "infer",
    "embed": "encode", "export": "convert", "finetune": "train", "view": "browse",
}  # fmt: skip
# What people give T5X's run modes as an option -> the macro of its gin files.
_MACROS = {
    **dict.fromkeys(("model_dir", "output_dir"), """--gin.MODEL_DIR="'DIR'\""""),
    **dict.fromkeys(("checkpoint", "checkpoint_path"), """--gin.CHECKPOINT_PATH="'DIR'\""""),
    **dict.fromkeys(("mixture", "task", "tasks"), """--gin.MIXTURE_OR_TASK_NAME="'NAME'\""""),
    **dict.fromkeys(("train_steps", "steps", "max_steps"), "--gin.TRAIN_STEPS=N"),
    **dict.fromkeys(("num_train_epochs", "epochs"), "--gin.TRAIN_STEPS=N"),
    **dict.fromkeys(
        ("learning_rate", "lr"), "--gin.utils.create_learning_rate_scheduler.base_learning_rate=R"
    ),
    "batch_size": "--gin.BATCH_SIZE=N",
}


def _suggest(name: str, options: list[Any], *, is_t5x: bool) -> str:
    """The options that a misspelt one may be meant for, or a command's first ones."""
    options = sorted(options, key=lambda each: not _is_required(each))
    known = [[n for n in (*each.opts, *each.secondary_opts) if n[:2] == "--"] for each in options]
    words = {n.removeprefix("--"): n for names in known for n in names}
    word = canonical(name.lstrip("-"))
    near = [each for each in [_CALLED_ELSEWHERE.get(word)] if each in words]
    near += difflib.get_close_matches(word, words, n=3, cutoff=0.65)
    parts = {each: {word, f"{word}s"} & {*each.split("_")} for each in words}
    near += [each for each in words if parts[each] and each not in near]
    if near:
        return f"Nearest: {', '.join(words[each] for each in near)}."
    setting = (_MACROS if is_t5x else {}).get(word, "--gin_param 'NAME = VALUE'")
    gin = f" A setting of the run is gin's: {setting}." * ("gin_param" in words)
    return f"There are {some([names[0] for names in known], 10) or 'none'}.{gin}"


def _prepare(command: Any) -> None:
    """Gives a command's parameters canonical names, types in words and readable addresses."""
    command.help, command.epilog = map(_keep_example_lines, (command.help, command.epilog))
    for parameter in command.params:
        show_canonical(parameter)
        if parameter.param_type_name == "argument":
            parameter.metavar = parameter.metavar or parameter.name.upper()
        else:
            parameter.metavar = parameter.metavar or f"<{_kind(parameter.type_descriptor)}>"
        # A path with a callback, such as `paths.output`, is checked by that.
        if parameter.callback is None and "Path" in str(parameter.type_descriptor.annotation):
            parameter.callback = read_addresses


def show_canonical(parameter: Any) -> None:
    """Has help show an option's names with underscores; the parser takes both spellings."""
    for names in (parameter.opts, parameter.secondary_opts):
        names[:] = [f"--{canonical(n[2:])}" if n.startswith("--") else n for n in names]


def _keep_example_lines(text: str | None) -> str | None:
    """A help text whose examples keep their lines."""
    # Click rewraps a paragraph unless it begins with \b.
    paragraphs = (text or "").split("\n\n")
    kept = [f"\b\n{each}" if ":\n  " in each else each for each in paragraphs]
    return "\n\n".join(kept) or None


def _kind(kind: Any) -> str:
    """What the value of an option is, in a word."""
    if kind.is_choice:
        return "|".join(str(getattr(choice, "value", choice)) for choice in kind.choices)
    element = (typing.get_args(kind.annotation) or (kind.annotation,))[0]
    return {int: "number", float: "number", Path: "path"}.get(element, "text")


def _write_options(command: Any, context: Any, formatter: Any) -> None:
    """Writes arguments, what is required, and the other options by their headings."""
    sections: dict[str, list[tuple[str, str]]] = {"Arguments": [], "Required": [], "Options": []}
    for parameter in command.get_params(context):
        if (record := parameter.get_help_record(context)) is not None:
            heading = getattr(parameter, "rich_help_panel", None) or "Options"
            if parameter.param_type_name == "argument":
                heading = "Arguments"
            elif parameter.required:
                heading = "Required"
            text = record[1].removesuffix("  [required]")
            sections.setdefault(heading, []).append((_names(parameter), text))
    shows_all = context.meta.get(_HELP_ALL, False)
    if hidden := [name for name in sections if isinstance(name, More)]:
        text = f"List all options, also of: {', '.join(hidden)}."
        options = sections["Options"]
        options[:] = [(n, text if n == "--help_all" else record) for n, record in options]
    for heading, records in sections.items():
        if records and (shows_all or not isinstance(heading, More)):
            with formatter.section(heading):
                formatter.write_dl(records)


def _names(parameter: Any) -> str:
    """A parameter's name with the kind of its value; of several long names, the first."""
    if parameter.param_type_name == "argument":
        return parameter.metavar
    short = [name for name in parameter.opts if not name.startswith("--")]
    first = next(name for name in parameter.opts if name.startswith("--"))
    names = ", ".join([*short, first, *parameter.secondary_opts])
    return names if parameter.is_flag else f"{names} {parameter.metavar}"


def help_page(program: str, text: str, sections: dict[str, list[tuple[str, str]]]) -> str:
    """The help page of a command that Typer does not parse: its text, then flags by headings.

    Args:
      program: the command's name.
      text: what it does, and an example, as a Typer command's help.
      sections: heading -> each flag with its kind of value, and its help.
    """
    formatter = click.HelpFormatter(width=80)
    formatter.write_usage(program, "[FLAGS]")
    formatter.write_paragraph()
    with formatter.indentation():
        formatter.write_text(_keep_example_lines(text) or "")
    for heading, records in sections.items():
        with formatter.section(heading):
            formatter.write_dl(records)
    return formatter.getvalue()
