"""Hostile and unlucky inputs, faults and races against the project's commands: hundreds of small cases.

    python -m tests.faults.hostile [--quick] [--only TEXT] [--json FILE] [--jobs N] [--keep]

The command prints one line per case (name, exit code, seconds, verdict) and the figures at the end. All figures except
`cases` and `skipped` must be 0. One warm process imports the libraries and the commands once; every case runs in a fork
of it, as `python -m` would run the command, with a working folder, a TMPDIR, a HOME and a session of its own.

To add a case, write it into a `cases_*.py` of this package (modules are found by that name):

    @case("prepare/zst-cut-at-half", refused("cut.txt.zst", "damaged"), cause=1, quick=True)
    def _(folder: Path, assets: Assets) -> Command:
        write(folder / "cut.txt.zst", zst(lines(2000))[:-500])
        return prepare(assets, "documents", "cut.txt.zst")

The function makes the input in `folder`, the command's working folder, and returns the command, or several commands
that run at the same time (`ranks`). Hundreds of cases come from families, one function over many rows:

    @family("shards/manifest", [row("samples-1e999", "samples", 1e999), row("format-2", "format", 2)],
            refused("manifest.json"), cause=25)
    def _(folder: Path, assets: Assets, key: str, value: object) -> Command: ...

- `cause`: the number of the cause that the case comes from, or "own". `quick=True`: the case is in the short form too,
  which has at least one case of every cause, but for those in COVERED_ELSEWHERE (case.py), which names their tests.
- Expectations are checks (verdict.py): refused, misused, done, done_and_said, gave_up, ended_with, same_result_as,
  counts, kept, absent, holds, either, and `check("a name", function)` with a function of the Outcome. If several are
  given, all must hold.
- Every case is also judged by these rules: no traceback; nothing new outside the command's `outputs` and nothing
  temporary inside them (`may_leave` lists what may stay); no changed input; no process left; and neither `secrets` nor
  the secrets in every case's environment in anything printed or written.
- If a case needs earlier commands, its function runs them: `ran(command)` (builders.py) returns when one has ended.
- `small_disk(path, kib)`, `Command(without_rights=True)`, `Command(limits=...)` and `serve(folder)` give full disks,
  files that cannot be read, limits and servers. If the machine cannot do this, they raise Skip, and the case counts as
  skipped.
- `Command(own_process=True)` runs in a new Python process (ten seconds of imports), for cases that a fork cannot show.
- `Command(meanwhile=function)` calls the function with the process id while the command runs, to kill it or change
  files.

Assets (assets.py) are made once per invocation and shared: never write below them; copy them (`assets.copy`) first.
"""
