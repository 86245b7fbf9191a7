"""The ledger proves who trained on what, over rollbacks, restarts and other runs' checkpoints."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from pretrain.config import ConfigError
from pretrain.inspection import check_ledger


def step(number: int, begin: int, end: int, *, restart: int = 0, attempt: int = 0) -> Mapping[str, Any]:
    return {"step": number, "restart": restart, "attempt": attempt, "position": [begin, end], "windows": "hash"}


def back(number: int, to: int, begin: int, end: int) -> Mapping[str, Any]:
    return {"step": number, "restart": 0, "back_to": to, "passed_over": [begin, end]}


def begun(number: int, position: int) -> Mapping[str, Any]:
    return {"step": number, "restart": 1, "position": position, "from": "runs/other/checkpoints/step_00000006"}


def ledger(folder: Path, *entries: Mapping[str, Any]) -> Path:
    path = folder / "ledger.jsonl"
    path.write_text("".join(json.dumps(entry) + "\n" for entry in entries))
    return path


def test_a_run_from_another_ones_checkpoint_begins_there(tmp_path: Path) -> None:
    said = check_ledger(ledger(tmp_path, begun(6, 48), step(7, 48, 56, restart=1), step(8, 56, 64, restart=1)))
    assert "steps 7 to 8 join without gap or overlap: positions 48 to 64" in said[0]
    assert "begun from runs/other/checkpoints/step_00000006" in said[1]
    with pytest.raises(ConfigError, match="step 7 starts at position 56, the step before it ended at 48: windows were skipped"):
        check_ledger(ledger(tmp_path, begun(6, 48), step(7, 56, 64)))
    with pytest.raises(ConfigError, match="step 7 starts at position 48, the step before it ended at 0: windows were skipped"):
        check_ledger(ledger(tmp_path, step(7, 48, 56)))


def test_it_begins_there_anew_where_it_was_killed_before_a_checkpoint_of_its_own(tmp_path: Path) -> None:
    path = ledger(tmp_path, begun(6, 48), step(7, 48, 56, restart=1), step(8, 56, 64, restart=1), begun(6, 48), step(7, 48, 56, restart=1))
    said = check_ledger(path)
    assert "steps 7 to 7 join without gap or overlap: positions 48 to 56" in said[0]
    assert "2 steps were taken again" in said[2]


@pytest.mark.parametrize("entries", [(), (begun(6, 48),), (step(1, 0, 8), step(2, 8, 16), back(2, 0, 8, 16))])
def test_a_ledger_without_a_step_says_so(tmp_path: Path, entries: tuple[Mapping[str, Any], ...]) -> None:
    with pytest.raises(ConfigError, match=r"ledger\.jsonl: no step was taken"):
        check_ledger(ledger(tmp_path, *entries))


def test_windows_that_were_passed_over_and_trained_on_after_all_are_told(tmp_path: Path) -> None:
    gone_back = (step(1, 0, 8), step(2, 8, 16), back(2, 1, 8, 16))
    assert "8 windows were passed over" in check_ledger(ledger(tmp_path, *gone_back, step(2, 16, 24)))[2]
    with pytest.raises(ConfigError, match="step 2 was trained on windows 8 to 16, which a rollback had passed over"):
        check_ledger(ledger(tmp_path, *gone_back, step(2, 8, 16), step(3, 16, 24)))
