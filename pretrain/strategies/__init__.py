"""One key chooses how the work is spread over processes. A new strategy is a new file and a line here."""

from pretrain.config import Config, ConfigError, Layout, build_options
from pretrain.strategies.base import StepResult, Strategy
from pretrain.strategies.ddp import DDP

STRATEGIES: dict[str, type[Strategy]] = {
    "single": Strategy,
    "ddp": DDP,
}
OPTIONS: dict[str, type] = {name: cls.Options for name, cls in STRATEGIES.items()}

__all__ = ["OPTIONS", "STRATEGIES", "StepResult", "Strategy", "choose"]


def choose(cfg: Config, layout: Layout, precision: str, launched: str | None = None) -> Strategy:
    """The strategy that the config names; `auto` is what the launch asks for, else `ddp` for several processes and `single` for one.

    Raises ConfigError where the two disagree, or where it cannot do what the config wants of it.
    """
    name = cfg.strategy.name
    if name == "auto":
        name = launched or ("ddp" if layout.world_size > 1 else "single")
    elif launched not in (None, name):
        raise ConfigError(f"the launch asks for {launched} and strategy.name for {name}; drop one (strategy.name=auto takes the launch's)")
    cls = STRATEGIES[name]
    strategy = cls(name, build_options(cls.Options, cfg.strategy.options), precision)
    strategy.check(cfg, layout)
    return strategy
