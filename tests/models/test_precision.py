"""The dtype of a device: hardware bf16 or fp32, and the user's word above both."""

from __future__ import annotations

import pytest
import torch

from afina.errors import ConfigError, ModelError
from afina.models import precision
from afina.models.precision import Precision, choose, fast_bf16

ZEN2 = "processor\t: 0\nvendor_id\t: AuthenticAMD\nflags\t\t: fpu sse2 avx2 bmi2 sha_ni\n"
ZEN4 = "processor\t: 0\nflags\t\t: fpu avx2 avx512f avx512_bf16 avx512_vnni\n"
SAPPHIRE = "processor\t: 0\nflags\t\t: fpu avx512f avx512_bf16 amx_bf16 amx_tile amx_int8\n"
DECOY = "model name\t: avx512_bf16 amx_bf16 speedster\nflags\t\t: fpu amx_tile avx512f\n"


@pytest.mark.parametrize(
    ("cpuinfo", "found"),
    [(ZEN2, None), (ZEN4, "AVX512-BF16"), (SAPPHIRE, "AMX"), (DECOY, None), ("", None)],
)
def test_fast_bf16_is_read_from_the_flags_alone(cpuinfo, found):
    assert fast_bf16(cpuinfo) == found


def test_other_architectures_are_not_asked(monkeypatch):
    monkeypatch.setattr(precision.platform, "machine", lambda: "aarch64")
    assert fast_bf16() is None


@pytest.mark.parametrize(
    ("found", "dtype", "reason"),
    [
        (None, torch.float32, "no fast bf16"),
        ("AMX", torch.bfloat16, "with AMX"),
        ("AVX512-BF16", torch.bfloat16, "with AVX512-BF16"),
    ],
)
def test_a_cpu_takes_bf16_only_where_it_is_fast(monkeypatch, found, dtype, reason):
    monkeypatch.setattr(precision, "fast_bf16", lambda: found)
    chosen = choose("cpu")
    assert (chosen.base, chosen.compute) == (dtype, dtype)
    assert reason in chosen.reason
    assert choose("cpu", "auto") == chosen


@pytest.mark.parametrize(("native", "dtype"), [(True, torch.bfloat16), (False, torch.float32)])
def test_a_gpu_takes_bf16_where_it_has_it(monkeypatch, native, dtype):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: native)
    assert choose("cuda").base == dtype


@pytest.mark.parametrize("dtype", ["bf16", "bfloat16", "torch.bfloat16", "BF16", torch.bfloat16])
def test_the_user_decides(monkeypatch, dtype):
    monkeypatch.setattr(precision, "fast_bf16", lambda: None)
    assert choose("cpu", dtype) == Precision(torch.bfloat16, torch.bfloat16, "set by the user")


def test_the_log_line_says_what_and_why():
    line = str(Precision(torch.bfloat16, torch.float32, "because"))
    assert line == "base bfloat16, computed in float32: because"


@pytest.mark.parametrize("dtype", ["bf61", "int8", "torch.int64", ""])
def test_an_unknown_dtype_is_refused(dtype):
    with pytest.raises(ConfigError, match="unknown dtype"):
        choose("cpu", dtype)


@pytest.mark.parametrize("dtype", ["fp8", "int8", "bf61", "bfloat61"])
def test_an_unknown_dtype_is_answered_with_all_that_are_known(dtype):
    with pytest.raises(ConfigError) as caught:
        choose("cpu", dtype)
    assert caught.value.wanted == "auto, fp32, bf16, fp16 or fp64"
    slip = "did you mean bfloat16? Or leave it out" if dtype == "bfloat61" else "leave it out"
    assert caught.value.cure == f"{slip} to let the device decide"


@pytest.mark.parametrize(
    ("count", "said"),
    [(0, "cpu, for there is no CUDA device"), (1, "cpu or cuda:0"), (3, "cpu or cuda:0 to cuda:2")],
)
def test_the_devices_there_are_are_named(monkeypatch, count, said):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    with pytest.raises(ModelError) as caught:
        choose("cuda:77")
    assert caught.value.wanted == said


@pytest.mark.parametrize(("device", "what"), [("gpu", "unknown device"), ("cuda:77", "no such")])
def test_a_device_that_is_not_here_is_refused(device, what):
    with pytest.raises(ModelError, match=what):
        choose(device)
