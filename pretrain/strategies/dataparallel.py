"""The historical baseline: one process, and in every forward a replica by thread on each visible GPU (`torch.nn.DataParallel`)."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from pretrain.config import Config, ConfigError, Layout
from pretrain.strategies.base import Strategy


class DataParallel(Strategy):
    def check(self, cfg: Config, layout: Layout) -> None:
        super().check(cfg, layout)
        replicas = 1 if cfg.run.device not in ("auto", "cuda") else max(1, torch.cuda.device_count())
        if replicas == 1:
            return
        if cfg.train.compile != "off":
            raise ConfigError(f"strategy.name={self.name} cannot run compiled code on its replicas; write train.compile=off")
        if cfg.model.dropout > 0:
            raise ConfigError(
                f"strategy.name={self.name} would drop the same places on every replica, whose generators start from one seed; "
                "write model.dropout=0, or use strategy.name=ddp"
            )
        if cfg.batch.micro < replicas:
            raise ConfigError(
                f"batch.micro={cfg.batch.micro} is shared out over {replicas} GPUs by strategy.name={self.name}; "
                f"write batch.micro={replicas} or more, or hide GPUs with CUDA_VISIBLE_DEVICES"
            )

    def wrap(self, module: nn.Module) -> nn.Module:
        device = self.accelerator.device
        gpus = torch.cuda.device_count() if device.type == "cuda" else 0
        self.replicas = f"{gpus} replicas" if gpus > 1 else f"one replica, since there is one {device.type}"
        if gpus < 2:
            return module
        dtype = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}[self.precision]
        return SummingDataParallel(module, list(range(gpus)), dtype)

    @property
    def devices(self) -> int:
        return len(self.model.device_ids) if isinstance(self.model, nn.DataParallel) else 1

    def notes(self) -> list[str]:
        return [f"{self.name}: {self.replicas}"]

    def wire(self, step: int) -> int:
        """No network; but every forward copies the weights from the first GPU to the others, and every backward the gradients back."""
        return 0


class SummingDataParallel(nn.DataParallel[nn.Module]):
    """For a forward that returns (loss sum, number of targets): the sums over the replicas, where DataParallel would make vectors."""

    def __init__(self, module: nn.Module, gpus: list[int], autocast: torch.dtype | None) -> None:
        super().__init__(module, device_ids=gpus)
        self._autocast = autocast

    def replicate(self, module: nn.Module, device_ids: Sequence[int | torch.device]) -> list[nn.Module]:
        replicas = super().replicate(module, device_ids)
        if self._autocast is not None:
            # A replica copies the module's __dict__, and with it `prepare`'s autocast forward, which is bound to the module itself: all
            # replicas would run on the first GPU's weights. Each gets its own, which holds in the replica's thread, as autocast must.
            for replica, device in zip(replicas, device_ids, strict=True):
                kind = torch.device(device).type
                replica.forward = torch.autocast(kind, self._autocast)(type(replica).forward.__get__(replica))
        return replicas

    def gather(self, outputs: Sequence[tuple[Tensor, ...]], output_device: int | torch.device) -> Any:
        return tuple(torch.stack([part.to(output_device) for part in parts]).sum() for parts in zip(*outputs, strict=True))
