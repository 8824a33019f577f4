"""A run's beginning and end: whose the folder is once it is held, and what is said of a run that ends early."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.trainer.support import recipe_of, recipe_values
from trainer import run
from trainer.config.load import as_toml
from trainer.distributed import Refused, World
from trainer.resilience.run_lock import lock
from trainer.resilience.stopping import NotSaved

ALONE = World.alone()


@pytest.mark.parametrize("resume", ["never", "auto"])
@pytest.mark.parametrize("filled", [True, False])
def test_a_folder_that_was_filled_during_the_wait(
    resume: str, filled: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another start held the folder, and its run was over before this start gave up waiting."""
    output = tmp_path / "run"
    recipe = recipe_of(recipe_values("shards", run={"output": str(output), "resume": resume}))
    other = recipe_of(recipe_values("shards", run={"output": str(output), "seed": 8}))

    @contextlib.contextmanager
    def wait(folder: Path) -> Iterator[None]:
        with lock(folder):
            if filled:
                (folder / "recipe.toml").write_text(as_toml(other))
            yield

    monkeypatch.setattr(run, "lock", wait)
    monkeypatch.setattr(run.dist, "barrier", lambda: None)
    with ExitStack() as stack:
        if not filled:
            run._claim(recipe, ALONE, stack)
            return
        with pytest.raises(Refused, match="another run" if resume == "never" else "run.seed = 8, not 7"):
            run._claim(recipe, ALONE, stack)
    assert (output / "recipe.toml").read_text() == as_toml(other)


def test_a_stop_without_its_checkpoint_is_an_error(tmp_path: Path) -> None:
    """A crash for a job, which starts again a few times at most, and no STOPPED, which says that it was saved."""
    for reason, named in (("SIGTERM", "SIGTERM"), (None, r"train\.stop_at_step")):
        with pytest.raises(NotSaved, match=rf"step 7 \({named}\), whose checkpoint could not be saved") as told:
            run._end_early(tmp_path, 7, reason, saved=False, world=ALONE)
        assert told.value.exit_code == 1
    run._end_early(tmp_path, 7, None, saved=True, world=ALONE)
    assert not list(tmp_path.iterdir())
    run._end_early(tmp_path, 7, "SIGTERM", saved=True, world=ALONE)
    assert json.loads((tmp_path / "STOPPED").read_text()) == {"step": 7, "reason": "SIGTERM"}


@pytest.mark.parametrize(("steps", "warmup", "warned"), [(1, 0.1, True), (1, 0.0, False), (2, 0.9, False)])
def test_a_run_of_one_step_that_trains_nothing(
    steps: int, warmup: float, warned: bool, caplog: pytest.LogCaptureFixture
) -> None:
    recipe = recipe_of(recipe_values("shards", optim={"warmup_ratio": warmup}))
    plan = run._plan(recipe, steps, evaluates=False)
    run._say_if_all_warm_up(plan)
    assert ("nothing is trained" in caplog.text) == warned
    assert warned == (not any(plan.learning_rate(step) for step in range(steps)))
