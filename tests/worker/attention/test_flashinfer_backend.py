"""FlashInfer's backend and the probe that chooses it, with a module in its place that computes in
torch and accepts only what FlashInfer's documentation says."""

import logging
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from longshore.protocol.errors import ConfigError
from longshore.worker.attention import attention_probe, selector
from longshore.worker.attention.attention_probe import prefill_backend
from longshore.worker.attention.flashinfer_backend import FlashInferAttention
from longshore.worker.attention.kind import PagedAttentionKind
from longshore.worker.attention.reach import Reach
from longshore.worker.attention.torch_backend import TorchAttention
from longshore.worker.attention.triton_backend import TritonAttention
from longshore.worker.kernels import prefill_attention
from longshore.worker.kernels.scoring import Scoring
from longshore.worker.kv_cache.buffer import PagedKV
from longshore.worker.kv_cache.fp8 import KVScales
from tests.worker.attention.test_backends import PagedSequences
from tests.worker.caches import paged_kv
from tests.worker.kernels.variants import in_triton


class FakeWrapper:
    """BatchPrefillWithPagedKVCacheWrapper."""

    num_runs = 0
    error = 0.0  # relative, of the results

    def __init__(self, float_workspace_buffer: Tensor, kv_layout: str) -> None:
        assert float_workspace_buffer.dtype == torch.uint8
        assert kv_layout == "HND"

    def plan(
        self,
        qo_indptr: Tensor,
        paged_kv_indptr: Tensor,
        paged_kv_indices: Tensor,
        paged_kv_last_page_len: Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        page_size: int,
        *,
        causal: bool,
        sm_scale: float,
        window_left: int,
        logits_soft_cap: float | None,
        q_data_type: torch.dtype,
        kv_data_type: torch.dtype,
    ) -> None:
        of_step = (qo_indptr, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len)
        assert all(each.dtype == torch.int32 and each.dim() == 1 for each in of_step)
        assert all(1 <= used <= page_size for used in paged_kv_last_page_len.tolist())
        assert len(paged_kv_indices) == paged_kv_indptr[-1]
        assert causal
        lens = (paged_kv_indptr.diff() - 1) * page_size + paged_kv_last_page_len
        self._table = torch.zeros((len(lens), int(paged_kv_indptr.diff().max())), dtype=torch.int32)
        for row, ids in enumerate(paged_kv_indices.tensor_split(paged_kv_indptr[1:-1].tolist())):
            self._table[row, : len(ids)] = ids
        self._chunks = torch.stack(
            (torch.arange(len(lens)), qo_indptr[:-1], qo_indptr.diff(), lens), dim=1
        ).long()
        self._shape = (int(qo_indptr[-1]), num_qo_heads, head_dim_qk)
        self._page = (num_kv_heads, page_size, head_dim_qk)
        self._dtypes = (q_data_type, kv_data_type)
        reach = Reach(window=None if window_left < 0 else window_left + 1)
        self._scoring = Scoring(sm_scale, reach, logits_soft_cap)

    def run(
        self,
        q: Tensor,
        paged_kv_cache: tuple[Tensor, Tensor],
        *,
        k_scale: float = 1.0,
        v_scale: float = 1.0,
    ) -> Tensor:
        keys, values = paged_kv_cache
        assert tuple(q.shape) == self._shape
        assert q.is_contiguous()
        assert keys.shape[1:] == values.shape[1:] == self._page
        assert keys.stride() == values.stride()
        assert keys.stride(3) == 1
        assert (q.dtype, keys.dtype) == self._dtypes
        type(self).num_runs += 1
        out, _ = prefill_attention.reference(
            q,
            keys,
            values,
            self._table,
            self._chunks,
            self._scoring._replace(key_scale=k_scale, value_scale=v_scale),
        )
        return out * (1 + self.error)


@pytest.fixture
def wrapper(monkeypatch: pytest.MonkeyPatch) -> type[FakeWrapper]:
    """The class that stands for FlashInfer's, of this test."""
    of_test = type("Wrapper", (FakeWrapper,), {})
    flashinfer = SimpleNamespace(BatchPrefillWithPagedKVCacheWrapper=of_test, __spec__=object())
    monkeypatch.setitem(sys.modules, "flashinfer", flashinfer)  # type: ignore[arg-type]
    monkeypatch.setattr(attention_probe, "CHUNKS", ((9, 20), (5, 5)))
    return of_test


def cache(dtype: torch.dtype = torch.bfloat16, scales: KVScales | None = None) -> PagedKV:
    return paged_kv(
        9,
        num_layers=3,
        block_size=4,
        num_kv_heads=2,
        head_dim=16,
        dtype=dtype,
        scales=scales,
    )


def timer(theirs: float, ours: float) -> Any:
    times = iter((theirs, ours))
    return lambda call, device: next(times)


def never(call: object, device: torch.device) -> float:
    raise AssertionError("what was asked for is not timed")


KIND = PagedAttentionKind(num_heads=4)


@pytest.mark.parametrize("scales", [None, KVScales(0.5, 2.0)], ids=["plain", "fp8"])
@pytest.mark.parametrize("kind", [{}, {"window": 5}, {"softcap": 2.0}], ids=str)
def test_chunks_are_planned_once_per_step_and_decodes_are_not(
    kind: dict[str, Any], scales: KVScales | None, wrapper: type[FakeWrapper]
) -> None:
    with in_triton():
        sequences = PagedSequences(
            FlashInferAttention,
            [13, 9, 20],
            block_size=4,
            group=2,
            seed=1,
            kind=PagedAttentionKind(num_heads=0, **kind),
            scales=scales,
        )
        runs = []
        for counts in ([7, 3, 11], [1, 1, 1], [2, 1, 7], [1, 4, 0]):
            sequences.step(counts)
            runs.append(wrapper.num_runs)
    first = runs[0]
    assert first > 0
    assert runs == [first, first, 2 * first, 3 * first]


def test_layers_with_sinks_use_the_triton_kernels(wrapper: type[FakeWrapper]) -> None:
    with in_triton():
        sequences = PagedSequences(
            FlashInferAttention,
            [9, 6],
            block_size=4,
            group=2,
            seed=1,
            kind=PagedAttentionKind(num_heads=0),
            has_sinks=True,
        )
        sequences.step([7, 3])
    assert wrapper.num_runs == 0


@pytest.mark.parametrize(
    ("scales", "window"), [(None, None), (KVScales(0.05, 0.1), None), (None, 7)], ids=str
)
def test_the_probe_chooses_flashinfer_if_it_is_right_and_faster(
    scales: KVScales | None,
    window: int | None,
    wrapper: type[FakeWrapper],
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    kind = PagedAttentionKind(num_heads=4, window=window)
    of_model = cache(scales=scales)
    backend = prefill_backend(of_model, kind, is_wanted=False, timer=timer(1e-5, 2e-5))
    assert type(backend) is FlashInferAttention
    assert backend.cache is of_model
    assert not of_model.planes.view(torch.uint8).any()
    assert [record.levelname for record in caplog.records] == ["INFO"]


def test_what_was_asked_for_need_not_be_faster(wrapper: type[FakeWrapper]) -> None:
    backend = prefill_backend(cache(), KIND, is_wanted=True, timer=never)
    assert type(backend) is FlashInferAttention


@pytest.mark.parametrize(
    ("error", "dtype", "chunk", "reason"),
    [
        (0.0, torch.bfloat16, None, "it takes 30 us for chunks that take Triton kernels 20 us"),
        (0.1, torch.bfloat16, None, "its results differ from plain torch by 10.0% (at most 2%)"),
        (float("nan"), torch.bfloat16, None, "its results differ from plain torch by nan%"),
        (0.0, torch.float32, None, "it does not compute torch.float32"),
        (0.0, torch.bfloat16, 8, "it has no chunks, of 8 tokens"),
    ],
)
def test_a_failed_probe_gives_its_reason_and_the_triton_kernels(
    error: float,
    dtype: torch.dtype,
    chunk: int | None,
    reason: str,
    wrapper: type[FakeWrapper],
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    wrapper.error = error
    kind = PagedAttentionKind(num_heads=4, chunk=chunk)
    backend = prefill_backend(cache(dtype), kind, is_wanted=False, timer=timer(3e-5, 2e-5))
    assert type(backend) is TritonAttention
    (message,) = caplog.messages
    assert f"FlashInfer is not used for {kind}: {reason}" in message


def test_an_error_of_flashinfer_is_a_warning_if_it_was_asked_for(
    wrapper: type[FakeWrapper], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def plan(*inputs: object, **settings: object) -> None:
        raise RuntimeError("no kernel for head_dim 16")

    monkeypatch.setattr(wrapper, "plan", plan)
    assert type(prefill_backend(cache(), KIND, is_wanted=True)) is TritonAttention
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    assert "RuntimeError: no kernel for head_dim 16" in record.message


@pytest.mark.parametrize("is_wanted", [False, True])
def test_flashinfer_that_is_not_installed_is_missed_only_if_it_was_asked_for(
    is_wanted: bool, caplog: pytest.LogCaptureFixture
) -> None:
    assert type(prefill_backend(cache(), KIND, is_wanted=is_wanted)) is TritonAttention
    assert ("No module named 'flashinfer'" in caplog.text) is is_wanted


def test_backends_that_need_a_gpu_are_rejected_on_a_cpu() -> None:
    for name in ("triton", "flashinfer"):
        with pytest.raises(ConfigError, match=f"attention_backend={name} needs a GPU"):
            selector.select(name, torch.device("cpu"))


def test_plain_torch_can_be_selected_on_any_device() -> None:
    selector.select("torch", torch.device("cpu"))
    try:
        assert type(selector.make_attention(cache(torch.float32), KIND)) is TorchAttention
        with in_triton():
            assert type(selector.make_attention(cache(torch.float32), KIND)) is TorchAttention
    finally:
        selector.select("auto", torch.device("cpu"))
