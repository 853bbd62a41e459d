"""Ranks on a GPU: device placement and NCCL."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from distsession import OptionsError, Session
from distsession.engine.host_info import nccl_version

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU"),
]


@pytest.fixture(scope="module")
def session():
    with Session(1) as session:
        yield session


def test_the_default_is_nccl_on_a_rank_per_gpu(session: Session) -> None:
    info = session.infos[0]
    assert info.backend == "nccl"
    assert info.device.device == "cuda:0"
    query = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]  # torch takes a context
    assert info.device.name == subprocess.check_output(query, text=True).splitlines()[0]
    assert info.device.memory_bytes > 0


def test_the_ranks_device_is_the_current_one(session: Session) -> None:
    assert session.evaluate("torch.cuda.current_device()")[0] == 0
    assert session.evaluate("str(device)")[0] == "cuda:0"
    assert session.evaluate("torch.cuda._is_in_bad_fork()")[0] is False


def test_collectives_run_over_nccl(session: Session) -> None:
    session.execute(
        "t = torch.ones(4, device=device)\ndist.all_reduce(t)\ntorch.cuda.synchronize()"
    )
    assert session.evaluate("t.sum().item()")[0] == 4.0


def test_a_result_on_the_gpu_arrives_on_the_cpu(session: Session) -> None:
    back = session.evaluate("{'x': torch.arange(3, device=device)}")[0]["x"]
    assert back.device.type == "cpu"
    assert back.tolist() == [0, 1, 2]


def test_the_use_of_the_ranks_own_gpu_is_known(session: Session) -> None:
    session.execute("held = torch.ones(1 << 28, device=device); torch.cuda.synchronize()")
    gauges = session.launcher.usage(30.0)
    assert gauges is not None
    use, device = gauges.uses[0], session.infos[0].device
    assert use.gpu_memory >= 1 << 30
    assert abs(use.gpu_total - device.memory_bytes) < device.memory_bytes / 10
    assert "GPU memory" in str(session.show_config())
    session.restart()  # ranks that are forked after NVML was asked have a sound CUDA
    assert session.evaluate("torch.ones(2, device=device).sum().item()")[0] == 2.0


def test_the_kernel_creates_no_context(session: Session) -> None:
    session.run(lambda: torch.ones(1, device="cuda").item())
    assert not torch.cuda.is_initialized()


def test_a_restarted_rank_has_its_gpu_again(session: Session) -> None:
    session.restart()
    session.execute("t = torch.ones(4, device=device)\ndist.all_reduce(t)")
    assert session.evaluate("t.sum().item()")[0] == 4.0


def test_more_ranks_than_gpus_are_refused() -> None:
    with pytest.raises(OptionsError, match="need a GPU each"):
        Session(torch.cuda.device_count() + 1)


def test_gloo_stays_on_the_cpu() -> None:
    with Session(2, backend="gloo") as session:
        assert list(session.evaluate("device.type").values()) == ["cpu", "cpu"]


def test_both_backends_at_once() -> None:
    with Session(1, backend="cpu:gloo,cuda:nccl") as session:
        session.execute(
            "a = torch.ones(2)\nb = torch.ones(2, device=device)\n"
            "dist.all_reduce(a)\ndist.all_reduce(b)"
        )
        assert session.evaluate("(a + b.cpu()).sum().item()")[0] == 4.0


def test_a_tensor_of_a_gpu_arrives_on_the_cpu_of_the_notebook(session) -> None:
    session.execute(
        "weights = torch.arange(300_000., device=device)[100:]; pair = [weights, weights[5:9]]"
    )
    back = session.pull("weights")
    assert back[0].device.type == "cpu"
    assert torch.equal(back[0], torch.arange(300_000.0)[100:])
    base, view = session.pull("pair")[0]
    base[5] = -1
    assert view[0] == -1
    assert not torch.cuda.is_initialized()


def test_a_sharded_or_plain_tensor_of_a_gpu_is_gathered(session) -> None:
    session.execute("part = torch.full((2, 3), float(rank), device=device)")
    whole = session.gather("part")
    assert whole.device.type == "cpu"
    assert whole.shape == (2 * session.world_size, 3)
    assert not torch.cuda.is_initialized()


def test_a_large_tensor_of_a_gpu_goes_through_pinned_memory(session) -> None:
    """It waits for what the GPU has still to do, and takes more pieces than there are buffers."""
    session.execute(
        "big = torch.zeros(20_000_000, device=device)\n"
        "for _ in range(100):\n    big += 1\n"
        "big[::7] = 3"
    )
    expected = torch.full((20_000_000,), 100.0)
    expected[::7] = 3
    assert torch.equal(session.pull("big")[0], expected)
    assert torch.equal(session.gather("big")[:20_000_000], expected)
    assert session.run(_buffers)[0] == (2, False)
    assert not torch.cuda.is_initialized()


def _buffers() -> tuple[int, bool]:
    from distsession.engine import pinned

    return len(pinned._staging._buffers), pinned._staging._has_failed


def test_a_gpu_is_named_by_its_uuid(session) -> None:
    uuid = session.infos[0].device.uuid
    with Session(devices=[uuid[:12]]) as named:
        assert named.infos[0].device.uuid == uuid
        assert named.infos[0].device.device == "cuda:0"
    with pytest.raises(OptionsError, match=f"no GPU 'GPU-none': .* shows {uuid}"):
        Session(devices=["GPU-none"])


def test_several_ranks_share_a_gpu_with_gloo() -> None:
    with pytest.warns(RuntimeWarning, match="Ranks 0-1 share GPU 0"):
        session = Session(2, devices=[0, 0], backend="cuda:gloo")
    with session:
        session.execute("t = torch.ones(4, device=device)\ndist.all_reduce(t)")
        assert list(session.evaluate("t.sum().item()").values()) == [8.0, 8.0]


def test_several_ranks_share_a_gpu_with_a_newer_nccl() -> None:
    if nccl_version() < (2, 30):
        with pytest.raises(OptionsError, match="NCCL takes several ranks on one GPU from"):
            Session(2, devices=[0, 0])
        return
    with Session(2, devices=[0, 0]) as shared:
        shared.execute("t = torch.ones(4, device=device)\ndist.all_reduce(t)")
        assert list(shared.evaluate("t.sum().item()").values()) == [8.0, 8.0]


FILL = """
import sys, torch
free, total = torch.cuda.mem_get_info()
held = torch.empty(free - total // 25, dtype=torch.uint8, device="cuda")
print("full", flush=True)
sys.stdin.read()
"""


def test_who_fills_a_gpu_is_said_at_the_start() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", FILL], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "full\n"
        with pytest.warns(RuntimeWarning, match=r"^GPU 0 \(.*\) of rank 0 has .* GiB free: "):
            session = Session(1)
        session.close()
        process.communicate()


def test_what_a_notebook_has_on_its_gpu_lands_on_that_of_the_rank(session) -> None:
    """The last one here: this process has a context of CUDA from now on."""
    session.push({"state": torch.arange(20_000_000, device="cuda")})
    assert session.evaluate("(state.device == device, state[-1].item())")[0] == (True, 19_999_999)
