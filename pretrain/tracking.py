"""metrics.jsonl is the truth; W&B and TensorBoard get copies through Accelerate's trackers, and may fail without consequence."""

import math
import os
import secrets
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from pretrain.config import Config, ConfigError
from pretrain.runfolder import Lines


def check(cfg: Config) -> None:
    """Raises ConfigError where a tracker was asked for and its package is missing."""
    for wanted, package in ((cfg.track.wandb != "off", "wandb"), (cfg.track.tensorboard, "tensorboard")):
        if wanted and find_spec(package) is None:
            raise ConfigError(f"track.{package} needs the package {package}: pip install {package}")


class Tracker:
    """Main process only: whole lines, each once per step."""

    def __init__(self, cfg: Config, facts: Mapping[str, Any], start_step: int, say: Callable[[str], None]) -> None:
        self._lines = Lines(cfg.folder / "metrics.jsonl", say)
        self._say = say
        self._copies: dict[str, Any] = {}
        if cfg.track.wandb != "off":
            self._guarded("wandb", lambda: self._start_wandb(cfg, facts))
        if cfg.track.tensorboard:
            self._guarded("tensorboard", lambda: self._start_tensorboard(cfg, start_step))

    def log(self, metrics: Mapping[str, Any]) -> None:
        """`metrics` holds `step`. A number that is not finite is null in the file, since JSON has no word for it."""
        plain = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in metrics.items()}
        self._lines.write(plain)
        for name, tracker in list(self._copies.items()):
            step = None if name == "wandb" else metrics["step"]  # W&B drops repeated steps: there it is a metric like any other
            self._guarded(name, lambda t=tracker, s=step: t.log(dict(metrics), step=s))  # type: ignore[misc]

    def cut_back(self, step: int) -> None:
        """What came after `step` has not happened. W&B and TensorBoard keep it, and get the steps again."""
        self._lines.cut_back(step if step else -1)

    def flush(self) -> None:
        self._lines.flush()

    def finish(self) -> None:
        self._lines.close()
        for name, tracker in list(self._copies.items()):
            self._guarded(name, tracker.finish)

    def _start_wandb(self, cfg: Config, facts: Mapping[str, Any]) -> None:
        from accelerate.tracking import WandBTracker

        id_file = cfg.folder / "logs" / "wandb_id.txt"
        if not id_file.exists():
            id_file.write_text(secrets.token_hex(8), encoding="utf-8")
        mode: Any = cfg.track.wandb
        if mode == "online" and os.environ.get("WANDB_MODE") == "offline":
            mode = "offline"
            self._say("W&B is offline, not online: WANDB_MODE=offline in the environment")
        tracker = WandBTracker(cfg.track.project, name=cfg.run.name, id=id_file.read_text("utf-8"), resume="allow",
                               mode=mode, dir=str(cfg.folder / "logs"), tags=list(cfg.track.tags) or None)  # fmt: skip
        tracker.start()
        tracker.tracker.define_metric("*", step_metric="step")
        tracker.store_init_configuration(dict(facts))
        self._copies["wandb"] = tracker

    def _start_tensorboard(self, cfg: Config, start_step: int) -> None:
        from accelerate.tracking import TensorBoardTracker

        tracker = TensorBoardTracker("tensorboard", str(cfg.folder / "logs"), purge_step=start_step + 1 if start_step else None)
        tracker.start()
        self._copies["tensorboard"] = tracker

    def _guarded(self, name: str, act: Callable[[], Any]) -> None:
        try:
            act()
        except Exception as error:  # whatever a tracker raises, training goes on
            self._copies.pop(name, None)
            self._say(
                f"{name} failed and is off from here on: {str(error).splitlines()[0] if str(error) else type(error).__name__}; metrics.jsonl has everything"
            )


def offline_hint(folder: Path) -> str | None:
    """The command that uploads an offline W&B run."""
    runs = sorted((folder / "logs" / "wandb").glob("offline-run-*"))
    return f"wandb sync {runs[-1]}" if runs else None
