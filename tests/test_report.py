"""The report: every number of the table against a case worked out by hand, and every file read back."""

import csv
import json
import math
import struct
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import wandb
from PIL import Image

from pretrain import cli
from pretrain import report as subject
from pretrain.report import expected_from, read_run, report, to_wandb

EXPECTED = Path(__file__).parents[1] / "configs" / "expected"
FIGURES = ["loss_steps", "loss_tokens", "loss_seconds", "throughput", "learning_rate", "grad_norm"]
Row = dict[str, Any]


@pytest.fixture
def text_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Figures take most of a report's time."""
    monkeypatch.setattr(subject, "FIGURES", {})


def train_row(step: int, loss: float | None, **more: Any) -> Row:
    row = {"step": step, "tokens": step * 1000, "loss": loss, "lr": 1e-3 / step, "grad_norm": 2.0 / step, "skipped": 0}
    row |= {"tokens_per_second": 100.0, "tokens_per_second_per_device": 50.0, "train_seconds": step * 6.0}
    return row | {"peak_memory_bytes": 2**30, "restarts": 0, "time": 1.8e9 + step} | more


def val_row(step: int, loss: float | None) -> Row:
    perplexity, bits = (None, None) if loss is None else (math.exp(loss), loss / math.log(2) / 4)
    return {"step": step, "val_loss": loss, "val_perplexity": perplexity, "val_bits_per_byte": bits}


def make_run(folder: Path, rows: Sequence[Row], status: Row | None = None, seed: int = 1, **facts: Any) -> Path:
    folder.mkdir(parents=True)
    given = {"config_file": "toy", "overrides": [], "world_size": 2, "strategy": "ddp", "precision": "bf16"} | facts
    # JSON is YAML; the trainer writes block style, which reads the same.
    (folder / "config.yaml").write_text(json.dumps({"run": {"name": folder.name, "seed": seed}, "facts": given}))
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    if status is not None:
        (folder / "status.json").write_text(json.dumps(status))
    return folder


def curve(steps: int, final: float, every: int = 10) -> list[Row]:
    """A loss that falls from 8 to `final`, logged and evaluated each `every` steps."""
    rows = [val_row(0, 8.0)]
    for step in range(every, steps + 1, every):
        loss = final + (8.0 - final) * (math.exp(-6 * step / steps) - math.exp(-6))
        rows += [train_row(step, loss + 0.02 * math.sin(step)), val_row(step, loss)]
    return rows


def table(output: Path) -> dict[str, dict[str, str]]:
    """Run name -> heading -> cell."""
    lines = [line for line in (output / "report.md").read_text("utf-8").splitlines() if line.startswith("|")]
    head, _, *rows = ([cell.strip() for cell in line.strip("|").split(" | ")] for line in lines)
    return {row[0]: dict(zip(head, row, strict=True)) for row in rows}


@pytest.mark.usefixtures("text_only")
def test_every_number_of_a_row_against_a_case_by_hand(tmp_path: Path) -> None:
    speeds = [10.0, 100.0, 30.0, 20.0, 1000.0, 40.0]  # median 35; without the first it would be 40
    losses = [5.0, 4.0, 3.0, 2.0, 1.5, 1.0]  # mean of the last five: 2.3
    rows = [val_row(0, 6.0)]
    for k, (speed, loss) in enumerate(zip(speeds, losses, strict=True), 1):
        more = {"tokens_per_second": speed, "tokens_per_second_per_device": speed / 2, "mfu": k / 100}
        more |= {"peak_memory_bytes": (3 if k == 2 else 1) * 2**30, "restarts": k // 3, "train_seconds": k * 620.8}
        rows.append(train_row(1000 * k, loss, **more))
    rows += [val_row(3000, 2.0), val_row(6000, 4 * math.log(2))]
    make_run(tmp_path / "hand", rows, {"state": "finished", "exit_status": 0}, parameters=124_475_904)
    report([tmp_path / "hand"], tmp_path / "out", None)
    assert table(tmp_path / "out") == {
        "hand": {
            "run": "hand",
            "parameters": "124.5M",
            "strategy × processes": "ddp × 2",
            "precision": "bf16",
            "tokens": "6M",
            "steps": "6,000",
            "last train loss": "2.3000",
            "final val loss (step)": "2.7726 (6,000)",
            "best val loss (step)": "2.0000 (3,000)",
            "bits per byte": "1.0000",
            "tokens/s": "35",
            "tokens/s per device": "18",  # 17.5, to even
            "MFU": "3.5%",
            "peak memory": "3.00 GiB",
            "training time": "1:02:05",  # 3,724.8 s
            "restarts": "2",
            "state": "finished",
        }
    }


@pytest.mark.usefixtures("text_only")
def test_how_a_run_stands_is_said(tmp_path: Path) -> None:
    rows = curve(50, 3.0)
    states = {
        "going": {"state": "running", "step": 50, "reason": None},
        "broken": {"state": "failed", "step": 50, "reason": "rank 1: out of memory | see logs/"},
        "lost": None,
        "again": {"state": "finished", "step": 50, "reason": "runs/again is finished: step 50. To train longer: …"},
    }
    runs = [make_run(tmp_path / name, rows, status) for name, status in states.items()]
    report(runs, tmp_path / "out", None)
    text = (tmp_path / "out" / "report.md").read_text("utf-8")
    assert "| running |" in text
    assert "| finished |" in text  # what a start that found it so had to say is of no use here
    assert "| failed: rank 1: out of memory \\| see logs/ |" in text  # the bar would end the cell
    assert "| unknown: no status.json |" in text


@pytest.mark.usefixtures("text_only")
def test_two_runs_are_two_rows_and_namesakes_go_by_their_paths(tmp_path: Path) -> None:
    runs = [make_run(tmp_path / name, curve(50, loss)) for name, loss in (("a/x", 3.0), ("b/x", 3.5), ("y", 4.0))]
    report(runs, tmp_path / "out", None)
    rows = table(tmp_path / "out")
    assert {name: row["final val loss (step)"] for name, row in rows.items()} == {
        str(tmp_path / "a/x"): "3.0000 (50)",
        str(tmp_path / "b/x"): "3.5000 (50)",
        "y": "4.0000 (50)",
    }
    assert "MFU" not in rows["y"]


def test_a_loss_that_was_not_finite_stays_visible(tmp_path: Path) -> None:
    rows = [val_row(0, 5.0), train_row(10, 4.0), val_row(10, 3.0), train_row(20, None), val_row(20, None)]
    run = make_run(tmp_path / "diverged", rows)
    report([run], tmp_path / "out", None)
    row = table(tmp_path / "out")["diverged"]
    assert row["last train loss"] == "nan"
    assert row["final val loss (step)"] == "nan (20)"
    assert row["best val loss (step)"] == "3.0000 (10)"
    cells = read_csv(tmp_path / "out")
    assert [line["loss"] for line in cells] == ["", "4.0", "", "nan", ""]


def read_csv(output: Path) -> list[dict[str, str]]:
    with open(output / "metrics.csv", newline="", encoding="utf-8") as f:
        return list(csv.DictReader(f))


@pytest.mark.usefixtures("text_only")
def test_csv_holds_every_line_and_every_key(tmp_path: Path) -> None:
    both = {"a": curve(50, 3.0), "b": [train_row(10, 1 / 3, wire_bytes=7)]}
    report([make_run(tmp_path / name, rows) for name, rows in both.items()], tmp_path / "out", None)
    back = [{key: cell for key, cell in line.items() if cell != ""} for line in read_csv(tmp_path / "out")]
    names = [line.pop("run") for line in back]
    assert names == ["a"] * len(both["a"]) + ["b"]
    assert [{key: float(cell) for key, cell in line.items()} for line in back] == both["a"] + both["b"]


@pytest.mark.parametrize(("tail", "steps"), [('{"step": 60, "lo', 50), ('{"step": 60, "loss": 3.0}', 60), ("6", 50)])
def test_a_last_line_cut_short_counts_only_if_it_is_whole(tmp_path: Path, tail: str, steps: int) -> None:
    run = make_run(tmp_path / "killed", curve(50, 3.0))
    with open(run / "metrics.jsonl", "a") as f:
        f.write(tail)
    assert read_run(run).rows[-1]["step"] == steps


@pytest.mark.parametrize("bad", ['{"step": 20, "lo', "[1]", '{"loss": 1.0}', '{"step": null}', ""])
def test_any_other_bad_line_is_named(tmp_path: Path, bad: str) -> None:
    run = make_run(tmp_path / "damaged", [train_row(10, 1.0)])
    with open(run / "metrics.jsonl", "a") as f:
        f.write(f"{bad}\n")
    with pytest.raises(ValueError, match=r"damaged/metrics\.jsonl, line 2: expected a JSON object with a step") as error:
        report([run], tmp_path / "out", None)
    assert "\n" not in str(error.value)
    assert not (tmp_path / "out").exists()


def test_a_folder_that_is_no_run_or_has_logged_nothing_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["report", str(tmp_path / "nowhere")]) == 2
    assert capsys.readouterr().err == f"{tmp_path / 'nowhere'}: not a run folder (it has no config.yaml)\n"
    with pytest.raises(ValueError, match=r"nowhere: not a run folder"):
        report([tmp_path / "nowhere"], tmp_path / "out", None)
    with pytest.raises(ValueError, match=r"started/metrics\.jsonl: no metrics yet"):
        report([make_run(tmp_path / "started", [])], tmp_path / "out", None)


@pytest.mark.filterwarnings("error")
def test_every_figure_is_written_and_shows_something(tmp_path: Path) -> None:
    runs = [make_run(tmp_path / "a", curve(500, 3.0)), make_run(tmp_path / "b", curve(300, 3.5))]
    files = report(runs, tmp_path / "out", None)
    names = [f"{figure}{suffix}" for figure in FIGURES for suffix in (".png", ".pdf")]
    assert files == [tmp_path / "out" / name for name in ("report.md", "metrics.csv", *names)]
    text = (tmp_path / "out" / "report.md").read_text("utf-8")
    for figure in FIGURES:
        assert f"]({figure}.png)" in text
        pdf = (tmp_path / "out" / f"{figure}.pdf").read_bytes()
        assert pdf.startswith(b"%PDF")
        assert b"/Type3" not in pdf  # fonts that publishers refuse
        pixels = np.asarray(Image.open(tmp_path / "out" / f"{figure}.png").convert("RGB"), int)
        assert pixels.shape == (600, 960, 3)
        for blue_or_vermilion in ((0, 114, 178), (213, 94, 0)):
            assert count(pixels, blue_or_vermilion) > 200, figure


def count(pixels: np.ndarray[Any, Any], colour: tuple[int, int, int]) -> int:
    return int((np.abs(pixels - colour).max(axis=-1) <= 3).sum())


def test_runs_are_told_apart_without_colour() -> None:
    looks = [(style["linestyle"], style["marker"]) for style in subject.STYLES]
    assert len({dash for dash, _ in looks}) == len({marker for _, marker in looks}) == len(looks)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("rows", [[val_row(0, 8.0)], [train_row(1, 8.0, lr=0.0)], [train_row(1, None), train_row(2, None)]])
def test_a_run_that_has_hardly_begun_is_drawn(tmp_path: Path, rows: list[Row]) -> None:
    files = report([make_run(tmp_path / "young", rows)], tmp_path / "out", None)
    assert tmp_path / "out" / "loss_steps.png" in files
    assert (tmp_path / "out" / "grad_norm.png" in files) == ("grad_norm" in rows[0])


def test_evaluations_lie_between_the_logs_around_them(tmp_path: Path) -> None:
    rows = [val_row(0, 8.0), train_row(10, 5.0), val_row(15, 4.5), train_row(20, 4.0)]
    run = read_run(make_run(tmp_path / "a", rows))
    assert [list(axis) for axis in run.series("val_loss", "tokens")] == [[0.0, 15_000.0], [8.0, 4.5]]
    assert list(run.series("val_loss", "train_seconds")[0]) == [0.0, 90.0]


def write_expected(folder: Path, points: Sequence[Mapping[str, float]]) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "toy.json").write_text(json.dumps({"title": "a toy", "source": "a book", "points": points}))
    return folder


def verdict(tmp_path: Path, final: float | None, points: Sequence[Mapping[str, float]], **facts: Any) -> str:
    rows = [val_row(0, 8.0), train_row(90, 3.0), val_row(90, 3.0), train_row(100, 3.0), val_row(100, final)]
    report([make_run(tmp_path / "a", rows, **facts)], tmp_path / "out", write_expected(tmp_path / "expected", points))
    _, found, text = (tmp_path / "out" / "report.md").read_text("utf-8").partition("## Is my loss normal?")
    return text if found else ""


POINTS = [
    {"step": 90, "tokens": 90_000, "val_loss": 9.0, "low": 9.0, "high": 9.0},
    {"step": 100, "tokens": 100_000, "val_loss": 3.0, "low": 2.9, "high": 3.1},
]


@pytest.mark.usefixtures("text_only")
@pytest.mark.parametrize(
    ("final", "words"),
    [
        (3.1, "inside, so normal"),
        (2.9, "inside, so normal"),
        (3.35, "above by 0.2500, worse than expected"),
        (2.5, "below by 0.4000, better than expected"),
        (None, "the run has diverged"),
    ],
)
def test_the_last_comparable_evaluation_is_judged_in_words(tmp_path: Path, final: float | None, words: str) -> None:
    text = verdict(tmp_path, final, POINTS)
    assert f"at step 100; expected is 2.900 to 3.100 at step 100: {words}" in text
    assert "a toy: a book" in text
    assert "started with" not in text


@pytest.mark.usefixtures("text_only")
def test_an_evaluation_is_held_only_against_a_point_near_it(tmp_path: Path) -> None:
    near, far = ({"step": s, "tokens": s * 1000, "val_loss": 3.0, "low": 2.9, "high": 3.1} for s in (102, 103))
    assert "at step 102: inside" in verdict(tmp_path / "near", 3.0, [near])
    assert "cannot be compared yet: it has no evaluation near step 103." in verdict(tmp_path / "far", 3.0, [far])


@pytest.mark.usefixtures("text_only")
def test_overrides_are_named_and_other_configs_not_judged(tmp_path: Path) -> None:
    assert "started with `run.seed=2`, `optim.lr=1`" in verdict(tmp_path / "a", 3.0, POINTS, overrides=["run.seed=2", "optim.lr=1"])
    assert verdict(tmp_path / "b", 3.0, POINTS, config_file="other") == ""


def test_the_band_is_drawn_behind_steps_and_tokens_not_time(tmp_path: Path) -> None:
    points = [{"step": s, "tokens": s * 1000, "val_loss": 4.0, "low": 3.5, "high": 4.5} for s in range(0, 501, 50)]
    run = make_run(tmp_path / "a", curve(500, 3.0))
    report([run], tmp_path / "with", write_expected(tmp_path / "expected", points))
    report([run], tmp_path / "without", None)
    for figure, drawn in (("loss_steps", True), ("loss_tokens", True), ("loss_seconds", False)):
        pair = [Image.open(tmp_path / folder / f"{figure}.png").convert("RGB") for folder in ("with", "without")]
        grey = [count(np.asarray(image, int), (217, 217, 217)) for image in pair]
        assert (grey[0] > grey[1] + 5000) == drawn, (figure, grey)


def test_one_far_expected_point_is_within_the_axes(tmp_path: Path) -> None:
    """A run that is still early shows where it should end."""
    point = {"step": 5000, "tokens": 5_000_000, "val_loss": 2.0, "low": 1.95, "high": 2.05}
    run = make_run(tmp_path / "a", curve(500, 3.0))
    report([run], tmp_path / "out", write_expected(tmp_path / "expected", [point]))
    pixels = np.asarray(Image.open(tmp_path / "out" / "loss_steps.png").convert("RGB"), int)
    lower_right = pixels[400:, 700:]
    assert count(lower_right, (128, 128, 128)) > 20


def test_the_first_fall_does_not_flatten_the_rest(tmp_path: Path) -> None:
    rows = [val_row(0, 100.0), *(val_row(step, 3.1 - step / 5000) for step in range(50, 501, 50))]
    report([make_run(tmp_path / "a", rows)], tmp_path / "out", None)
    pixels = np.asarray(Image.open(tmp_path / "out" / "loss_steps.png").convert("RGB"), int)
    lines = np.nonzero((np.abs(pixels[150:, 400:] - (0, 114, 178)).max(axis=-1) <= 3).any(axis=1))[0]
    assert np.ptp(lines) > 100


def test_expected_from_seeds_by_hand(tmp_path: Path) -> None:
    """Losses 3.0, 3.1, 3.2: mean 3.1, sample standard deviation 0.1. Step 30 is not in every run and so is left out."""
    runs = []
    for seed, loss in enumerate((3.0, 3.1, 3.2)):
        rows = [val_row(0, 8.0), train_row(20, loss), val_row(20, loss), *([val_row(30, 1.0)] if seed else [])]
        runs.append(make_run(tmp_path / f"s{seed}", rows, seed=seed))
    made = expected_from(runs)
    assert made["points"] == [
        {"step": 0, "tokens": 0, "val_loss": 8.0, "low": 8.0, "high": 8.0},
        {"step": 20, "tokens": 20_000, "val_loss": 3.1, "low": 2.8, "high": 3.4},
    ]
    assert made["title"] == "toy, 3 seeds"
    assert "seeds 0, 1, 2" in made["source"]
    with pytest.raises(ValueError, match=r"needs 3 runs or more of one config; found 2 of toy"):
        expected_from(runs[:2])
    other = make_run(tmp_path / "other", [val_row(0, 8.0)], config_file="other")
    with pytest.raises(ValueError, match=r"found 4 of other, toy"):
        expected_from([*runs, other])


@pytest.mark.parametrize("path", sorted(EXPECTED.glob("*.json")), ids=lambda path: path.stem)
def test_shipped_curves_are_whole(path: Path) -> None:
    shipped = json.loads(path.read_text("utf-8"))
    assert set(shipped) == {"title", "source", "points"}
    steps = [point["step"] for point in shipped["points"]]
    assert steps == sorted(set(steps)) != []
    for point in shipped["points"]:
        assert set(point) == {"step", "tokens", "val_loss", "low", "high"}
        assert point["low"] <= point["val_loss"] <= point["high"]


@pytest.mark.usefixtures("text_only")
def test_gpt2_124m_is_judged_by_the_published_run(tmp_path: Path) -> None:
    published = json.loads((EXPECTED / "gpt2-124m.json").read_text("utf-8"))["points"]
    assert [point["tokens"] for point in published] == [18_865 * 524_288]
    rows = [val_row(0, 11.0), train_row(18_865, 3.3, tokens=18_865 * 524_288), val_row(18_865, 3.28)]
    report([make_run(tmp_path / "a", rows, config_file="gpt2-124m")], tmp_path / "out", EXPECTED)
    assert "3.270 to 3.300 at step 18,865: inside, so normal" in (tmp_path / "out" / "report.md").read_text("utf-8")


def test_wandb_gets_every_line_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    rows = [val_row(0, 8.0), train_row(10, 4.0), val_row(10, 3.0), train_row(20, None)]
    to_wandb(make_run(tmp_path / "sent", rows), "a-project")
    wandb.teardown()  # waits for the service, which writes the file behind our back
    (file,) = (tmp_path / "sent" / "logs").glob("wandb/offline-run-*/run-*.wandb")
    records = list(wandb_records(file))
    (run,) = (record.run for record in records if record.HasField("run"))
    assert (run.project, run.display_name) == ("a-project", "sent")
    assert "facts" in {item.key for item in run.config.update}
    metrics = [record.metric for record in records if record.HasField("metric")]
    assert [(metric.glob_name, metric.step_metric) for metric in metrics] == [("*", "step")]
    lines = [record.history.item for record in records if record.HasField("history")]
    sent = [{item.nested_key[0]: json.loads(item.value_json) for item in line} for line in lines]
    own = [{key: value for key, value in line.items() if not key.startswith("_")} for line in sent]
    assert math.isnan(own[-1].pop("loss"))
    assert rows[-1].pop("loss") is None
    assert own == rows


def wandb_records(path: Path) -> Iterator[Any]:
    """A .wandb file is 7 bytes of its own, then LevelDB's log: blocks of 32 KiB; per piece a CRC, its length and its kind."""
    from wandb.proto.wandb_internal_pb2 import Record

    data, at, whole = path.read_bytes(), 7, b""
    assert data[:4] == b":W&B"
    while at + 7 <= len(data):
        left = 2**15 - at % 2**15
        if left < 7:  # too little for a piece: padding
            at += left
            continue
        _, length, kind = struct.unpack("<IHB", data[at : at + 7])
        whole, at = whole + data[at + 7 : at + 7 + length], at + 7 + length
        if kind in (1, 4):  # a whole record, or the last piece of one
            record = Record()
            record.ParseFromString(whole)
            whole = b""
            yield record
