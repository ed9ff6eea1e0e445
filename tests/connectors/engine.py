"""An engine with a connector, for requests with fields that `LLM` does not offer."""

import json
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

import longshore
from longshore.deploy.llm.in_process_engine import InProcessEngine
from longshore.deploy.llm.remote_engine import RemoteEngine
from longshore.deploy.model.demo import DEMO_MODEL_DIR
from longshore.deploy.model.folder import read_model_folder
from longshore.deploy.settings.options import engine_options
from longshore.deploy.supervisor.engine_plan import plan_engine
from longshore.protocol.arrays import EMPTY_INT32, Int32Array, int32_array
from longshore.protocol.outputs import FinishedRequest
from longshore.protocol.plan import SchedulerOutput
from longshore.protocol.requests import AbortRequests, AddRequest, RequestOptions
from longshore.protocol.sampling import SamplingParams
from longshore.protocol.statistics import SchedulerStats
from longshore.scheduler.scheduler import Scheduler

BLOCK_SIZE: Final = 16

SETTINGS: Final[dict[str, Any]] = {
    "device": "cpu",
    "dtype": "float32",
    "threads": 1,
    "max_model_len": 256,
    "max_num_seqs": 4,
    "num_blocks": 60,
    "watermark": 0.0,
    "preempt_threshold": 1.0,
    "admit_threshold": 1.0,
}


class Answer:
    """token_ids: so far; end: when the request has ended."""

    def __init__(self) -> None:
        self.token_ids: list[int] = []
        self.end: FinishedRequest | None = None


class Engine:
    """In this process, or in processes of its own. num_computed: tokens of all plans (in-process).

    settings: of `EngineOptions`, over `SETTINGS`."""

    def __init__(
        self,
        model: Path,
        connector: str | None = None,
        options: dict[str, Any] | None = None,
        *,
        in_process: bool = True,
        **settings: Any,
    ) -> None:
        if connector is not None:
            settings |= {"kv_connector": connector, "kv_connector_config": json.dumps(options)}
        plan = plan_engine(
            engine_options({"log_level": "warning", **SETTINGS, **settings}),
            read_model_folder(model),
        )
        self.engine: InProcessEngine | RemoteEngine
        self.num_computed = 0
        self._answers: list[Answer] = []
        if not in_process:
            self.engine = RemoteEngine(plan)
            return
        self.engine = InProcessEngine(plan)
        submit = self.engine._runner.submit

        def counted(plan: SchedulerOutput, on_report: Any) -> Any:
            self.num_computed += plan.num_scheduled_tokens
            return submit(plan, on_report)

        self.engine._runner.submit = counted  # type: ignore[method-assign]

    def __enter__(self) -> "Engine":
        return self

    def __exit__(self, *_: object) -> None:
        self.engine.close()

    @property
    def stats(self) -> SchedulerStats:
        return self.scheduler.make_stats()

    @property
    def scheduler(self) -> Scheduler:
        assert isinstance(self.engine, InProcessEngine)
        return self.engine.scheduler

    def add(
        self,
        prompt: Sequence[int],
        *,
        max_tokens: int = 8,
        request_id: str | None = None,
        output_token_ids: Int32Array = EMPTY_INT32,
        **options: Any,
    ) -> Answer:
        """options: fields of `RequestOptions`."""
        handle = len(self._answers)
        self._answers.append(Answer())
        sampling = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, seed=0)
        self.engine.send(
            AddRequest(
                request_id or f"r{handle}",
                handle,
                int32_array(list(prompt)),
                sampling,
                RequestOptions(**options),
                output_token_ids,
            )
        )
        return self._answers[-1]

    def abort(self, answer: Answer) -> None:
        handle = self._answers.index(answer)
        self.engine.send(AbortRequests(int32_array([handle])))

    def until(self, is_over: Callable[[], bool]) -> None:
        while not is_over():
            self.receive()

    @property
    def must_be_driven(self) -> bool:
        """Whether it goes on only in `receive`, or will have outputs."""
        is_answering = any(answer.end is None for answer in self._answers)
        return is_answering or isinstance(self.engine, InProcessEngine)

    def receive(self) -> None:
        """Take the outputs of one step, if there are any; waits for them a moment."""
        outputs = self.engine.receive()
        if outputs is None:
            return
        for handle, token in zip(outputs.handles.tolist(), outputs.tokens.tolist(), strict=True):
            self._answers[handle].token_ids.append(token)
        for end in outputs.finished:
            self._answers[end.handle].end = end

    def wait(self, *answers: Answer) -> None:
        self.until(lambda: all(answer.end is not None for answer in answers))

    def run(
        self, *prompts: Sequence[int], is_together: bool = False, **fields: Any
    ) -> list[list[int]]:
        """The output tokens of each prompt: one after the other, or all at the same time."""
        answers = []
        for prompt in prompts:
            answers.append(self.add(prompt, **fields))
            if not is_together:
                self.wait(answers[-1])
        self.wait(*answers)
        return [answer.token_ids for answer in answers]


def prompts_of(*lengths: int, seed: int = 0, vocab_size: int = 128) -> list[list[int]]:
    chance = random.Random(seed)
    return [chance.choices(range(3, vocab_size), k=length) for length in lengths]


def check_tokens_of_demo_model(**connector: Any) -> None:
    """An engine with these settings of a connector, and blocks for one request, gives the tokens of
    one without, and loads what it has computed before."""
    shared: dict[str, Any] = {"device": "cpu", "dtype": "float32", "threads": 1}
    shared |= {"max_model_len": 256, "max_num_seqs": 4}
    prompts = [{"prompt_token_ids": ids} for ids in prompts_of(100, 130, 60, 150)]
    greedy = longshore.SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    with longshore.LLM(DEMO_MODEL_DIR, in_process=True, num_blocks=100, **shared) as plain:
        wanted = [
            each.outputs[0].token_ids for each in plain.generate(prompts, greedy, use_tqdm=False)
        ]
    with longshore.LLM(DEMO_MODEL_DIR, num_blocks=18, **shared, **connector) as llm:
        for _ in range(2):
            outputs = [llm.generate([each], greedy, use_tqdm=False)[0] for each in prompts]
            assert [output.outputs[0].token_ids for output in outputs] == wanted
    assert [output.num_cached_tokens for output in outputs] == [96, 128, 48, 144]
