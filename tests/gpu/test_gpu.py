"""Ranks on a GPU: device placement and NCCL."""

from __future__ import annotations

import pytest
import torch

from distsession import OptionsError, Session

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
    assert info.device.name == torch.cuda.get_device_name(0)
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
