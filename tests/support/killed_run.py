"""A run on several ranks that saves as it goes, and in which one of them may be killed.

killed_run.py FOLDER STEPS [KILLED_AT]
"""

import os
import signal
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from language_models import LanguageModel, batches, train
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard

import sketchoptim as so


def main(folder: Path, steps: int, killed_at: int | None) -> None:
    # torchrun ends the survivor of a killed rank with SIGTERM, at times before the survivor has met
    # the broken connection. It has to end by its own error; torchrun kills one that hangs.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    dist.init_process_group("gloo")
    model = fully_shard(LanguageModel())
    optimizer = so.AdamW(so.param_groups(model), lr=0.01)
    saved = sorted(int(path.parent.name) for path in folder.glob("*/.metadata"))
    start = saved[-1] if saved else 0
    if saved:
        weights, state = get_state_dict(model, optimizer)
        dcp.load({"model": weights, "optimizer": state}, checkpoint_id=folder / str(start))
        set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=state)
    for step in range(start, steps):
        if step == killed_at and not saved and dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        train(model, optimizer, batches(1, start=step))
        if (step + 1) % 2 == 0:
            weights, state = get_state_dict(model, optimizer)
            dcp.save({"model": weights, "optimizer": state}, checkpoint_id=folder / str(step + 1))
    numbers = {name: it.full_tensor() for name, it in model.named_parameters()}
    if dist.get_rank() == 0:
        torch.save(numbers, folder / "weights.pt")
        (folder / "started_at").write_text(str(start))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]) if len(sys.argv) > 3 else None)
