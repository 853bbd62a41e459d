"""What a written script has around its cells, and the batch file beside it."""

from __future__ import annotations

import json
from collections.abc import Sequence

__all__ = ["MARK", "TAIL", "batch", "head"]

MARK = "Written by distsession"
"""By this an export knows a file that it may write over."""

TAIL = """# %% the end
if _made_group and dist.is_initialized():
    dist.barrier()  # a rank that leaves early cuts off others that are still connecting
    dist.destroy_process_group()
    import atexit
    import sys

    if "distsession.engine" not in sys.modules:  # this process is the script's own
        # gloo (torch 2.13) now and then aborts a process that ends as usual.
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)
"""


def head(
    name: str,
    ranks: int,
    *,
    backend: str | None,
    on_gpu: bool,
    timeout: float | None,
    seed: int | None,
    seed_per_rank: bool,
    threads: int | None,
    imports: Sequence[str],
    left_out: Sequence[str],
    accelerator: str = "",
) -> str:
    """The top of a script: imports, this rank's place, its device, the process group.

    Args:
        name: Of the script.
        ranks: How many there were.
        backend: As the session was asked for; None chooses as a session does.
        on_gpu: Where the session's ranks were.
        timeout: Of collectives, in seconds.
        seed: Of the session.
        seed_per_rank: Of the session.
        threads: Of the session.
        imports: What the cells need besides.
        left_out: What ran and was not chosen.
        accelerator: The type of the ranks' devices, if they are neither CPUs nor GPUs.
    """
    text = f'"""{MARK} from what ran on {ranks} rank{"s" if ranks > 1 else ""}.\n\n'
    text += "Start it with one of these::\n\n"
    text += f"    torchrun --standalone --nproc-per-node={ranks} {name}\n"
    text += f"    distsession run --ranks {ranks} {name}\n"
    if left_out:
        text += "\nThis ran, too, and was left out:\n\n"
        text += "".join(f"- {each}\n" for each in left_out)
    lines = [text + '"""', ""]
    future = [each for each in imports if each.startswith("from __future__")]
    modules = {"import os", *imports} - set(future)
    if timeout is not None:
        modules.add("from datetime import timedelta")
    if seed is not None:
        modules |= {"import random", "import sys"}
    lines += [*future, *[""] * bool(future)]
    lines += sorted(modules, key=lambda each: (each.startswith("from"), each))
    lines += ["", "import torch", "import torch.distributed as dist", ""]
    lines += [
        'rank = int(os.environ.get("RANK", 0))',
        'local_rank = int(os.environ.get("LOCAL_RANK", 0))',
        'world_size = int(os.environ.get("WORLD_SIZE", 1))',
        *_device(backend, on_gpu, accelerator),
    ]
    if threads is not None:
        lines.append(f"torch.set_num_threads({threads})")
    if seed is not None:
        value = f"{seed} + rank" if seed_per_rank else str(seed)
        numpy_seed = f"({value}) % 2**32" if seed_per_rank else str(seed % 2**32)
        lines += [
            f"random.seed({value})",
            f"torch.manual_seed({value})",
            'if "numpy" in sys.modules:',
            f'    sys.modules["numpy"].random.seed({numpy_seed})',
        ]
    limit = "" if timeout is None else f", timeout=timedelta(seconds={timeout:g})"
    chosen = json.dumps(backend) if backend else '"nccl" if device.type == "cuda" else "gloo"'
    lines += [
        "_made_group = not dist.is_initialized()",
        "if _made_group:",
        '    _alone = {} if "RANK" in os.environ else '
        '{"store": dist.HashStore(), "rank": 0, "world_size": 1}',
        "    dist.init_process_group(",
        f"        {chosen}{limit},",
        '        device_id=device if device.type == "cuda" else None,',
        "        **_alone,",
        "    )",
    ]
    return "\n".join(lines)


def _device(backend: str | None, on_gpu: bool, accelerator: str) -> list[str]:
    if accelerator:
        return [
            f'device = torch.device("{accelerator}", local_rank)',
            "torch.get_device_module(device).set_device(device)",
        ]
    cuda = 'torch.device("cuda", local_rank)'
    if backend and not on_gpu:
        return ['device = torch.device("cpu")']
    if on_gpu and backend:
        return [f"device = {cuda}", "torch.cuda.set_device(device)"]
    return [
        f'device = {cuda} if torch.cuda.is_available() else torch.device("cpu")',
        'if device.type == "cuda":',
        "    torch.cuda.set_device(device)",
    ]


def batch(name: str, ranks: int, *, on_gpu: bool, threads: int) -> str:
    """A Slurm batch file that starts a script under torchrun, on one host or several.

    Args:
        name: Of the script.
        ranks: For each host.
        on_gpu: Whether each rank needs a GPU.
        threads: Of each rank.
    """
    job = name.removesuffix(".py")
    gpus = f"#SBATCH --gpus-per-node={ranks}\n" if on_gpu else ""
    return f"""#!/bin/bash
# {MARK}: sbatch {job}.sbatch
# More hosts: --nodes=N, each with {ranks} rank{"s" if ranks > 1 else ""}. Adapt the time.
#SBATCH --job-name={job}
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=1
{gpus}#SBATCH --cpus-per-task={ranks * threads}
#SBATCH --time=01:00:00
#SBATCH --output=%x-%j.log

set -euo pipefail
first=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
port=$((10000 + SLURM_JOB_ID % 20000))  # below those that systems give away by themselves
export OMP_NUM_THREADS={threads}

srun torchrun \\
    --nnodes="$SLURM_NNODES" \\
    --nproc-per-node={ranks} \\
    --rdzv-id="$SLURM_JOB_ID" \\
    --rdzv-backend=c10d \\
    --rdzv-endpoint="$first:$port" \\
    {name} "$@"
"""
