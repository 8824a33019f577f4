"""Hostile and unlucky inputs, faults and races against the project's commands: hundreds of small cases.

    python -m tests.faults.hostile [--quick] [--only TEXT] [--json FILE] [--jobs N] [--keep]

A line a case (name, exit code, seconds, verdict) and the figures at the end, all of which but `cases` and `skipped`
must be 0. One warm process imports the libraries and the commands once; every case runs in a fork of it, as
`python -m` would run the command, with a working folder, a TMPDIR, a HOME and a session of its own.

To add a case, write it into a `cases_*.py` of this package (modules are found by that name):

    @case("prepare/zst-cut-at-half", refused("cut.txt.zst", "damaged"), cause=1, quick=True)
    def _(folder: Path, assets: Assets) -> Command:
        write(folder / "cut.txt.zst", zst(lines(2000))[:-500])
        return prepare(assets, "documents", "cut.txt.zst")

The function makes the input in `folder`, which is the command's working folder, and returns the command, or several
that run at the same time (`ranks`). Hundreds of cases come from families, one function over many rows:

    @family("shards/manifest", [row("samples-1e999", "samples", 1e999), row("format-2", "format", 2)],
            refused("manifest.json"), cause=25)
    def _(folder: Path, assets: Assets, key: str, value: object) -> Command: ...

- `cause`: the number of the cause that the case comes from, or "own". `quick=True`: in the short form too, one a cause.
- Expectations are checks (verdict.py): refused, misused, done, done_and_said, gave_up, ended_with, same_result_as,
  counts, kept, absent, holds, either, and whatever `check("a name", function)` makes of a function of the Outcome.
  Several are given one after another and must all hold.
- Judged in every case, unasked: no traceback; nothing new outside the command's `outputs` and nothing temporary inside
  them (`may_leave` lists what may stay); no input changed; no process left; none of `secrets` nor of the secrets that
  every case has in its environment in what is printed or written.
- Earlier commands of a story run in the function itself: `ran(command)` (builders.py) returns when it has ended.
- `small_disk(path, kib)`, `Command(without_rights=True)`, `Command(limits=...)`, `serve(folder)`: full disks, files
  that cannot be read, limits, servers. What the machine cannot do raises Skip, and the case counts as skipped.
- `Command(own_process=True)`: a Python of its own (ten seconds of imports), for what a fork cannot show.
- `Command(meanwhile=function)`: called with the process id while the command runs, to kill it or change files.

Assets (assets.py) are made once an invocation and shared: never write below them, copy (`assets.copy`) first.
"""
