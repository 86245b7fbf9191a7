"""metrics.jsonl is the truth. W&B and TensorBoard get copies; when one of them fails, training and the file go on."""

import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import accelerate
import accelerate.tracking
import drive
import pytest
import wandb
from group import Ranks
from test_report import wandb_records

from pretrain import config as configs
from pretrain import tracking as subject
from pretrain.config import Config, ConfigError
from pretrain.tracking import Tracker, check, offline_hint

FACTS = {"world_size": 2}


@pytest.fixture(autouse=True)
def _accelerate_is_up() -> Iterator[None]:
    """Its trackers log through it; a run has an Accelerator long before it has a tracker."""
    accelerate.PartialState(cpu=True)
    yield
    accelerate.PartialState._reset_state()


@pytest.fixture
def cfg(tmp_path: Path) -> Callable[..., Config]:
    def make(**track: Any) -> Config:
        (tmp_path / "run" / "logs").mkdir(parents=True, exist_ok=True)
        made = configs.replace(configs.replace(Config(), "run.dir", str(tmp_path)), "run.name", "run")
        for name, value in track.items():
            made = configs.replace(made, f"track.{name}", value)
        return made

    return make


def test_lines_are_appended_whole_and_at_once(cfg: Callable[..., Config], tmp_path: Path) -> None:
    """A number that is not finite is null: JSON has no word for it, and readers must not choke on one."""
    path = tmp_path / "run" / "metrics.jsonl"
    tracker = Tracker(cfg(), FACTS, 0, pytest.fail)
    tracker.log({"step": 1, "loss": 2.5})
    assert path.read_text() == '{"step": 1, "loss": 2.5}\n', "readable while the run goes on"
    tracker.log({"step": 2, "loss": math.nan, "grad_norm": math.inf, "low": -math.inf, "n": 3})
    tracker.finish()
    again = Tracker(cfg(), FACTS, 2, pytest.fail)
    again.log({"step": 3, "loss": 1.0})
    again.finish()
    assert drive.lines(path) == [
        {"step": 1, "loss": 2.5},
        {"step": 2, "loss": None, "grad_norm": None, "low": None, "n": 3},
        {"step": 3, "loss": 1.0},
    ]
    assert "NaN" not in path.read_text()


def test_lines_that_a_full_disk_has_kept_back_come_once_and_at_the_end(cfg: Callable[..., Config], tmp_path: Path) -> None:
    """Of steps 2 to 4, kept in memory, a rollback gives up two; nothing but the end comes after them."""
    path = tmp_path / "run" / "metrics.jsonl"
    tracker = Tracker(cfg(), FACTS, 0, lambda line: None)
    tracker.log({"step": 1})
    tracker._lines.path = Path("/dev/full")
    for step in (2, 3, 4):
        tracker.log({"step": step})
    tracker._lines.path = path
    tracker.cut_back(2)
    tracker._lines.path = Path("/dev/full")
    tracker.log({"step": 3})
    tracker._lines.path = path
    tracker.finish()
    assert [row["step"] for row in drive.lines(path)] == [1, 2, 3]


class Breaking:
    """A W&B that raises at one of its calls."""

    at = ""
    logged: list[int] = []  # noqa: RUF012 — reset by the fixture

    def __init__(self, *args: Any, **more: Any) -> None:
        self.tracker = self
        self.meet("init")

    def meet(self, call: str) -> None:
        if call == Breaking.at:
            raise ConnectionError("no route to host\nand many more lines")

    def start(self) -> None:
        self.meet("start")

    def define_metric(self, *args: Any, **more: Any) -> None: ...

    def store_init_configuration(self, values: Any) -> None:
        self.meet("config")

    def log(self, values: dict[str, Any], step: int | None) -> None:
        if values["step"] == 2:
            self.meet("log")
        Breaking.logged.append(values["step"])

    def finish(self) -> None:
        self.meet("finish")


@pytest.fixture
def broken(monkeypatch: pytest.MonkeyPatch) -> type[Breaking]:
    monkeypatch.setattr(accelerate.tracking, "WandBTracker", Breaking)
    Breaking.logged = []
    return Breaking


@pytest.mark.parametrize(
    ("at", "sent"), [("init", []), ("start", []), ("config", []), ("log", [1]), ("finish", [1, 2, 3]), ("", [1, 2, 3])]
)
def test_a_tracker_that_fails_is_switched_off_with_one_line(
    cfg: Callable[..., Config], tmp_path: Path, broken: type[Breaking], at: str, sent: list[int]
) -> None:
    broken.at = at
    said: list[str] = []
    tracker = Tracker(cfg(wandb="offline"), FACTS, 0, said.append)
    for step in (1, 2, 3):
        tracker.log({"step": step})
    tracker.finish()
    assert [row["step"] for row in drive.lines(tmp_path / "run" / "metrics.jsonl")] == [1, 2, 3]
    assert broken.logged == sent
    assert said == (["wandb failed and is off from here on: no route to host; metrics.jsonl has everything"] if at else [])


def test_a_real_offline_run_keeps_its_id_over_restarts(cfg: Callable[..., Config], tmp_path: Path) -> None:
    """Two starts are one W&B run; every line arrives, with the step as a metric like any other."""
    sent: list[list[dict[str, Any]]] = [[{"step": 0, "val_loss": 4.0}, {"step": 1, "loss": 3.5}],
                                        [{"step": 2, "loss": math.nan}, {"step": 2, "val_loss": 3.0}]]  # fmt: skip
    for rows in sent:
        tracker = Tracker(cfg(wandb="offline", tags=("a", "b"), project="p"), FACTS, rows[0]["step"], pytest.fail)
        for row in rows:
            tracker.log(row)
        tracker.finish()
        wandb.teardown()
    files = sorted((tmp_path / "run" / "logs" / "wandb").glob("offline-run-*/run-*.wandb"), key=lambda p: p.stat().st_mtime_ns)
    assert len(files) == 2
    received, ids = [], set()
    for file in files:
        records = list(wandb_records(file))
        (run,) = (record.run for record in records if record.HasField("run"))
        assert (run.project, run.display_name, list(run.tags)) == ("p", "run", ["a", "b"])
        ids.add(run.run_id)
        assert [(m.glob_name, m.step_metric) for m in (r.metric for r in records if r.HasField("metric"))] == [("*", "step")]
        for record in records:
            if record.HasField("history"):
                items = {item.nested_key[0] if item.nested_key else item.key: json.loads(item.value_json) for item in record.history.item}
                received.append({key: value for key, value in items.items() if not key.startswith("_")})
    assert ids == {(tmp_path / "run" / "logs" / "wandb_id.txt").read_text()}
    assert len(received) == 4
    assert received[0] == sent[0][0]
    assert math.isnan(received[2]["loss"])
    assert received[3] == sent[1][1]
    hint = offline_hint(tmp_path / "run")
    assert hint is not None
    assert Path(hint.removeprefix("wandb sync ")).is_dir()
    assert offline_hint(tmp_path) is None


def test_tensorboard_shows_each_step_once_after_a_restart(cfg: Callable[..., Config], tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    for start, steps in ((0, (1, 2, 3)), (2, (3, 4))):
        tracker = Tracker(cfg(tensorboard=True), FACTS, start, pytest.fail)
        for step in steps:
            tracker.log({"step": step, "loss": float(10 * start + step)})
        tracker.finish()
    events = EventAccumulator(str(next((tmp_path / "run" / "logs").rglob("events*")).parent)).Reload()
    assert [(e.step, e.value) for e in events.Scalars("loss")] == [(1, 1.0), (2, 2.0), (3, 23.0), (4, 24.0)]


def test_a_package_that_is_missing_is_named_before_anything_starts(cfg: Callable[..., Config], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subject, "find_spec", lambda package: None)
    check(cfg())
    with pytest.raises(ConfigError, match=r"track\.wandb needs the package wandb: pip install wandb"):
        check(cfg(wandb="offline"))
    with pytest.raises(ConfigError, match="pip install tensorboard"):
        check(cfg(tensorboard=True))


def test_four_ranks_write_one_log_and_start_one_tracker(ranks: Ranks, config: Callable[..., Path]) -> None:
    path = config({"train.max_steps": 2, "train.eval_every": 1, "track.tensorboard": True})
    ranks.run(drive.whole, path)
    folder = configs.load(path).folder
    rows = [(row["step"], "val_loss" in row) for row in drive.lines(folder / "metrics.jsonl")]
    assert rows == [(0, True), (1, False), (1, True), (2, False), (2, True)]
    assert len(list(folder.rglob("events*"))) == 1
    assert len(drive.lines(folder / "ledger.jsonl")) == 2
