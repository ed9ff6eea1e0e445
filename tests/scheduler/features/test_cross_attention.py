"""Models with an encoder: one sound per request, encoded in the step that gives it a row."""

import re
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from longshore.connectors.base import CacheLookup, EncoderConnector
from longshore.protocol.errors import ConfigError
from longshore.protocol.kv_cache_spec import KVCacheSpec
from longshore.protocol.outputs import FinishReason, TransferReport
from longshore.protocol.requests import (
    LoRARequest,
    MultimodalFeature,
    PromptEmbeds,
)
from longshore.scheduler.config import SchedulerConfig
from longshore.scheduler.features.encoder import RowEncoder, check_encoder
from tests.harness.driver import Driver
from tests.harness.kv_groups import config_of, cross, full, window
from tests.harness.tokens import expected_output, prompt_of
from tests.scheduler.features.test_encoder import request_of


def sound(name: str, num_tokens: int = 12, **fields: Any) -> tuple[MultimodalFeature, ...]:
    settings = {"offset": 0, "modality": "audio", "data": np.ones(8, np.uint8)} | fields
    return (MultimodalFeature(name, num_tokens=num_tokens, **settings),)


class HearingDriver(Driver):
    """Of a model with an encoder."""

    def __init__(self, *specs: KVCacheSpec, **settings: Any) -> None:
        specs = specs or (full(), cross())
        super().__init__(*specs, **({"max_num_encoder_input_tokens": 12} | settings))

    def hear(self, request_id: str, num_tokens: int = 12, **fields: Any) -> tuple[int, int]:
        """Queue a request with a sound of its own."""
        fields = {"multimodal": sound(request_id, num_tokens)} | fields
        return self.add(request_id, fields.pop("prompt", prompt_of(5)), **fields)


@pytest.mark.req("KVM-11")
def test_a_request_is_admitted_with_blocks_for_what_the_encoder_makes_of_its_sound() -> None:
    driver = HearingDriver(full(), cross(40), max_num_encoder_input_tokens=40)
    driver.hear("short", 9, prompt=prompt_of(12))
    driver.hear("long", 31)
    plan = driver.plan()
    assert plan is not None
    assert [[len(ids) for ids in start.block_ids] for start in plan.added] == [[3, 3], [2, 8]]
    driver.answer()
    driver.run()


@pytest.mark.parametrize("steps_in_flight", [1, 2])
def test_a_request_that_does_not_fit_the_encoders_budget_waits_in_its_place(
    steps_in_flight: int,
) -> None:
    driver = HearingDriver(max_num_encoder_input_tokens=24, max_steps_in_flight=steps_in_flight)
    keys = [driver.hear(name, size) for name, size in (("a", 12), ("b", 8), ("c", 5), ("d", 4))]
    driver.plan()
    assert driver.running == ["a", "b"]  # d, which would fit, does not slip past c
    (waiting, next_one) = driver.scheduler.make_report(driver.now, "engine").waiting
    assert waiting.waits_for == (
        "the encoder: a step encodes max_num_encoder_input_tokens=24 tokens, "
        "the last step had 4 left, and the request needs 5"
    )
    assert next_one.waits_for == "its turn: 1 ahead of it could run first"
    driver.step()
    driver.plan()
    assert driver.running == ["a", "b", "c", "d"]
    driver.run()
    for key, name in zip(keys, "abcd", strict=True):
        assert driver.received[key] == expected_output(name, 8)


def test_a_request_that_waits_for_blocks_says_how_many_with_those_for_its_sound() -> None:
    driver = HearingDriver(num_blocks=20, max_num_encoder_input_tokens=24)
    for name in ("a", "b", "c", "d"):
        driver.hear(name)
        driver.step()
    (waiting,) = driver.scheduler.make_report(driver.now, "engine").waiting
    assert "blocks: its next chunk needs 5" in waiting.waits_for
    driver.run()


@pytest.mark.parametrize("new_epoch", [False, True])
def test_a_resumed_request_is_encoded_again_in_the_step_in_which_it_takes_its_row(
    new_epoch: bool,
) -> None:
    """The driver compares each plan's encoder inputs with whom it adds."""
    driver = HearingDriver(
        num_blocks=20, max_model_len=60, max_num_encoder_input_tokens=24, verify_plan=True
    )
    keys = {name: driver.hear(name, max_tokens=30) for name in ("a", "b")}
    driver.steps(3)
    if new_epoch:
        driver.restart_workers(2)
    driver.run()
    num_added = sum(len(plan.added) for plan in driver.plans)
    assert num_added > 2
    assert sum(start.resumed for plan in driver.plans for start in plan.added) == num_added - 2
    for name, key in keys.items():
        assert driver.received[key] == expected_output(name, 30)


def test_nothing_is_found_and_nothing_is_shared_among_equal_requests() -> None:
    driver = HearingDriver(max_num_encoder_input_tokens=24)
    prompt = prompt_of(20)
    first = driver.hear("one", prompt=prompt)
    driver.run()
    fork = {"fork_of": first[1], "multimodal": sound("one")}
    again = [driver.hear(name, prompt=prompt, **fork) for name in ("two", "three")]
    driver.plan()
    assert driver.running == ["two", "three"]  # the driver sees that each block is held once
    driver.answer()
    more = driver.hear("four", prompt=prompt, fork_of=again[0][1], multimodal=sound("one"))
    driver.run()
    for key in (first, *again, more):
        assert driver.finished[key].num_cached_tokens == 0
    assert driver.num_copies == 0
    assert driver.scheduler.make_stats().num_prefix_queried_tokens == 0
    assert driver.scheduler.reset_encoder_cache()


def test_a_rewound_row_has_its_sound_still() -> None:
    encoder = RowEncoder(budget=12)
    encoder.begin_step()
    request = request_of("r", ("a", 0, 12), row=3)
    encoder.admit(request, 0, 5)
    assert encoder.take_encoder_inputs() == ((3, 0),)
    encoder.rewound(request)
    assert not encoder.pending
    encoder.begin_step()
    assert encoder.take_encoder_inputs() == ()


@pytest.mark.parametrize(
    ("fields", "complaint"),
    [
        ({"multimodal": ()}, "exactly one audio item .* this one has 0 items"),
        ({"multimodal": sound("x") + sound("y")}, "exactly one audio item .* this one has 2 items"),
        ({"multimodal": sound("x", 13)}, "has 13 tokens.*takes 1 to 12 .max_encoder_tokens"),
        ({"multimodal": sound("x", 0)}, "has 0 tokens.*takes 1 to 12"),
        ({"multimodal": sound("x", offset=2)}, "offset=2, .*use 0"),
        ({"multimodal": sound("x", modality="image")}, "modality 'image'; .* takes 'audio'"),
        ({"multimodal": sound("x", data=np.zeros(0, np.uint8))}, "has 0 bytes; .*float32"),
        ({"multimodal": sound("x", data=np.zeros(7, np.uint8))}, "has 7 bytes; .*float32"),
        ({"prompt_embeds": PromptEmbeds(np.zeros(80, np.uint8), 4, "float32")}, "prompt_embeds"),
        ({"resumable": True}, "sessions cannot be combined with multimodal"),
        ({"lora": LoRARequest("red")}, "max_loras=0"),
    ],
)
def test_a_request_that_such_a_model_cannot_serve_is_rejected(
    fields: dict[str, Any], complaint: str
) -> None:
    driver = HearingDriver()
    bad = driver.hear("bad", **fields)
    good = driver.hear("good")
    assert driver.reason(bad) is FinishReason.ERROR
    assert re.search(complaint, driver.finished[bad].message or "")
    driver.run()
    assert driver.received[good] == expected_output("good", 8)


def test_settings_under_which_no_request_could_be_admitted_are_rejected_at_the_start() -> None:
    with pytest.raises(ConfigError, match=r"max_num_encoder_input_tokens=11 .* the 12 tokens"):
        HearingDriver(max_num_encoder_input_tokens=11)
    config = SchedulerConfig(max_model_len=64, max_num_encoder_input_tokens=12)
    check_encoder(config, config_of(20, full(), cross()), has_connector=False)
    check_encoder(config, config_of(20, full(), window(4)), has_connector=True)
    with pytest.raises(ConfigError, match="cannot run with kv_connector"):
        check_encoder(config, config_of(20, full(), cross()), has_connector=True)
    with pytest.raises(ConfigError, match=r"num_blocks=19 are too few.* needs 20"):
        HearingDriver(num_blocks=19)


def test_the_encoder_cache_size_has_no_effect() -> None:
    driver = HearingDriver(encoder_cache_size=0)
    key = driver.hear("r")
    driver.run()
    assert driver.received[key] == expected_output("r", 8)
    assert driver.scheduler.make_stats().encoder_cache_usage == 0.0


happenings = st.lists(
    st.one_of(
        st.tuples(st.just("hear"), st.integers(1, 12), st.integers(1, 30)),
        st.tuples(st.just("steps"), st.integers(1, 6)),
        st.tuples(st.just("abort"), st.integers(0, 7)),
        st.tuples(st.just("epoch")),
    ),
    min_size=2,
    max_size=20,
)


@pytest.mark.req("KVM-11")
@settings(max_examples=150, deadline=None, derandomize=True)
@given(st.data(), happenings)
def test_whatever_happens_each_row_reads_its_own_sound_in_every_step(
    data: st.DataObject, happened: list[tuple[Any, ...]]
) -> None:
    num_drafts = data.draw(st.integers(0, 2))
    decoder = data.draw(st.sampled_from([full(), full(8), window(6)]))
    driver = HearingDriver(
        *data.draw(
            st.permutations([decoder, cross(block_size=data.draw(st.sampled_from([2, 4])))])
        ),
        num_blocks=data.draw(st.integers(26, 50)),
        max_num_seqs=data.draw(st.integers(1, 4)),
        max_num_batched_tokens=data.draw(st.integers(1, 30)),
        max_num_encoder_input_tokens=data.draw(st.integers(12, 30)),
        max_steps_in_flight=data.draw(st.integers(1, 2)),
        num_speculative_tokens=num_drafts,
        draft=lambda name, position: expected_output(name, position + num_drafts)[position:],
        verify_plan=data.draw(st.booleans()),
    )
    keys: list[tuple[int, int]] = []
    epoch = 1
    for what, *numbers in happened:
        match what:
            case "hear":
                num_tokens, length = numbers
                name = f"r{len(keys)}"
                keys.append(driver.hear(name, num_tokens, prompt=prompt_of(length)))
            case "steps":
                driver.steps(numbers[0])
            case "abort" if numbers[0] < len(keys) and keys[numbers[0]] not in driver.finished:
                driver.abort(keys[numbers[0]])
            case "epoch":
                epoch += 1
                driver.restart_workers(epoch)
    driver.run()
    for number, key in enumerate(keys):
        if driver.reason(key) is not FinishReason.ABORTED:
            assert driver.received[key] == expected_output(f"r{number}", 8)
    assert driver.num_free_blocks == driver.num_blocks - 1


class HandOver(EncoderConnector):
    """Answers by the hash of the item; missing without an entry."""

    def __init__(self) -> None:
        self.answers: dict[str, CacheLookup] = {}
        self.rows: list[tuple[str, int]] = []
        self.reports: list[tuple[int, bytes]] = []
        self.num_epochs = 0

    def has_caches(self, item: MultimodalFeature) -> CacheLookup:
        return self.answers.get(item.hash, CacheLookup.MISSING)

    def update_state_after_alloc(self, item: MultimodalFeature, row: int) -> None:
        self.rows.append((item.hash, row))

    def build_connector_meta(self, step: int, answered_step: int) -> bytes:
        return f"{step} {answered_step}".encode()

    def update_connector_output(self, rank: int, metadata: bytes) -> None:
        self.reports.append((rank, metadata))

    def on_new_epoch(self) -> None:
        self.num_epochs += 1


@pytest.mark.req("FEA-09")
def test_a_loaded_output_takes_no_budget_and_a_pending_one_lets_others_go_first() -> None:
    connector = HandOver()
    connector.answers = {"slow": CacheLookup.PENDING, "there": CacheLookup.LOADABLE}
    encoder = RowEncoder(budget=12, connector=connector)
    requests = {name: request_of(name, (name, 0, 12)) for name in ("slow", "there", "new", "late")}
    encoder.begin_step()
    is_loading = {name: encoder.is_loading(request) for name, request in requests.items()}
    assert is_loading == {"slow": True, "there": False, "new": False, "late": False}
    for row, name in enumerate(("new", "there")):
        requests[name].row = row
        assert encoder.would_limit(requests[name], 0, 5) == 5
        encoder.admit(requests[name], 0, 5)
    assert encoder.would_limit(requests["late"], 0, 5) == 0
    assert connector.rows == [("new", 0), ("there", 1)]
    assert encoder.take_encoder_inputs() == ((0, 0), (1, 0))
    counts = encoder.counts()
    assert (counts["num_encoded_items"], counts["num_loaded_encoder_outputs"]) == (1, 1)
    encoder.clear()
    assert connector.num_epochs == 1


@pytest.mark.req("FEA-09")
def test_a_request_whose_output_is_pending_waits_while_others_run() -> None:
    connector = HandOver()
    connector.answers = {"slow": CacheLookup.PENDING}
    driver = HearingDriver(
        max_num_encoder_input_tokens=24, scheduler={"encoder_connector": connector}
    )
    driver.hear("slow")
    driver.hear("other")
    plan = driver.plan()
    assert plan is not None
    assert driver.running == ["other"]
    assert plan.ec_connector_metadata == b"1 0"
    (waiting,) = driver.scheduler.make_report(driver.now, "engine").waiting
    assert "other engines are asked" in waiting.waits_for
    driver.answer()
    report = TransferReport(plan.epoch, 0, ec_connector_metadata=b"done")
    driver.scheduler.update_from_transfers(report, driver.now)
    assert connector.reports == [(0, b"done")]
    connector.answers = {}
    driver.plan()
    assert "slow" in driver.running
    driver.run()


def test_an_encoder_connector_needs_an_encoder() -> None:
    with pytest.raises(ConfigError, match="this model has no encoder"):
        Driver(full(), scheduler={"encoder_connector": HandOver()})
