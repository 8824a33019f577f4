"""Sizes with narrower feed-forwards in a recipe: read as they are written, and refused where they cannot be trained."""

from __future__ import annotations

from typing import Any

import pytest

from data.ground.errors import ConfigError
from models.settings import EmbeddingSettings
from models.sizes import Ladder, ModelError, Size
from trainer.config.checks import check
from trainer.config.load import as_toml, build_recipe
from trainer.config.schema import Recipe
from trainer.config.step_sizes import StepSizes

LADDER = [[2, 16, 0.25], [3, 32, 0.25], [3, 48]]
VALUES: dict[str, dict[str, Any]] = {
    "run": {"output": "runs/x"},
    "model": {"source": "somewhere", "ladder": LADDER},
    "data": {"shards": ["shards"]},
    "objective": {"name": "contrastive"},
    "train": {"steps": 6},
}


def recipe(**sections: dict[str, Any]) -> Recipe:
    values = {name: dict(table) for name, table in VALUES.items()}
    for section, table in sections.items():
        values[section] = {**values.get(section, {}), **table}
    return build_recipe(values)


def test_a_ladder_is_read_and_written_as_it_is() -> None:
    found = recipe()
    check(found)
    assert found.ladder == Ladder.of(LADDER)
    assert [str(size) for size in found.step_sizes.fixed] == ["2x16x0.25", "3x32x0.25", "3x48"]
    text = as_toml(found).replace(" ", "").replace("\n", "").replace(",]", "]")
    assert "ladder=[[2,16,0.25],[3,32,0.25],[3,48]]" in text


def test_the_kinds_of_sizes_keep_the_fraction() -> None:
    ladder = Ladder.of(LADDER)
    grid = StepSizes("grid", ladder).fixed
    assert len(grid) == 9 and grid[0] == Size(2, 16, 0.25) and Size(3, 16, 0.25) in grid and Size(3, 16) in grid
    assert StepSizes("adaptive_layers", ladder).fixed == (Size(2, 48, 0.25), Size(3, 48, 0.25), Size(3, 48))


@pytest.mark.parametrize(
    ("sections", "said"),
    [
        ({"objective": {"sizes": "mrl"}}, 'objective.sizes = "mrl" trains whole ones only; use "ladder" or "grid"'),
        ({"objective": {"sizes": "two_d"}}, "trains whole ones only"),
        ({"objective": {"sizes": "espresso"}}, "trains whole ones only"),
        ({"objective": {"sizes": "one", "size": "3x48x0.25"}}, "train a ladder with this size, or a model that is cut"),
        ({"objective": {"name": "masked"}}, "masked pre-training has whole ones only"),
        ({"model": {"lora_rank": 4}}, "adapters .model.lora_rank = 4. have no such prefix"),
        ({"train": {"compile": True}}, "set it to false"),
        ({"model": {"ladder": [[3, 16, 0.5], [3, 48, 0.75]]}}, "end the ladder with"),
        ({"model": {"ladder": [[3, 16, 1.5], [3, 48]]}}, "model.ladder: size 3x16x1.5 has no fraction"),
        ({"model": {"ladder": [[2.5, 16], [3, 48]]}}, "no whole numbers"),
        ({"model": {"ladder": [[float("nan"), 16], [3, 48]]}}, "model.ladder = nan must be a number"),
        ({"model": {"ladder": [[3, 16, "half"], [3, 48]]}}, "model.ladder = 'half' must be a number"),
        ({"model": {"ladder": [16, [3, 48]]}}, "model.ladder = 16 must be a list, each entry a number"),
    ],
)
def test_what_cannot_be_trained_is_refused_in_one_sentence(sections: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said) as refused:
        check(recipe(**sections))
    assert "\n" not in str(refused.value)


def test_files_of_whole_feed_forwards_have_two_numbers() -> None:
    # What earlier versions read: three numbers only where feed-forwards are narrower.
    assert Size(3, 48).numbers == (3, 48) and Size(3, 48, 1.0).numbers == (3, 48)
    settings = EmbeddingSettings(ladder=tuple(size.numbers for size in Ladder.of(LADDER)))
    assert settings.ladder == ((2, 16, 0.25), (3, 32, 0.25), (3, 48)) and settings.sizes == Ladder.of(LADDER)


def test_settings_come_back_from_their_file(tmp_path: Any) -> None:
    settings = EmbeddingSettings(ladder=((2, 16, 0.25), (3, 48)))
    settings.save(tmp_path)
    found = EmbeddingSettings.load(tmp_path)
    assert found == settings and [size.feed_forward for size in found.sizes] == [0.25, 1.0]
    path = tmp_path / "barista.json"
    path.write_text(path.read_text().replace("0.25", "1.25"))
    with pytest.raises(ModelError):
        EmbeddingSettings.load(tmp_path)
