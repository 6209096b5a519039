import pytest
import torch
import torch.distributed as dist

from lightning_ft.elastic import _torch_compat
from lightning_ft.elastic.collectives import Collectives
from lightning_ft.elastic.engine import SoloEngine
from lightning_ft.elastic.process_group import ElasticProcessGroup


def make_proxy():
    engine = SoloEngine()
    return ElasticProcessGroup(engine, Collectives(engine))


def test_this_torch_passes_the_self_test():
    _torch_compat.self_test(make_proxy)
    assert not dist.is_initialized()


def test_raw_collectives_go_through_the_proxy_and_its_handle_stays_valid():
    proxy = make_proxy()
    _torch_compat.install_default_group(proxy, dist.HashStore(), num_slots=4)
    try:
        tensor = torch.tensor([1.5, 2.0])
        dist.all_reduce(tensor)
        gathered = [torch.zeros(2)]
        dist.all_gather(gathered, tensor)
        objects = [{"a": 1}]
        dist.broadcast_object_list(objects, src=0)
        assert (tensor.tolist(), gathered[0].tolist(), objects) == ([1.5, 2.0], [1.5, 2.0], [{"a": 1}])
        assert dist.group.WORLD is proxy
        assert (dist.get_rank(), dist.get_world_size()) == (0, 1)
        with pytest.raises(NotImplementedError, match="are not available under `FTStrategy`"):
            dist.recv(torch.zeros(1))
    finally:
        _torch_compat.uninstall_default_group(proxy)
        _torch_compat.uninstall_default_group(proxy)
    assert not dist.is_initialized()


def test_a_second_default_group_is_refused():
    proxy = make_proxy()
    _torch_compat.install_default_group(proxy, dist.HashStore(), num_slots=1)
    try:
        with pytest.raises(RuntimeError, match="remove the call of `torch"):
            _torch_compat.install_default_group(make_proxy(), dist.HashStore(), num_slots=1)
    finally:
        _torch_compat.uninstall_default_group(proxy)
