"""What the GPU senders tell engines, taken by vLLM's own classes; no GPU is needed to read it."""

from typing import Any

import pytest
import torch

from linckia_trainer.weights import ipc, nccl
from linckia_trainer.weights.buckets import Parameter
from linckia_trainer.weights.transfer import receiver

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # vLLM's and its imports' own
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
]

LAYOUT = [Parameter("a.weight", (3, 4), "bfloat16"), Parameter("b", (5,), "float32")]


def test_nccl_invitations_are_what_vllm_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.distributed.weight_transfer.nccl_engine import NCCLWeightTransferInitInfo, NCCLWeightTransferUpdateInfo

    monkeypatch.setattr(nccl, "new_unique_id", lambda: bytes(range(128)))
    invitations = nccl.NcclSender(0, LAYOUT, 1 << 20, 10.0).invite(["x", "y", "z"], workers=2)
    infos = {engine: NCCLWeightTransferInitInfo(**one.init_info) for engine, one in invitations.items()}
    assert {engine: info.rank_offset for engine, info in infos.items()} == {"x": 1, "y": 3, "z": 5}
    for info in infos.values():
        assert info.world_size == 7
        assert info.nccl_unique_id_bytes == bytes(range(128))
        assert (info.packed, info.packed_buffer_size_bytes, info.packed_num_buffers) == (True, 1 << 20, 2)
    (update,) = receiver(invitations["x"], 10.0)()
    taken = NCCLWeightTransferUpdateInfo(**update)
    assert (taken.names, taken.dtype_names) == (["a.weight", "b"], ["bfloat16", "float32"])
    assert taken.shapes == [[3, 4], [5]]
    assert nccl.NcclSender(1, LAYOUT, 1 << 20, 10.0).invite(["x"], workers=2) == {}


def test_ipc_chunks_reach_the_engine_and_wait_until_they_are_read() -> None:
    from vllm.distributed.weight_transfer.ipc_engine import IPCWeightTransferInitInfo, IPCWeightTransferUpdateInfo

    sender = ipc.IpcSender(0, "127.0.0.1", LAYOUT, 16, 0.2)
    assert sender.bucket_bytes == 32  # vLLM refuses a tensor that does not fit into the buffer
    invitation = sender.invite(["x"], workers=1)["x"]
    assert IPCWeightTransferInitInfo(**invitation.init_info).packed is True
    handle = (torch.Tensor, (32,), (1,), 0, torch.storage.TypedStorage, torch.uint8, 0, b"h", 32, 0, False, b"c", 0, b"e", True)  # fmt: skip  # noqa: E501
    told: dict[str, Any] = {
        "names": ["a.weight"],
        "shapes": [[3, 4]],
        "dtype_names": ["bfloat16"],
        "tensor_sizes": [24],
        "ipc_handles": {"GPU-1": handle},
    }
    chunks = receiver(invitation, 5.0)()
    assert sender.store is not None
    sender.store.set(sender._key("x"), ipc.encode(told))
    taken = IPCWeightTransferUpdateInfo(**next(chunks))
    assert taken.ipc_handles == {"GPU-1": handle}
    assert taken.tensor_sizes == [24]
    assert not sender.store.check([sender._key("x") + "/read"])  # it is being read
    sender.store.set("1/x/1", ipc.END)
    assert list(chunks) == []
    assert sender.store.check([sender._key("x") + "/read"])
    lost: dict[str, str] = {}
    sender.sent = 2
    sender._tell(told, lost)  # nobody reads this one
    assert list(lost) == ["x"]
