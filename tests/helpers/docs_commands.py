"""Finds the command lines of t0repro in the pages, and what is wrong with one."""

from __future__ import annotations

import re
import shlex
import subprocess
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]

_SHELLS = ("", "bash", "sh")  # languages of blocks that a reader pastes into a shell

# These take what belongs to the command that they start, or to a table of placeholders.
_OF_ANOTHER = {"run", "launch"}


def pages() -> list[Path]:
    """README.md and every page of docs/."""
    return [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def fenced_blocks(text: str) -> list[tuple[str, str]]:
    """(language, content) of each block of a page between fences, of any language."""
    return re.findall(r"^```(\w*)\n(.*?)^```$", text, re.M | re.S)


def command_lines(text: str) -> Iterator[str]:
    """The lines of a page's code that call t0repro, continued lines joined, from its name on."""
    fenced = [block for language, block in fenced_blocks(text) if language in _SHELLS]
    indented = re.findall(r"(?:^ {4}.*\n)+", text, re.M)
    in_line = re.findall(r"`([^`\n]*\bt0repro [^`\n]*)`", text)
    for block in [*fenced, *indented, *in_line]:
        for line in re.sub(r"\\\n", " ", block).splitlines():
            # After `$ `, a folder of programs and variables.
            start = re.sub(r"^\s*(\$ )?(\.venv/bin/|[A-Z_0-9]+=\S+ |python -m )*", "", line)
            if re.match(r"t0repro [a-z-]", start):
                # Up to a comment, a pipe or another command.
                yield re.split(r"\s+#|\s\||;|\s>|\s&|…", start)[0].strip()


def fault(line: str, command: Any) -> str | None:
    """What a command line has that the command does not; None if there is nothing.

    Args:
      line: The command line.
      command: The whole of t0repro, as Typer makes it.
    """
    words = shlex.split(line.replace("...", ""))[1:]
    path = []
    while words and hasattr(command, "commands"):
        if words[0] not in command.commands:
            # `t0repro train, eval` in running text, or a placeholder.
            return None if words[0].isupper() or words[0].startswith("-") else f"no {words[0]}"
        path.append(words.pop(0))
        command = command.commands[path[-1]]
    if path and path[0] in _OF_ANOTHER:
        return None
    known = {name.replace("-", "_") for each in command.params for name in each.opts}
    known |= {name.replace("-", "_") for each in command.params for name in each.secondary_opts}
    for word in words:
        if word == "--":
            break
        name = word.partition("=")[0]
        if name.startswith("--") and not name.startswith("--gin.") and name != "--help":
            if name.replace("-", "_") not in known:
                return f"{' '.join(path)} has no {name}"
    return None


# In bash, every program of a page is this function: it records the words that the shell passes.
# Folders are made, since the shell's own redirections write into them; a clone is an empty one.
_RECORDER = r"""
made_by=$(type -P mkdir)
mkdir() { "$made_by" "$@"; }
git() { command_not_found_handle git "$@"; mkdir -p "${@: -1}"; }
PATH=/nowhere
command_not_found_handle() { printf '%s\0' "$@" >&9; printf '\1\0' >&9; }
enable -n source
"""
_PROGRAM = (
    r"(?:\S+/)?(?:t0repro|t5_mesh_transformer|seqio_cache_tasks|bash|python|pip|pytest|gcloud|docker"
    r"|mkdir|git)"
)
_VARIABLE = r"[A-Z_0-9]+=\S+"
# Comments may come before the first command.
_SHELL = re.compile(
    rf"(?:#.*\n)*(?:\$ )?"
    rf"(?:(?:{_VARIABLE}\s+(?:\\\n\s*)?)*{_PROGRAM} |export {_VARIABLE}|[a-z]+=\")"
)


def shell_blocks(text: str) -> Iterator[str]:
    """The blocks of a page that a reader pastes into a shell; of a session, what follows `$ `."""
    fenced = [block for language, block in fenced_blocks(text) if language in _SHELLS]
    rest = re.sub(r"^```.*?^```", "", text, flags=re.M | re.S)
    indented = re.findall(r"(?:^ {4}.*\n)(?:^ {4}.*\n|^\n(?= {4}))*", rest, re.M)
    for block in [*fenced, *map(textwrap.dedent, indented)]:
        if re.search(r"^\$ ", block, re.M):
            yield "\n".join(re.findall(r"^\$ ((?:.*\\\n)*.*)", block, re.M)) + "\n"
        elif _SHELL.match(block):
            yield block


def programs_started(script: str, folder: Path) -> list[list[str]]:
    """The words of each program that bash would start for a script, none of which runs.

    Raises:
      AssertionError: if bash cannot read the script.
    """
    script = re.sub(r"(?<![\w/])\.venv/bin/", "", script)
    record = folder / "record"
    done = subprocess.run(
        ["bash", "-c", f"exec 9>{record}\n{_RECORDER}\n{script}"],
        cwd=folder, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert not done.stderr, f"{done.stderr}\n{script}"
    programs = record.read_text().split("\1\0")[:-1]
    return [program.split("\0")[:-1] for program in programs]


def commands(page: Path) -> list[str]:
    """The commands of a page's blocks, each with the lines that continue it, without comments."""
    found: list[str] = []
    begun = ""
    for line in "".join(shell_blocks(page.read_text())).splitlines():
        line = re.sub(r"\s+# .*|^# .*", "", line)
        begun = f"{begun}\n{line}" if begun else line
        # A text within quotation marks may have lines of its own.
        whole = not line.endswith("\\") and begun.count('"') % 2 == 0 == begun.count("'") % 2
        if whole:
            found += [begun] if begun.strip() else []
            begun = ""
    assert not begun, f"{page.name}: {begun}"
    return found


def failures(
    page: str, lines: Sequence[str], folder: Path, env: Mapping[str, str]
) -> Iterator[str]:
    """Runs a page's commands in one shell; yields those that fail, with what they printed.

    Args:
      page: The page's name.
      lines: Its commands.
      folder: The shell's folder; what the commands print is in a folder `.logs` there.
      env: The shell's environment.
    """
    logs = folder / ".logs" / page
    logs.mkdir(parents=True)
    script = [f"{{ {each}\n}} >.logs/{page}/{number} 2>&1 </dev/null; echo $? >>.logs/{page}/codes"
              for number, each in enumerate(lines)]  # fmt: skip
    subprocess.run(
        ["bash", "-c", "\n".join(script)], cwd=folder, env=dict(env), check=False, timeout=1800,
    )  # fmt: skip
    codes = (logs / "codes").read_text().split() if lines else []
    assert len(codes) == len(lines), f"{page}: the shell ended after {len(codes)} commands"
    for number, (command, code) in enumerate(zip(lines, codes, strict=True)):
        if code != "0":
            text = (logs / str(number)).read_text(errors="replace")
            yield f"{command}\nexit code {code}\n{text[-1500:]}"
