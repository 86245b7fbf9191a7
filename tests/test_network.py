"""An emulated link is never faster than it was asked to be, and not much slower; what goes over it is what went before."""

import json
import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import drive
import psutil
import pytest
import torch
import torch.distributed as dist
import yaml
from group import Ranks
from imported import forking
from launching import TWO, make_set, pretrain_train, run, write_config

from pretrain import config as configs
from pretrain import interception
from pretrain.config import Compare, Config, ConfigError, Network
from pretrain.network import namespaces
from pretrain.network.delay import Link, seconds
from pretrain.network.emulation import emulate, slow

MB = 1_000_000
SLOW = Network(bandwidth_gbit=0.1, latency_ms=5)
LINKS = ["compare.network.bandwidth_gbit=10", "compare.network.latency_ms=0.2"]


def test_the_model_of_a_ring() -> None:
    network = Network(1, 10)  # 125 MB/s
    assert seconds(network, "all_reduce", 125 * MB, 4) == pytest.approx(6 * 0.01 + 1.5)
    assert seconds(network, "all_gather", 125 * MB, 4) == seconds(network, "reduce_scatter", 125 * MB, 4) == pytest.approx(0.03 + 0.75)
    assert seconds(network, "broadcast", 125 * MB, 4) == pytest.approx(0.03 + 1)
    assert seconds(network, "gather", 125 * MB, 4) == pytest.approx(0.03 + 3)
    assert seconds(network, "barrier", 4, 4) == pytest.approx(0.06)
    assert seconds(network, "all_reduce", 125 * MB, 1) == seconds(Network(), "all_reduce", 125 * MB, 4) == 0
    assert seconds(Network(1), "all_reduce", 125 * MB, 2) == pytest.approx(1)


def timed(numels: Sequence[int]) -> tuple[list[list[float]], list[list[float]], bool]:
    """Over `SLOW`: by size, seconds of several all-reduces; seconds of two at a time; whether one was ever under way after it was issued."""
    dist.init_process_group("gloo")
    control = dist.new_group(backend="gloo")
    single, pairs, under_way = [], [], False
    with interception.intercepted(slow(Link(SLOW), [control])):
        for numel in numels:
            of_one, of_two = [], []
            for _ in range(3):
                dist.barrier(control)
                began = time.monotonic()
                dist.all_reduce(torch.ones(numel))
                of_one.append(time.monotonic() - began)
                dist.barrier(control)
                began = time.monotonic()
                works = [dist.all_reduce(torch.ones(numel), async_op=True) for _ in range(2)]
                under_way |= not works[1].is_completed()
                for work in works:
                    work.wait()
                of_two.append(time.monotonic() - began)
            single.append(of_one)
            pairs.append(of_two)
    return single, pairs, under_way


@pytest.mark.parametrize("world", [2, 4])
def test_collectives_take_as_long_as_the_model_says(ranks: Ranks, world: int) -> None:
    """The bound from above is for the fastest of three: a busy machine can hold up each of them, but hardly all by as much again."""
    numels = [1, 500_000]
    models = [seconds(SLOW, "all_reduce", 4 * numel, world) for numel in numels]
    for single, pairs, under_way in ranks.run(timed, numels, size=world):
        for model, of_one, of_two in zip(models, single, pairs, strict=True):
            assert min(of_one) >= model
            assert min(of_two) >= 2 * model, "one link carries one after the other"
            assert min(of_one) < 2 * model + 0.25
            assert min(of_two) < 4 * model + 0.25
        assert under_way, "issuing must not wait"


def scattered() -> list[tuple[str, list[float], list[float]]]:
    """(name, what gloo makes, what we make) on this rank."""
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    found = []
    for dtype in (torch.float32, torch.bfloat16):
        whole = (torch.arange(world * 6) % 7 + rank / 3).to(dtype)
        for op in (dist.ReduceOp.SUM, dist.ReduceOp.AVG, dist.ReduceOp.MAX, dist.ReduceOp.MIN, dist.ReduceOp.PRODUCT):
            for name, issue in scatterings(whole, world, op).items():
                theirs = issue()
                with interception.intercepted(slow(None)):
                    found.append((f"{name} {dtype} {op}", theirs.view(-1).tolist(), issue().view(-1).tolist()))
    return found


def scatterings(whole: torch.Tensor, world: int, op: Any) -> dict[str, Callable[[], torch.Tensor]]:
    def of_tensor(async_op: bool) -> torch.Tensor:
        part = torch.empty(2, 3, dtype=whole.dtype)
        work = dist.reduce_scatter_tensor(part, whole.view(world * 2, 3), op=op, async_op=async_op)
        if async_op:
            work.wait()
        return part

    def of_list() -> torch.Tensor:
        part = torch.empty(2, 3, dtype=whole.dtype)
        dist.reduce_scatter(part, [chunk.view(2, 3) for chunk in whole.chunk(world)], op=op)
        return part

    def coalesced() -> torch.Tensor:
        parts = [torch.empty(6, dtype=whole.dtype) for _ in range(2)]
        options = dist.ReduceScatterOptions()
        options.reduceOp = op
        dist.group.WORLD.reduce_scatter_tensor_coalesced(parts, [whole, whole * 2], options).wait()  # type: ignore[union-attr]
        return torch.cat(parts)

    return {"of a tensor": lambda: of_tensor(False), "asynchronous": lambda: of_tensor(True), "of a list": of_list, "coalesced": coalesced}


@pytest.mark.parametrize("world", [2, 4])
def test_a_reduce_scatter_makes_what_gloos_makes(ranks: Ranks, world: int) -> None:
    for found in ranks.run(scattered, size=world):
        for name, theirs, ours in found:
            assert ours == pytest.approx(theirs, rel=2e-2 if "bfloat16" in name else 1e-6), name


def lost() -> list[str]:
    """What rank 0 hears, each time on new groups, when the other one does not come."""
    dist.init_process_group("gloo")
    heard = []
    for async_op in (False, True):
        for issue in (all_reduce_of, reduce_scatter_of):
            control = dist.new_group(backend="gloo", timeout=timedelta(seconds=9))
            group = dist.new_group(backend="gloo", timeout=timedelta(seconds=0.5))
            if dist.get_rank() == 0:
                with interception.intercepted(slow(Link(Network(latency_ms=1)), [control])):
                    try:
                        work = issue(group, async_op)
                        if async_op:
                            work.wait()
                            dist.broadcast(torch.ones(1), 0, group=control)  # which the other one need not come for
                        heard.append("nothing")
                    except RuntimeError as error:
                        heard.append(str(error))
    dist.barrier()
    return heard


def all_reduce_of(group: Any, async_op: bool) -> Any:
    return dist.all_reduce(torch.ones(1), group=group, async_op=async_op)


def reduce_scatter_of(group: Any, async_op: bool) -> Any:
    return dist.reduce_scatter_tensor(torch.ones(1), torch.ones(2), group=group, async_op=async_op)


def test_a_lost_rank_is_reported_and_not_waited_for(ranks: Ranks) -> None:
    """Before anything is made of what did not arrive, though waiting for a Work of a future raises nothing."""
    heard = ranks.run(lost, size=2)[0]
    assert len(heard) == 4
    assert all("500ms" in said for said in heard), heard


@contextmanager
def for_now() -> Iterator[None]:
    """What a run adds for its process's life goes with it."""
    before = interception._layers
    try:
        yield
    finally:
        for layer in set(interception._layers) - set(before):
            interception.remove(layer)


def with_and_without(path: Path, each: Sequence[Sequence[str]]) -> list[tuple[drive.Rows, drive.Rows]]:
    found = []
    for k, overrides in enumerate(each):
        rows = drive.run(path, [*overrides, f"run.name=fast{k}"], 3)[0]
        drive.leave()
        with for_now():
            slowly = drive.run(path, [*overrides, *LINKS, f"run.name=slow{k}"], 3)[0]
        drive.leave()
        found.append((rows, slowly))
    return found


def test_every_strategy_computes_the_same_over_a_slow_network(ranks: Ranks, config: Callable[..., Path]) -> None:
    each = drive.every_strategy(4)
    for found in ranks.run(with_and_without, config({"batch.micro": 1}), list(each.values()), size=4):
        for name, (rows, slowly) in zip(each, found, strict=True):
            for key in ("loss", "grad_norm"):
                assert [row[key] for row in slowly] == pytest.approx([row[key] for row in rows], rel=1e-5), f"{name} {key}"


def has_namespaces() -> str:
    """Why not; empty where they can be made."""
    with namespaces.made(asking(Network(1)), 2) as environment:
        return json.loads(environment["PRETRAIN_NETWORK"])["why_not"] or ""


def asking(network: Network | None) -> Config:
    return Config(compare=Compare(network=network))


def left(owner: str) -> list[str]:
    """Namespaces and interfaces of that name."""
    folder = Path("/run/netns")
    paths = [path.name for path in folder.iterdir()] if folder.exists() else []
    return [name for name in (*paths, *psutil.net_if_addrs()) if owner in name]


def measured_inside(rank: int, environment: dict[str, str], port: int, pipe: Any) -> None:
    """(when each of three all-reduces of 4 MB began and ended on this rank, the same of three tiny ones)."""
    os.environ |= environment
    namespaces.enter(rank)
    store = os.environ["MASTER_ADDR"].removesuffix("1") + "2"  # rank 0 holds it, where a launcher would
    dist.init_process_group("gloo", init_method=f"tcp://{store}:{port}", rank=rank, world_size=2, timeout=timedelta(seconds=60))
    found = []
    for numel in (1_000_000, 1):
        tensor, times = torch.ones(numel), []
        for _ in range(3):
            dist.barrier()
            began = time.monotonic()
            dist.all_reduce(tensor)
            times.append((began, time.monotonic()))
        found.append(times)
    dist.destroy_process_group()
    pipe.send(found)


@pytest.fixture
def possible() -> None:
    if why := has_namespaces():
        pytest.skip(why)


def test_links_between_namespaces_are_as_slow_as_asked(possible: None) -> None:
    """Each rank sends and receives 4 MB; what a link may let through at once is not counted, nor, from above, headers."""
    megabytes_per_second = 12.5
    context = forking()
    with namespaces.made(asking(Network(megabytes_per_second * 8 / 1000)), 2) as environment:
        pipes = [context.Pipe() for _ in range(2)]
        processes = [context.Process(target=measured_inside, args=(k, environment, 29500, pipes[k][1])) for k in range(2)]
        for process in processes:
            process.start()
        try:
            for (ours, _), process in zip(pipes, processes, strict=True):
                assert ours.poll(240), f"no answer; status {process.exitcode}"  # seconds on an idle machine
            by_rank = [ours.recv() for ours, _ in pipes]
        finally:
            for process in processes:
                process.kill()
    for size, model in enumerate((4 / megabytes_per_second, 0.0)):
        took = [
            max(end for _, end in ranks) - min(begin for begin, _ in ranks)
            for ranks in zip(*(found[size] for found in by_rank), strict=True)
        ]
        assert min(took) >= model - 2 * namespaces.LEAST_BURST / MB / megabytes_per_second
        assert min(took) < 2 * model + 0.25
    assert not left(json.loads(environment["PRETRAIN_NETWORK"])["owner"])


def make_and_die(pipe: Any) -> None:
    with namespaces.made(asking(Network(1)), 2) as environment:
        pipe.send(json.loads(environment["PRETRAIN_NETWORK"])["owner"])
        os.kill(os.getpid(), signal.SIGKILL)


def test_what_a_killed_launch_left_goes_at_the_next_start(possible: None) -> None:
    context = forking()
    ours, theirs = context.Pipe()
    process = context.Process(target=make_and_die, args=(theirs,))
    process.start()
    assert ours.poll(240)
    owner = ours.recv()
    process.join()
    assert len(left(owner)) == 5  # two namespaces, two links and the bridge
    with namespaces.made(asking(Network(1)), 2) as environment:
        mine = json.loads(environment["PRETRAIN_NETWORK"])["owner"]
        assert not left(owner)
        with namespaces.made(asking(Network(1)), 1) as nothing:
            assert nothing == {}
        assert len(left(mine)) == 5
    assert not left(mine)


@pytest.mark.parametrize(
    ("changes", "flags", "why"),
    [
        ({"track.wandb": "online"}, [], "track.wandb=online needs a way out"),
        ({"model.init_from": "gpt2"}, [], "model.init_from may need a way out"),
        ({}, ["--num_machines=2"], "the launcher's own flags say how many processes start here"),
        ({}, ["--config_file", "my.yaml"], "the launcher's own flags say how many processes start here"),
    ],
)
def test_where_there_can_be_no_namespaces_the_run_is_told_why(changes: dict[str, str], flags: list[str], why: str) -> None:
    cfg = asking(Network(1))
    for key, value in changes.items():
        cfg = configs.replace(cfg, key, value)
    with namespaces.made(cfg, 2, flags) as environment:
        told = json.loads(environment["PRETRAIN_NETWORK"])
    assert told["interface"] == ""
    assert why in told["why_not"] or "root" in told["why_not"] or "iproute2" in told["why_not"]


def test_without_the_programs_there_are_no_namespaces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    assert "root" in has_namespaces() or "ip and tc" in has_namespaces()


def on_gpus() -> str:
    dist.init_process_group("gloo")
    assert emulate(None, "cuda", []).facts == {}
    with pytest.raises(ConfigError) as refused:
        emulate(Network(1), "cuda", [])
    return str(refused.value)


def test_gpus_and_single_processes_are_answered(ranks: Ranks) -> None:
    assert "run on cuda" in ranks.run(on_gpus, size=2)[0]
    alone = emulate(Network(1), "cpu", [None])
    assert (alone.facts, alone.notes) == ({}, ["network: as it is, since one process sends nothing"])


@pytest.mark.launch
def test_a_launch_says_how_its_network_is_emulated(tmp_path: Path) -> None:
    config = write_config(tmp_path / "tiny.yaml", make_set(tmp_path / "set"), train={"max_steps": 3})
    overrides = ["compare.network.bandwidth_gbit=0.1", "compare.network.latency_ms=1"]
    folder = tmp_path / "runs" / "tiny"
    status, launched = run(pretrain_train(config, *overrides, flags=TWO), folder, cwd=tmp_path)
    assert status == 0, launched.story()
    facts, why = yaml.safe_load((folder / "config.yaml").read_text())["facts"]["network"], has_namespaces()
    assert (facts["bandwidth_gbit"], facts["latency_ms"]) == (0.1, 1.0)
    assert facts["without_namespaces"] == (why or None)
    assert facts["bandwidth_by"] == ("collective layer" if why else "namespaces")
    assert f"0.1 Gbit/s by {'holding collectives back' if why else 'network namespaces (tbf)'}" in launched.out
    assert min(m["step_seconds"] for m in launched.metrics()) > 2 * 1e-3  # an all-reduce at least, of two steps on two ranks
