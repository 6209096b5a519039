"""Each rank shards a module, loads the checkpoint of the first argument, and leaves what it found, and a checkpoint."""

import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict
from torch.distributed.fsdp import fully_shard

from lightning_ft.checkpoint import load_sharded
from lightning_ft.errors import MalformedStateError


def make() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 160), nn.BatchNorm1d(160), nn.Linear(160, 120))


def main() -> None:
    dist.init_process_group("gloo")
    model, wider = make(), nn.Sequential(nn.Linear(8, 160), nn.BatchNorm1d(160), nn.Linear(160, 121))
    for module in (model, wider):
        for layer in (module[0], module[2]):
            fully_shard(layer)
        fully_shard(module)
    weights = [parameter for parameter in model.parameters() if parameter.ndim > 1]
    others = [parameter for parameter in model.parameters() if parameter.ndim == 1]
    optimizer = torch.optim.AdamW([{"params": weights, "lr": 0.5}, {"params": others, "lr": 0.5}])
    before = wider[2].weight.to_local().clone()
    refused = ""
    try:
        load_sharded(wider, None, sys.argv[1])
    except MalformedStateError as error:
        refused = str(error)
    load_sharded(model, optimizer, sys.argv[1])
    model_state, optimizer_state = get_model_state_dict(model), get_optimizer_state_dict(model, optimizer)
    dcp.save({"state_dict": model_state, "optimizer_0": optimizer_state}, checkpoint_id="again")
    result = {
        "refused": refused,
        "untouched": bool(torch.equal(before, wider[2].weight.to_local())),
        "rows": len(model[2].weight.to_local()),
        "lr": [group["lr"] for group in optimizer.param_groups],
    }
    Path(f"result_{dist.get_rank()}.json").write_text(json.dumps(result))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
