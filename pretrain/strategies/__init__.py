"""One key chooses how the work is spread over processes. A new strategy is a new file and a line here."""

from typing import Any

from pretrain.config import Config, build_options
from pretrain.strategies.base import StepResult, Strategy
from pretrain.strategies.ddp import DDP

STRATEGIES: dict[str, type[Strategy]] = {
    "single": Strategy,
    "ddp": DDP,
}
OPTIONS: dict[str, type] = {name: cls.Options for name, cls in STRATEGIES.items()}

__all__ = ["OPTIONS", "STRATEGIES", "StepResult", "Strategy", "choose"]


def choose(cfg: Config, world_size: int, precision: str) -> tuple[str, Strategy]:
    """The strategy that the config names; `auto` is `ddp` for several processes and `single` for one."""
    name = cfg.strategy.name
    if name == "auto":
        name = "ddp" if world_size > 1 else "single"
    cls = STRATEGIES[name]
    options: Any = build_options(cls.Options, cfg.strategy.options)
    return name, cls(options, precision)
