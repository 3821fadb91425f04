"""Which errors mean that a process has lost its GPU."""

import pytest
import torch

from tenuto.errors import EnvironmentFaultError, is_lack_of_memory
from tenuto.profiles.networks.device import loses_device
from tests.instruments.fake_cuda import FakeCuda

CUDNN = RuntimeError("cuDNN error: CUDNN_STATUS_EXECUTION_FAILED")


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    made = FakeCuda()
    made.install(monkeypatch)
    return made


def test_the_device_is_asked_whatever_the_words_are(cuda: FakeCuda) -> None:
    assert not loses_device(CUDNN)  # one kernel was refused, the next may run
    cuda.lost = "an illegal memory access was encountered"
    assert loses_device(CUDNN)
    assert loses_device(torch.AcceleratorError("CUDA error: device-side assert triggered"))


@pytest.mark.parametrize(
    "error",
    [torch.OutOfMemoryError("CUDA out of memory"), EnvironmentFaultError("cannot be captured"), ValueError("x")],
)
def test_what_is_not_the_devices_fault_is_never_sticky(error: Exception, cuda: FakeCuda) -> None:
    cuda.lost = "anything"
    assert not loses_device(error)


def test_what_torch_raises_without_memory_is_told_as_that() -> None:
    with pytest.raises(RuntimeError) as raised:
        torch.empty(1 << 60, dtype=torch.uint8)  # of the machine's own memory
    assert is_lack_of_memory(raised.value)
    assert is_lack_of_memory(torch.OutOfMemoryError("CUDA out of memory"))
    assert not is_lack_of_memory(CUDNN)


def test_a_full_device_is_not_a_lost_one(cuda: FakeCuda) -> None:
    cuda.device_bytes_left = 0
    assert not loses_device(CUDNN)


def test_without_a_device_none_is_lost() -> None:
    assert not loses_device(CUDNN)
