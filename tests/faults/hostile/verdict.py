"""The judgement of a case: the outcome of its commands, and the named checks that look at it."""

from __future__ import annotations

import fnmatch
import json
import re
import stat
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.faults.comparison import step_records

# Ordered from the most serious on; a case's verdict is the first of these that was found.
VERDICTS = ("leaked", "traceback", "silent", "wrong", "left_behind", "skipped", "ok")
_ROOT = Path(__file__).resolve().parents[3]
_TRACEBACK = "Traceback (most recent call last)"
# Names of unfinished work.
_TEMPORARY = ("*.partial", "*.tmp", "*.old", "tmp-*", ".plan")
# Caches that may stay for the next command. In the temporary folder: the documented marks of verified shards, fetched
# shards (data.cache_dir), and the folder that torch makes for its optimizers. At home: matplotlib's fonts.
_CACHES = (
    "tmp/barista-*",
    "tmp/torchinductor_*",
    "home/.cache",
    "home/.cache/matplotlib*",
    "home/.config",
    "home/.config/matplotlib*",
)
# The label of a node in a log that several nodes write.
_NODE = r"(\[node [\d?]+\] )?"


@dataclass(frozen=True)
class Finding:
    verdict: str
    said: str


@dataclass(frozen=True)
class Ended:
    """A command that has ended."""

    code: int  # negative: the signal that killed it
    out: str
    err: str
    seconds: float
    in_time: bool = True

    @property
    def last_line(self) -> str:
        lines = [line for line in self.err.splitlines() if line.strip()]
        return lines[-1] if lines else ""

    @property
    def errors(self) -> list[str]:
        return [line for line in self.err.splitlines() if re.match(rf"{_NODE}error: ", line)]


@dataclass(frozen=True)
class Entry:
    """A file, folder or link at one moment."""

    kind: int
    facts: tuple[object, ...]


Snapshot = dict[str, Entry]


def snapshot(folder: Path) -> Snapshot:
    """Everything below a folder; links are not followed."""
    found: Snapshot = {}
    waiting = [folder]
    while waiting:
        try:
            entries = sorted(waiting.pop().iterdir())
        except PermissionError:
            continue
        for path in entries:
            about = path.lstat()
            kind = stat.S_IFMT(about.st_mode)
            facts: tuple[object, ...] = (stat.S_IMODE(about.st_mode),)
            if stat.S_ISDIR(about.st_mode):
                waiting.append(path)
            elif stat.S_ISLNK(about.st_mode):
                facts = (str(path.readlink()),)
            else:
                facts += (about.st_size, about.st_mtime_ns, about.st_ino)
            found[str(path.relative_to(folder))] = Entry(kind, facts)
    return found


@dataclass(frozen=True)
class Outcome:
    """What a case's commands did. Paths of `before` and `after` begin with work/, tmp/ or home/."""

    place: Path  # holds work, tmp and home
    ended: Sequence[Ended]  # in the order of the commands
    before: Snapshot
    after: Snapshot
    outputs: tuple[str, ...]
    survivors: tuple[str, ...] = ()
    secrets: tuple[str, ...] = ()
    may_leave: tuple[str, ...] = ()
    assets: Path = Path()

    @property
    def folder(self) -> Path:
        return self.place / "work"

    @property
    def first(self) -> Ended:
        return self.ended[0]

    @property
    def new(self) -> list[str]:
        return [path for path in self.after if path not in self.before]

    @property
    def changed(self) -> list[str]:
        """Files and links that changed or were replaced, and folders whose mode changed."""
        return [path for path, entry in self.after.items() if path in self.before and self.before[path] != entry]

    def is_output(self, path: str) -> bool:
        return any(path == f"work/{each}" or path.startswith(f"work/{each}/") for each in self.outputs)


@dataclass(frozen=True)
class Check:
    """A named expectation. `look` finds nothing if the expectation is met."""

    name: str
    look: Callable[[Outcome], Iterable[Finding]]


def check(name: str, holds: Callable[[Outcome], bool | str | None]) -> Check:
    """A check by a function, which returns True or None if all is well, else False or what was seen instead."""

    def look(outcome: Outcome) -> Iterator[Finding]:
        seen = holds(outcome)
        if seen is not True and seen is not None:
            yield _unmet(outcome, f"{name}: {seen}" if seen else f"not so: {name}")

    return Check(name, look)


def _unmet(outcome: Outcome, said: str) -> Finding:
    """A finding of an unmet check. It is silent if every command ended with 0, because a user would not notice."""
    return Finding("silent" if all(each.code == 0 for each in outcome.ended) else "wrong", said)


# ----------------------------------------------------------------------------------------------------- how it ended


def refused(*naming: str, untouched: bool = False, code: int = 2) -> Check:
    """The first command ends with `code`, and its stderr ends with one line `error: …` that holds each of the words.

    untouched: not even the output was begun.
    """
    return Check(
        f"refused, naming {', '.join(naming)}" if naming else "refused",
        lambda outcome: _refusal(outcome, naming, untouched=untouched, code=code, usage=False),
    )


def misused(*naming: str) -> Check:
    """Like `refused`, for mistakes in the command line: argparse's `python -m NAME: error: …` is also accepted."""
    return Check(
        f"refused as misuse, naming {', '.join(naming)}",
        lambda outcome: _refusal(outcome, naming, untouched=True, code=2, usage=True),
    )


def gave_up(*naming: str) -> Check:
    """The first command ends with code 3 and one sentence: the run could not go on."""
    return Check("gave up", lambda outcome: _refusal(outcome, naming, untouched=False, code=3, usage=False))


def _refusal(outcome: Outcome, naming: Sequence[str], *, untouched: bool, code: int, usage: bool) -> Iterator[Finding]:
    ended = outcome.first
    if not ended.in_time:
        return  # a command that runs too long is a finding of its own
    wanted = f"a refusal ({code})" + (f" naming {', '.join(map(repr, naming))}" if naming else "")
    if ended.code == 0:
        yield Finding("silent", f"expected {wanted}; exit code 0, saying {_end_of(ended)!r}")
        return
    if ended.code != code:
        yield Finding("wrong", f"expected {wanted}; exit code {ended.code}, saying {_end_of(ended)!r}")
        return
    pattern = r"(python -m [\w.]+( \w+)*: )?error: \S" if usage else rf"{_NODE}error: \S"
    if not re.match(pattern, ended.last_line):
        yield Finding("wrong", f"the last line of stderr is no `error: …` but {ended.last_line!r}")
    elif len(ended.errors) > 1:
        yield Finding("wrong", f"{len(ended.errors)} errors in place of one: {ended.errors}")
    elif missing := [word for word in naming if word not in ended.last_line]:
        yield Finding("wrong", f"{ended.last_line!r} does not name {', '.join(map(repr, missing))}")
    others = [number for number, each in enumerate(outcome.ended) if each.code == 0]
    if others:
        yield Finding("wrong", f"rank {others[0]} ended with 0 all the same")
    if untouched and (written := [path for path in [*outcome.new, *outcome.changed] if outcome.is_output(path)]):
        yield Finding("wrong", f"refused only after {written[0]} was written")


def ended_with(code: int, *saying: str) -> Check:
    """The first command ends with `code` and prints the words."""

    def look(outcome: Outcome) -> Iterator[Finding]:
        if not outcome.first.in_time:
            return
        if outcome.first.code != code:
            yield _unmet(
                outcome, f"exit code {outcome.first.code} in place of {code}, saying {_end_of(outcome.first)!r}"
            )
        else:
            yield from _unsaid(outcome, saying)

    return Check(f"ended with {code}", look)


def done() -> Check:
    """Every command ends with 0."""
    return done_and_said()


def done_and_said(*words: str) -> Check:
    """Every command ends with 0, and the words are on one of its streams."""

    def look(outcome: Outcome) -> Iterator[Finding]:
        for ended in outcome.ended:
            if ended.code != 0 and ended.in_time:
                yield Finding("wrong", f"exit code {ended.code} in place of 0, saying {_end_of(ended)!r}")
                return
        yield from _unsaid(outcome, words)

    return Check(f"done, saying {', '.join(words)}" if words else "done", look)


def _unsaid(outcome: Outcome, words: Sequence[str]) -> Iterator[Finding]:
    printed = "".join(each.out + each.err for each in outcome.ended)
    if missing := [word for word in words if word not in printed]:
        yield Finding("silent", f"nothing says {', '.join(map(repr, missing))}; it ended {_end_of(outcome.first)!r}")


def _end_of(ended: Ended) -> str:
    return (ended.last_line or ended.out.strip().rpartition("\n")[2])[-300:]


def either(*alternatives: Check | tuple[Check, ...]) -> Check:
    """One of the alternatives is met; a tuple is an alternative of several checks that must all be met."""
    groups = [each if isinstance(each, tuple) else (each,) for each in alternatives]
    name = ", or ".join(" and ".join(each.name for each in group) for group in groups)

    def look(outcome: Outcome) -> Iterator[Finding]:
        found = [[finding for each in group for finding in each.look(outcome)] for group in groups]
        if all(found) and outcome.first.in_time:
            yield _unmet(outcome, f"neither {name}: {'; '.join(each[0].said for each in found)}")

    return Check(f"either {name}", look)


# ------------------------------------------------------------------------------------------------------ what it left


def kept(*paths: str) -> Check:
    """These files below the working folder are unchanged, byte for byte, and were not replaced."""

    def holds(outcome: Outcome) -> str | None:
        for path in paths:
            name = f"work/{path}"
            assert name in outcome.before, f"{path} was never there"
            if outcome.after.get(name) != outcome.before[name]:
                return f"{path} is {'changed' if name in outcome.after else 'gone'}"
        return None

    return check(f"kept {', '.join(paths)}", holds)


def absent(*paths: str) -> Check:
    """These paths below the working folder do not exist at the end."""

    def holds(outcome: Outcome) -> str | None:
        there = [path for path in paths if f"work/{path}" in outcome.after]
        return f"{there[0]} is there" if there else None

    return check(f"no {', '.join(paths)}", holds)


def holds(path: str, *words: str) -> Check:
    """The file exists and holds the words."""

    def look(outcome: Outcome) -> str | None:
        file = outcome.folder / path
        if not file.is_file():
            return f"{path} is not there"
        text = file.read_text(encoding="utf-8", errors="replace")
        missing = [word for word in words if word not in text]
        return f"{path} lacks {missing[0]!r}" if missing else None

    return check(f"{path} holds {', '.join(words)}", look)


def counts(output: str, *, samples: int) -> Check:
    """The folder that data.prepare has made holds `samples` samples."""

    def look(outcome: Outcome) -> str | None:
        path = outcome.folder / output / "manifest.json"
        if not path.is_file():
            return f"{output} has no manifest"
        seen = json.loads(path.read_bytes())["totals"]["samples"]
        return None if seen == samples else f"{seen} samples in place of {samples}"

    return check(f"{samples} samples", look)


def same_result_as(reference: str, output: str) -> Check:
    """The output equals another command's: the same files or, for a run, the same records of steps and weights.

    reference: a path below the working folder, or below the assets if it begins with assets/.
    """

    def look(outcome: Outcome) -> str | None:
        wanted = outcome.assets / reference[7:] if reference.startswith("assets/") else outcome.folder / reference
        got = outcome.folder / output
        if (wanted / "metrics.jsonl").is_file():
            ours, theirs = dict(step_records(got)), dict(step_records(wanted))
            differing = sorted(step for step in {*ours, *theirs} if ours.get(step) != theirs.get(step))
            if differing:
                return f"steps {differing} differ"
            return _differing(wanted / "model", got / "model")
        return _differing(wanted, got)

    return check(f"the same as {reference}", look)


def _differing(wanted: Path, got: Path) -> str | None:
    names = {path.relative_to(folder) for folder in (wanted, got) for path in folder.rglob("*") if path.is_file()}
    for name in sorted(names):
        if not (got / name).is_file():
            return f"{name} is missing"
        if not (wanted / name).is_file():
            return f"{name} is too many"
        if (wanted / name).read_bytes() != (got / name).read_bytes():
            return f"{name} differs"
    return None if names else f"{wanted} is empty"


# --------------------------------------------------------------------------------------------------- in every case


def judge(outcome: Outcome, expect: Sequence[Check]) -> list[Finding]:
    """All findings, by the rules for every case and by the case's own expectations."""
    found = [*_always(outcome)]
    for each in expect:
        found += each.look(outcome)
    if any(each.verdict == "traceback" for each in found):
        # Other findings about the command's end are consequences of the traceback.
        found = [each for each in found if each.verdict not in ("wrong", "silent")]
    return found


def verdict_of(found: Sequence[Finding]) -> str:
    return min((each.verdict for each in found), key=VERDICTS.index, default="ok")


def _always(outcome: Outcome) -> Iterator[Finding]:
    for ended in outcome.ended:
        if not ended.in_time:
            yield Finding("wrong", f"did not end within {ended.seconds:.0f} s")
        for text in (ended.err, ended.out):
            if _TRACEBACK in text:
                yield Finding("traceback", _cause_of(text))
                break
    yield from _leaks(outcome)
    yield from _left(outcome)
    for survivor in outcome.survivors:
        yield Finding("left_behind", f"process {survivor} lives on")


def _cause_of(text: str) -> str:
    """The exception of the last traceback, and its last frame in the project, or else its last frame."""
    lines = text[text.rindex(_TRACEBACK) :].splitlines()
    frames = [line.strip() for line in lines if line.lstrip().startswith("File ")]
    ours = [line for line in frames if f'"{_ROOT}/' in line and "site-packages" not in line]
    frames = [line for line in ours if "tests/faults/hostile/" not in line] or frames
    frames = [line.replace(f"{_ROOT}/", "") for line in frames]
    errors = [line for line in lines[1:] if line and not line[0].isspace() and not line.startswith("error: ")]
    return f"{frames[-1] if frames else ''} {errors[0][:300] if errors else ''}".strip()


def _leaks(outcome: Outcome) -> Iterator[Finding]:
    for secret in outcome.secrets:
        for number, ended in enumerate(outcome.ended):
            for name, text in (("stdout", ended.out), ("stderr", ended.err)):
                if secret in text:
                    yield Finding("leaked", f"the secret {secret!r} is on {name} of command {number}")
        for path in [*outcome.new, *outcome.changed]:
            file, entry = outcome.place / path, outcome.after[path]
            # A secret may be in a file that only its owner can read.
            if stat.S_ISREG(entry.kind) and _others_read(entry) and secret.encode() in file.read_bytes():
                yield Finding("leaked", f"the secret {secret!r} is in {path}")
            if secret in path:
                yield Finding("leaked", f"the secret {secret!r} is in the name {path}")


def _others_read(entry: Entry) -> bool:
    mode = entry.facts[0]
    assert isinstance(mode, int)
    return bool(mode & (stat.S_IRGRP | stat.S_IROTH))


def _left(outcome: Outcome) -> Iterator[Finding]:
    told: list[str] = []
    for path in sorted(outcome.new):
        if any(path.startswith(f"{each}/") for each in told):
            continue
        parts = path.split("/")
        temporary = any(fnmatch.fnmatch(part, pattern) for part in parts[1:] for pattern in _TEMPORARY)
        allowed = any(fnmatch.fnmatch(path, each) for each in _CACHES)
        allowed = allowed or any(fnmatch.fnmatch(path, f"work/{each}") for each in outcome.may_leave)
        if not allowed and (temporary or not outcome.is_output(path)):
            told.append(path)
            yield Finding("left_behind", f"{path} is left")
    for path in outcome.changed:
        if not outcome.is_output(path) and not any(fnmatch.fnmatch(path, each) for each in _CACHES):
            yield Finding("wrong", f"{path} was changed")
    for path in outcome.before:
        if path not in outcome.after and not outcome.is_output(path):
            yield Finding("wrong", f"{path} was removed")
